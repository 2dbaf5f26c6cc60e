"""From the wanted ranges of a file to the blocks in which it is read.

Pure, except for the tasks that it hands out: it opens and reads nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from milepost.fetching.checksums import Check
from milepost.fetching.copying import address_in
from milepost.fetching.tasks import GAP_BYTES, BoxTask, FilePlan, RunTask, SmallTask, WholeTask

BLOCK_BYTES: Final = 8 << 20
"""How much to read at once: large enough for the device, so small that buffers take little memory
and the first block arrives soon. A multiple of a stretch and of a page."""

Range = tuple[int, int]


def merge(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges that cover all given ones, ascending, and more than `GAP_BYTES` apart."""
    merged: list[Range] = []
    low = high = -1
    for begin, end in sorted(ranges):
        if low >= 0 and begin <= high + GAP_BYTES:
            high = max(high, end)
            continue
        if low >= 0:
            merged.append((low, high))
        low, high = begin, end
    if low >= 0:
        merged.append((low, high))
    return merged


def cut(ranges: Iterable[Range]) -> Iterator[Range]:
    """Yield the ranges in parts that end at multiples of `BLOCK_BYTES` of the file."""
    for begin, end in ranges:
        while begin < end:
            until = min(end, (begin // BLOCK_BYTES + 1) * BLOCK_BYTES)
            yield begin, until
            begin = until


@dataclass(slots=True)
class FileBlock:
    """A range of a file that is read at once, and the tasks that it serves, completely or in
    part.
    """

    begin: int
    end: int
    smalls: list[SmallTask] = field(default_factory=list)
    """The small tasks that lie completely within the block."""
    runs: list[RunTask] = field(default_factory=list)
    elements: list[BoxTask] = field(default_factory=list)
    wholes: list[WholeTask] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


class Ranged(Protocol):
    """A range of a file."""

    @property
    def begin(self) -> int: ...
    @property
    def end(self) -> int: ...


def hand_out(
    plan: FilePlan,
    ranges: Sequence[Range],
    when_small: Callable[[SmallTask, bytearray], None],
    give: Callable[[BoxTask, int, int, int], None],
) -> list[FileBlock]:
    """Return blocks of these ranges, with the tasks in them. The ranges cover all tasks of the
    plan.

    Args:
        ranges: ascending; they do not overlap.
        when_small: called with a small container that lies in several blocks.
        give: called with an element that lies in two blocks: task, begin and end, and address.
    """
    blocks = [FileBlock(begin, end) for begin, end in ranges]
    starts = [block.begin for block in blocks]

    def over(task: Ranged) -> Sequence[FileBlock]:
        first = bisect_right(starts, task.begin) - 1
        last = bisect_right(starts, task.end - 1)
        return blocks[first:last]

    for run in plan.runs:
        for block in over(run):
            block.runs.append(run)
    for check in plan.checks:
        for block in over(check):
            block.checks.append(check)
    wholes = list(plan.wholes)
    for elements in plan.elements:
        for block in over(elements):
            block.elements.append(elements)
            divided = elements.cut_element(block.end)
            if divided is not None:
                wholes.append(_gather_element(elements, divided, give))
    at = 0
    for small in plan.smalls:
        while blocks[at].end <= small.begin:
            at += 1
        if small.end <= blocks[at].end:
            blocks[at].smalls.append(small)
        else:
            wholes.append(_gather_small(small, when_small))
    for whole in wholes:
        for block in over(whole):
            block.wholes.append(whole)
    return blocks


def _gather_small(
    small: SmallTask, when_small: Callable[[SmallTask, bytearray], None]
) -> WholeTask:
    return WholeTask(small.begin, small.end, lambda memory: when_small(small, memory))


def _gather_element(
    elements: BoxTask, element: Range, give: Callable[[BoxTask, int, int, int], None]
) -> WholeTask:
    def done(memory: bytearray) -> None:
        give(elements, *element, address_in(memory))

    return WholeTask(*element, done)
