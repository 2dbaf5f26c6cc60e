"""Loads while saves are under way, saves right behind loads, and training beside both."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.faults.fleet import DEADLINE_S, Trainer, fired, log_lines, members, until
from tests.faults.judging import check_root, judge, partials
from tests.integration.cluster import Rank, run_ranks

ROUNDS: Final = 4
"""Number of rounds. Every second one goes back a step and saves the abandoned step again."""


STEP_S: Final = 0.01
"""How long training computes between its collectives."""


@contextlib.contextmanager
def seeing_no_checkpoints() -> Iterator[None]:
    """Hide the checkpoints' names, as on a node with an old attribute cache."""
    from milepost.storage.catalog import CheckpointEntry
    from milepost.storage.root import Root

    def no_checkpoints(root: Root) -> list[CheckpointEntry]:
        return []

    real = Root.checkpoints
    Root.checkpoints = no_checkpoints  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Root.checkpoints = real  # type: ignore[method-assign]


def save_and_load_in_turns(rank: Rank) -> dict[str, Any]:
    """Begin saves, load the checkpoints that they become, and save again at once, while a thread
    trains with the default group. Return what was seen.
    """
    import torch
    import torch.distributed as dist

    trainer = Trainer(rank, process_group=dist.new_group(), deadline_s=DEADLINE_S)
    sums: list[float] = []
    is_done = threading.Event()

    def train() -> None:
        while True:
            sums.append(trainer.train(rounds=5))
            # All ranks end at the same round: how many are done is summed up as well.
            done = torch.tensor(float(is_done.is_set()))
            dist.all_reduce(done)
            if done == rank.world:
                return
            time.sleep(STEP_S)

    training = threading.Thread(target=train)
    training.start()
    loaded, ends = [], []
    seen = seeing_no_checkpoints if rank.rank == 1 else contextlib.nullcontext
    for number in range(1, ROUNDS + 1):
        step = 10 * number
        trainer.begin(step)
        # Now one of them is late, now the other.
        time.sleep(0.1 * ((number + rank.rank) % 2))
        trainer.begin(step + 1)
        with seen():
            loaded.append(trainer.load())
        trainer.begin(step + 2)
        ends += [trainer.finish(step), trainer.finish(step + 1)]
        if number % 2:
            ends.append(trainer.finish(step + 2))
            continue
        with seen():
            loaded.append(trainer.load(step))
        ends.append(trainer.finish(step + 2))
        trainer.take_branch(number)
        trainer.begin(step + 1)
        with seen():
            loaded.append(trainer.load())
        ends.append(trainer.finish(step + 1))
    is_done.set()
    training.join()
    trainer.close()
    return {"loaded": loaded, "ends": [end["phase"] for end in ends], "sums": sums}


def test_loads_and_saves_in_any_order_neither_wait_for_one_another_for_ever_nor_disturb_training(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    # Every save is still under way when it is loaded.
    faults = [["before-publish:sleep:0.1"], ["after-write:sleep:0.05"]]
    with members(folder, root, faults, **places) as daemons:
        nodes = [member.node for member in daemons]
        told = run_ranks(save_and_load_in_turns, root, nodes, environment=places)
        until(lambda: not partials(root), "nothing is left over")
        saves = 3 * ROUNDS + ROUNDS // 2
        assert [saves, saves] == [len(fired(node)) for node in nodes]
        assert not [line for node in nodes for line in log_lines(node) if line["level"] == "error"]
    loads = []
    for number in range(1, ROUNDS + 1):
        step = 10 * number
        loads += [step + 1] if number % 2 else [step + 1, step, step + 1]
    for each in told:
        assert loads == each["loaded"], "the newest one, or the one that was asked for"
        assert ["committed"] * saves == each["ends"]
        assert {2.0 * sum(range(5))} == set(each["sums"])
    assert len(told[0]["sums"]) == len(told[1]["sums"])
    assert f"step_{10 * ROUNDS + 1}" == os.readlink(root / "latest")
    names = [f"step_{10 * number + more}" for number in range(1, ROUNDS + 1) for more in range(3)]
    assert names == check_root(root)
    judge(root, ["latest"], branch=ROUNDS)
    assert [] == os.listdir(shm)
