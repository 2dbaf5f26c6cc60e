"""Which stored chunks hold a wanted box of a tensor, and where a box lies in a chunk's bytes.

Pure arithmetic over offsets and sizes; no torch, no files. A *chunk* is a stored box. An *overlap*
is the common part of a chunk and a wanted box. Elements are counted in row-major order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

from milepost.wire.offers import Box


class Intersection(NamedTuple):
    """The common part of a chunk and a wanted box."""

    chunk: int
    """Index of the chunk."""
    stored_at: Box
    """Where it begins in the chunk."""
    wanted_at: Box
    """Where it begins in the wanted box."""
    sizes: Box


class _Order(NamedTuple):
    """Chunks ordered by where they begin along one dimension: the one in which most of them
    differ.
    """

    dim: int
    indices: list[int]
    starts: list[int]
    longest: int


class Chunks:
    """The stored chunks of one tensor, as columns.

    Args:
        offsets: for each dimension, where each chunk begins.
        sizes: for each dimension, the length of each chunk.
        count: the number of chunks. A scalar has no dimensions and one chunk.
    """

    def __init__(
        self, offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], count: int
    ) -> None:
        self._offsets = offsets
        self._sizes = sizes
        self._count = count

    @classmethod
    def of(cls, boxes: Sequence[tuple[Box, Box]]) -> Chunks:
        """Return chunks made from these boxes, each as (offsets, sizes)."""
        return cls(
            list(zip(*(at for at, _ in boxes), strict=True)),
            list(zip(*(sizes for _, sizes in boxes), strict=True)),
            len(boxes),
        )

    def overlaps(self, offsets: Box, sizes: Box) -> list[Intersection]:
        """Return the non-empty common parts of the chunks and a box.

        `O(log n)` in the number of chunks for usual shardings, after the first call has sorted
        them.
        """
        if 0 in sizes:
            return []
        found = []
        for chunk in self._candidates(offsets, sizes):
            overlap = self._overlap(chunk, offsets, sizes)
            if overlap is not None:
                found.append(overlap)
        return found

    def sizes_of(self, chunk: int) -> Box:
        """Return the sizes of a chunk."""
        return tuple(extents[chunk] for extents in self._sizes)

    def _candidates(self, offsets: Box, sizes: Box) -> Sequence[int]:
        if self._count <= 2 or not offsets:
            return range(self._count)
        dim, indices, starts, longest = self._order
        low = bisect_left(starts, offsets[dim] - longest + 1)
        high = bisect_left(starts, offsets[dim] + sizes[dim])
        return indices[low:high]

    @cached_property
    def _order(self) -> _Order:
        dim = max(range(len(self._offsets)), key=lambda dim: len(set(self._offsets[dim])))
        column = list(self._offsets[dim])
        indices = sorted(range(self._count), key=column.__getitem__)
        return _Order(dim, indices, [column[i] for i in indices], max(self._sizes[dim]))

    def _overlap(self, chunk: int, offsets: Box, sizes: Box) -> Intersection | None:
        stored_at, wanted_at, lengths = [], [], []
        for starts, extents, at, length in zip(
            self._offsets, self._sizes, offsets, sizes, strict=True
        ):
            start = starts[chunk]
            low = max(start, at)
            shared = min(start + extents[chunk], at + length) - low
            if shared <= 0:
                return None
            stored_at.append(low - start)
            wanted_at.append(low - at)
            lengths.append(shared)
        return Intersection(chunk, tuple(stored_at), tuple(wanted_at), tuple(lengths))


def missing(sizes: Box, overlaps: Sequence[Intersection]) -> int:
    """Return how many elements of a box no chunk holds; chunks must not overlap."""
    return prod(sizes) - sum(prod(overlap.sizes) for overlap in overlaps)


# --- a box in the bytes of its chunk --------------------------------------------------------------


def flat_range(chunk: Box, at: Box, sizes: Box) -> tuple[int, int] | None:
    """Return first element and number of elements of a box that is one run in its chunk; None if it
    is not.

    Args:
        chunk: the chunk's sizes.
        at, sizes: the box, within the chunk; not empty.
    """
    first, stride, count = 0, 1, 1
    is_whole = True
    for length, begin, extent in zip(reversed(chunk), reversed(at), reversed(sizes), strict=True):
        if extent > 1 and not is_whole:
            return None
        if extent < length:
            is_whole = False
        first += begin * stride
        stride *= length
        count *= extent
    return first, count


def flat_spans(chunk: Box, at: Box, sizes: Box, gap: int) -> Iterator[tuple[int, int]]:
    """Yield first element and number of elements of spans that cover a box, ascending. Elements
    between two of its runs belong to a span if there are at most `gap` of them.

    chunk, at, sizes: as for `flat_range`.
    """
    first, stride, length = 0, 1, 1
    apart: list[tuple[int, int]] = []
    for whole, begin, extent in zip(reversed(chunk), reversed(at), reversed(sizes), strict=True):
        if extent > 1 and (apart or stride - length > gap):
            apart.append((extent, stride))
        elif extent > 1:
            length += (extent - 1) * stride
        first += begin * stride
        stride *= whole
    for place in product(*(range(extent) for extent, _ in reversed(apart))):
        yield (
            first + sum(n * by for n, (_, by) in zip(place, reversed(apart), strict=True)),
            length,
        )


def boxes_within(
    chunk: Box, at: Box, sizes: Box, begin: int, end: int
) -> Iterator[tuple[Box, Box]]:
    """Yield the parts of a box that lie between elements `begin` and `end` of its chunk, each as
    (where it begins in the chunk, sizes).

    There are at most two parts for each dimension.
    """
    begin, end = max(begin, 0), min(end, prod(chunk))
    if begin >= end or 0 in sizes:
        return
    if not chunk:
        yield (), ()
        return
    row, low, high = prod(chunk[1:]), at[0], at[0] + sizes[0]
    # Whole rows, and the rows at either end that lie there in part.
    first, over = -(-begin // row), end // row
    cut = {begin // row} if begin % row else set()
    if end % row:
        cut.add(over)
    for index in cut:
        if low <= index < high:
            base = index * row
            inner = boxes_within(chunk[1:], at[1:], sizes[1:], begin - base, end - base)
            yield from (((index, *where), (1, *extent)) for where, extent in inner)
    first, over = max(first, low), min(over, high)
    if first < over:
        yield (first, *at[1:]), (over - first, *sizes[1:])
