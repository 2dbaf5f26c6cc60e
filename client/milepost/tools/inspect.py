"""`milepost inspect`: what a checkpoint holds, and whether its index describes every tensor whole.

Reads the index and the manifest, no payload; `verify` reads the bytes. Works for any DCP
checkpoint.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

import msgspec

from milepost.errors import LoadFailed
from milepost.format.manifest import MANIFEST_NAME, Manifest, read_manifest
from milepost.format.tiling import IndexProblem

if TYPE_CHECKING:
    from pathlib import Path


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor as the index describes it."""

    key: str
    dtype: str
    """Without `torch.`: "float32"."""
    size: tuple[int, ...]
    shards: int
    bytes: int
    """Of the whole tensor's elements."""
    files: tuple[str, ...]


class ObjectEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One serialised object."""

    key: str
    bytes: int
    file: str


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One data file."""

    name: str
    bytes: int
    """-1: the file is missing."""
    blobs: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a checkpoint."""

    checkpoint: str
    step: int
    """-1 without a manifest."""
    save_id: str
    job: str
    world: int
    """Ranks that saved; 0 without a manifest."""
    torch_version: str
    committed_at_ms: int
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    files: tuple[FileEntry, ...]
    problems: tuple[IndexProblem, ...]


def inspect(checkpoint: Path) -> Inspection:
    """Return what the index says.

    Raises:
        LoadFailed: there is no index, or it cannot be read.
        CorruptCheckpoint: index or manifest are malformed.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from milepost.dcp_format.coverage import index_problems
    from milepost.dcp_format.index import read_metadata

    metadata = read_metadata(checkpoint)
    try:
        manifest = read_manifest(checkpoint) or Manifest()
    except OSError as error:
        text = f"{checkpoint / MANIFEST_NAME} cannot be read: {str(error.strerror).lower()}"
        raise LoadFailed("io-error", text) from error
    files_of: dict[str, dict[str, None]] = {}
    bytes_of: Counter[str] = Counter()
    blobs_of: Counter[str] = Counter()
    for index, info in metadata.storage_data.items():
        files_of.setdefault(index.fqn, {})[info.relative_path] = None
        bytes_of[index.fqn] += info.length
        blobs_of[info.relative_path] += 1
    tensors, objects = [], []
    for key, entry in metadata.state_dict_metadata.items():
        files = tuple(files_of.get(key, ()))
        if isinstance(entry, TensorStorageMetadata):
            tensors.append(
                TensorEntry(
                    key=key,
                    dtype=str(entry.properties.dtype).removeprefix("torch."),
                    size=tuple(entry.size),
                    shards=len(entry.chunks),
                    bytes=prod(entry.size) * entry.properties.dtype.itemsize,
                    files=files,
                )
            )
        else:
            objects.append(ObjectEntry(key=key, bytes=bytes_of[key], file="".join(files)))
    return Inspection(
        checkpoint=str(checkpoint),
        step=manifest.step,
        save_id=manifest.save_id,
        job=manifest.job,
        world=manifest.world,
        torch_version=manifest.torch_version,
        committed_at_ms=manifest.committed_at_ms,
        tensors=tuple(tensors),
        objects=tuple(objects),
        files=tuple(
            FileEntry(name=name, bytes=_length(checkpoint / name), blobs=count)
            for name, count in sorted(blobs_of.items())
        ),
        problems=tuple(index_problems(metadata)),
    )


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
