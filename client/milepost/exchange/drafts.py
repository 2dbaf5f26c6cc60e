"""Output that gets its name only when it is whole: files, directories of files, and checkpoints.

Everything is written next to its place under another name, synced, and renamed. If anything ends a
block before that, such as a full disk or an interrupt, what was written is removed.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from milepost.errors import UsageError, listed
from milepost.format.manifest import MANIFEST_NAME, METADATA_NAME
from milepost.storage.blocks import reserve
from milepost.storage.durable import delete_tree, sync_directory, unlink
from milepost.storage.refusals import reported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

WINDOW_BYTES: Final = 256 << 20
"""How much is written before it is synced and dropped from the page cache, which belongs to
training."""

_SUFFIX: Final = ".milepost-"


class Draft:
    """A new file, written from front to back. Use it as a context manager, which syncs it at the
    end.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        """Make the file and reserve its `size` in bytes. None: the file exists and has holes to
        fill. Raises StorageError.
        """
        self._path = path
        self._at = 0
        self._unsynced = 0
        with reported("write", path, size):
            flags = os.O_RDWR | os.O_CLOEXEC | (0 if size is None else os.O_CREAT | os.O_EXCL)
            self._file = os.open(path, flags, 0o666)
            self._size = os.fstat(self._file).st_size if size is None else size
            try:
                reserve(self._file, self._size)
            except BaseException:
                os.close(self._file)
                raise

    def write(self, data: bytes | memoryview) -> None:
        """Append. Raises StorageError."""
        with reported("write", self._path, self._size):
            rest = memoryview(data)
            while rest:
                count = os.pwrite(self._file, rest, self._at)
                self._at += count
                rest = rest[count:]
            self._unsynced += len(data)
            if self._unsynced >= WINDOW_BYTES:
                os.fdatasync(self._file)
                self._let_go()

    def skip_to(self, at: int) -> None:
        """Fill with zeros up to an offset, and go on there."""
        assert at >= self._at
        self._at = at

    def patch(self, data: bytes, at: int) -> None:
        """Put bytes in a place that was written before. Raises StorageError."""
        with reported("write", self._path, self._size):
            os.pwrite(self._file, data, at)

    def _let_go(self) -> None:
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                with reported("write", self._path, self._size):
                    os.ftruncate(self._file, self._size)
                    os.fsync(self._file)
                    self._let_go()
        finally:
            os.close(self._file)


def resolved(out: Path) -> Path:
    """Return the path to write to: absolute, links followed, in a directory that exists. Raises
    UsageError.
    """
    path = Path(os.path.realpath(out))
    if not path.parent.is_dir():
        raise UsageError("usage", f"{out}: there is no directory {path.parent}", "make it first")
    return path


@contextmanager
def file_draft(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield the path at which to write a file that becomes `target` when the block ends well.

    Raises UsageError if `target` exists and must not be overwritten, or is not a file;
    StorageError.
    """
    if target.exists() and not target.is_file():
        raise UsageError("usage", f"{target} exists, and is not a file")
    _require_absent(target, overwrite)
    temp = _beside(target)
    try:
        yield temp
        _require_absent(target, overwrite)
        with reported("rename", target):
            os.rename(temp, target)
            sync_directory(target.parent)
    finally:
        with suppress(OSError):
            unlink(temp)


@contextmanager
def folder_draft(
    target: Path, *, overwrite: bool, is_replaced: Callable[[str], bool]
) -> Iterator[Path]:
    """Yield a directory to fill with files that appear in `target` when the block ends well.

    If `target` does not exist, it appears by one rename. If it exists (it may be a mount point), it
    keeps its files: the new files are moved in one by one, `*.index.json` last, and files for which
    `is_replaced` is true are replaced. If the process is killed between these moves, a directory
    below `target` holds the files that were not moved yet.

    Raises UsageError if a file would be replaced but must not be overwritten; StorageError.
    """
    if target.exists() and not target.is_dir():
        raise UsageError("usage", f"{target} exists, and is not a directory")
    is_there = target.is_dir()
    taken = [name for name in sorted(os.listdir(target)) if is_replaced(name)] if is_there else []
    if taken and not overwrite:
        raise UsageError(
            "usage",
            f"{target} holds {listed(taken)} already",
            "--overwrite replaces them, or name another directory",
        )
    temp = _beside(target / "export") if is_there else _beside(target)
    with reported("make", temp):
        temp.mkdir()
    try:
        yield temp
        with reported("move into place", target):
            sync_directory(temp)
            if is_there:
                _move_in(temp, target, taken)
            else:
                os.rename(temp, target)
                sync_directory(target.parent)
    finally:
        with suppress(OSError):
            delete_tree(temp)


def _move_in(temp: Path, target: Path, taken: list[str]) -> None:
    """Exchange old files for the new ones; after a failure, exchange them back."""
    aside = temp / "replaced"
    new = sorted(os.listdir(temp), key=lambda name: (name.endswith(".index.json"), name))
    aside.mkdir()
    moved: list[tuple[Path, Path]] = []
    steps = [(target / name, aside / name) for name in reversed(taken)]
    steps += [(temp / name, target / name) for name in new]
    try:
        for source, goal in steps:
            os.rename(source, goal)
            moved.append((source, goal))
        sync_directory(target)
    except BaseException:
        for source, goal in reversed(moved):
            with suppress(OSError):
                os.rename(goal, source)
        raise


@contextmanager
def checkpoint_draft(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a directory that becomes the checkpoint `target`, by a rename, when the block ends
    well.

    Raises UsageError if `target` exists, unless it is a checkpoint, holds nothing else, and is to
    be overwritten; StorageError.
    """
    is_there = target.exists() and (not target.is_dir() or any(target.iterdir()))
    if is_there:
        _require_checkpoint(target)
        _require_absent(target, overwrite)
    temp, aside = _beside(target), _beside(target)
    with reported("make", temp):
        temp.mkdir()
    try:
        yield temp
        with reported("rename", target):
            sync_directory(temp)
            if is_there:
                _require_checkpoint(target)
                os.rename(target, aside)
            try:
                os.rename(temp, target)
            except OSError:
                if is_there:
                    os.rename(aside, target)
                raise
            sync_directory(target.parent)
    finally:
        with suppress(OSError):
            delete_tree(temp)
        if target.exists():
            with suppress(OSError):
                delete_tree(aside)


def _require_checkpoint(target: Path) -> None:
    names = os.listdir(target) if target.is_dir() else []
    own = (METADATA_NAME, MANIFEST_NAME)
    foreign = sorted(n for n in names if n not in own and not n.endswith(".distcp"))
    if METADATA_NAME not in names or foreign:
        holds = f" and holds {listed(foreign)}" if METADATA_NAME in names else ", no checkpoint"
        raise UsageError(
            "usage", f"{target} exists{holds}", "name another directory, or move it away"
        )


def _require_absent(target: Path, overwrite: bool) -> None:
    if not overwrite and os.path.lexists(target):
        raise UsageError(
            "usage", f"{target} exists already", "--overwrite replaces it, or name another"
        )


def _beside(target: Path) -> Path:
    """Return a new hidden name in the directory of `target`. A root never takes such a name for a
    checkpoint.
    """
    return target.with_name(f".{target.name[:200]}{_SUFFIX}{secrets.token_hex(8)}")
