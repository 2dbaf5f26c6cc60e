"""Which boxes of a tensor one rank holds, according to the placements of a DTensor.

Pure arithmetic, except that it reads torch's placements. A strided placement may give several
boxes; torch's helper returns a single, wrong one. Sources: torch/distributed/tensor/_utils.py and
placement_types.py (2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from milepost.wire.offers import Box

BOXES_MAX: Final = 1024
"""How many boxes one local shard may consist of; each costs a container of 1.5 KiB and an entry in
the index."""


Split: TypeAlias = tuple[int, int, int]
"""How one mesh dimension cuts a tensor dimension: number of parts, this rank's part, split factor
(1: a plain Shard)."""


class LocalBox(NamedTuple):
    """One box of a tensor on this rank."""

    offsets: Box
    """In the whole tensor."""
    sizes: Box
    local_offsets: Box
    """In the local tensor."""


def _cut(ranges: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return positions [begin, end) of the indices in `ranges` (start, length), as such ranges."""
    taken = []
    for start, length in ranges:
        low, high = max(begin, 0), min(end, length)
        if low < high:
            taken.append((start + low, high - low))
        begin, end = begin - length, end - length
        if end <= 0:
            break
    return taken


def local_ranges(size: int, splits: Sequence[Split]) -> list[tuple[int, int]]:
    """Return which indices of a dimension a rank holds, in its order, as (start, length) ranges.

    The cuts apply one after the other, each to the result of the one before. A plain cut is
    torch.chunk; a cut with a split factor f first cuts into f pieces, then takes this rank's chunk
    of each.
    """
    ranges = [(0, size)] if size else []
    for parts, index, factor in splits:
        total = sum(length for _, length in ranges)
        piece = -(-total // factor)
        left: list[tuple[int, int]] = []
        for begin in range(0, total, piece) if piece else ():
            end = min(begin + piece, total)
            chunk = -(-(end - begin) // parts)
            low = min(begin + index * chunk, end)
            for start, length in _cut(ranges, low, min(low + chunk, end)):
                if left and sum(left[-1]) == start:
                    left[-1] = (left[-1][0], left[-1][1] + length)
                else:
                    left.append((start, length))
        ranges = left
    return ranges


def local_boxes(size: Box, splits: Mapping[int, Sequence[Split]]) -> list[LocalBox]:
    """Return the boxes that make up a rank's local tensor: at least one.

    An empty local tensor is one box without elements, at the offset where torch puts it: the end of
    the dimension. Raises ValueError for more than `BOXES_MAX` boxes.

    Args:
        size: the size of the whole tensor.
        splits: the cuts of each tensor dimension.
    """
    axes = []
    for dim, length in enumerate(size):
        if dim not in splits:
            axes.append([(0, length, 0)])
            continue
        axis, at = [], 0
        for start, count in local_ranges(length, splits[dim]):
            axis.append((start, count, at))
            at += count
        axes.append(axis or [(length, 0, 0)])
    count = prod(map(len, axes))
    if count > BOXES_MAX:
        raise ValueError(f"its local part is {count} separate boxes, more than {BOXES_MAX}")
    return [
        LocalBox(
            tuple(start for start, _, _ in box),
            tuple(length for _, length, _ in box),
            tuple(at for _, _, at in box),
        )
        for box in product(*axes)
    ]


def splits_of(
    placements: Sequence[Any], mesh_shape: Box, coordinate: Sequence[int], order: Sequence[int]
) -> dict[int, list[Split]]:
    """Return the cuts of each tensor dimension, in the order in which the mesh dimensions apply.

    Raises ValueError, whose text says what to do, for any placement except Replicate and Shard.
    """
    splits: dict[int, list[Split]] = {}
    for mesh_dim in order:
        placement = placements[mesh_dim]
        if type(placement) is Replicate:
            continue
        if type(placement) is Shard:
            factor = 1
        elif type(placement) is _StridedShard:
            factor = int(placement.split_factor)
        elif isinstance(placement, Partial):
            raise ValueError(
                f"it is placed as {placement!r}, values not yet reduced; "
                "redistribute it to Shard or Replicate first"
            )
        else:
            raise ValueError(
                f"it is placed as {placement!r}, which is neither Shard nor Replicate; "
                "redistribute it first"
            )
        cut = (mesh_shape[mesh_dim], coordinate[mesh_dim], factor)
        splits.setdefault(placement.dim, []).append(cut)
    return splits
