"""Writing an image into a file: direct I/O in large blocks, or buffered in a bounded window.

Owns the block size, the space that is reserved ahead, and what stays in the page cache. Knows no
checkpoint. Raises OSError. Sources: fallocate(2), fcntl(2) on O_DIRECT, posix_fadvise(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from milepost.format.layout import PAGE_BYTES
from milepost.storage.modes import UNKNOWN, open_new

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES: Final = 16 << 20
"""One direct write: large enough that the device, not the call, sets the speed; small enough to
report progress.
"""

BUFFERED_WINDOW_BLOCKS: Final = 16
"""Where direct I/O is refused: dirty blocks of one file before they are synced and dropped. An
image must not push the data loader's files out of the page cache, nor pile up there and then reach
the device all at once.
"""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def reserve(file: int, length: int) -> None:
    """Reserve the space, so that a full disk is found before the first byte is written.

    Uses plain fallocate(2): if it is not supported, glibc's emulation would write byte by byte.
    Only raises an error that says that the file cannot fit; any other error shows in the writes.
    """
    while length and _LIBC.fallocate(file, 0, ctypes.c_int64(0), ctypes.c_int64(length)):
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
            raise OSError(number, os.strerror(number))
        return


def write_image(
    path: Path,
    image: memoryview,
    on_block: Callable[[int], None] | None,
    before_block: Callable[[int, int], None] | None,
    block_bytes: int,
    umask: int = UNKNOWN,
) -> None:
    """See `Root.write_image`."""
    # Use a descriptor, so that the file can be removed even if its directory was renamed meanwhile.
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        file = open_new(path.name, umask, folder=folder)
        try:
            try:
                _write_blocks(file, image.cast("B"), on_block, before_block, block_bytes)
            finally:
                os.close(file)
        except BaseException:
            with suppress(OSError):
                os.unlink(path.name, dir_fd=folder)
            raise
    finally:
        os.close(folder)


def _set_direct(file: int, direct: bool) -> bool:
    """Turn direct I/O on or off; return False if the file system refuses.

    By fcntl: an open with O_DIRECT may create the file and still be refused.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, wanted)
    except OSError:
        return False
    return True


def _write_blocks(
    file: int,
    image: memoryview,
    on_block: Callable[[int], None] | None,
    before_block: Callable[[int, int], None] | None,
    block_bytes: int,
) -> None:
    """Write an image into its open, empty file, and sync it: direct where that is possible."""
    length = len(image)
    reserve(file, length)
    whole = length - length % PAGE_BYTES
    done = asked = 0

    def ask_until(end: int) -> None:
        nonlocal asked
        # The rest of a failed or short write was announced already.
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
                break  # A buffered write says why, where a direct one may only say EINVAL.
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
