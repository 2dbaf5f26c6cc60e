"""SIGTERM to one rank: all ranks leave their loops at the same step, saved and durable."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.integration.cluster import Node, Rank, judge, run_ranks


def train_until_told(rank: Rank) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from milepost import Checkpointer

    before = signal.getsignal(signal.SIGTERM)
    with Checkpointer(rank.root) as ck:
        state = {"w": torch.zeros(100)}
        ck.prepare(state)
        for step in range(1, 2000):
            state["w"] += 1
            dist.all_reduce(state["w"], op=dist.ReduceOp.MAX)
            if ck.preempted:
                ck.save(step, state).wait(60)
                break
            if step == 20 and rank.rank == rank.arguments["told"]:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.002 * (1 + rank.rank))
        else:
            raise AssertionError("nobody told this rank to go")
    return {"step": step, "is_restored": signal.getsignal(signal.SIGTERM) == before}


def weight(rank: int, world: int, path: str) -> float:
    """Load what was saved with stock torch; return the one value that all of it has."""
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp

    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    state = {"w": torch.zeros(100)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    (value,) = set(state["w"].tolist())
    return float(value)


def test_all_ranks_stop_at_the_same_step_once_one_was_told_to_go(
    pair: list[Node], root: Path
) -> None:
    from milepost.reading.verification import (
        verify,
    )  # The judge imports this file, and must not import ours.

    first, second = pair
    told = run_ranks(train_until_told, root, [first, first, second], told=2)
    steps = {each["step"] for each in told}
    assert 1 == len(steps), told
    (step,) = steps
    assert step >= 20, "not before the signal"
    assert f"step_{step}" == os.readlink(root / "latest")
    assert () == verify(root / f"step_{step}").damages
    assert [float(step)] == judge(weight, 1, str(root / "latest"))
    assert all(each["is_restored"] for each in told)


def never_ask(rank: Rank) -> None:
    import torch

    from milepost import Checkpointer

    ck = Checkpointer(rank.root)
    ck.save(1, {"w": torch.ones(3)}).wait(60)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(80)


def test_a_loop_that_never_asks_keeps_the_signals_default(pair: list[Node], root: Path) -> None:
    node, _ = pair
    started_s = time.monotonic()
    assert [None] == run_ranks(never_ask, root, [node], expect_death=[0])
    assert time.monotonic() - started_s < 79, "it has slept to its end"
