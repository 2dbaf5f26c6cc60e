"""`Writer`, and the decision which saves are ours: where a save goes, or why stock torch has to
make it.

Looks only at arguments.

Sources: torch/distributed/checkpoint/{filesystem,_storage_utils}.py (2.13).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager

from milepost.storage.paths import absolute

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.staging import AsyncStager
    from torch.distributed.checkpoint.storage import StorageWriter

PLACE_CHARACTERS_MAX: Final = 3000
"""Longest path that a daemon accepts."""


class Writer(FileSystemWriter):
    """A `FileSystemWriter` with another name. With `milepost.dcp.save`, milepost writes; with
    `torch.distributed.checkpoint.save`, it works as a `FileSystemWriter`.

    Arguments as of `FileSystemWriter`. `single_file_per_rank`, `sync_files`, `thread_count`,
    `per_thread_copy_ahead` and `cache_staged_state_dict` have no effect in `milepost.dcp`: each
    rank writes one file, which is always synced.
    """


_OURS: Final = (FileSystemWriter, Writer)
"""The classes themselves; their subclasses may write anything."""

_COPYING: Final = (DefaultStager, BlockingAsyncStager, *_OURS)
"""Stagers that only copy what they are given."""


class Target(NamedTuple):
    """Where one save goes.

    Attributes:
        path: the checkpoint's directory, as it was given.
        place: the same as an absolute path, which stays right if the program changes its working
            directory; see `absolute`.
        overwrite: whether a checkpoint that stands there may be replaced.
        storage_meta: what planners are told.
    """

    path: Path
    place: str
    overwrite: bool
    storage_meta: StorageMeta | None


def target_of(
    storage_writer: StorageWriter | None, checkpoint_id: str | os.PathLike[str] | None
) -> Target:
    """Return where a save goes that is not left to torch. Raises RuntimeError as torch does if
    neither says it.
    """
    if storage_writer is None:
        if not checkpoint_id:
            raise RuntimeError(
                "`checkpoint_id` must be specified if storage_reader/storage_writer is None."
            )
        storage_writer = FileSystemWriter(checkpoint_id)
    elif checkpoint_id is not None:
        storage_writer.reset(checkpoint_id)
    assert isinstance(storage_writer, FileSystemWriter)
    path = Path(storage_writer.path)
    return Target(path, absolute(path), storage_writer.overwrite, storage_writer.storage_meta())


def why_not_ours(
    storage_writer: StorageWriter | None,
    checkpoint_id: str | os.PathLike[str] | None,
    *,
    use_collectives: bool,
) -> str:
    """Return why stock torch has to write this; "": we do."""
    if not use_collectives:
        return "use_collectives=False"
    if storage_writer is not None:
        if not isinstance(storage_writer, FileSystemWriter) or type(storage_writer) not in _OURS:
            return f"the writer is a {type(storage_writer).__name__}"
        if storage_writer.transforms.extensions:
            return "the writer has extensions"
        if storage_writer.serialization_format != SerializationFormat.TORCH_SAVE:
            return f"the writer's format is {storage_writer.serialization_format.name}"
    path = getattr(storage_writer, "path", "") if checkpoint_id is None else checkpoint_id
    if "://" in str(path):
        return f"{path} is a URL"
    if len(absolute(path)) > PLACE_CHARACTERS_MAX or not str(path).isprintable():
        return "no daemon can be told the path"
    return ""


def why_not_staged(async_stager: AsyncStager | None) -> str:
    """Return why stock torch has to save what this stager makes from a state; "": it only
    copies.
    """
    if async_stager is None or type(async_stager) in _COPYING:
        return ""
    return f"the stager is a {type(async_stager).__name__}"
