"""`milepost inspect`: what a checkpoint holds, and whether its index describes every tensor whole.

Reads the index and the manifest, no payload; `verify` reads the bytes. Works for any DCP
checkpoint.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

import msgspec

from milepost.format.manifest import Manifest, read_manifest
from milepost.format.tiling import GAP, check_tiling

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata


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


class IndexProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a key cannot be loaded whole."""

    code: str
    """`coverage-gap`, `coverage-overlap` or `coverage-bounds`."""
    key: str
    text: str


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

    from milepost.format.index import read_metadata

    metadata = read_metadata(checkpoint)
    manifest = read_manifest(checkpoint) or Manifest()
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


def index_problems(metadata: Metadata) -> list[IndexProblem]:
    """Check that the shards of each tensor tile it, and that a file holds every shard and
    object.
    """
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    problems = []
    # Equality of MetadataIndex goes by key and offset; a whole tensor may have been stored without.
    held = {(index.fqn, index.offset) for index in metadata.storage_data}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            if not any((key, offset) in held for offset in (None, ())):
                text = "no file holds the object"
                problems.append(IndexProblem(code=GAP, key=key, text=text))
            continue
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        problem = check_tiling(tuple(entry.size), boxes)
        if problem is not None:
            problems.append(IndexProblem(code=problem.code, key=key, text=problem.text))
        problems += _unheld(key, entry, held)
    return problems


def _unheld(
    key: str, entry: TensorStorageMetadata, held: set[tuple[str, object]]
) -> list[IndexProblem]:
    """Return the shards of a tensor that have no place in any file."""
    return [
        IndexProblem(
            code=GAP, key=key, text=f"no file holds the shard at {list(chunk.offsets)}"
        )
        for chunk in entry.chunks
        if (key, chunk.offsets) not in held
        and not (len(entry.chunks) == 1 and (key, None) in held)
    ]  # fmt: skip


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
