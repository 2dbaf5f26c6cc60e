"""SIGTERM to one rank: all ranks leave their loops at the same step, saved and durable."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.integration.cluster import Rank, nodes, run_ranks


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


def test_all_ranks_stop_at_the_same_step_once_one_was_told_to_go(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 2, root) as (first, second):
        told = run_ranks(train_until_told, root, [first, first, second], told=2)
    steps = {each["step"] for each in told}
    assert 1 == len(steps), told
    assert (root / f"step_{steps.pop()}" / ".metadata").exists()
    assert all(each["is_restored"] for each in told)


def never_ask(rank: Rank) -> None:
    import torch

    from milepost import Checkpointer

    ck = Checkpointer(rank.root)
    ck.save(1, {"w": torch.ones(3)}).wait(60)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)


def test_a_loop_that_never_asks_keeps_the_signals_default(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        started_s = time.monotonic()
        assert [None] == run_ranks(never_ask, root, [node], expect_death=[0])
    assert time.monotonic() - started_s < 19
