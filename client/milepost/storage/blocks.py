"""Writing an image into a file: direct I/O in large blocks, or buffered in a bounded window.

Owns the space that is asked for ahead and what stays in the page cache. Knows no checkpoint.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from typing import TYPE_CHECKING, Final

from milepost.format.layout import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

BUFFERED_WINDOW_BLOCKS: Final = 16
"""Dirty blocks of one file before they are synced and dropped, where direct I/O is refused: an
image must not push the data loader's files out of the page cache, nor collect there and then reach
the device at once.
"""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def _reserve(file: int, length: int) -> None:
    """Ask for the space ahead, so that a full disk is found before the first byte is written.

    Plain fallocate(2): where it is not supported glibc's emulation would write byte by byte. Only
    what says that the file cannot fit is an error; for anything else the writes themselves tell.
    """
    while length and _LIBC.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(length)):
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
            raise OSError(number, os.strerror(number))
        return


def _set_direct(file: int, direct: bool) -> bool:
    """Turn direct I/O on or off; False if the file system refuses.

    By fcntl: an open with O_DIRECT that is refused may have created the file all the same.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True


def write_blocks(
    file: int,
    image: memoryview,
    on_block: Callable[[int], None] | None,
    before_block: Callable[[int, int], None] | None,
    block_bytes: int,
) -> None:
    """Write an image into its open, empty file, and sync it: direct where that is possible.

    Args:
        on_block: told how many bytes each call has written.
        before_block: asked before each block: its bytes, and what is left with it.
    """
    length = len(image)
    _reserve(file, length)
    whole = length - length % PAGE_BYTES
    done = asked = 0

    def ask_until(end: int) -> None:
        nonlocal asked
        # What a failed or short write has left was asked for already.
        if before_block is not None and end > asked:
            before_block(end - asked, length - asked)
            asked = end

    if _set_direct(file, True):
        while done < whole:
            wanted = min(block_bytes, whole - done)
            ask_until(done + wanted)
            try:
                count = os.pwrite(file, image[done : done + wanted], done)
            except OSError as error:
                if error.errno == errno.EIO:
                    raise
                break  # A direct write may say EINVAL where a buffered one says why.
            done += count
            if on_block is not None and count:
                on_block(count)
            if count < wanted:
                break
        _set_direct(file, False)
    buffered = done < length
    unsynced = 0
    while done < length:
        wanted = min(block_bytes, length - done)
        ask_until(done + wanted)
        count = os.pwrite(file, image[done : done + wanted], done)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done += count
        unsynced += count
        if on_block is not None:
            on_block(count)
        if unsynced >= BUFFERED_WINDOW_BLOCKS * block_bytes:
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            unsynced = 0
    os.fsync(file)
    if buffered:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    if os.fstat(file).st_size != length:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
