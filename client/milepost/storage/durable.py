"""Durable file operations: their effect survives a crash of the machine.

Knows no checkpoint. All calls block. Raises OSError.
Sources: rename(2), fsync(2).
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from milepost.storage.modes import UNKNOWN, make_directory, open_new

TEMP_PREFIX: Final = ".tmp-"
"""Prefix of a file's name until a rename gives it its final name."""

_DELETE_TRIES: Final = 100


def temporary(directory: Path) -> Path:
    """Return a new path for a file that will be renamed to its final name."""
    return directory / f"{TEMP_PREFIX}{secrets.token_hex(8)}"


def unlink(path: str | os.PathLike[str]) -> None:
    """Remove a file; missing is fine."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a directory. There a name is as durable as
        # it can be.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def make_directories(path: Path, umask: int = UNKNOWN) -> None:
    """Make `path` and the directories missing above it, with the modes that a umask gives them;
    sync each name into its parent.
    """
    if not path.parent.exists():
        make_directories(path.parent, umask)
    make_directory(path, umask)
    # Sync existing names, too: another node may have made one and died before its sync. A parent
    # that we may not read contains nothing of ours.
    with suppress(PermissionError):
        sync_directory(path.parent)


def create_file(path: Path, data: bytes, umask: int = UNKNOWN) -> None:
    """Write `data` into the new file `path` and sync it; after a failure there is no such file.

    The directory is not synced. Raises FileExistsError.
    """
    file = open_new(path, umask)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        finally:
            os.close(file)
    except BaseException:
        unlink(path)
        raise


def replace_file(path: Path, data: bytes, umask: int = UNKNOWN) -> None:
    """Make `path` hold `data`, or leave it as it was. Syncs its directory, which must exist."""
    temp = temporary(path.parent)
    create_file(temp, data, umask)
    try:
        os.rename(temp, path)
    except OSError:
        unlink(temp)
        raise
    sync_directory(path.parent)


def delete_tree(path: Path) -> None:
    """Delete a directory, even while another process deletes it; missing is fine."""
    for _ in range(_DELETE_TRIES):
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        if not os.path.lexists(path):
            return
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
