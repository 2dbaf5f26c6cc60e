"""Calls of a Checkpointer that overlap: one in the background, one that fails, one that is late."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.cluster import Node, Rank, nodes, run_ranks, until


def prepare_behind(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer

    state = {"w": torch.rand(200_000)}
    with Checkpointer(rank.root) as ck:
        ck.prepare(state, wait=False)
        ck.wait(60)
        first = ck.save(1, state).wait(60).step
        ck.prepare({"other": torch.rand(100_000)}, wait=False)
        loaded = ck.load({"w": torch.zeros(200_000)}).step
        second = ck.save(2, {"other": torch.rand(100_000)}).wait(60).step
    return {"steps": (first, loaded, second)}


def test_wait_and_load_wait_for_a_preparation_in_the_background(
    pair: list[Node], root: Path
) -> None:
    node, _ = pair
    told = run_ranks(prepare_behind, root, [node, node])
    assert [(1, 1, 2)] * 2 == [each["steps"] for each in told]


class Broken:
    """A part of the state whose `state_dict()` raises."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("not now")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def prepare_what_raises_on_one(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer, SaveFailed

    state = {"w": torch.ones(10)}
    with Checkpointer(rank.root) as ck:
        broken: dict[str, Any] = {**state, "b": Broken()} if rank.rank else state
        with pytest.raises((ValueError, SaveFailed)) as raised:
            ck.prepare(broken)
        dist.barrier()
        return {"raised": repr(raised.value), "step": ck.save(1, state).wait(60).step}


def test_a_state_that_raises_in_prepare_on_one_rank_ends_it_on_all_and_the_next_save_commits(
    pair: list[Node], root: Path
) -> None:
    node, _ = pair
    told = run_ranks(prepare_what_raises_on_one, root, [node, node])
    assert [1, 1] == [each["step"] for each in told]
    assert "rank 1 could not stage: ValueError('not now')" in told[0]["raised"]
    assert "ValueError('not now')" == told[1]["raised"]


def skip_ahead_of_the_others(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer

    state = {"w": torch.rand(1000)}
    on_busy: Any = "skip" if rank.rank else "wait"
    with Checkpointer(rank.root, on_busy=on_busy) as ck:
        ck.prepare(state)
        _, held = ck.save(1, state), ck.save(2, state)
        dist.barrier()
        if rank.rank == 0:
            until(lambda: bool(ck.status()["jobs"][0]["last_skipped"]), "the other's word is here")
        skipped = ck.save(3, state)
        was_held = not held.done()
        with pytest.raises(Exception, match="slots in use"):
            skipped.wait(60)
        dist.barrier()  # Each rank has looked whether the second save is still held.
        rank.arguments["go_on"].touch()
        told = (skipped.phase, was_held, held.wait(60).step)
        dist.barrier()
        return {"told": told, "next": ck.save(4, state).wait(60).step}


def test_a_step_that_one_rank_skipped_keeps_no_later_rank_waiting_for_a_slot(folder: Path) -> None:
    root, go_on = folder / "root", folder / "go-on"
    # The slots of the first two saves are kept until a rank has seen its third one skipped.
    faults = ",".join(f"after-staged:hold:{go_on}@{step}" for step in (1, 2))
    with nodes(folder, 1, root, ["--allow-faults"], MILEPOSTD_FAULTS=faults) as (node,):
        told = run_ranks(skip_ahead_of_the_others, root, [node, node], go_on=go_on)
    assert [("skipped", True, 2)] * 2 == [each["told"] for each in told]
    assert [4, 4] == [each["next"] for each in told]


class Saving:
    """A part of the state that calls `save()` while it is read, as a signal handler may."""

    def __init__(self) -> None:
        self.call: Any = None

    def state_dict(self) -> dict[str, Any]:
        if self.call is not None:
            self.call()
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def save_within_a_save(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer, UsageError

    part = Saving()
    state = {"w": torch.ones(10), "part": part}
    refusals = []
    with Checkpointer(rank.root) as ck:
        for call in (lambda: ck.save(2, state), lambda: ck.prepare(state), lambda: ck.load(state)):
            part.call = call
            with pytest.raises(UsageError) as refused:
                ck.save(1, state)
            refusals.append(str(refused.value))
        part.call = None
        return {"refusals": refusals, "step": ck.save(1, state).wait(60).step}


def test_a_call_within_a_call_of_the_same_thread_is_refused(pair: list[Node], root: Path) -> None:
    node, _ = pair
    (told,) = run_ranks(save_within_a_save, root, [node])
    assert [
        f"{name}() was called within save() by the same thread" in refusal
        for name, refusal in zip(("save", "prepare", "load"), told["refusals"], strict=True)
    ] == [True] * 3
    assert 1 == told["step"]


FAILING = "after-write:eio@1,after-write:eio@3"


def fail_and_be_told(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer, SaveFailed

    state = {"w": torch.ones(10)}
    ck = Checkpointer(rank.root, on_failure="raise")
    ck.save(1, state)
    ck.wait(60)  # returns however they end, and tells nobody
    told: list[Any] = []
    with pytest.raises(SaveFailed) as raised:
        ck.save(2, state)
    told.append(raised.value.code)
    told.append(ck.save(2, state).wait(60).step)
    ck.save(3, state)
    with pytest.raises(SaveFailed) as raised:
        ck.close()
    told.append(raised.value.code)
    ck.close()
    return {"told": told}


def test_with_on_failure_raise_a_failure_is_raised_at_the_next_save_and_at_close(
    folder: Path,
) -> None:
    root = folder / "root"
    with nodes(folder, 1, root, ["--allow-faults"], MILEPOSTD_FAULTS=FAILING) as (node,):
        (told,) = run_ranks(fail_and_be_told, root, [node])
    assert ["io-error", 2, "io-error"] == told["told"]


def interrupt_where_nobody_is_told(rank: Rank) -> dict[str, Any]:
    """Interrupt just after a save was opened, and just before its failure is sent."""
    from milepost import Checkpointer
    from milepost.saving.saves import Saves

    opened, give_up = Saves.open, Saves.give_up

    def open_and_stop(*arguments: Any, **named: Any) -> Any:
        opened(*arguments, **named)
        raise KeyboardInterrupt

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    state = {"w": torch.ones(10)}
    steps: list[int] = []
    with Checkpointer(rank.root) as ck:
        for step, (name, wrong) in enumerate((("open", open_and_stop), ("give_up", stop))):
            for call in (ck.prepare, lambda state: ck.save(7, state)):
                with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(Saves, name, wrong)
                    call({**state, "b": Broken()})
                steps.append(ck.save(10 * step + len(steps), state).wait(60).step)
                ck.wait(0)
        assert (opened, give_up) == (Saves.open, Saves.give_up)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Saves, "open", open_and_stop)
            ck.save(8, state)
    return {"steps": steps}


def test_the_next_call_ends_a_save_that_an_interrupt_left_open(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        (told,) = run_ranks(interrupt_where_nobody_is_told, root, [node])
    assert [0, 1, 12, 13] == told["steps"]


def save_with_a_umask(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer

    os.umask(rank.arguments["umasks"][rank.rank])
    with Checkpointer(rank.root) as ck:
        ck.save(1, {"w": torch.ones(10), "mine": rank.rank}).wait(60)
    return {}


@pytest.mark.parametrize("umask", [0o077, 0o002])
def test_a_checkpoint_has_the_modes_of_the_trainers_umask_not_of_the_daemons(
    pair: list[Node], root: Path, umask: int
) -> None:
    """That of rank 0, whose process makes the root: one checkpoint has one rule."""
    run_ranks(save_with_a_umask, root, pair, umasks=[umask, 0o027])
    folder = root / "step_1"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", ".milepost"} <= modes.keys()
    assert {0o666 & ~umask} == set(modes.values())
    folders = (root, root / ".partial", root / ".milepost-run", folder)
    assert {0o777 & ~umask} == {stat.S_IMODE(path.stat().st_mode) for path in folders}


def save_where_people_put_files(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer, KeepLast

    def save(ck: Checkpointer, step: int, value: float) -> None:
        ck.save(step, {"w": torch.full((10,), value)}).wait(60)

    folder = rank.root / "step_1"
    with Checkpointer(rank.root) as ck:
        save(ck, 1, 1.0)
    (folder / "config.json").write_text("{}")
    (folder / "best").mkdir()
    (folder / "best" / ".metadata").write_text("nested")
    (rank.root / "step_2").mkdir()
    (rank.root / "step_2" / "log").write_text("made before")
    (rank.root / "latest").unlink()
    (rank.root / "latest").write_text("mine")
    told: dict[str, Any] = {}
    with Checkpointer(rank.root, keep=KeepLast(1)) as ck:
        save(ck, 1, 2.0)
        state = {"w": torch.zeros(10)}
        told["loaded"] = (ck.load(state, step=1).step, state["w"][0].item())
        told["replaced"] = sorted(path.name for path in folder.iterdir())
        save(ck, 2, 3.0)
        until(lambda: ck.steps() == [2], "retention has removed step 1")
    return told


def test_what_people_put_below_a_root_outlives_replacing_and_retention(
    folder: Path,
) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        (told,) = run_ranks(save_where_people_put_files, root, [node])
        until(lambda: not os.listdir(root / ".partial"), "nothing is left over")
        log = node.log.read_text()
    assert (1, 2.0) == told["loaded"]
    assert [".metadata", ".milepost", "__0_0.distcp", "best", "config.json"] == told["replaced"]
    assert ["best", "config.json"] == sorted(os.listdir(root / "step_1"))
    assert "nested" == (root / "step_1" / "best" / ".metadata").read_text()
    assert "made before" == (root / "step_2" / "log").read_text()
    assert "mine" == (root / "latest").read_text()
    assert [1, 1] == [log.count(event) for event in ("retention.kept", "latest.foreign")]
