"""States seen from one rank of a mesh, and the items in them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from milepost.state.collecting import collect
from milepost.state.flattening import flatten
from milepost.state.items import Items


def items_of(state: dict[Any, Any]) -> Items:
    return collect(*flatten(state))


def torch_shard(
    whole: torch.Tensor, mesh: tuple[int, ...], place: tuple[int, ...], cuts: tuple[Placement, ...]
) -> torch.Tensor:
    """Return a rank's part as distribute_tensor makes it: split by each mesh dimension in turn."""
    for parts, index, cut in zip(mesh, place, cuts, strict=True):
        if isinstance(cut, Shard | _StridedShard):
            shards, _ = cut._split_tensor(whole, parts, with_padding=False)
            whole = shards[index]
    return whole


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, cuts: list[Placement]) -> DTensor:
    return distribute_tensor(tensor, mesh, cuts, src_data_rank=None)
