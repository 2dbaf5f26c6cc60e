"""Do boxes tile a tensor: each element covered once, none twice, none outside?

Pure arithmetic over offsets and sizes, no torch, no numpy. The planner asks before anything is
copied, and `milepost inspect` asks about the index of any checkpoint. The usual cases (one box, a
chain along one dimension) take one pass. The rest is cut apart along every dimension that no box
straddles, which settles grids and all uneven mixtures of them in `n log n`. Only what cannot be cut
(a pinwheel, an overlap) is compared pair by pair.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from milepost.wire.offers import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

GAP: Final = "coverage-gap"
OVERLAP: Final = "coverage-overlap"
BOUNDS: Final = "coverage-bounds"


class TilingProblem(NamedTuple):
    """Why boxes do not tile.

    code: `coverage-gap`, `coverage-overlap` or `coverage-bounds`, as in `milepost.errors.CODES`.
    text: a sentence for people, lower case, without the tensor's name.
    boxes: indices of the wrong boxes; empty for a gap.
    """

    code: str
    text: str
    boxes: tuple[int, ...] = ()


def check_tiling(size: Box, boxes: Sequence[tuple[Box, Box]]) -> TilingProblem | None:
    """Return None if the boxes cover a tensor of this size exactly once, else the first problem.

    A box is `(offsets, sizes)`. Boxes without elements are allowed anywhere within the bounds (the
    last ranks of an uneven sharding hold some); a scalar is one element. About 1 us a box for the
    usual shardings.
    """
    if _is_chain(size, boxes):
        return None
    for index, (offsets, sizes) in enumerate(boxes):
        if len(offsets) != len(size) or len(sizes) != len(size):
            text = f"shard {index} has {len(sizes)} dimensions, its tensor {len(size)}"
            return TilingProblem(BOUNDS, text, (index,))
        if any(
            at < 0 or length < 0 or at + length > limit
            for at, length, limit in zip(offsets, sizes, size, strict=True)
        ):
            box = _show(offsets, sizes)
            text = f"shard {index}, {box}, lies outside a tensor of size {list(size)}"
            return TilingProblem(BOUNDS, text, (index,))
    full = [index for index, (_, sizes) in enumerate(boxes) if 0 not in sizes]
    if 0 in size:
        return None
    pending = [((0,) * len(size), size, full)]
    while pending:
        start, extent, group = pending.pop()
        if len(group) == 1 and boxes[group[0]] == (start, extent):
            continue
        if not group:
            return TilingProblem(GAP, f"no shard holds {_show(start, extent)}")
        parts = _cut(start, extent, boxes, group)
        if parts is None:
            problem = _compare(start, extent, boxes, group)
            if problem is not None:
                return problem
        else:
            pending += parts
    return None


def _is_chain(size: Box, boxes: Sequence[tuple[Box, Box]]) -> bool:
    """Return whether the boxes follow each other along one dimension, whole in all others."""
    if not boxes:
        return False
    first = boxes[0][1]
    if len(first) != len(size):
        return False
    if not size:
        return len(boxes) == 1 and not boxes[0][0]
    along = next((d for d, length in enumerate(size) if first[d] != length), 0)
    before, after = size[:along], size[along + 1 :]
    zeros_before, zeros_after = (0,) * along, (0,) * len(after)
    at = 0
    for offsets, sizes in sorted(boxes):
        if (
            len(sizes) != len(size)
            or len(offsets) != len(size)
            or offsets[along] != at
            or sizes[along] < 0
            or sizes[:along] != before
            or sizes[along + 1 :] != after
            or offsets[:along] != zeros_before
            or offsets[along + 1 :] != zeros_after
        ):
            return False
        at += sizes[along]
    return at == size[along]


_Region = tuple[Box, Box, list[int]]


def _cut(
    start: Box, extent: Box, boxes: Sequence[tuple[Box, Box]], group: list[int]
) -> list[_Region] | None:
    """Split a region along the first dimension where that is possible; return None if none is.

    A range that no box covers becomes a part without boxes. Every part is narrower than the region,
    so cutting ends.
    """
    for dim, length in enumerate(extent):
        parts: list[_Region] = []
        low = start[dim]
        end = low + length

        def part(low: int, high: int, members: list[int], dim: int = dim) -> _Region:
            return (
                (*start[:dim], low, *start[dim + 1 :]),
                (*extent[:dim], high - low, *extent[dim + 1 :]),
                members,
            )

        members: list[int] = []
        reach = low
        for index in sorted(group, key=lambda index: boxes[index][0][dim]):
            at = boxes[index][0][dim]
            if at >= reach:
                if members:
                    parts.append(part(low, reach, members))
                if at > reach:
                    parts.append(part(reach, at, []))
                members, low = [], at
            members.append(index)
            reach = max(reach, at + boxes[index][1][dim])
        parts.append(part(low, reach, members))
        if reach < end:
            parts.append(part(reach, end, []))
        if len(parts) > 1:
            return parts
    return None


def _compare(
    start: Box, extent: Box, boxes: Sequence[tuple[Box, Box]], group: list[int]
) -> TilingProblem | None:
    """Check a region that cannot be cut: no two boxes may meet, and the volumes must add up."""
    active: list[int] = []
    for index in sorted(group, key=lambda index: boxes[index][0]):
        offsets, sizes = boxes[index]
        if offsets:
            active = [a for a in active if boxes[a][0][0] + boxes[a][1][0] > offsets[0]]
        for other in active:
            other_offsets, other_sizes = boxes[other]
            if all(
                at < other_at + other_length and other_at < at + length
                for at, length, other_at, other_length in zip(
                    offsets, sizes, other_offsets, other_sizes, strict=True
                )
            ):
                low, high = sorted((index, other))
                first, second = _show(*boxes[low]), _show(*boxes[high])
                text = f"shard {low}, {first}, and shard {high}, {second}, overlap"
                return TilingProblem(OVERLAP, text, (low, high))
        active.append(index)
    missing = prod(extent) - sum(prod(boxes[index][1]) for index in group)
    if missing:
        text = f"no shard holds {missing} of the {prod(extent)} elements of {_show(start, extent)}"
        return TilingProblem(GAP, text)
    return None


def _show(offsets: Box, sizes: Box) -> str:
    """Write a box as `[0:4, 8:16]`, as it would be sliced."""
    return (
        f"[{', '.join(f'{at}:{at + length}' for at, length in zip(offsets, sizes, strict=True))}]"
    )


class IndexProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a key cannot be loaded whole."""

    code: str
    """`coverage-gap`, `coverage-overlap` or `coverage-bounds`."""
    key: str
    text: str
