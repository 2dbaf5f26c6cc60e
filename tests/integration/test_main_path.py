"""The main path: two daemons, two ranks each, shards and replicas, read back by stock torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.cluster import Rank, judge, nodes, run_ranks
from tests.integration.stagings import STAGINGS, opened


def _state(rank: int, world: int, seed: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (world,))
    return {
        "model": {
            "table": distribute_tensor(torch.randn(13, 4), mesh, [Shard(0)]),
            "replica": torch.randn(64, 64),
        },
        "extra": {"step": seed, "names": ["a", "b"], "list": [torch.arange(seed), {"x": 1.5}]},
    }


def save_two_steps(rank: Rank) -> dict[str, Any]:
    with opened(rank, is_guarded=True) as ck:
        first = _state(rank.rank, rank.world, 3)
        ck.prepare(first)
        own = {"rng": torch.full((4,), rank.rank), "name": f"rank {rank.rank}"}
        saves = [ck.save(3, first, per_rank=own)]
        first["model"]["replica"].add_(1000)
        first["model"]["table"].add_(1000)
        saves.append(ck.save(5, _state(rank.rank, rank.world, 5), per_rank=own))
        done = [save.wait(60) for save in saves]
        back = _state(rank.rank, rank.world, 4)
        back["extra"]["list"][0] = torch.zeros(3, dtype=torch.int64)
        report = ck.load(back, step=3)
        assert torch.equal(
            _state(rank.rank, rank.world, 3)["model"]["replica"], back["model"]["replica"]
        )
        return {
            "ids": [save.save_id for save in saves],
            "paths": [str(each.path) for each in done],
            "steps": ck.steps(),
            "latest": ck.latest(),
            "own": (report.per_rank["rng"].tolist(), report.per_rank["name"]),
        }


def load_and_compare(rank: int, world: int, path: str, seed: int) -> bool:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    torch.manual_seed(seed)
    table, replica = torch.randn(13, 4), torch.randn(64, 64)
    target: Any = torch.zeros(13, 4)
    if world > 1:
        target = distribute_tensor(target, init_device_mesh("cpu", (world,)), [Shard(0)])
    state: dict[str, Any] = {
        "model": {"table": target, "replica": torch.zeros(64, 64)},
        "extra": {"step": 0, "names": [], "list": [torch.zeros(seed, dtype=torch.int64), {"x": 0}]},
    }
    dcp.load(state, checkpoint_id=path, no_dist=world == 1)
    got = state["model"]["table"]
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    assert torch.equal(table, whole)
    assert torch.equal(replica, state["model"]["replica"])
    assert state["extra"]["step"] == seed
    assert state["extra"]["names"] == ["a", "b"]
    assert torch.equal(torch.arange(seed), state["extra"]["list"][0])
    assert state["extra"]["list"][1] == {"x": 1.5}
    return True


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("staging", STAGINGS)
def test_two_nodes_with_two_ranks_each_commit_what_stock_torch_reads(
    staging: str, folder: Path
) -> None:
    root = folder / "checkpoints"
    with nodes(folder, 2, root) as (first, second):
        results = run_ranks(save_two_steps, root, [first, first, second, second], staging=staging)
        status = first.status()
    assert [result["ids"] for result in results] == [["1-2", "1-3"]] * 4
    assert [str(root / "step_3"), str(root / "step_5")] == results[0]["paths"]
    assert results[3]["steps"] == [3, 5]
    assert [result["latest"] for result in results] == [5] * 4
    assert [([rank] * 4, f"rank {rank}") for rank in range(4)] == [r["own"] for r in results]
    assert status["jobs"][0]["committed_total"] == 2
    assert os.readlink(root / "latest") == "step_5"
    assert list((root / ".partial").iterdir()) == []
    for world in (1, 2, 3):
        for step in (3, 5):
            assert [True] * world == judge(
                load_and_compare, world, str(root / f"step_{step}"), step
            )
