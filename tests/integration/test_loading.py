"""Loads on two ranks: refused together, and the state of each rank with its own keys."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.integration.cluster import Rank, nodes, run_ranks


def sum_of_ranks(rank: Rank) -> float:
    """A collective, as training makes them."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(rank.rank))
    dist.all_reduce(total)
    return total.item()


class Failing:
    """Stateful, and cannot say its state."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("gone")

    def load_state_dict(self, state: Any) -> None: ...


def refuse(rank: Rank) -> dict[str, Any]:
    """Have one rank refuse each load for another reason; tell what each load said and took."""
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
    folder: Path,
) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        for told in run_ranks(refuse, root, [node, node]):
            reasons = ["lacks 1 of the keys", "KeyError: 'gone'", "is [4], wanted [5]"]
            for reason, message in zip(reasons, told["errors"], strict=True):
                assert "rank 1: " in message
                assert reason in message
            # A second: the machine may be busy, and the group's own timeout is half an hour.
            assert max(told["took_s"]) < 1
            assert [1.0, 1.0, 1.0] == told["sums"]
            assert told["untouched"]
            assert 1 == told["step"]


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


def test_keys_and_empty_dicts_of_all_ranks_come_back_without_a_template(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        for state, back, own, own_back in run_ranks(save_own, root, [node, node]):
            assert state == back
            assert own == own_back
