"""`milepost.dcp.load` and `Reader` on two ranks: torch's semantics, one answer for both."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Node, Rank, run_ranks

RANKS: list[Node | None] = [None, None]
"""Loading needs no daemon."""


def sharded_state(value: float) -> dict[str, Any]:
    """DTensors of several placements, a plain tensor, an object and state of each rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).reshape(7, 5) * value
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole.clone(), mesh, [Replicate()]),
        "plain": whole.clone(),
        f"own{dist.get_rank()}": torch.full((3,), value + dist.get_rank()),
        "nested": {"n": [value, "x"]},
    }


def full(state: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    return {
        key: value.full_tensor().tolist() if isinstance(value, DTensor)
        else value.tolist() if hasattr(value, "tolist") else value
        for key, value in state.items()
    }  # fmt: skip


def save_sharded(rank: Rank) -> dict[str, Any]:
    """Save with stock torch, or with a Checkpointer."""
    import torch.distributed.checkpoint as stock

    from milepost import Checkpointer

    state = sharded_state(2.0)
    if rank.arguments["is_ours"]:
        with Checkpointer(rank.root.parent) as ck:
            ck.save(1, state, checkpoint_id=rank.root.name).wait(60)
    else:
        stock.save(state, checkpoint_id=rank.root)
    return full(state)


def without_numpy() -> None:
    """Have torch's collectives of objects fail as they do where numpy is not installed."""
    import torch.distributed.distributed_c10d as c10d

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("Numpy is not available")

    c10d._tensor_to_object = c10d._object_to_tensor = refuse


def load_sharded(rank: Rank) -> list[dict[str, Any]]:
    """Load by stock torch through `Reader`, by `load`, and by `load` without numpy."""
    import torch.distributed.checkpoint as stock

    import milepost.dcp as dcp

    found = []
    for load in (
        partial(stock.load, checkpoint_id=rank.root),
        partial(stock.load, storage_reader=dcp.Reader(rank.root)),
        partial(dcp.load, checkpoint_id=str(rank.root)),
    ):
        state = sharded_state(0.0)
        load(state)
        found.append(full(state))
    without_numpy()
    with pytest.raises(RuntimeError, match="Numpy is not available"):
        stock.load({"plain": sharded_state(0.0)["plain"]}, checkpoint_id=rank.root)
    state = sharded_state(0.0)
    dcp.load(state, storage_reader=dcp.Reader(rank.root))
    found.append(full(state))
    return found


@pytest.mark.parametrize("is_ours", [False, True], ids=["by torch", "by milepost"])
def test_what_two_ranks_saved_comes_back_on_two_ranks_with_and_without_numpy(
    pair: list[Node], root: Path, is_ours: bool
) -> None:
    root.mkdir()
    node = pair[0] if is_ours else None
    saved = run_ranks(save_sharded, root / "c", [node, node], is_ours=is_ours)
    for expected, found in zip(saved, run_ranks(load_sharded, root / "c", RANKS), strict=True):
        assert [expected] * 4 == found


def save_alone(rank: Rank) -> None:
    import torch
    import torch.distributed.checkpoint as stock

    whole = torch.arange(35.0).reshape(7, 5) * 2.0
    state = {"rows": whole, "columns": whole, "replicated": whole, "large": torch.ones(1 << 19)}
    stock.save({**state, "n": 1}, checkpoint_id=rank.root, no_dist=True)


def load_resharded(rank: Rank) -> dict[str, Any]:
    """Load into DTensors, and into a tensor that has no memory yet."""
    import torch

    import milepost.dcp as dcp

    state = {key: value for key, value in sharded_state(0.0).items()
             if key in ("rows", "columns", "replicated")}  # fmt: skip
    dcp.load(state, checkpoint_id=rank.root)
    with torch.device("meta"):
        empty = {"large": torch.zeros(1 << 19)}
    with pytest.warns(UserWarning, match="_get_pg_default_device"):
        dcp.load(empty, checkpoint_id=rank.root)
    assert torch.equal(torch.ones(1 << 19), empty["large"])
    return full(state)


def test_what_one_rank_saved_is_resharded_to_two(root: Path) -> None:
    root.mkdir()
    run_ranks(save_alone, root / "c", [None])
    whole = [[2.0 * (5 * row + column) for column in range(5)] for row in range(7)]
    for found in run_ranks(load_resharded, root / "c", RANKS):
        assert {"rows": whole, "columns": whole, "replicated": whole} == found


class Failing:
    """Stateful; cannot say its state, or cannot take it."""

    def __init__(self, when: str) -> None:
        self.when = when

    def state_dict(self) -> dict[str, Any]:
        if self.when == "saying":
            raise KeyError(self.when)
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise KeyError(self.when)


def refuse(rank: Rank) -> list[Any]:
    """Have rank 1 fail in many ways; tell what each rank heard, and that the group goes on."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    import milepost.dcp as dcp

    class Broken(DefaultLoadPlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            raise OSError("broken plan")

    is_bad = rank.rank == 1
    told: list[Any] = []
    for bad, planner in (
        ({"gone": 1}, None),
        ({"rows": torch.zeros(2, 2)}, None),
        ({"failing": Failing("saying")}, None),
        ({"failing": Failing("loading")}, None),
        ({}, Broken()),
    ):
        state: dict[str, Any] = {"rows": torch.zeros(7, 5), **(bad if is_bad else {})}
        started_s = time.monotonic()
        try:
            dcp.load(state, checkpoint_id=rank.root, planner=planner if is_bad else None)
        except CheckpointException as error:
            told.append({
                number: f"{type(each).__name__} {each}"
                for number, (each, _) in error.failures.items()
            })  # fmt: skip
        except KeyError as error:
            told.append(error.args[0])
        # Far less than a group's timeout, also where the machine is busy.
        assert time.monotonic() - started_s < 60
        total = torch.tensor(1.0)
        dist.all_reduce(total)
        assert 2.0 == total.item()
    state = {"rows": torch.zeros(7, 5)}
    dcp.load(state, checkpoint_id=rank.root)
    assert state["rows"].any()
    return told


def test_a_failure_of_one_rank_is_told_to_both_at_once_and_the_group_goes_on(root: Path) -> None:
    root.mkdir()
    run_ranks(save_alone, root / "c", [None])
    first, second = run_ranks(refuse, root / "c", RANKS)
    for told, text in zip(
        first,
        [
            "RuntimeError Missing key in checkpoint state_dict: gone.",
            "ValueError Size mismatch between saved torch.Size([7, 5]) and current: "
            "torch.Size([2, 2]) for rows",
            "KeyError 'saying'",
            "KeyError 'loading'",
            "OSError broken plan",
        ],
        strict=True,
    ):
        assert {1: text} == told
    assert ["saying", "loading"] == second[2:4]
    assert first[:2] + first[4:] == second[:2] + second[4:]


def load_damaged(rank: Rank) -> list[str]:
    """Load what only rank 1 reads the damaged part of, by `load` and by stock torch."""
    import torch
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint import CheckpointException

    import milepost.dcp as dcp

    told = []
    for load in (
        partial(dcp.load, checkpoint_id=rank.root),
        partial(stock.load, storage_reader=dcp.Reader(rank.root)),
    ):
        state = {"large": torch.zeros(1 << 19)} if rank.rank else {"rows": torch.zeros(7, 5)}
        try:
            load(state)
        except CheckpointException as error:
            (number, (each, _)), = error.failures.items()  # fmt: skip
            told.append(f"{number} {type(each).__name__} {each}")
    return told


def test_a_flipped_byte_that_one_rank_reads_is_refused_on_both(root: Path) -> None:
    root.mkdir()
    run_ranks(save_alone, root / "c", [None])
    file = root / "c" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for told in run_ranks(load_damaged, root / "c", RANKS):
        assert 2 == len(told)
        for each in told:
            assert each.startswith("1 CorruptCheckpoint")
            assert "large" in each
            assert file.name in each


def load_in_groups(rank: Rank) -> list[Any]:
    """Load alone inside the group, then in two groups at once, each another checkpoint; and by a
    planner that plans for all.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import CheckpointException, LoadPlan
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    import milepost.dcp as dcp

    class Dividing(DefaultLoadPlanner):
        """Each rank reads one of two tensors."""

        def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
            assert dist.get_rank() == 0
            return [
                LoadPlan([item for item in plan.items
                          if item.dest_index.fqn == ("rows", "columns")[number]])
                for number, plan in enumerate(global_plan)
            ]  # fmt: skip

    found: list[Any] = []
    state = {"rows": torch.zeros(7, 5)}
    if rank.rank == 0:
        dcp.load(state, checkpoint_id=rank.root, no_dist=True)
    found.append(state["rows"].any().item())
    groups = [dist.new_group([number]) for number in range(2)]
    both = dist.new_group([0, 1])
    key = "rows" if rank.rank else "columns"
    state = {key: torch.zeros(7, 5)}
    dcp.load(state, checkpoint_id=rank.root, process_group=groups[rank.rank])
    found.append(state[key].any().item())
    state = {"rows": torch.zeros(7, 5), "columns": torch.zeros(7, 5)}
    dcp.load(state, checkpoint_id=rank.root, process_group=both, planner=Dividing())
    found.append([state[key].any().item() for key in ("rows", "columns")])
    try:
        dcp.load({"gone": 1}, checkpoint_id=rank.root, process_group=both)
    except CheckpointException as error:
        found.append(sorted(error.failures))
    return found


def test_one_rank_loads_alone_groups_load_at_once_and_a_planner_plans_for_all(root: Path) -> None:
    root.mkdir()
    run_ranks(save_alone, root / "c", [None])
    first, second = run_ranks(load_in_groups, root / "c", RANKS)
    assert [True, True, [True, False], [0, 1]] == first
    assert [False, True, [False, True], [0, 1]] == second
