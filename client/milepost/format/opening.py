"""Opening the files of a checkpoint, which somebody else may have put there.

A pipe would let its reader wait for ever, and a device has no end. Sources: open(2), fifo(7).
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from pathlib import Path


class IrregularFile(OSError):
    """There is a pipe, a socket or a device of that name."""


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Raises OSError: IsADirectoryError
    for a directory, `IrregularFile` for a pipe or a device, without waiting for it.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise IrregularFile(errno.EINVAL, "it is no regular file", str(path))


def opened(path: Path) -> BinaryIO:
    """Return the same as a stream."""
    return cast("BinaryIO", os.fdopen(open_regular(path), "rb"))


def read_regular(path: Path) -> bytes:
    """Return all bytes of a regular file. Raises as `open_regular`."""
    with opened(path) as file:
        return file.read()
