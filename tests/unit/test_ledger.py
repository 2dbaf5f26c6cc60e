"""What a rank knows of its saves: each message changes what it should, and no end is lost."""

from __future__ import annotations

import pytest

from milepost.ledger import (
    EARLY_ENDS_MAX,
    LAYOUTS_MAX,
    Advance,
    Decision,
    EndCommitted,
    EndUncommitted,
    ForgetWords,
    FreeSlot,
    KnownPlan,
    Ledger,
    LoseArena,
)
from milepost.wire.messages import (
    Cause,
    Concluded,
    Ending,
    LayoutReady,
    Progress,
    SaveRef,
    SlotFreed,
)

LOST = Cause("daemon-lost", "the daemon is away", "start it again")
SHORT = Cause("no-space", "the disk is full")


def made(*, is_raising: bool = False) -> Ledger[str]:
    ledger: Ledger[str] = Ledger(is_raising=is_raising)
    ledger.begin("job", 3)
    return ledger


def opened(ledger: Ledger[str], step: int, *, is_plan_only: bool = False) -> SaveRef:
    """Open a save; its handle is `handle <step>`."""
    name = "prepare" if is_plan_only else f"step_{step}"
    ref = ledger.name_save(step, name, is_plan_only=is_plan_only)
    assert [] == ledger.open(ref, f"handle {step}")
    return ref


def ends(decisions: object) -> list[tuple[str, str]]:
    """Which handles end, and how."""
    assert isinstance(decisions, list)
    return [
        (each.handle, each.message.outcome if isinstance(each, EndCommitted) else each.outcome)
        for each in decisions
        if isinstance(each, EndCommitted | EndUncommitted)
    ]


def test_saves_are_numbered_by_call_and_the_count_goes_on_from_attempt_to_attempt() -> None:
    ledger = made()
    ids = [ledger.name_save(step, f"step_{step}").save_id for step in (10, 20)]
    ledger.begin("job", 4)
    ids.append(ledger.name_save(10, "step_10").save_id)
    assert ["3-1", "3-2", "4-3"] == ids


def test_a_layout_is_kept_for_the_save_that_waits_for_it_and_for_no_other() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    mine = LayoutReady(save_id=ref.save_id, layout_id="a", assigned=b"\1")
    assert [] == ledger.heard(mine)
    assert [] == ledger.heard(LayoutReady(save_id="3-9", layout_id="b", assigned=b"\1"))
    assert mine == ledger.layout_of(ref.save_id)
    assert None is ledger.layout_of("3-9")
    ledger.heard(Concluded(save_id=ref.save_id, outcome=Ending.FAILED, cause=SHORT))
    assert None is ledger.layout_of(ref.save_id)


def test_progress_reaches_a_handle_once_the_image_is_complete() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    writing = Progress(save_id=ref.save_id, phase="writing")
    assert [] == ledger.heard(writing)
    assert [Advance("handle 10", "staged")] == ledger.stage(ref.save_id)
    assert [Advance("handle 10", "writing")] == ledger.heard(writing)
    assert ["writing"] == [each.phase for each in ledger.open_saves]


def test_a_commit_ends_the_handle_frees_the_slot_and_forgets_what_was_said() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    ledger.stage(ref.save_id)
    message = Concluded(save_id=ref.save_id, outcome=Ending.COMMITTED, path="/r/step_10")
    expected: list[Decision[str]] = [
        ForgetWords(ref.save_id), FreeSlot(ref.save_id), EndCommitted("handle 10", ref, message)
    ]  # fmt: skip
    assert expected == ledger.heard(message)
    assert not ledger.is_open(ref.save_id)
    assert 10 == ledger.last_step
    assert "save 3-1 of this attempt" == ledger.taken_by("step_10")


def test_a_slot_that_is_still_read_comes_back_by_a_word_of_its_own() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    ledger.stage(ref.save_id)
    decisions = ledger.heard(
        Concluded(save_id=ref.save_id, outcome=Ending.FAILED, cause=SHORT, slot_free=False)
    )
    assert FreeSlot(ref.save_id) not in decisions
    assert [("handle 10", "failed")] == ends(decisions)
    freed = {FreeSlot(ref.save_id), ForgetWords(ref.save_id)}
    assert freed == set(ledger.heard(SlotFreed(save_id=ref.save_id)))


def test_a_restarted_daemon_is_told_of_a_slot_that_the_one_before_has_not_given_back() -> None:
    """Simulation found it: killed while it read the image of a failed save, a daemon left the rank
    with one slot fewer, since nobody spoke of that save any more.
    """
    ledger = made()
    ref = opened(ledger, 10)
    ledger.stage(ref.save_id)
    still_read = Concluded(save_id=ref.save_id, outcome=Ending.FAILED, cause=SHORT, slot_free=False)
    assert ForgetWords(ref.save_id) not in ledger.heard(still_read)
    # What was said is said again to the next daemon, whose answer frees the slot.
    again = Concluded(save_id=ref.save_id, outcome=Ending.FAILED, cause=SHORT)
    assert [ForgetWords(ref.save_id), FreeSlot(ref.save_id)] == ledger.heard(again)
    assert [] == ledger.gone(LOST)


def test_slots_that_a_daemon_never_gave_back_are_free_once_it_is_gone_for_good() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    ledger.stage(ref.save_id)
    ledger.heard(
        Concluded(save_id=ref.save_id, outcome=Ending.FAILED, cause=SHORT, slot_free=False)
    )
    assert [FreeSlot(ref.save_id)] == ledger.gone(LOST)


def test_a_new_attempt_says_nothing_of_slots_of_the_one_before() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    ledger.stage(ref.save_id)
    ledger.heard(
        Concluded(save_id=ref.save_id, outcome=Ending.FAILED, cause=SHORT, slot_free=False)
    )
    assert [ForgetWords(ref.save_id)] == ledger.begin("job", 4)
    assert [] == ledger.gone(LOST)


@pytest.mark.parametrize("outcome", [Ending.FAILED, Ending.SKIPPED])
def test_what_became_no_checkpoint_gives_its_name_back(outcome: Ending) -> None:
    ledger = made()
    ref = opened(ledger, 10)
    decisions = ledger.heard(Concluded(save_id=ref.save_id, outcome=outcome, cause=SHORT))
    assert [("handle 10", outcome)] == ends(decisions)
    assert None is ledger.taken_by("step_10")
    assert -1 == ledger.last_step


def test_an_end_that_is_not_known_keeps_the_name_and_counts_as_saved() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    ledger.heard(Concluded(save_id=ref.save_id, outcome=Ending.UNKNOWN, cause=LOST))
    assert "save 3-1 of this attempt" == ledger.taken_by("step_10")
    assert 10 == ledger.last_step


def test_an_end_without_a_reason_says_so() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    (*_, end) = ledger.heard(Concluded(save_id=ref.save_id, outcome=Ending.FAILED))
    assert isinstance(end, EndUncommitted)
    assert "internal" == end.cause.code


def test_a_save_that_others_have_ended_ends_as_soon_as_it_is_called() -> None:
    ledger = made()
    early = Concluded(
        save_id="3-2", outcome=Ending.SKIPPED, cause=Cause("busy", "all slots in use")
    )
    assert [] == ends(ledger.heard(early))
    opened(ledger, 10)
    ref = ledger.name_save(20, "step_20")
    assert [("handle 20", "skipped")] == ends(ledger.open(ref, "handle 20"))
    assert None is ledger.taken_by("step_20")
    assert [("handle 10",)] == [(each.handle,) for each in ledger.open_saves]


def test_an_end_of_the_next_attempt_is_kept_until_this_rank_gets_there() -> None:
    ledger = made()
    opened(ledger, 10)
    ledger.heard(Concluded(save_id="4-2", outcome=Ending.FAILED, cause=SHORT))
    ledger.begin("job", 4)
    ref = ledger.name_save(10, "step_10")
    assert [("again", "failed")] == ends(ledger.open(ref, "again"))


def test_only_the_newest_early_ends_are_kept_and_no_end_of_a_save_that_was_called() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    ledger.give_up(ref.save_id, SHORT)
    for count in range(1, EARLY_ENDS_MAX + 4):
        ledger.heard(Concluded(save_id=f"3-{count}", outcome=Ending.FAILED, cause=SHORT))
    # 3-1 was called, and of the rest the two oldest are too many.
    ended = []
    for step in range(EARLY_ENDS_MAX + 2):
        ended += ends(ledger.open(ledger.name_save(step, f"step_{step}"), f"handle {step}"))
    assert EARLY_ENDS_MAX == len(ended)
    assert ("handle 2", "failed") == ended[0]


def test_a_second_end_changes_nothing() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    assert [("handle 10", "failed")] == ends(ledger.give_up(ref.save_id, SHORT))
    assert [] == ledger.give_up(ref.save_id, SHORT)
    committed = Concluded(save_id=ref.save_id, outcome=Ending.COMMITTED, path="/r/step_10")
    assert [] == ends(ledger.heard(committed))
    assert [] == ledger.stage(ref.save_id)


def test_a_save_is_in_hand_until_this_rank_has_staged_or_skipped_it_or_it_ends() -> None:
    ledger = made()
    staged, skipped, ended, left = (opened(ledger, step) for step in (10, 20, 30, 40))
    ledger.stage(staged.save_id)
    ledger.skip(skipped.save_id)
    ledger.give_up(ended.save_id, SHORT)
    assert [left] == ledger.in_hand


def test_when_the_daemon_is_gone_what_was_staged_is_unknown_and_the_rest_has_failed() -> None:
    ledger = made()
    staged, staging = opened(ledger, 10), opened(ledger, 20)
    ledger.stage(staged.save_id)
    decisions = ledger.gone(LOST)
    assert [("handle 10", "outcome-unknown"), ("handle 20", "failed")] == ends(decisions)
    assert {FreeSlot(staged.save_id), FreeSlot(staging.save_id)} <= set(decisions)
    (unknown,) = [each for each in decisions if isinstance(each, EndUncommitted)][:1]
    assert "outcome-unknown" == unknown.cause.code
    assert "this rank had staged the save, but the daemon is away" == unknown.cause.message
    assert () == ledger.open_saves


def test_an_arena_that_was_taken_away_is_replaced() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    decisions = ledger.give_up(ref.save_id, Cause("arena-invalid", "there is no such file"))
    assert LoseArena() in decisions


def test_plans_hold_until_a_save_ends_by_its_structure_and_the_oldest_go_first() -> None:
    ledger = made()
    for number in range(LAYOUTS_MAX + 1):
        ledger.keep_plan(f"s{number}", KnownPlan(f"layout {number}", (0,)))
    assert None is ledger.plan_of("s0")
    assert KnownPlan("layout 1", (0,)) == ledger.plan_of("s1")
    ledger.heard(Concluded(save_id="3-1", outcome=Ending.FAILED, cause=SHORT, layout_valid=False))
    assert None is ledger.plan_of("s1")


def test_failures_are_kept_for_whoever_raises_them_each_once() -> None:
    ledger = made(is_raising=True)
    for step, outcome in ((10, Ending.FAILED), (20, Ending.SKIPPED), (30, Ending.UNKNOWN)):
        ref = opened(ledger, step)
        ledger.heard(Concluded(save_id=ref.save_id, outcome=outcome, cause=SHORT))
    raised = opened(ledger, 40)
    (end,) = ledger.give_up(raised.save_id, SHORT, is_raised=True)
    assert isinstance(end, EndUncommitted)
    assert not end.is_logged
    assert ["handle 10", "handle 30"] == ledger.take_failures()
    assert [] == ledger.take_failures()


def test_without_on_failure_raise_failures_are_logged_only() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    (end,) = ledger.give_up(ref.save_id, SHORT)
    assert isinstance(end, EndUncommitted)
    assert end.is_logged
    assert [] == ledger.take_failures()


def test_what_is_opened_for_a_layout_only_takes_no_name_and_leaves_no_failure() -> None:
    ledger = made(is_raising=True)
    prepared = opened(ledger, 0, is_plan_only=True)
    user = ledger.name_save(7, "prepare")
    ledger.open(user, "handle 7")
    assert [("handle 0", "skipped")] == ends(ledger.close_plan(prepared.save_id))
    assert [] == ledger.close_plan(prepared.save_id)
    failed = opened(ledger, 0, is_plan_only=True)
    ledger.heard(Concluded(save_id=failed.save_id, outcome=Ending.UNKNOWN, cause=LOST))
    assert [] == ledger.take_failures()
    assert "save 3-2 of this attempt" == ledger.taken_by("prepare")
    assert -1 == ledger.last_step


def test_a_new_attempt_may_save_again_what_an_earlier_one_has_saved() -> None:
    ledger = made()
    ref = opened(ledger, 10)
    ledger.heard(Concluded(save_id=ref.save_id, outcome=Ending.COMMITTED, path="/r/step_10"))
    ledger.keep_plan("s", KnownPlan("layout", (0,)))
    ledger.begin("job", 4)
    ledger.resume(5, "step_5")
    assert None is ledger.taken_by("step_10")
    assert "the checkpoint this attempt resumed from" == ledger.taken_by("step_5")
    assert -1 == ledger.last_step
    assert KnownPlan("layout", (0,)) == ledger.plan_of("s")


def test_going_back_further_than_before_frees_what_then_lies_beyond() -> None:
    """Simulation found it: `load(90)`, then `load(80)`, and step 90 could not be saved again."""
    ledger = made()
    ledger.resume(90, "step_90")
    ledger.resume(80, "step_80")
    assert None is ledger.taken_by("step_90")
    ledger.resume(85, "best")
    assert "the checkpoint this attempt resumed from" == ledger.taken_by("step_80")
    assert "the checkpoint this attempt resumed from" == ledger.taken_by("best")


def test_a_message_of_no_save_changes_nothing() -> None:
    assert [] == made().heard(object())
