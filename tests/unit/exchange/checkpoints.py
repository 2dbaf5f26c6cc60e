"""Checkpoints made by hand: tensors cut into any boxes, as ranks would have written them."""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any

import torch
from isal import isal_zlib
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from milepost.format.manifest import MANIFEST_NAME, METADATA_NAME, Manifest, encode_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from milepost.wire.offers import Box


def whole(tensor: torch.Tensor) -> tuple[torch.Tensor, list[tuple[Box, Box]]]:
    """Return a tensor as one box."""
    return tensor, [((0,) * tensor.dim(), tuple(tensor.size()))]


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, tuple[torch.Tensor, Sequence[tuple[Box, Box]]]],
    objects: Mapping[str, Any] | None = None,
    *,
    with_manifest: bool = True,
    files: int = 2,
) -> Path:
    """Write a checkpoint whose boxes go to its files in turn; return its directory."""
    folder.mkdir(parents=True)
    content = [bytearray() for _ in range(files)]
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    crcs: list[int] = []

    def put(index: MetadataIndex, value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        file = len(places) % files
        blob = buffer.getvalue()
        places[index] = _StorageInfo(f"__{file}_0.distcp", len(content[file]), len(blob))
        crcs.append(isal_zlib.crc32(blob))
        content[file] += blob

    for key, (tensor, boxes) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        described[key] = TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), tensor.size(), chunks
        )
        for number, (offsets, sizes) in enumerate(boxes):
            part = tensor
            for dim, (at, length) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, at, length)
            # A clone keeps the strides of a tensor that is dense, as torch's own writer does.
            index = MetadataIndex(key, torch.Size(offsets), number)
            put(
                index, part.clone() if part.dim() and len(boxes) == 1 else part.contiguous().clone()
            )
    for key, value in (objects or {}).items():
        described[key] = BytesStorageMetadata()
        put(MetadataIndex(key), value)
    for file, data in enumerate(content):
        (folder / f"__{file}_0.distcp").write_bytes(data)
    metadata = Metadata(described, {key: (key,) for key in described}, places)
    pickled = pickle.dumps(metadata)
    (folder / METADATA_NAME).write_bytes(pickled)
    if with_manifest:
        infos = list(places.values())
        manifest = Manifest(
            step=1,
            files=tuple(f"__{file}_0.distcp" for file in range(files)),
            file_bytes=tuple(len(data) for data in content),
            keys=tuple(index.fqn for index in places),
            files_of=tuple(int(info.relative_path.split("_")[2]) for info in infos),
            offsets=tuple(info.offset for info in infos),
            lengths=tuple(info.length for info in infos),
            crcs=tuple(crcs),
            index_crc=isal_zlib.crc32(pickled),
        )
        (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))
    return folder


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
