"""Whether an index is one, and describes whole tensors: every field has its type, the shards tile
each tensor, and a file holds each shard.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from milepost.dcp_format.container import is_possible
from milepost.format.tiling import GAP, IndexProblem, check_tiling


def form_problem(metadata: Any) -> str:
    """Return what is wrong with the form of an unpickled index; "" if nothing is.

    What is unpickled has the right classes, but a pickle may put anything into their fields.
    """
    if not isinstance(metadata, Metadata):
        return f"it holds a {type(metadata).__name__}"
    described: Any = getattr(metadata, "state_dict_metadata", None)
    storage_data: Any = getattr(metadata, "storage_data", None)
    if not isinstance(described, dict) or not isinstance(storage_data, dict):
        return "it lacks state_dict_metadata or storage_data"
    for key, entry in described.items():
        if not isinstance(key, str):
            return f"it has a {type(key).__name__} as a key"
        if not isinstance(entry, TensorStorageMetadata | BytesStorageMetadata):
            return f"it describes {key!r} by a {type(entry).__name__}"
        if isinstance(entry, TensorStorageMetadata) and not _is_tensor(entry):
            return f"its entry of the tensor {key!r} is malformed"
    names = set()
    for index, info in storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            return f"it has a {type(info).__name__} as the place of a {type(index).__name__}"
        if not _is_place(index, info):
            return f"its place of {getattr(index, 'fqn', None)!r} is malformed"
        names.add(info.relative_path)
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            return f"it names the file {name!r}, outside the checkpoint"
    return ""


def _is_tensor(entry: Any) -> bool:
    """Tell whether the fields of a tensor's entry have their types."""
    try:
        size, chunks = entry.size, entry.chunks
        return (
            isinstance(entry.properties.dtype, torch.dtype)
            and _is_box(size)
            and is_possible(size)
            and isinstance(chunks, list | tuple)
            and all(
                _is_box(chunk.offsets)
                and _is_box(chunk.sizes)
                and len(chunk.offsets) == len(chunk.sizes) == len(size)
                for chunk in chunks
            )
        )
    except AttributeError:
        return False


def _is_place(index: Any, info: Any) -> bool:
    """Tell whether the fields of an entry of `storage_data` have their types, and are possible."""
    try:
        return (
            isinstance(index.fqn, str)
            and (index.offset is None or _is_box(index.offset))
            and isinstance(info.relative_path, str)
            and _is_count(info.offset)
            and _is_count(info.length)
        )
    except AttributeError:
        return False


def _is_count(value: Any) -> bool:
    """Tell whether this is a number of bytes that a file can have."""
    return type(value) is int and 0 <= value < 1 << 63


def _is_box(value: Any) -> bool:
    """Tell whether this is a shape, or offsets into one."""
    if type(value) is torch.Size:  # Of integers, whatever else; an index may have millions.
        return min(value, default=0) >= 0
    return isinstance(value, tuple) and all(type(each) is int and each >= 0 for each in value)


def index_problems(metadata: Metadata) -> list[IndexProblem]:
    """Check that the shards of each tensor tile it, and that a file holds each shard and object."""
    problems = []
    # A MetadataIndex is its key and offset; a whole tensor may have been stored without an offset.
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
