"""The memory of one file on a memory file system: checks that there is enough, reserves it, maps
it.

Owns the limits that are checked before anything is reserved. Touches pages in pieces, by several
threads, and as huge pages if the mount allows them. Knows nothing of the file's content.

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
"""One madvise call: long enough to be efficient, short enough that signals are handled in between.
"""

FAULT_THREADS_MAX: Final = 4
"""More threads gain little: the kernel clears pages as fast as memory allows."""

_RESERVE_PIECE_BYTES: Final = 256 << 20
"""One fallocate call: tmpfs starts a call again when a signal arrives, so one call for the whole
file might never end.
"""

_LIBC: Final = ctypes.CDLL(None, use_errno=True)

_SHM_HINT: Final = (
    "set MILEPOST_SHM_DIR to a larger memory file system, or give the container more (docker: "
    "--shm-size; kubernetes: an emptyDir of medium Memory), or, if slots is above 2, use fewer"
)


# --- is there enough ----------------------------------------------------------------------------


def memory_free(own: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many bytes this process may still use: the free memory of the machine, or of its
    control groups if that is less.
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
            # The kernel gives up page cache when memory is wanted. This figure does not include
            # memory file systems.
            cache = sum(
                int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active")
            )
            free = min(free, max(0, int(limit) - used + cache))
    return free


def _memory_groups(own: Path, mount: Path) -> Iterator[tuple[Path, str, str, str]]:
    """Yield this process's memory groups, innermost first, each with the names of its files (which
    differ between cgroup v1 and v2).
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
        # In a container, the path may exist only on the host. Then the top of the mount is the
        # container's own group.
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
    """Return the free bytes of the file system; None if it has no limit of its own."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize if status.f_blocks else None


def check_room(directory: Path, wanted: int) -> None:
    """Raise Rejected("shm-too-small") if a file of `wanted` bytes would not fit."""
    free = _free_bytes(directory)
    if free is not None and wanted > free:
        raise _too_small(directory, wanted, free, "the file system")
    memory = memory_free()
    if wanted > memory:
        raise _too_small(directory, wanted, memory, "memory")


# --- reserving it -------------------------------------------------------------------------------


def reserve_pages(path: Path, descriptor: int, nbytes: int) -> None:
    """Reserve all pages of a new file. A shortage is an error now; with a sparse file it would be a
    SIGBUS at the first touch.

    Raises Rejected("shm-too-small"); OSError for anything else.
    """
    if _may_be_huge(path.parent):
        _reserve_huge(descriptor, nbytes)
    for at in range(0, nbytes, _RESERVE_PIECE_BYTES):
        try:
            os.posix_fallocate(descriptor, at, min(_RESERVE_PIECE_BYTES, nbytes - at))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            free = _free_bytes(path.parent) or 0
            raise _too_small(path.parent, nbytes, free + at, "the file system") from error


def _may_be_huge(directory: Path) -> bool:
    """Return whether the mount gives huge pages on request (tmpfs mounted with `huge=advise`). With
    `always` and `within_size` it gives them without a request.
    """
    try:
        device = os.stat(directory).st_dev
        # As bytes: a mount point can contain any, and only line feeds and blanks are escaped.
        lines = Path("/proc/self/mountinfo").read_bytes().split(b"\n")
    except OSError:
        return False
    name = f"{os.major(device)}:{os.minor(device)}".encode()
    for line in lines:
        # Id, parent, device, ..., and last the options of the file system.
        fields = line.split(b" ")
        if len(fields) > 3 and fields[2] == name and b"huge=advise" in fields[-1].split(b","):
            return True
    return False


def _reserve_huge(descriptor: int, nbytes: int) -> None:
    """Reserve the whole file in huge pages, or nothing. fallocate(2) never asks for huge pages.

    Writing huge pages with direct I/O takes a third of the system time; freeing them takes almost
    none.
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
        # Small pages are reserved next; a shortage is reported there.
        os.ftruncate(descriptor, 0)


def keep_from_children(mapping: mmap.mmap) -> None:
    """Exclude the mapping from forked children: they would keep the memory long after this process
    has released it.
    """
    anchor = ctypes.c_char.from_buffer(mapping)
    _LIBC.madvise(
        ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapping)), _MADV_DONTFORK
    )


# --- mapping it ---------------------------------------------------------------------------------


def fault_in(mapping: mmap.mmap, threads: int | None = None) -> None:
    """Map every page of a file; contents do not change. Never holds the GIL for long.

    Args:
        threads: how many share the work; None: one for every second core that this process may
            use, up to `FAULT_THREADS_MAX`.
    """

    def read(at: int, length: int) -> None:
        # For kernels before 5.14. It only reads, since staging may be writing there.
        with memoryview(mapping) as view:
            bytes(view[at : at + length : PAGE_BYTES])

    _touch_all(mapping, threads, read)


def _touch_all(
    mapping: mmap.mmap, threads: int | None, otherwise: Callable[[int, int], None]
) -> None:
    """Have the kernel map every page of a mapping as writable, without changing any.

    Args:
        threads: see `fault_in`.
        otherwise: called with offset and length of each piece that the kernel refuses.
    """
    if threads is None:
        threads = min(FAULT_THREADS_MAX, max(1, len(os.sched_getaffinity(0)) // 2))
    # A mapping cannot be closed while the anchor exists.
    anchor = ctypes.c_char.from_buffer(mapping)
    start, nbytes = ctypes.addressof(anchor), len(mapping)
    # Each thread takes the next piece: `next` on a range's iterator is atomic under the GIL.
    pieces = iter(range(0, nbytes, _FAULT_PIECE_BYTES))

    def work() -> None:
        for at in pieces:
            length = min(_FAULT_PIECE_BYTES, nbytes - at)
            if not _populate(start + at, length):
                otherwise(at, length)

    others: list[threading.Thread] = []
    try:
        # Without more threads it only takes longer.
        with suppress(RuntimeError):
            for _ in range(threads - 1):
                other = threading.Thread(target=work, name="milepost-fault-in", daemon=True)
                other.start()
                others.append(other)
        work()
    finally:
        # Wait for the threads after an interrupt, too: none may touch memory that the caller is
        # about to unmap. See docs/design/0010-interrupts.md.
        for _ in pieces:
            pass
        for each in others:
            each.join()
        del anchor


def _populate(address: int, length: int) -> bool:
    """Have the kernel map a range of pages; return False if it refuses."""
    while _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            return False
    return True
