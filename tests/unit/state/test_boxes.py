"""Which boxes of a tensor a rank holds: what torch gave it is the judge."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.unit.state.states import torch_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from milepost.state.boxes import BOXES_MAX, local_boxes

PLACEMENTS: list[Placement] = [
    Replicate(),
    Shard(0),
    Shard(1),
    _StridedShard(0, split_factor=2),
    _StridedShard(0, split_factor=3),
    _StridedShard(1, split_factor=2),
]


@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (5, 7), (6, 4), (8, 8), (0, 3)])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (4, 1), (3,), (2, 2, 2)])
def test_boxes_of_every_rank_hold_what_torch_gave_it(
    shape: tuple[int, int], mesh: tuple[int, ...]
) -> None:
    """All placements over small meshes: each local element lies where its box says."""
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    options = PLACEMENTS if len(mesh) < 3 else PLACEMENTS[1:4]
    for cuts in itertools.product(options, repeat=len(mesh)):
        for place in itertools.product(*map(range, mesh)):
            local = torch_shard(whole, mesh, place, cuts)
            splits: dict[int, list[tuple[int, int, int]]] = {}
            for parts, index, cut in zip(mesh, place, cuts, strict=True):
                if isinstance(cut, Shard | _StridedShard):
                    factor = getattr(cut, "split_factor", 1)
                    splits.setdefault(cut.dim, []).append((parts, index, factor))
            seen = torch.zeros_like(local)
            for box in local_boxes(shape, splits):
                there = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                here = tuple(
                    slice(o, o + n) for o, n in zip(box.local_offsets, box.sizes, strict=True)
                )
                assert whole[there].equal(local[here]), (cuts, place, box)
                assert box.sizes == tuple(local[here].shape)
                seen[here] += 1
            assert bool((seen == 1).all()), (cuts, place)


@pytest.mark.parametrize("size", [1, 3, 6, 7])
def test_plain_shards_are_the_box_that_torch_reports_empty_ones_too(size: int) -> None:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for place in itertools.product(range(2), range(3)):
        cuts = (Shard(0), Shard(1))
        sizes, offsets = _compute_local_shape_and_global_offset(
            (size, size), (2, 3), list(place), cuts
        )
        (box,) = local_boxes((size, size), {0: [(2, place[0], 1)], 1: [(3, place[1], 1)]})
        assert (offsets, sizes) == (box.offsets, box.sizes)


def test_a_shard_in_too_many_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="separate boxes"):
        local_boxes((4 * BOXES_MAX,), {0: [(2, 0, 2 * BOXES_MAX)]})
