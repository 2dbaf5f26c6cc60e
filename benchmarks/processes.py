"""What processes use: processor time, memory and open files of whole process trees.

Reads `/proc` by psutil, and what psutil does not tell by itself. Source: proc(5).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil

SHARED_MEMORY: Final = Path("/dev/shm")
SAMPLE_S: Final = 0.02


class Usage(msgspec.Struct, frozen=True):
    """Held at an instant."""

    memory_bytes: int
    """Private and file pages of all processes."""
    shared_bytes: int
    """Files in shared memory that they map, each once."""
    descriptors: int


class Group:
    """A process and all below it, and its companions with all below them.

    Companions may be below the process or not; `is_counted` says whether they belong to the group.
    """

    def __init__(
        self, root: int, companions: Iterable[int] = (), *, is_counted: bool = True
    ) -> None:
        self._root = root
        self._companions = tuple(companions)
        self._is_counted = is_counted

    def _companions_tree(self) -> dict[int, psutil.Process]:
        return {pid: process for root in self._companions for pid, process in _tree(root)}

    def _members(self) -> Iterable[psutil.Process]:
        companions, own = self._companions_tree(), dict(_tree(self._root))
        if self._is_counted:
            return (own | companions).values()
        return [process for pid, process in own.items() if pid not in companions]

    def cpu_s(self) -> float:
        """Return the processor time used so far, by ended children too. Resolution: a tick (10 ms)
        a process.
        """
        total = 0.0
        for process in self._members():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def usage(self) -> Usage:
        """Return what is held now. What companions map is theirs, whoever made it."""
        memory_bytes = descriptors = 0
        shared: dict[int, int] = {}
        for process in self._members():
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                fields = dict(line.split(":", 1) for line in status.splitlines())
                for name in ("RssAnon", "RssFile"):
                    memory_bytes += int(fields.get(name, "0 kB").split()[0]) << 10
                descriptors += process.num_fds()
                shared |= _shared_files(process.pid)
        if not self._is_counted:
            for pid in self._companions_tree():
                with contextlib.suppress(OSError):
                    for inode in _shared_files(pid):
                        shared.pop(inode, None)
        return Usage(memory_bytes, sum(shared.values()), descriptors)


def _shared_files(pid: int) -> dict[int, int]:
    """Return the length of each file in shared memory that a process maps, by inode."""
    found: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith(f"{SHARED_MEMORY}/"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            length = int(offset, 16) + end - begin
            found[int(inode)] = max(length, found.get(int(inode), 0))
    return found


def _tree(root: int) -> Iterator[tuple[int, psutil.Process]]:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for each in (process, *process.children(recursive=True)):
            yield each.pid, each


class Watch:
    """Samples what a group holds, in a thread, from `__enter__` to `__exit__`.

    Attributes:
        peak: the most there was of each kind.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.peak = group.usage()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_over.wait(SAMPLE_S):
            peak, now = self.peak, self._group.usage()
            self.peak = Usage(
                max(peak.memory_bytes, now.memory_bytes),
                max(peak.shared_bytes, now.shared_bytes),
                max(peak.descriptors, now.descriptors),
            )
