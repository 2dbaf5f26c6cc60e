"""Reads a data file: from the page cache what is in it, and everything else past the page cache.

Owns descriptors, direct I/O and what happens if it is refused, and asks the kernel what is in
memory. Knows no checkpoint. Thread-safe; releases the GIL while it reads.

Sources: open(2) and statx(2) on O_DIRECT, cachestat in the kernel's mm/filemap.c (6.5 and newer),
preadv2(2) on RWF_NOWAIT.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from milepost.format.layout import PAGE_BYTES, align

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import TracebackType

IDLE_FILES_MAX: Final = 16
"""How many files stay open because somebody may need them again."""

PROBE_EVERY_BYTES: Final = 1 << 20
"""If the kernel does not count pages, one byte in this many is probed."""

BRING_BYTES: Final = 256 << 10
"""How much to request for the page cache at once. The kernel ignores the rest of a larger
request.
"""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_SYS_CACHESTAT: Final = 451
"""On every architecture."""


class ShortFile(OSError):
    """A file ended while it was read."""


class DataFile:
    """One open file.

    Attributes:
        size: in bytes, when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open it. Raises OSError, also if it is not a regular file."""
        self._path = path
        # Do not wait for a writer if it is a pipe.
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        self._direct = self._probe = -1
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(path))
            self.size = status.st_size
            self._direct = self._open_again(os.O_DIRECT)
        except BaseException:
            self.close()
            raise

    def _open_again(self, flags: int) -> int:
        """Open the same file again; -1 if the system refuses, or another file has its name now."""
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError:
            return -1
        if os.path.sameopenfile(file, self._file):
            return file
        os.close(file)
        return -1

    def close(self) -> None:
        """Close it; idempotent."""
        for file in (self._file, self._direct, self._probe):
            if file >= 0:
                os.close(file)
        self._file = self._direct = self._probe = -1

    def __enter__(self) -> DataFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- what is in memory

    def is_cached(self, begin: int, end: int) -> bool:
        """Whether most of a range is in the page cache. Reads nothing, or almost nothing."""
        end = min(end, self.size)
        if begin >= end:
            return False
        pages = self._count_pages(begin, end)
        if pages is None:
            return self._is_probably_cached(begin, end)
        return 2 * pages * PAGE_BYTES >= end - begin

    def _count_pages(self, begin: int, end: int) -> int | None:
        """Return how many pages of a range are in memory; None if the kernel does not say."""
        # Of `struct cachestat_range` and `struct cachestat`, all fields are 64 bits.
        asked = (ctypes.c_uint64 * 2)(begin, end - begin)
        cached = (ctypes.c_uint64 * 5)()
        failed = _LIBC.syscall(
            ctypes.c_long(_SYS_CACHESTAT),
            ctypes.c_uint(self._file),
            asked,
            cached,
            ctypes.c_uint(0),
        )
        return None if failed else int(cached[0])

    def _is_probably_cached(self, begin: int, end: int) -> bool:
        """Try to read single bytes without waiting. For kernels before 6.5, and for users who may
        not count the pages of other people's files.
        """
        if self._probe < 0:
            self._probe = self._open_again(0)
            if self._probe < 0:
                return False
            # The kernel may fetch a missing byte for the next reader, but not its neighbours.
            os.posix_fadvise(self._probe, 0, 0, os.POSIX_FADV_RANDOM)
        hits = asked = 0
        byte = bytearray(1)
        for at in range(begin, end, PROBE_EVERY_BYTES):
            asked += 1
            try:
                hits += os.preadv(self._probe, [byte], at, os.RWF_NOWAIT)
            except BlockingIOError:
                continue
            except OSError:
                return False
        return 2 * hits > asked

    # --- reading

    def bring(self, begin: int, end: int) -> None:
        """Let the kernel begin to read the missing parts of a range into the page cache. Waits only
        if the device has too much to do.
        """
        with suppress(OSError):
            for at in range(begin, end, BRING_BYTES):
                length = min(BRING_BYTES, end - at)
                os.posix_fadvise(self._file, at, length, os.POSIX_FADV_WILLNEED)

    def read(self, memory: memoryview, at: int) -> None:
        """Fill memory from an offset on, through the page cache.

        Raises OSError; ShortFile if the file ends before.
        """
        done = 0
        while done < len(memory):
            count = os.preadv(self._file, [memory[done:]], at + done)
            if not count:
                raise ShortFile(errno.EIO, f"it ends at {at + done} while it is read")
            done += count

    def read_past_cache(self, memory: memoryview, at: int, length: int) -> None:
        """Fill the first `length` bytes of memory from an offset on, past the page cache.

        Args:
            memory: begins on a page, and is a whole number of pages; the bytes after `length` are
                overwritten, too.
            at: a multiple of a page.

        If direct I/O is refused, or fails for another reason than the medium, reads through the
        page cache, and drops the pages afterwards. Then the raised error is the true one.
        """
        done = 0
        if self._direct >= 0:
            wanted = align(length, PAGE_BYTES)
            while done < length:
                try:
                    count = os.preadv(self._direct, [memory[done:wanted]], at + done)
                except OSError as error:
                    if error.errno == errno.EIO:
                        raise
                    # A direct read may only say EINVAL; a read through the cache gives the true
                    # reason.
                    break
                done += count
                if not count or count % PAGE_BYTES:
                    break
        if done < length:
            self.read(memory[done:length], at + done)
            self.forget(at + done, at + length)

    def forget(self, begin: int, end: int) -> None:
        """Let the kernel drop a range from the page cache, which belongs to training."""
        with suppress(OSError):
            os.posix_fadvise(self._file, begin, end - begin, os.POSIX_FADV_DONTNEED)


class Buffer:
    """Memory that begins on a page, for direct I/O.

    Attributes:
        view: all of it.
        address: the address of its first byte.
    """

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, align(max(nbytes, 1), PAGE_BYTES))
        with suppress(OSError):
            # Touching small pages for the first time costs more than reading into them.
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._mapping)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))


class OpenFiles:
    """The files of one checkpoint, open while they are needed. Thread-safe.

    Args:
        checkpoint: its directory.
        is_shared: whether another process reads a range of a file at about the same time; such a
            range is read through the page cache.

    Attributes:
        failed: names of files that could not be read.
        read_bytes: how much was read from all files.
    """

    def __init__(
        self, checkpoint: Path, is_shared: Callable[[str, int, int], bool] = lambda *_: False
    ) -> None:
        self.failed: set[str] = set()
        self.read_bytes = 0
        self._checkpoint = checkpoint
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._open: dict[str, DataFile] = {}
        """Open files, the least recently used first."""
        self._needed: Counter[str] = Counter()

    def expect(self, names: Iterable[str]) -> None:
        """Keep each file open until `let_go` was called as often as the file is named here."""
        with self._lock:
            self._needed.update(names)

    def get(self, name: str) -> DataFile:
        """Return a file. It stays open as long as it is expected to be needed. Raises OSError."""
        with self._lock:
            found = self._open.pop(name, None) or DataFile(self._checkpoint / name)
            self._open[name] = found
            return found

    def let_go(self, name: str) -> None:
        """Note that one of the expected uses of a file is over."""
        with self._lock:
            self._needed[name] -= 1
            idle = [each for each in self._open if self._needed[each] <= 0]
            for each in idle[:-IDLE_FILES_MAX]:
                self._open.pop(each).close()

    def is_cached(self, name: str, file: DataFile, begin: int, end: int) -> bool:
        """Whether to read a range through the page cache: it is there already, or other processes
        want it, too.
        """
        if file.is_cached(begin, end):
            return True
        if not self._is_shared(name, begin, end):
            return False
        file.bring(begin, end)
        return True

    def count(self, nbytes: int) -> None:
        """Add to the number of bytes read."""
        with self._lock:
            self.read_bytes += nbytes

    def read_few(self, name: str, at: int, length: int) -> bytes:
        """Return a few bytes of a file. Raises OSError."""
        self.expect([name])
        try:
            file = self.get(name)
            begin = at // PAGE_BYTES * PAGE_BYTES
            buffer = Buffer(at + length - begin)
            if self.is_cached(name, file, begin, at + length):
                file.read(buffer.view[: at + length - begin], begin)
            else:
                file.read_past_cache(buffer.view, begin, at + length - begin)
            self.count(length)
            return bytes(buffer.view[at - begin : at - begin + length])
        finally:
            self.let_go(name)

    def close(self) -> None:
        """Close all."""
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()
