"""States of four ranks: tensors that are sharded over meshes, and their whole values.

Ranks and judges both import this module, so it must not import milepost. Where possible, the whole
values are computed and not gathered from the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from tests.integration.states import State, describe, metadata

WORLD = 4

S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()

LINE: dict[str, tuple[tuple[int, ...], Placement]] = {
    "even": ((8, 3), S0),
    "uneven": ((13, 4), S0),
    "one_row": ((1, 7), S0),
    "no_rows": ((0, 5), S0),
    "six_rows": ((6, 2), S0),
    "five_rows": ((5,), S0),
    "no_columns": ((4, 0), S0),
    "columns": ((5, 7), S1),
    "one_column": ((5, 1), S1),
    "third_dim": ((2, 3, 6), S2),
    "sizes_7_5_1": ((7, 5, 1), S1),
    "replica": ((4, 4), R),
    "replicated_scalar": ((), R),
}
"""Whole size and placement of tensors over all four ranks in a line."""

GRID: dict[str, tuple[tuple[int, ...], tuple[Placement, Placement]]] = {
    "both": ((8, 8), (S0, S1)),
    "both_odd": ((5, 7), (S0, S1)),
    "both_three": ((3, 3), (S0, S1)),
    "both_one": ((1, 1), (S0, S1)),
    "both_turned": ((5, 7), (S1, S0)),
    "hybrid": ((6, 4), (R, S0)),
    "hybrid_odd": ((5, 3), (R, S0)),
    "hybrid_columns": ((3, 5), (R, S1)),
    "hybrid_turned": ((5, 3), (S0, R)),
    "twice": ((8, 3), (S0, S0)),
    "twice_odd": ((5, 3), (S0, S0)),
    "twice_one": ((1, 3), (S0, S0)),
    "replicas": ((3, 3), (R, R)),
}
"""Whole size and placements of tensors over a mesh of 2 x 2."""

STRIDED: dict[str, tuple[int, ...]] = {
    "even": (8, 4),
    "odd": (5, 7),
    "three": (3, 3),
    "six": (6, 1),
    "one": (1, 2),
    "vector": (7,),
}
"""Whole sizes of tensors that the second mesh dimension cuts first, as FSDP does over TP."""


APART: dict[str, tuple[int, int]] = {"rows_8": (8, 3), "rows_7": (7, 2), "rows_13": (13, 1)}
"""Whole sizes of tensors of which each rank holds several separate runs of rows."""


def whole(name: str, size: Sequence[int]) -> torch.Tensor:
    """Return the values of a tensor, of which no two elements are equal."""
    count = torch.Size(size).numel()
    return (torch.arange(count, dtype=torch.float32) + 1000 * len(name)).reshape(tuple(size))


@cache
def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


@cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


@cache
def part(*ranks: int) -> DeviceMesh:
    """Return a mesh of some ranks; all ranks call it."""
    return DeviceMesh("cpu", list(ranks))


def strided(name: str, size: tuple[int, ...]) -> DTensor:
    """Return this rank's part of a tensor that is cut along one dimension, first by the inner mesh
    dimension and then by the outer one.
    """
    outer, inner = grid().get_coordinate() or (0, 0)
    full = whole(name, size)
    local = _chunk(_chunk(full, inner), outer)
    return DTensor.from_local(
        local.contiguous(),
        grid(),
        [_StridedShard(0, split_factor=2), S0],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def _chunk(tensor: torch.Tensor, number: int) -> torch.Tensor:
    parts = torch.chunk(tensor, 2)
    return parts[number] if number < len(parts) else tensor[:0]


class Mlp(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(batch).relu())
        return out * self.scale


def mlp(kind: str, *, seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after one step of AdamW: sharded ("fsdp"), over the mesh's inner dimension
    only with a replica on each outer one ("hsdp"), or over TP ("fsdp_tp").
    """
    torch.manual_seed(seed)
    model = Mlp(hidden=11 if kind == "fsdp" else 12)
    if kind == "fsdp_tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, grid()["inner"], plan)
        fully_shard(model, mesh=grid()["outer"], reshard_after_forward=True)
    elif kind == "hsdp":
        fully_shard(model, mesh=grid())
    else:
        fully_shard(model.up, mesh=line())
        fully_shard(model, mesh=line())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 16).reshape(2, 8)).square().sum().backward()
    optimizer.step()


def _trained(kind: str) -> State:
    weights, moments = get_state_dict(*mlp(kind))
    return {"model": weights, "optimizer": moments}


def make(name: str, rank: int) -> State:
    """Return this rank's part of a state. All ranks call it, in the same order."""
    if name == "line":
        state: State = {
            key: distribute_tensor(whole(key, size), line(), [placement])
            for key, (size, placement) in LINE.items()
        }
        state["half"] = distribute_tensor(whole("half", (7, 2)).bfloat16(), line(), [S0])
        state["count"] = distribute_tensor(whole("count", (7, 2)).long(), line(), [S0])
        state["transposed"] = distribute_tensor(whole("t", (6, 5)), line(), [S0]).t()
        return state | {"plain": whole("plain", (3, 3)), "epoch": 3, "names": ["a", "b"]}
    if name == "grid":
        return {
            key: distribute_tensor(whole(key, size), grid(), list(placements))
            for key, (size, placements) in GRID.items()
        }
    if name == "strided":
        return {key: strided(key, size) for key, size in STRIDED.items()}
    if name == "apart":
        placements = [S0, _StridedShard(0, split_factor=2)]
        return {
            key: distribute_tensor(whole(key, size), grid(), placements, src_data_rank=None)
            for key, size in APART.items()
        }
    if name == "stages":
        # As in a pipeline: rank 0 holds nothing at all, and every stage has keys of its own.
        late = distribute_tensor(whole("late", (5, 2)), part(2, 3), [S0])
        if rank == 0:
            return {}
        if rank == 1:
            return {"early": {"weight": whole("early", (2, 3)), "note": "of rank 1"}}
        return {"late": {"weight": late, f"own_{rank}": whole("own", (rank,))}}
    if name == "parts":
        # Every rank lists both tensors, and is no part of the mesh of one of them.
        return {
            "low": distribute_tensor(whole("low", (3, 2)), part(0, 1), [S0]),
            "high": distribute_tensor(whole("high", (3, 2)), part(2, 3), [S1]),
        }
    return _trained(name)


def whole_values(name: str, state: State) -> dict[str, Any]:
    """Return the whole value of each key of a state. All ranks call it."""
    if name == "stages":
        return {
            "early.weight": describe(whole("early", (2, 3))),
            "early.note": describe("of rank 1"),
            "late.weight": describe(whole("late", (5, 2))),
            "late.own_2": describe(whole("own", (2,))),
            "late.own_3": describe(whole("own", (3,))),
        }
    sizes: Mapping[str, tuple[int, ...]] = {}
    if name == "line":
        sizes = {key: size for key, (size, _) in LINE.items()}
    elif name == "grid":
        sizes = {key: size for key, (size, _) in GRID.items()}
    elif name == "strided":
        sizes = STRIDED
    elif name == "apart":
        sizes = APART
    elif name == "parts":
        sizes = {"low": (3, 2), "high": (3, 2)}
    values: dict[str, Any] = {key: describe(whole(key, size)) for key, size in sizes.items()}
    if name == "line":
        values["half"] = describe(whole("half", (7, 2)).bfloat16())
        values["count"] = describe(whole("count", (7, 2)).long())
        values["transposed"] = describe(whole("t", (6, 5)).t())
        values |= {"plain": describe(whole("plain", (3, 3))), "epoch": describe(3)}
        values["names"] = describe(["a", "b"])
    if not values:
        flat, _ = flatten_state_dict(state)
        for key, value in flat.items():
            values[key] = describe(value.full_tensor() if isinstance(value, DTensor) else value)
    return values


NAMES = ("line", "grid", "strided", "apart", "stages", "parts", "fsdp", "hsdp", "fsdp_tp")


# --- for the judge --------------------------------------------------------------------------------


def read_cut(
    rank: int, world: int, paths: dict[str, str], dim: int = 0
) -> dict[str, dict[str, Any]]:
    """Load whole checkpoints with stock torch, with every tensor sharded along one dimension over
    all ranks; rank 0 returns the whole values.
    """
    told = {}
    for name, path in paths.items():
        state: State = {}
        for key, known in metadata(path).state_dict_metadata.items():
            if not isinstance(known, TensorStorageMetadata):
                state[key] = None
                continue
            empty = torch.zeros(known.size, dtype=known.properties.dtype)
            is_cut = world > 1 and empty.dim() > dim
            state[key] = distribute_tensor(empty, line(), [Shard(dim)]) if is_cut else empty
        dcp.load(state, checkpoint_id=path, no_dist=world == 1)
        values = {
            key: describe(value.full_tensor() if isinstance(value, DTensor) else value)
            for key, value in state.items()
        }
        told[name] = values if rank == 0 else {}
    return told


def resume(rank: int, world: int, path: str) -> dict[str, Any]:
    """Load a sharded model and its optimizer on this number of ranks, and go on for a step."""
    model, optimizer = mlp("fsdp", seed=50)
    weights, moments = get_state_dict(model, optimizer)
    state: State = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return after_step(model, optimizer)


def after_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Take a step; return each whole parameter, rounded so that the order of sums does not
    matter.
    """
    step(model, optimizer)
    return {
        name: [round(float(each), 4) for each in value.full_tensor().reshape(-1)]  # type: ignore[attr-defined]
        for name, value in model.named_parameters()
    }
