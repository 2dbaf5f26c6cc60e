"""The other ranks of this host that load the same checkpoint, and what they are about to read.

Bytes that several ranks want are read through the page cache: the first rank brings them there, and
the kernel ensures that nobody reads them twice. The ranks only tell one another what they want, so
that everything else is read past the page cache. No rank waits for another: if a rank does not know
what the others want, it reads for itself. See docs/design/0011-once-per-node.md.

Sources: random(4) on boot_id, posix_fadvise(2).
"""

from __future__ import annotations

import hashlib
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Final

import msgpack

from milepost.fetching.copying import row_major
from milepost.fetching.files import DataFile
from milepost.fetching.requests import ObjectRead, TensorRead
from milepost.link.rendezvous import Group, Store

log = logging.getLogger("milepost")

GRAIN_BYTES: Final = 1 << 20
"""Ranges that ranks tell one another are rounded out to this size, which is read for one
checksum.
"""

RUNS_MAX: Final = 20_000
"""How many runs of grains a rank tells the others. If there are more, gaps between them are
filled.
"""

Run = tuple[int, int]
"""First grain, and the grain after the last one."""


class Neighbours:
    """What one rank tells the others and hears from them, for one load.

    Args:
        group: the ranks that load together.
        topic: identifies the load in the group's store; never used before.
        checkpoint: its directory.

    `tell`, then, once all ranks of the group have done so, `listen`; at the end `close`, when no
    rank reads any more. Errors of the store are logged, and the rank reads for itself.
    """

    def __init__(self, group: Group, topic: str, checkpoint: Path) -> None:
        self._store = group.store
        self._topic = topic
        self._checkpoint = checkpoint
        self._place = ""
        """Prefix of this host's keys in the store."""
        self._key = ""
        self._wanted: dict[str, tuple[list[int], list[int]]] = {}
        """For each file, where the runs that others want begin and end."""
        self._brought: list[tuple[str, int, int]] = []

    def __enter__(self) -> Neighbours:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def are_possible(self) -> bool:
        """Whether the group has other ranks."""
        return self._store is not None

    def tell(
        self,
        reads: Iterable[TensorRead | ObjectRead],
        is_in_parts: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Tell the others on this host what this rank is about to read.

        is_in_parts: whether a part of a large container in a file may be read alone.
        """
        if self._store is None:
            return
        try:
            place = f"{self._topic}/reads/{page_cache_of(self._checkpoint)}"
            key = f"{place}/{self._store.add(place, 1)}"
            self._store.set(key, _pack(reads, is_in_parts))
            self._place, self._key = place, key
        except (OSError, RuntimeError, ValueError) as error:
            self._alone(error)

    def listen(self) -> None:
        """Read what the others have told. Idempotent."""
        store, place, self._place = self._store, self._place, ""
        if store is None or not place:
            return
        try:
            told = [self._take(store, f"{place}/{n + 1}") for n in range(store.add(place, 0))]
        except (OSError, RuntimeError, ValueError) as error:
            self._alone(error)
            return
        runs: dict[str, list[Run]] = {}
        for files in told:
            for file, flat in files.items():
                runs.setdefault(file, []).extend(zip(flat[::2], flat[1::2], strict=True))
        for file, of_file in runs.items():
            merged = _merge(of_file, 0)
            self._wanted[file] = [begin for begin, _ in merged], [end for _, end in merged]

    def _take(self, store: Store, key: str) -> dict[str, list[int]]:
        # A rank that has left has deleted its message; another may have died before it sent one.
        if key == self._key or not store.check([key]):
            return {}
        told: dict[str, list[int]] = msgpack.unpackb(store.get(key))
        return told

    def is_shared(self, file: str, begin: int, end: int) -> bool:
        """Whether another rank wants a part of a range, too. Read such a range through the page
        cache; `close` drops it from there. Thread-safe.
        """
        starts, ends = self._wanted.get(file, ((), ()))
        first = bisect_right(ends, begin // GRAIN_BYTES)
        if first == len(starts) or starts[first] * GRAIN_BYTES >= end:
            return False
        self._brought.append((file, begin, end))
        return True

    def close(self) -> None:
        """Let the kernel drop what this rank has brought into the page cache. Idempotent."""
        brought, self._brought = self._brought, []
        by_file: dict[str, list[Run]] = {}
        for file, begin, end in brought:
            by_file.setdefault(file, []).append((begin, end))
        for file, ranges in by_file.items():
            with suppress(OSError), DataFile(self._checkpoint / file) as opened:
                for begin, end in _merge(ranges, 0):
                    opened.forget(begin, end)
        if self._store is not None and self._key:
            # A store that cannot delete keeps what was told for as long as the run lasts.
            with suppress(OSError, RuntimeError, ValueError):
                self._store.delete_key(self._key)
                place, _, number = self._key.rpartition("/")
                if number == "1":
                    self._store.delete_key(place)
            self._key = ""

    def _alone(self, error: Exception) -> None:
        log.info("each rank of this host reads for itself what several of them want: %s", error)


def page_cache_of(directory: Path) -> str:
    """Return a name for the page cache that holds a directory's files. It is the same for two
    processes that share this page cache: it names the boot of the kernel, the device and the inode.
    Raises OSError.
    """
    status = os.stat(directory)
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    text = f"{kernel} {status.st_dev} {status.st_ino}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _pack(reads: Iterable[TensorRead | ObjectRead], is_in_parts: Callable[[str], bool]) -> bytes:
    by_file: dict[str, list[Run]] = {}
    for read in reads:
        begin, end = read.blob.offset, read.blob.offset + read.blob.length
        if isinstance(read, TensorRead) and is_in_parts(read.blob.file):
            begin, end = _range_of(read)
        run = begin // GRAIN_BYTES, -(-end // GRAIN_BYTES)
        by_file.setdefault(read.blob.file, []).append(run)
    gap = 0
    while True:
        merged = {file: _merge(runs, gap) for file, runs in by_file.items()}
        if sum(map(len, merged.values())) <= max(RUNS_MAX, len(merged)):
            break
        gap = 2 * gap + 1
    packed: bytes = msgpack.packb(
        {file: [place for run in runs for place in run] for file, runs in merged.items()}
    )
    return packed


def _range_of(read: TensorRead) -> Run:
    """Return roughly what is read of a file: from the box's first element to its last, with the
    bytes around the payload.
    """
    begin, length = read.blob.offset, read.blob.length
    if read.sizes == read.chunk or 0 in read.sizes or length <= GRAIN_BYTES:
        return begin, begin + length
    nbytes, strides = read.dtype.itemsize, row_major(read.chunk)
    around = max(0, length - prod(read.chunk) * nbytes)
    first = sum(at * by for at, by in zip(read.at, strides, strict=True))
    last = first + sum((size - 1) * by for size, by in zip(read.sizes, strides, strict=True))
    return begin + first * nbytes, begin + around + (last + 1) * nbytes


def _merge(runs: Iterable[Run], gap: int) -> list[Run]:
    """Return runs that cover all given ones, ascending, and more than `gap` apart."""
    merged: list[Run] = []
    for begin, end in sorted(runs):
        if merged and begin <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged
