"""Checkpoints to fetch from: as stock torch writes them, as older torches did, and with manifests
of ours.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

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

from milepost.dcp_format.columns import columns_of, pack_columns
from milepost.dcp_format.index import read_metadata
from milepost.fetching.checksums import KnownChecksums
from milepost.fetching.fetch import fetch
from milepost.fetching.index import Destination, read_index
from milepost.fetching.requests import Fetched
from milepost.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    encode_manifest,
    pack_crcs,
)
from milepost.wire.offers import Box

Known: TypeAlias = Literal["nothing", "blobs", "stretches"]
"""What a manifest tells: there is none, one from before there were stretches, one of today."""

Writer: TypeAlias = Literal["torch", "old torch", "odd"]
"""How containers are made: as this torch does, as 2.4 did, as nobody does that we know."""


class Chunk(NamedTuple):
    """A stored box of a tensor."""

    key: str
    size: Box
    offsets: Box
    data: torch.Tensor


def container(value: object, writer: Writer) -> bytes:
    """Return an archive around a tensor or an object."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if writer == "torch":
        return buffer.getvalue()
    left_out = {".format_version", ".storage_alignment", ".data/serialization_id"}
    older = io.BytesIO()
    with zipfile.ZipFile(buffer) as source, zipfile.ZipFile(older, "w") as target:
        entries = source.infolist()
        for entry in entries if writer == "old torch" else reversed(entries):
            if entry.filename.partition("/")[2] not in left_out:
                target.writestr(entry.filename, source.read(entry))
    return older.getvalue()


def write_checkpoint(
    folder: Path,
    files: Sequence[Sequence[Chunk]],
    objects: Mapping[str, object] | None = None,
    *,
    writer: Writer = "torch",
    known: Known = "stretches",
    stretch_bytes: int = 4096,
    align: int = 1,
    with_columns: bool = True,
) -> Path:
    """Write a checkpoint whose files hold these chunks, objects in the first one.

    align: of each container in its file; stock torch writes them one behind another.
    """
    folder.mkdir(exist_ok=True)
    described: dict[str, Any] = {}
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    for number, chunks in enumerate(files):
        name, content = f"__{number}_0.distcp", bytearray()

        def put(index: MetadataIndex, blob: bytes, name: str = name,
                content: bytearray = content) -> None:  # fmt: skip
            content += bytes(-len(content) % align)
            storage_data[index] = _StorageInfo(name, len(content), len(blob))
            content += blob

        for key, size, offsets, data in chunks:
            entry = described.setdefault(
                key, TensorStorageMetadata(TensorProperties(data.dtype), torch.Size(size), [])
            )
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), data.shape))
            put(MetadataIndex(key, offsets, len(entry.chunks) - 1), container(data, writer))
        for key, value in (objects or {}).items() if not number else ():
            described[key] = BytesStorageMetadata()
            put(MetadataIndex(key), value if isinstance(value, bytes) else container(value, writer))
        (folder / name).write_bytes(content)
    pickled = pickle.dumps(Metadata(described, storage_data=storage_data))
    (folder / METADATA_NAME).write_bytes(pickled)
    if known != "nothing":
        add_manifest(folder, known, stretch_bytes, with_columns=with_columns)
    return folder


def add_manifest(
    folder: Path, known: Known, stretch_bytes: int = 4096, *, with_columns: bool = True
) -> None:
    """Write the manifest of a checkpoint."""
    metadata = read_metadata(folder)
    places = [
        (index.fqn, info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    ]
    files = sorted({file for _, file, _, _ in places})
    content = {file: (folder / file).read_bytes() for file in files}
    columns = columns_of(metadata)
    columns.crcs = [
        isal_zlib.crc32(content[columns.files[file]][at : at + length])
        for file, at, length in zip(columns.files_of, columns.ats, columns.lengths, strict=True)
    ]
    has_stretches = known == "stretches"
    manifest = Manifest(
        step=1,
        files=tuple(files),
        file_bytes=tuple(len(content[file]) for file in files),
        keys=tuple(key for key, _, _, _ in places),
        files_of=tuple(files.index(file) for _, file, _, _ in places),
        offsets=tuple(offset for _, _, offset, _ in places),
        lengths=tuple(length for _, _, _, length in places),
        crcs=tuple(
            isal_zlib.crc32(content[file][offset : offset + length])
            for _, file, offset, length in places
        ),
        index_crc=isal_zlib.crc32((folder / METADATA_NAME).read_bytes()),
        stretch_bytes=stretch_bytes if has_stretches else 0,
        stretches=tuple(
            pack_crcs(
                [
                    isal_zlib.crc32(content[file][at : at + stretch_bytes])
                    for at in range(0, len(content[file]), stretch_bytes)
                ]
            )
            for file in files
        )
        if has_stretches
        else (),
        index=pack_columns(columns) if has_stretches and with_columns else b"",
    )
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def make_cold(folder: Path) -> None:
    """Have the kernel forget the data files."""
    for path in folder.glob("*.distcp"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def whole(tensors: Mapping[str, torch.Tensor]) -> list[Destination]:
    """All of each tensor, into itself."""
    return [Destination(key, (0,) * memory.dim(), memory) for key, memory in tensors.items()]


def fetch_into(
    folder: Path, wanted: Sequence[Destination], objects: Sequence[str] = (), **more: Any
) -> Fetched:
    """Fetch by a checkpoint's own index."""
    index = read_index(folder)
    return fetch(
        folder,
        index.tensor_reads(wanted),
        index.object_reads(objects),
        KnownChecksums(index.manifest),
        **more,
    )
