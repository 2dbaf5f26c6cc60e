"""Cutting a tensor into bands that follow one another in row-major order.

Pure arithmetic, no torch. A band is a box whose elements are neighbours in the whole tensor, so the
bands, one after another, are the tensor's bytes. A shard's part of a band is also one run in the
shard's own row-major order, and later bands have later runs. So a reader that goes through the
bands reads every shard once, from front to back.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from milepost.wire.offers import Box


class Part(NamedTuple):
    """The common part of a box and a band.

    within: its offsets from the band's first element. sizes: its sizes. start: the number of the
    band's elements before it; -1 if its elements are not neighbours within the band.
    """

    within: Box
    sizes: Box
    start: int


def bands(size: Box, item_bytes: int, limit_bytes: int) -> Iterator[tuple[Box, Box]]:
    """Yield (offsets, sizes) of the bands of a tensor, each of at most `limit_bytes`, or of one
    element if that is larger; none for a tensor without elements.
    """
    if 0 in size:
        return
    if not size:
        yield (), ()
        return
    along, inner = len(size) - 1, item_bytes
    while along and inner * size[along] <= limit_bytes:
        inner *= size[along]
        along -= 1
    step = max(1, limit_bytes // inner)
    ones, behind = (1,) * along, size[along + 1 :]
    zeros = (0,) * len(behind)
    for before in product(*map(range, size[:along])):
        for at in range(0, size[along], step):
            yield (*before, at, *zeros), (*ones, min(step, size[along] - at), *behind)


def meet(band: tuple[Box, Box], box: tuple[Box, Box]) -> Part | None:
    """Return the common part of a band and a box, both given as (offsets, sizes); None if there is
    none.
    """
    within, sizes = [], []
    for at, length, box_at, box_length in zip(*band, *box, strict=True):
        low = max(at, box_at)
        high = min(at + length, box_at + box_length)
        if low >= high:
            return None
        within.append(low - at)
        sizes.append(high - low)
    return Part(tuple(within), tuple(sizes), _start(band[1], tuple(within), tuple(sizes)))


def _start(extent: Box, within: Box, sizes: Box) -> int:
    """Return where the part's first element is if its elements are neighbours, else -1."""
    is_whole_behind = True
    for length, part in zip(reversed(extent), reversed(sizes), strict=True):
        if not is_whole_behind and part != 1:
            return -1
        is_whole_behind = is_whole_behind and part == length
    return sum(at * prod(extent[dim + 1 :]) for dim, at in enumerate(within))
