"""What a rank tells the planner it could write."""

from __future__ import annotations

from typing import Any

import torch
from tests.unit.state.states import distribute, items_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from milepost.state.offering import digests_of, make_offer, serialise_objects
from milepost.wire.offers import decode_offer, encode_offer


def test_an_offer_describes_every_item_and_survives_the_wire(mesh: DeviceMesh) -> None:
    state = {
        "w": nn.Parameter(torch.rand(2, 3)),
        "s": distribute(torch.rand(4, 4), mesh, [Shard(0), Shard(1)]),
        "o": {"deep": "object"},
    }
    items = items_of(state)
    offer = make_offer(items, serialise_objects(items))
    assert offer == decode_offer(encode_offer(offer))
    assert offer.keys == ("w", "s", "o.deep")
    assert offer.dtypes == ("float32", "float32", "")
    assert offer.global_sizes == ((2, 3), (4, 4), ())
    assert offer.offsets == ((0, 0), (0, 2), ())
    assert offer.sizes == ((2, 3), (2, 2), ())
    assert bytes([1, 0, 0]) == offer.requires_grad
    assert offer.paths == (("w",), ("s",), ("o", "deep"))
    assert offer.container_bytes[0] > 24
    assert offer.container_bytes[2] == 0
    assert offer.digests[1] == -1


def test_digests_are_equal_exactly_for_replicas_with_equal_content(mesh: DeviceMesh) -> None:
    def digests(values: torch.Tensor, *objects: Any) -> tuple[int, ...]:
        state = {
            "t": values,
            "s": distribute(values.repeat(2, 1), mesh, [Shard(0), Replicate()]),
            "o": list(objects),
            "big": values.repeat(4000, 1),
        }
        items = items_of(state)
        serialised = serialise_objects(items)
        return make_offer(items, serialised, digests=digests_of(items, serialised)).digests

    values = torch.arange(6.0).view(2, 3)
    base = digests(values, 1, {2}, torch.Size([3]))
    assert -1 not in base
    assert base == digests(values.t().contiguous().t(), 1, {2}, torch.Size([3]))
    other = digests(values + 1, 2, {3}, torch.Size([4]))
    assert [] == [digest for digest in base if digest in other]


def test_an_offer_without_digests_says_so() -> None:
    assert (-1,) == make_offer(items_of({"t": torch.ones(3)}), {}).digests
