"""Decisions reach handles, slots and the session, outside of the lock that guards the ledger."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from milepost.errors import SaveFailed, UsageError
from milepost.handle import Save
from milepost.link.session import Session
from milepost.memory.arena import Slot
from milepost.saving.saves import Saves
from milepost.staging.slots import Slots
from milepost.staging.stager import StagedImage
from milepost.wire.messages import (
    AbortWanted,
    Cause,
    Concluded,
    Ending,
    LayoutReady,
    SaveRef,
    Skipped,
    SlotFreed,
    Staged,
    Unable,
)

END_S = 20.0
SHORT = Cause("no-space", "the disk is full", "free some", "n0", 1)


class FakeSession:
    """Notes what is said, and who was forgotten."""

    node_id = "n0"

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.settled: list[str] = []

    def say(self, message: Any) -> None:
        self.said.append(message)

    send = say

    def settle(self, save_id: str) -> None:
        self.settled.append(save_id)


class FakeSlot:
    index = 1

    def __init__(self) -> None:
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


class Bench:
    """The saves of rank 1, with real slots over no stager."""

    def __init__(self, *, is_raising: bool = False, rank: int = 1) -> None:
        self.session = FakeSession()
        self.saves = Saves(cast("Session", self.session), rank, is_raising=is_raising)
        self.slots = Slots(
            cast("Any", None), self.saves.changed, count=2, timeout_s=END_S, who="rank 1"
        )
        self.saves.begin("job", 3, self.slots)

    def staged(self, ref: SaveRef) -> FakeSlot:
        slot = FakeSlot()
        record = cast("Any", type("Record", (), {"layout_id": "a", "image_bytes": 64}))
        self.saves.hand_over(ref, StagedImage(Path("/shm/a"), cast("Slot", slot), record))
        return slot

    def is_locked(self) -> bool:
        """Whether another thread would have to wait for the lock."""
        found: list[bool] = []

        def look() -> None:
            found.append(not self.saves.changed.acquire(blocking=False))
            if not found[0]:
                self.saves.changed.release()

        other = threading.Thread(target=look)
        other.start()
        other.join()
        return found[0]


def committed(ref: SaveRef) -> Concluded:
    return Concluded(
        save_id=ref.save_id,
        outcome=Ending.COMMITTED,
        path="/r/s",
        checkpoint_bytes=5,
        elapsed_s=0.5,
    )


def test_an_image_that_is_complete_is_told_and_its_slot_held_until_the_daemon_is_done() -> None:
    bench = Bench()
    ref, save = bench.saves.open(10, "step_10")
    slot = bench.staged(ref)
    assert "staged" == save.phase
    (said,) = bench.session.said
    assert (ref, "a", "/shm/a", 1) == (said.save, said.layout_id, said.arena, said.slot)
    assert isinstance(said, Staged)
    assert (ref.save_id,) == bench.slots.held
    assert "step 10 is staged" == bench.saves._told(bench.slots.held)
    bench.saves.heard(committed(ref))
    assert slot.is_released
    assert [ref.save_id] == bench.session.settled
    assert (10, Path("/r/s"), 5, 0.5) == (
        (found := save.wait(0)).step, found.path, found.bytes, found.elapsed_s
    )  # fmt: skip
    bench.saves.await_ends(0)


def test_an_image_that_nobody_wants_any_more_gives_its_slot_back_at_once() -> None:
    bench = Bench()
    ref, save = bench.saves.open(10, "step_10")
    bench.saves.heard(Concluded(save_id=ref.save_id, outcome=Ending.FAILED, cause=SHORT))
    assert bench.saves.is_over(ref)
    assert bench.staged(ref).is_released
    assert [] == bench.session.said
    assert "failed" == save.phase


def test_a_slot_that_is_still_read_is_held_until_its_own_word() -> None:
    bench = Bench()
    ref, _ = bench.saves.open(10, "step_10")
    slot = bench.staged(ref)
    bench.saves.heard(
        Concluded(save_id=ref.save_id, outcome=Ending.FAILED, cause=SHORT, slot_free=False)
    )
    assert not slot.is_released
    bench.saves.heard(SlotFreed(save_id=ref.save_id))
    assert slot.is_released


@pytest.mark.parametrize("how", ["heard", "given up", "gone", "early"])
def test_callbacks_of_a_handle_run_outside_the_lock(how: str) -> None:
    bench = Bench()
    locked: list[bool] = []

    def opened() -> tuple[SaveRef, Save]:
        ref, save = bench.saves.open(10, "step_10")
        save.add_done_callback(lambda _: locked.append(bench.is_locked()))
        return ref, save

    if how == "early":
        bench.saves.heard(Concluded(save_id="3-1", outcome=Ending.FAILED, cause=SHORT))
    ref, save = opened()
    if how == "heard":
        bench.saves.heard(committed(ref))
    elif how == "given up":
        bench.saves.give_up(ref, RuntimeError("no"))
    elif how == "gone":
        bench.saves.gone(Cause("daemon-lost", "away"))
    assert save.done()
    assert [False] == locked


def test_a_save_that_cannot_be_completed_is_told_with_the_place_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(is_raising=True)
    ref, save = bench.saves.open(10, "step_10")
    with caplog.at_level(logging.WARNING, "milepost"):
        bench.saves.give_up(ref, KeyError("no"))
    (said,) = bench.session.said
    assert isinstance(said, Unable)
    assert ("internal", "n0", 1) == (said.cause.code, said.cause.node, said.cause.rank)
    assert "save 3-1 of step 10 failed" in caplog.text
    assert [save] == bench.saves.take_failures()
    with pytest.raises(SaveFailed, match="rank 1 could not stage: KeyError"):
        save.wait(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_daemon_warns_of_is_logged_by_the_first_rank(
    caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    bench = Bench(rank=rank)
    ref, save = bench.saves.open(10, "step_10")
    bench.saves.heard(
        Concluded(
            save_id=ref.save_id,
            outcome=Ending.COMMITTED,
            warnings=(Cause("replicas-differ", "copies of w differ", "do this"),),
        )
    )
    assert save.done()
    assert (
        ["copies of w differ [replicas-differ]\nhint: do this"] if rank == 0 else []
    ) == caplog.messages


def test_an_error_that_the_caller_raises_is_not_logged_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(is_raising=True)
    ref, _ = bench.saves.open(10, "step_10")
    bench.saves.give_up(ref, UsageError("usage", "no"))
    assert [] == caplog.messages
    assert [] == bench.saves.take_failures()


def test_a_layout_is_waited_for_until_it_comes_or_the_save_ends() -> None:
    bench = Bench()
    first, _ = bench.saves.open(10, "step_10")
    second, _ = bench.saves.open(20, "step_20")
    ready = LayoutReady(save_id=first.save_id, layout_id="a", assigned=b"\1")
    ended = Concluded(save_id=second.save_id, outcome=Ending.FAILED, cause=SHORT)
    for ref, message, expected in ((first, ready, ready), (second, ended, None)):
        other = threading.Thread(target=bench.saves.heard, args=(message,))
        other.start()
        assert expected == bench.saves.await_layout(ref, END_S, "waits")
        other.join()
    third, _ = bench.saves.open(30, "step_30")
    assert None is bench.saves.await_layout(third, 0.01, "waits")
    assert not bench.saves.is_over(third)


def test_an_abort_is_a_word_to_the_daemon() -> None:
    bench = Bench()
    ref, save = bench.saves.open(10, "step_10")
    save.abort()
    assert [AbortWanted(save=ref)] == bench.session.said
    assert not save.done()


def test_what_was_opened_for_a_layout_ends_without_a_trace() -> None:
    bench = Bench(is_raising=True)
    ref, save = bench.saves.open(0, "prepare", is_plan_only=True)
    with pytest.raises(TimeoutError, match="save 3-1 of step 0"):
        bench.saves.await_ends(0)
    bench.saves.close_plan(ref)
    bench.saves.await_ends(0)
    assert "skipped" == save.phase
    assert [ref.save_id] == bench.session.settled
    assert [] == bench.saves.take_failures()


def test_what_an_interrupted_call_has_left_is_given_up_and_nothing_else() -> None:
    bench = Bench()
    staged, _ = bench.saves.open(10, "step_10")
    bench.staged(staged)
    left, handle = bench.saves.open(20, "step_20")
    bench.session.said.clear()
    bench.saves.give_up_left()
    (said,) = bench.session.said
    assert (left, "aborted") == (said.save, said.cause.code)
    assert "failed" == handle.phase
    assert not bench.saves.is_over(staged)


def test_without_a_free_slot_a_save_that_may_not_wait_is_skipped_by_the_daemons_word() -> None:
    bench = Bench()
    for step in (10, 20):
        bench.staged(bench.saves.open(step, f"step_{step}")[0])
    ref, handle = bench.saves.open(30, "step_30")
    assert not bench.saves.take_turn(ref, may_wait=False)
    said = bench.session.said[-1]
    assert isinstance(said, Skipped)
    assert "has all 2 slots in use: step 10 is staged, step 20 is staged" in said.reason
    assert not handle.done()
    bench.saves.give_up_left()
    assert not handle.done()
