"""Runs that roll back, alternate between structures, or change paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.integration.cluster import Node, Rank, run_ranks


def roll_back(rank: Rank) -> dict[str, Any]:
    import torch

    from milepost import Checkpointer

    with Checkpointer(rank.root) as ck:
        for step in (1, 2, 3):
            ck.save(step, {"t": torch.full((10,), float(step))}).wait(60)
        state = {"t": torch.zeros(10)}
        before = ck.attempt
        ck.load(state, step=1)
        latest = []
        for step in (2, 3, 4):
            ck.save(step, {"t": torch.full((10,), 20.0 + step)}).wait(60)
            latest.append((ck.latest(), os.readlink(rank.root / "latest")))
        again = {"t": torch.zeros(10)}
        ck.load(again, step=3)
        return {
            "back": state["t"].tolist(),
            "again": again["t"].tolist(),
            "latest": latest,
            "attempts": ck.attempt - before,
            "steps": ck.steps(),
        }


def test_rolling_back_in_one_process_replaces_the_abandoned_future(
    pair: list[Node], root: Path
) -> None:
    first, second = pair
    told = run_ranks(roll_back, root, [first, first, second])
    for each in told:
        assert [1.0] * 10 == each["back"]
        assert [23.0] * 10 == each["again"]
        assert [(2, "step_2"), (3, "step_3"), (4, "step_4")] == each["latest"]
        assert [1, 2, 3, 4] == each["steps"]
        assert each["attempts"] >= 1


def alternate(rank: Rank) -> list[Any]:
    import torch

    from milepost import Checkpointer

    told: list[Any] = []
    with Checkpointer(rank.root) as ck:
        for step in range(18):
            state = {f"head_{step % 6}": torch.full((3,), float(step)), "w": torch.ones(2)}
            ck.save(step, state).wait(60)
        for step in (12, 17):
            state = {f"head_{step % 6}": torch.zeros(3), "w": torch.zeros(2)}
            ck.load(state, step=step)
            told.append(state[f"head_{step % 6}"].tolist())
        with torch.inference_mode():
            ck.prepare({"i": torch.ones(4)})
        ck.save(20, {"i": torch.ones(4)}).wait(60)
        paths = [
            ck.save(21, {"a": {"b": torch.ones(1)}, "o": {"x": 1}}).wait(60).path,
            ck.save(22, {"a.b": torch.ones(1, requires_grad=True), "o.x": 1}).wait(60).path,
        ]
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    for path in paths:
        metadata = FileSystemReader(path).read_metadata()
        held = metadata.state_dict_metadata["a.b"]
        assert isinstance(held, TensorStorageMetadata)
        told.append((metadata.planner_data, held.properties.requires_grad))
    return told


def test_structures_that_alternate_keep_their_layouts_and_paths_are_part_of_them(
    pair: list[Node], root: Path
) -> None:
    node, _ = pair
    (told,) = run_ranks(alternate, root, [node])
    assert [12.0] * 3 == told[0]
    assert [17.0] * 3 == told[1]
    assert ({"a.b": ("a", "b"), "o.x": ("o", "x")}, False) == told[2]
    assert ({"a.b": ("a.b",), "o.x": ("o.x",)}, True) == told[3]


def mishandle(rank: Rank) -> dict[str, Any]:
    """Save with a forked child, from several threads at once, and after shared memory was
    cleaned.
    """
    import threading

    import torch

    from milepost import Checkpointer, SaveFailed, UsageError

    state = {"w": torch.ones(100)}
    told: dict[str, Any] = {}
    with Checkpointer(rank.root) as ck:
        ck.save(1, state).wait(60)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ck.save(2, state)
            except UsageError:
                ck.close()
                code = 0
            os._exit(code)
        told["child"] = os.waitpid(child, 0)[1]
        told["after fork"] = ck.save(2, state).wait(60).step

        saves: list[Any] = []
        threads = [
            threading.Thread(target=lambda step=step: saves.append(ck.save(step, state)))
            for step in range(10, 20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told["threads"] = sorted(save.wait(60).step for save in saves)

        for path in ck._saves.slots.stager.arenas:
            path.unlink()
        try:
            ck.save(30, state).wait(60)
        except SaveFailed as error:
            told["cleaned"] = error.code
        told["after cleaning"] = ck.save(31, state).wait(60).step
    return told


def test_a_fork_threads_and_a_cleaner_of_shared_memory_cost_one_save_at_most(
    pair: list[Node], root: Path
) -> None:
    node, _ = pair
    (told,) = run_ranks(mishandle, root, [node])
    assert 0 == told["child"]
    assert 2 == told["after fork"]
    assert list(range(10, 20)) == told["threads"]
    assert told.get("cleaned") in ("arena-invalid", None)
    assert 31 == told["after cleaning"]
