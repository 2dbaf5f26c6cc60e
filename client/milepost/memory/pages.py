"""Memory of a memory file system for one file: whether there is enough, taking it, mapping it.

Owns the limits that are looked at before anything is taken, and how pages are touched: in pieces,
by several threads, huge where the mount allows. Knows nothing of what lies in the file.

Sources: posix_fallocate(3), madvise(2), tmpfs(5), proc_pid_mountinfo(5), the kernel's
admin-guide/mm/transhuge, cgroup v1 and v2 memory controllers.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from milepost.errors import Rejected
from milepost.format.layout import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MADV_DONTFORK: Final = 10
_MADV_POPULATE_WRITE: Final = 23

_FAULT_PIECE_BYTES: Final = 64 << 20
"""One madvise call: long enough to be efficient, short enough that a signal is served in between.
"""

FAULT_THREADS_MAX: Final = 4
"""More gain little: the kernel clears pages as fast as memory allows."""

_RESERVE_PIECE_BYTES: Final = 256 << 20
"""One fallocate call: tmpfs starts a call anew when a signal arrives, so one call for all might
never end.
"""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_SHM_HINT: Final = (
    "set MILEPOST_SHM_DIR to a larger memory file system, or give the container more (docker: "
    "--shm-size; kubernetes: an emptyDir of medium Memory), or, if slots is above 2, use fewer"
)


# --- how much there is --------------------------------------------------------------------------


def memory_free(own: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes this process may still take: the machine's, or what its control groups leave
    if that is less.
    """
    free: int = psutil.virtual_memory().available
    for group, limit_name, used_name, prefix in _memory_groups(own, mount):
        try:
            limit = (group / limit_name).read_text().strip()
            used = int((group / used_name).read_text())
            fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue  # No limit here, or the memory controller is off.
        if limit.isdecimal():
            # Page cache goes when memory is wanted; memory file systems are not counted among it.
            cache = sum(
                int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active")
            )
            free = min(free, max(0, int(limit) - used + cache))
    return free


def _memory_groups(own: Path, mount: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield this process's memory groups, innermost first, each with the names of its files for v1
    or v2.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = mount, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            top = mount / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # In a container the path may name what only the host sees; the top of the mount is then
        # the container's own group.
        parts = () if ".." in path else Path(path.lstrip("/")).parts
        for count in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:count]), *names


def _too_small(directory: Path, wanted: int, free: int, of: str) -> Rejected:
    return Rejected(
        "shm-too-small",
        f"an arena in {directory} wants {wanted} bytes, {free} bytes of {of} are free",
        _SHM_HINT,
    )


def _free_bytes(directory: Path) -> int | None:
    """Return what the file system has left; None if it has no limit of its own."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def check_room(directory: Path, wanted: int) -> None:
    free = _free_bytes(directory)
    if free is not None and wanted > free:
        raise _too_small(directory, wanted, free, "the file system")
    memory = memory_free()
    if wanted > memory:
        raise _too_small(directory, wanted, memory, "memory")


# --- taking it ----------------------------------------------------------------------------------


def reserve(path: Path, descriptor: int, nbytes: int) -> None:
    """Take all pages of a new file now: a shortage is an error here, where a sparse file would be
    SIGBUS at the first touch.

    Raises Rejected("shm-too-small"); OSError for anything else.
    """
    if _may_be_huge(path.parent):
        _take_huge(descriptor, nbytes)
    for at in range(0, nbytes, _RESERVE_PIECE_BYTES):
        try:
            os.posix_fallocate(descriptor, at, min(_RESERVE_PIECE_BYTES, nbytes - at))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            free = _free_bytes(path.parent) or 0
            raise _too_small(path.parent, nbytes, free + at, "the file system") from error


def _may_be_huge(directory: Path) -> bool:
    """Tell whether the mount gives huge pages to who asks for them (tmpfs mounted with
    `huge=advise`); with `always` and `within_size` it gives them to everybody.
    """
    try:
        device = os.stat(directory).st_dev
        # A mount point is any bytes; the kernel escapes line feeds and blanks in it, no others.
        lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return False
    name = f"{os.major(device)}:{os.minor(device)}".encode()
    for line in lines:
        # Id, parent, device, ..., and the options of the file system last.
        fields = line.split(b" ")
        if len(fields) > 3 and fields[2] == name and b"huge=advise" in fields[-1].split(b","):
            return True
    return False


def _take_huge(descriptor: int, nbytes: int) -> None:
    """Take all of it in huge pages, which fallocate(2) never asks for; or nothing.

    To write them directly takes a third of the system's time, and to free them next to none.
    """
    refused: list[int] = []
    os.ftruncate(descriptor, nbytes)
    with mmap.mmap(descriptor, nbytes) as mapping:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            return
        _touch_all(mapping, None, lambda at, length: refused.append(at))
    if refused:
        # Whoever takes small ones can tell what is missing.
        os.ftruncate(descriptor, 0)


def keep_from_children(mapping: mmap.mmap) -> None:
    """Leave the mapping out of forked children: they would keep the memory long after this process
    has given it back.
    """
    anchor = ctypes.c_char.from_buffer(mapping)
    _LIBC.madvise(
        ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapping)), _MADV_DONTFORK
    )


# --- mapping it ---------------------------------------------------------------------------------


def fault_in(mapping: mmap.mmap, threads: int | None = None) -> None:
    """Map every page of a file; contents do not change. Holds no GIL for long.

    Args:
        threads: among which the pages are shared out; None: one for every second core that this
            process may use, up to `FAULT_THREADS_MAX`.
    """

    def read(at: int, length: int) -> None:
        # For kernels before 5.14. Reading, since staging may be writing there.
        with memoryview(mapping) as view:
            bytes(view[at : at + length : PAGE_BYTES])

    _touch_all(mapping, threads, read)


def _touch_all(
    mapping: mmap.mmap, threads: int | None, otherwise: Callable[[int, int], None]
) -> None:
    """Have the kernel make every page of a mapping there and writable, and change none.

    Args:
        threads: see `fault_in`.
        otherwise: called with offset and length of a piece that the kernel refuses.
    """
    if threads is None:
        threads = min(FAULT_THREADS_MAX, max(1, len(os.sched_getaffinity(0)) // 2))
    # Also keeps `close` from unmapping meanwhile.
    anchor = ctypes.c_char.from_buffer(mapping)
    start, nbytes = ctypes.addressof(anchor), len(mapping)
    # Each takes the next piece: `next` on a range's iterator is one step under the GIL.
    pieces = iter(range(0, nbytes, _FAULT_PIECE_BYTES))

    def work() -> None:
        for at in pieces:
            length = min(_FAULT_PIECE_BYTES, nbytes - at)
            if not _populate(start + at, length):
                otherwise(at, length)

    others: list[threading.Thread] = []
    try:
        # A thread that cannot be had costs time only.
        with suppress(RuntimeError):
            for _ in range(threads - 1):
                other = threading.Thread(target=work, name="milepost-fault-in", daemon=True)
                other.start()
                others.append(other)
        work()
    finally:
        # Also after an interrupt nobody may go on where the caller is about to unmap, which is
        # refused as long as the anchor is there.
        for _ in pieces:
            pass
        for each in others:
            each.join()
        del anchor


def _populate(address: int, length: int) -> bool:
    while _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            return False
    return True
