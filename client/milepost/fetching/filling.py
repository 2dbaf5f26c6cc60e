"""Checks one block's bytes and puts them where they are wanted.

Owns the order of work within a block: read a stretch, compute its checksum, and copy its bytes
while they are in the processor's cache. The bytes come past the page cache, through it, or from
another rank; the work is the same. Several threads call it at once, each with its own block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import pairwise
from operator import attrgetter
from typing import Final

import torch
from isal import isal_zlib

from milepost.fetching.blocks import FileBlock, Ranged
from milepost.fetching.checksums import Check
from milepost.fetching.copying import (
    address_in,
    bytes_at,
    copy_bytes,
    copy_elements,
    copy_few,
)
from milepost.fetching.files import DataFile
from milepost.fetching.tasks import BoxTask, RunTask, SmallTask
from milepost.staging.streams import Streams

STRAIGHT_BYTES: Final = 64 << 10
"""Runs in the page cache that are at least this long are read straight to their destination.
Shorter runs are read together."""

STEP_BYTES: Final = 1 << 20
"""How much to read, check and copy at a time."""


class BlockFilling:
    """What the blocks of one fetch have in common.

    Attributes:
        touched: for each tensor read, whether its memory was written to.
        strange: tensor reads whose container is not the expected one, or names another checksum
            than its payload has. They are read again, one by one.
    """

    def __init__(
        self,
        reads: int,
        *,
        is_checked: bool,
        streams_of: Callable[[torch.device], Streams | None],
    ) -> None:
        self.touched = bytearray(reads)
        self.strange: set[int] = set()
        self._is_checked = is_checked
        self._streams_of = streams_of
        # Many small tensors mean work for the interpreter. Threads that share the GIL would wait
        # for one another more than they work.
        self._one_by_one = threading.Lock()

    def fill(
        self, block: FileBlock, view: memoryview, address: int, through: DataFile | None
    ) -> None:
        """Serve a block's tasks.

        Args:
            view, address: memory for the block's bytes, the first one at its start.
            through: None if the bytes are in `view` already. Otherwise the file from which to read
                them through the page cache, to their destination or into `view`.

        Raises OSError, and torch's exceptions for memory to which it cannot copy.
        """
        wrong = self._pass(block, view, address, through)
        if block.smalls:
            with self._one_by_one:
                for small in block.smalls:
                    if wrong and _overlaps(small, wrong):
                        self.strange.add(small.read)
                    else:
                        self._put_small(small, view, address, block.begin)
        for elements in block.elements:
            if not _overlaps(elements, wrong):
                self._put(elements, block.begin, block.end, address)
        for whole in block.wholes:
            # The caller looks at failed checks and reads their ranges again.
            if not _overlaps(whole, wrong):
                low, high = max(whole.begin, block.begin), min(whole.end, block.end)
                whole.put(low, view[low - block.begin : high - block.begin])

    def when_small(self, small: SmallTask, memory: bytearray) -> None:
        """Serve a small container that was gathered from several blocks."""
        with self._one_by_one:
            self._put_small(small, memoryview(memory), address_in(memory), small.begin)

    def give_element(self, elements: BoxTask, begin: int, end: int, address: int) -> None:
        """Copy an element that was gathered from two blocks; its memory is freed after this
        call.
        """
        self.touched[elements.read] = 1
        elements.put(begin, end, address, _copy_now)

    def _pass(
        self, block: FileBlock, view: memoryview, address: int, through: DataFile | None
    ) -> list[Check]:
        """Read (if necessary), compare, and copy runs, a step at a time. Returns the checks that
        failed. Their bytes are not copied, unless they were read straight to their destination.
        """
        runs = sorted(block.runs)
        straight = _straight(block, runs) if through is not None else []
        pending, ahead = sorted(block.checks, key=_BEGIN, reverse=True), straight[::-1]
        if not self._is_checked:
            pending = []
        active: list[tuple[Check, int, int]] = []
        wrong: list[Check] = []
        for begin, end in pairwise(_steps(block, pending, straight)):
            while ahead and ahead[-1].end <= begin:
                ahead.pop()
            into = ahead[-1] if ahead and ahead[-1].begin <= begin else None
            if into is None:
                part = view[begin - block.begin : end - block.begin]
            else:
                part = bytes_at(into.address + begin - into.begin, end - begin)
                self.touched[into.read] = 1
            if through is not None:
                through.read(part, begin)
            while pending and pending[-1].begin <= begin:
                active.append((pending.pop(), begin, 0))
            if active:
                active = _continue(active, part, end, wrong)
            if into is None and not (wrong and wrong[-1].end == end):
                self._copy_runs(runs, begin, end, address - block.begin)
        for check, since, crc in active:
            check.add(since, block.end, crc)
        return wrong

    def _copy_runs(self, runs: list[RunTask], begin: int, end: int, base: int) -> None:
        """Copy the parts of runs that lie between two places. base: where the file would begin in
        memory.
        """
        for run in runs:
            if run.begin >= end:
                return
            low, high = max(run.begin, begin), min(run.end, end)
            if low < high:
                self.touched[run.read] = 1
                copy_bytes(run.address + low - run.begin, base + low, high - low)

    def _put_small(self, small: SmallTask, view: memoryview, address: int, base: int) -> None:
        begin, _, prefix, at, nbytes, to, read, crc_at, payload_bytes = small
        payload_at = begin - base + len(prefix)
        if bytes(view[begin - base : payload_at]) != prefix:
            self.strange.add(read)
            return
        if crc_at and self._is_checked:
            written = int.from_bytes(view[crc_at - base : crc_at - base + 4], "little")
            if isal_zlib.crc32(view[payload_at : payload_at + payload_bytes]) != written:
                self.strange.add(read)
                return
        self.touched[read] = 1
        copy_few(to, address + at - base, nbytes)

    def _put(self, elements: BoxTask, begin: int, end: int, address: int) -> None:
        self.touched[elements.read] = 1
        streams = self._streams_of(elements.memory.device)
        if streams is None:
            elements.put(begin, end, address, copy_elements)
            return

        def give(memory: torch.Tensor, source: torch.Tensor) -> None:
            def work() -> None:
                memory.copy_(source, non_blocking=True)

            streams.give(work)

        elements.put(begin, end, address, give)


_BEGIN: Final = attrgetter("begin")


def _copy_now(memory: torch.Tensor, source: torch.Tensor) -> None:
    memory.copy_(source)


def _straight(block: FileBlock, runs: list[RunTask]) -> list[RunTask]:
    """Return, cut to the block, the long runs whose part of the block no other task wants."""
    parts = [
        RunTask(low, high, run.address + low - run.begin, run.read)
        for run in runs
        for low, high in [(max(run.begin, block.begin), min(run.end, block.end))]
    ]
    if not any(part.end - part.begin >= STRAIGHT_BYTES for part in parts):
        return []
    ranges = [(part.begin, part.end, index) for index, part in enumerate(parts)]
    ranges += [(small.begin, small.end, -1) for small in block.smalls]
    ranges += [(elements.begin, elements.end, -1) for elements in block.elements]
    ranges += [(whole.begin, whole.end, -1) for whole in block.wholes]
    ranges.sort()
    found = []
    reach = block.begin
    for at, (begin, end, index) in enumerate(ranges):
        is_alone = reach <= begin and (at + 1 == len(ranges) or ranges[at + 1][0] >= end)
        if index >= 0 and is_alone and end - begin >= STRAIGHT_BYTES:
            found.append(parts[index])
        reach = max(reach, end)
    return found


def _steps(block: FileBlock, checks: Iterable[Check], straight: Iterable[RunTask]) -> list[int]:
    """Return where the steps through a block begin, and the block's end. A step begins wherever
    a checksum or a run begins or ends. Steps are so short that their bytes are still in the
    processor's cache when they are copied.
    """
    first = block.begin // STEP_BYTES * STEP_BYTES + STEP_BYTES
    points = {block.begin, block.end, *range(first, block.end, STEP_BYTES)}
    points.update(place for check in checks for place in (check.begin, check.end))
    points.update(place for run in straight for place in (run.begin, run.end))
    return sorted(place for place in points if block.begin <= place <= block.end)


def _continue(
    active: list[tuple[Check, int, int]], part: memoryview, end: int, wrong: list[Check]
) -> list[tuple[Check, int, int]]:
    """Continue checksums over the next part of a block; return those that go on beyond it. Adds
    complete ones that differ to `wrong`.
    """
    left = []
    for check, since, crc in active:
        crc = isal_zlib.crc32(part, crc)
        if check.end > end:
            left.append((check, since, crc))
            continue
        check.add(since, end, crc)
        if since == check.begin and crc != check.crc:
            wrong.append(check)
    return left


def _overlaps(task: Ranged, checks: list[Check]) -> bool:
    return any(check.begin < task.end and check.end > task.begin for check in checks)
