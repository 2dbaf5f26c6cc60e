"""Loads on two ranks: both refuse together, and each rank gets its own state under its own keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Node, Rank, nodes, run_ranks


def sum_of_ranks(rank: Rank) -> float:
    """A collective, as training makes them."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(rank.rank))
    dist.all_reduce(total)
    return total.item()


class Failing:
    """A Stateful whose `state_dict()` raises."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("gone")

    def load_state_dict(self, state: Any) -> None: ...


def refuse(rank: Rank) -> dict[str, Any]:
    """Let one rank refuse each load for another reason; return the error and the time of each."""
    import torch

    from milepost import Checkpointer, LoadFailed

    told: dict[str, Any] = {"errors": [], "sums": [], "took_s": []}
    with Checkpointer(rank.root) as ck:
        ck.save(1, {"w": torch.ones(4), "n": 1}).wait(60)
        ck.load({"w": torch.zeros(4)})
        for bad in ({"gone": 1}, {"failing": Failing()}, {"w": torch.zeros(5)}):
            state: dict[str, Any] = {"w": torch.zeros(4)}
            if rank.rank == 1:
                state |= bad
            started_s = time.monotonic()
            try:
                ck.load(state)
            except LoadFailed as error:
                told["errors"].append(error.message)
            told["took_s"].append(time.monotonic() - started_s)
            told["sums"].append(sum_of_ranks(rank))
            told["untouched"] = not state["w"].any().item()
        told["step"] = ck.load({"w": torch.zeros(4)}).step
    return told


def test_a_load_that_one_rank_refuses_ends_at_once_on_both_and_collectives_go_on(
    pair: list[Node], root: Path
) -> None:
    node, _ = pair
    for told in run_ranks(refuse, root, [node, node]):
        reasons = ["lacks 1 of the keys", "KeyError: 'gone'", "is [4], wanted [5]"]
        for reason, message in zip(reasons, told["errors"], strict=True):
            assert "rank 1: " in message
            assert reason in message
        # The machine may be busy, and the group's own timeout is half an hour.
        assert max(told["took_s"]) < 60
        assert [1.0, 1.0, 1.0] == told["sums"]
        assert told["untouched"]
        assert 1 == told["step"]


def sharded_run(rank: Rank) -> tuple[Any, Any]:
    """Return an FSDP2 model and its bare optimizer; the seed makes the same ones everywhere."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(rank.arguments.get("seed", 3))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def steps_of(model: Any, optimizer: Any, count: int) -> None:
    import torch

    for _ in range(count):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 24).reshape(4, 6)).square().mean().backward()
        optimizer.step()


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return all of a sharded run, gathered, as lists."""
    from torch.distributed.tensor import DTensor

    tensors = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{number}.{name}": value for name, value in state.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
        for name, value in tensors.items()
    }


def save_sharded(rank: Rank) -> Any:
    from milepost import Checkpointer

    model, optimizer = sharded_run(rank)
    steps_of(model, optimizer, 3)
    with Checkpointer(rank.root) as ck:
        ck.save(3, {"model": model, "optimizer": optimizer}).wait(60)
    saved = whole(model, optimizer)
    steps_of(model, optimizer, 2)
    return saved, whole(model, optimizer)


def resume_sharded(rank: Rank) -> Any:
    """Load into a fresh run with a bare optimizer, and into a model without memory."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    import milepost

    model, optimizer = sharded_run(rank)
    report = milepost.load(rank.root, {"model": model, "optimizer": optimizer})
    assert () == report.unexpected
    moments = [value for state in optimizer.state.values() for value in state.values()]
    assert 8 == sum(isinstance(value, DTensor) for value in moments)
    loaded = whole(model, optimizer)
    steps_of(model, optimizer, 2)

    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    fully_shard(empty)
    state = {"model": dict(empty.state_dict())}
    milepost.load(rank.root, state)
    gathered = {name: value.full_tensor().tolist() for name, value in state["model"].items()}
    assert gathered == {name: loaded[name] for name in gathered}
    return loaded, whole(model, optimizer)


def test_a_fresh_bare_optimizer_of_a_sharded_model_goes_on_on_any_number_of_ranks(
    folder: Path,
) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        saved, trained = run_ranks(save_sharded, root, [node, node])[0]
    again = run_ranks(resume_sharded, root, [None, None], seed=99)
    assert [(saved, trained)] * 2 == again
    for loaded, _ in run_ranks(resume_sharded, root, [None] * 3, seed=99):
        assert saved == loaded


def read_only_first(rank: Rank) -> dict[str, Any]:
    """Open a root that cannot be written to, load from it, and save once it can be written to."""
    import torch
    import torch.distributed as dist

    from milepost import Checkpointer, Rejected, SaveFailed, StorageError
    from milepost.storage.root import Root

    told: dict[str, Any] = {}
    real = Root.prepare

    def refuse(root: Root) -> None:
        raise StorageError("read-only", f"prepare {root.path}: read-only file system")

    Root.prepare = refuse  # type: ignore[assignment,method-assign]
    state = {"w": torch.zeros(4)}
    with Checkpointer(rank.root) as ck:
        told["loaded"] = ck.load(state).step
        told["value"] = state["w"][0].item()
        told["steps"] = (ck.steps(), ck.latest())
        save = ck.save(2, state)
        told["phase"] = save.phase
        try:
            save.wait(10)
        except SaveFailed as error:
            told["failure"] = (error.code, error.message)
        try:
            ck.prepare(state)
        except Rejected as error:
            told["prepare"] = error.code
        dist.barrier()
        Root.prepare = real  # type: ignore[method-assign]
        dist.barrier()
        ck.prepare(state)
        told["committed"] = ck.save(3, state).wait(60).step
        told["attempt"] = ck.attempt
    return told


def test_a_root_that_cannot_be_written_to_is_loaded_and_saves_work_once_it_can(
    folder: Path,
) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        run_ranks(save_one, root, [node])
        for told in run_ranks(read_only_first, root, [node, node]):
            assert (1, 1.0, ([1], 1)) == (told["loaded"], told["value"], told["steps"])
            assert "failed" == told["phase"]
            code, message = told["failure"]
            assert "read-only" == code
            assert "read-only file system" in message
            assert "read-only" == told["prepare"]
            assert (3, 2) == (told["committed"], told["attempt"])


def save_one(rank: Rank) -> None:
    import torch

    from milepost import Checkpointer

    with Checkpointer(rank.root) as ck:
        ck.save(1, {"w": torch.ones(4)}).wait(60)


LOAD = """
import os, signal, sys, time, torch
import milepost

state = {"w": torch.zeros(4)}
assert 1 == milepost.load(sys.argv[1], state).step
with milepost.Checkpointer(sys.argv[1]) as ck:
    assert 1 == ck.load(state).step
    assert [1] == ck.steps()
    assert not ck.preempted
    os.kill(os.getpid(), signal.SIGTERM)
    while not ck.preempted:
        time.sleep(0.05)
    try:
        ck.save(2, state).wait(10)
    except milepost.SaveFailed as error:
        print(error.code, state["w"].tolist())
"""


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
def test_a_read_only_mount_is_loaded_with_and_without_a_checkpointer(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        run_ranks(save_one, root, [node])
        shell = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && exec "$2" -c "$3" "$1"'
        run = subprocess.run(
            ["unshare", "-rm", "sh", "-c", shell, "sh", root, sys.executable, LOAD],
            capture_output=True,
            text=True,
            env={**os.environ, "MILEPOST_RUN_DIR": str(node.run_dir)},
        )
    if run.returncode and run.stderr.startswith(("unshare:", "mount:")):
        pytest.skip("no namespaces here")
    assert (0, "read-only [1.0, 1.0, 1.0, 1.0]\n") == (run.returncode, run.stdout), run.stderr


def describe(value: Any) -> Any:
    """Return plain data that is equal for two states exactly if keys, types and values are."""
    if isinstance(value, dict):
        return {(type(key).__name__, str(key)): describe(inner) for key, inner in value.items()}
    return (type(value).__name__, str(value))


def save_own(rank: Rank) -> Any:
    """Save state with keys of several types, some of it each rank's own, and bring it back."""
    import torch

    from milepost import Checkpointer

    state: dict[Any, Any] = {
        "shared": {7: torch.ones(2), (1, 2): {None: "x"}},
        "empty": {},
        3: {"deep": {True: 1}},
    }
    own: dict[Any, Any] = {
        rank.rank: torch.tensor(rank.rank),
        "loader": {rank.rank: {}, "at": {2.5: rank.rank}},
    }
    with Checkpointer(rank.root) as ck:
        ck.save(1, state, per_rank=own).wait(60)
        report = ck.load(None)
    return [describe(each) for each in (state, report.state, own, report.per_rank)]


def test_keys_and_empty_dicts_of_all_ranks_come_back_without_a_template(
    pair: list[Node], root: Path
) -> None:
    node, _ = pair
    for state, back, own, own_back in run_ranks(save_own, root, [node, node]):
        assert state == back
        assert own == own_back
