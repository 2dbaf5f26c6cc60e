"""Turns an OSError into a StorageError: its code, its hint, and whether trying again may help."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from milepost.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_CODES: Final = {
    errno.ENOSPC: "no-space",
    errno.EDQUOT: "quota",
    errno.EFBIG: "file-too-large",
    errno.EROFS: "read-only",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
}

_HINTS: Final = {
    "no-space": "free space there, or remove old checkpoints (`milepost prune ROOT --keep-last N`) "
    "and keep fewer (`keep=KeepLast(n)`)",
    "quota": "ask for a larger quota, or remove old checkpoints "
    "(`milepost prune ROOT --keep-last N`)",
    "file-too-large": "raise the process's file size limit (`ulimit -f`, LimitFSIZE=)",
    "read-only": "mount the file system for writing, or use another root",
    "permission": "let the daemon's user write there (`ls -ld`), or use another root",
    "io-error": "check that the file system is mounted and healthy (kernel log), and that nothing "
    "else changes these files",
}

_NOT_DIRECTORY_HINT: Final = "a part of the path is a file: name another root"

_TRANSIENT: Final = {errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.EINTR}


def storage_error(
    operation: str, path: str | os.PathLike[str], error: OSError, wanted: int | None = None
) -> StorageError:
    """Return an error that names the operation, the path, the reason, and the bytes `wanted`."""
    number = error.errno or 0
    code = _CODES.get(number, "io-error")
    reason = (os.strerror(number) if number else str(error)).lower()
    size = "" if wanted is None else f" ({wanted} bytes wanted)"
    return StorageError(
        code,
        f"{operation} {os.fspath(path)}: {reason}{size}",
        _NOT_DIRECTORY_HINT if number == errno.ENOTDIR else _HINTS[code],
        operation=operation,
        path=os.fspath(path),
        errno=number,
        transient=number in _TRANSIENT,
    )


@contextmanager
def reported(
    operation: str, path: str | os.PathLike[str], wanted: int | None = None
) -> Iterator[None]:
    """Raise what the system refuses in this block as StorageError, by `storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(operation, path, error, wanted) from error
