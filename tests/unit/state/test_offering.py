"""What a rank tells the planner it could write."""

from __future__ import annotations

from typing import Any

import torch
from tests.unit.state.states import distribute, items_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from milepost.state.offering import make_offer, serialise_objects
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


def test_digests_are_equal_exactly_for_replicas_with_equal_content() -> None:
    def digests(state: dict[str, Any]) -> tuple[int, ...]:
        items = items_of(state)
        return make_offer(items, serialise_objects(items)).digests

    values = torch.arange(6.0).view(2, 3)
    base = digests({"t": values, "o": [1], "big": torch.zeros(20_000)})
    assert base == digests({"t": values.t().contiguous().t(), "o": [1], "big": torch.ones(20_000)})
    assert base[2] == -1
    other = digests({"t": values + 1, "o": [2], "big": torch.zeros(20_000)})
    assert base[0] != other[0]
    assert base[1] != other[1]
    assert {-1} == set(make_offer(items_of({"t": values}), {}, with_digests=False).digests)
