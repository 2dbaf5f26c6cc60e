"""The demonstration fails if the trainers' records do not show what they should."""

from __future__ import annotations

import msgspec
import pytest

from milepost.demo.checking import check_losses, check_resume, check_saves, saved_parts
from milepost.demo.judging import Judgement, sum_up
from milepost.demo.processes import DemoFailed
from milepost.demo.records import Called, Ended, Finished, Record, Recorded, RecordedPart, Stepped

WHOLE = RecordedPart(-1, "whole")


def state(step: int, *, is_resumed: bool = False, **parts: RecordedPart) -> Recorded:
    return Recorded(step, parts, is_resumed)


def saved(step: int, phase: str | None = "committed") -> list[Record]:
    called = Called(step, f"1-{step}", 0.0, 0.0, 0.0)
    return [called] if phase is None else [called, Ended(step, f"1-{step}", phase, 1.0)]


def stepped(*losses: tuple[int, float]) -> list[Record]:
    return [Stepped(step, loss, 0.0, 1.0) for step, loss in losses]


def test_only_the_last_save_of_a_killed_attempt_may_be_open() -> None:
    killed = [[*saved(6), *saved(12, None)]]
    check_saves(1, killed, [], may_be_open=True)
    with pytest.raises(DemoFailed, match="rank 0: the save of step 12 is not known"):
        check_saves(1, killed, [], may_be_open=False)
    with pytest.raises(DemoFailed, match="the save of step 6 is not known"):
        check_saves(1, [[*saved(6, None), *saved(12)]], [], may_be_open=True)


def test_a_save_that_failed_fails_the_demonstration() -> None:
    with pytest.raises(DemoFailed, match="attempt 2, rank 1: the save of step 6 is failed"):
        check_saves(2, [[*saved(6), Finished(2.0)], saved(6, "failed")], [], may_be_open=False)


def test_a_rank_that_did_not_finish_fails_the_demonstration() -> None:
    check_saves(1, [[*saved(6), Finished(2.0)]], [], may_be_open=False)
    with pytest.raises(DemoFailed, match="rank 0 ended without being finished"):
        check_saves(1, [saved(6)], [], may_be_open=False)


def test_every_rank_has_to_resume_from_what_it_saved() -> None:
    part = RecordedPart(4, "a")
    before: list[list[Record]] = [[state(6, w=part, lr=WHOLE)]]
    same = state(6, is_resumed=True, w=part, lr=WHOLE)
    assert (6, 2) == check_resume(before, [[same]], 6, [])
    for wrong in ({"w": RecordedPart(4, "b"), "lr": WHOLE}, {"w": part}):
        other = msgspec.structs.replace(same, parts=wrong)
        with pytest.raises(DemoFailed, match="rank 0 resumed from step 6 with 1 values that"):
            check_resume(before, [[other]], 6, [])


def test_ranks_that_resume_from_different_steps_or_too_early_fail_the_demonstration() -> None:
    resumed: list[list[Record]] = [[state(step, is_resumed=True, lr=WHOLE)] for step in (6, 12)]
    with pytest.raises(DemoFailed, match=r"ranks resumed from steps \[6, 12\]"):
        check_resume([], resumed, 6, [])
    with pytest.raises(DemoFailed, match="resumed from step 6, but 12 was committed"):
        check_resume([], resumed[:1], 12, [])


def test_the_losses_of_steps_that_were_done_twice_are_compared() -> None:
    before = [stepped((6, 3.0), (7, 2.0), (8, 1.0))]
    assert "did steps 7 to 8 again: the same losses, bit for bit, on every rank" == check_losses(
        before, [stepped((7, 2.0), (8, 1.0), (9, 0.5))], 6
    )
    assert check_losses(before, [stepped((7, 2.0), (8, 1.0001))], 6).endswith(
        "1 of 2 losses the same bit for bit, the others to 1e-04"
    )
    with pytest.raises(DemoFailed, match=r"rank 0 had loss 1\.0 at step 8, and 1\.1 after"):
        check_losses(before, [stepped((7, 2.0), (8, 1.1))], 6)
    for steps in ([], [(8, 1.0)]):
        with pytest.raises(DemoFailed, match="after step 6 these steps were done again"):
            check_losses(before, [stepped(*steps)], 6)


def test_a_checkpoint_has_the_parts_of_the_latest_attempt_that_saved_its_step() -> None:
    first: list[list[Record]] = [
        [state(6, w=RecordedPart(2, f"first-{rank}"), lr=WHOLE)] for rank in (0, 1)
    ]
    second: list[list[Record]] = [
        [state(6, w=RecordedPart(2, f"second-{rank}"), lr=WHOLE)] for rank in (0, 1)
    ]
    expected = [RecordedPart(2, "second-0"), RecordedPart(2, "second-1")]
    assert {"w": expected, "lr": [WHOLE]} == saved_parts(6, [first, second])
    cut_short: list[list[Record]] = [second[0], []]
    assert [RecordedPart(2, "first-0"), RecordedPart(2, "first-1")] == saved_parts(
        6, [first, cut_short]
    )["w"]


def test_ranks_that_saved_different_values_of_a_whole_fail_the_demonstration() -> None:
    ranks: list[list[Record]] = [[state(6, lr=RecordedPart(-1, text))] for text in ("1", "2")]
    with pytest.raises(DemoFailed, match="step_6: ranks saved different values of lr"):
        saved_parts(6, [ranks])


def test_a_judgement_counts_only_if_every_value_of_every_checkpoint_is_equal() -> None:
    expected = {"step_6": {"w": [WHOLE], "lr": [WHOLE]}}
    assert 2 == sum_up(expected, {"step_6": Judgement(2, ())})
    with pytest.raises(DemoFailed, match="1 values differ from what was saved:\n  step_6: w is"):
        sum_up(expected, {"step_6": Judgement(1, ("w is other",))})
    with pytest.raises(DemoFailed, match="values differ"):
        sum_up(expected, {})
    with pytest.raises(DemoFailed, match="not everything was compared"):
        sum_up(expected, {"step_6": Judgement(1, ())})
