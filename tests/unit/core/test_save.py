"""One save on one node, on two and on three: every way it can go, every row of the tables, and all
interleavings of a small one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pytest
from tests.unit.core.core_world import NO_SPACE, Network, World, losing, outcome_of, save_ref

from milepost.wire.messages import (
    Cause,
    Concluded,
    Ending,
    Fail,
    Gathered,
    LayoutReady,
    Outcome,
    PeerEnvelope,
    PeerMessage,
    Planned,
    Prepared,
    Progress,
    RankLayout,
    RankReport,
    SlotFreed,
    Staged,
    WordWanted,
    WrittenFile,
    encode,
)
from milepostd.core.causes import named
from milepostd.core.commands import (
    BuildIndex,
    Discard,
    GiveUp,
    MakePlan,
    Publish,
    RemoveArenas,
    WriteFragment,
    WriteImage,
)
from milepostd.core.coordination import Coordination
from milepostd.core.events import (
    FileDurable,
    FileFailed,
    IndexBuilt,
    IndexFailed,
    PeerSaid,
    PlanMade,
    RankSaid,
    SessionLost,
)
from milepostd.core.participation import Participation
from milepostd.core.phases import COORDINATOR, PARTICIPANT, Phase, Trigger
from milepostd.core.role import PEER_LOST_S, RESEND_S, RESOLVE_GRACE_S, VERDICT_GRACE_S, Role

SAVE = save_ref(1)
PREPARE = save_ref(1, is_plan_only=True)
KEY = (SAVE.job, SAVE.save_id)

SCENARIOS: list[Callable[[], None]] = []


def scenario(test: Callable[[], None]) -> Callable[[], None]:
    """Let the transitions of this test count as taken."""
    SCENARIOS.append(test)
    return test


def committed(*ranks_per_node: int, network: Network | None = None) -> World:
    """A world in which one save was staged by all and has run its course."""
    world = World(ranks_per_node) if network is None else World(ranks_per_node, network=network)
    world.stage(SAVE)
    world.run()
    return world


# --- the good way


@scenario
def test_a_staged_save_is_committed_on_one_node() -> None:
    world = committed(1)
    assert world.concluded(0, SAVE) == Concluded(
        save_id="1-1",
        outcome=Ending.COMMITTED,
        path="/data/run/step_10",
        checkpoint_bytes=4096,
        elapsed_s=0.04,
    )
    assert world.sent == []
    assert world.timers == {}


@scenario
def test_a_staged_save_is_committed_on_three_nodes_with_two_ranks_each() -> None:
    world = committed(2, 2, 2)
    assert {"committed"} == world.outcomes(SAVE) == world.verdicts(SAVE)
    assert "committed" == world.disk[KEY]
    assert [6, 3, 1, 1] == [
        len(world.done(kind)) for kind in (WriteImage, WriteFragment, BuildIndex, Publish)
    ]
    (built,) = world.done(BuildIndex)
    assert isinstance(built, BuildIndex)
    assert [0, 1, 2, 3, 4, 5] == [file.rank for file in built.files]
    assert ("fragment.A", "fragment.B", "fragment.C") == built.fragments
    assert world.timers == {}


def test_each_rank_hears_that_its_save_is_being_written_and_how_it_ended() -> None:
    world = committed(2)
    for rank in (0, 1):
        assert [Progress, Concluded] == [type(message) for message in world.heard[rank][1:]]


def test_steady_state_costs_two_small_messages_a_node_and_no_plan() -> None:
    world = committed(4, 4)
    assert [Gathered, Prepared] == [
        type(message) for source, _, message in world.sent if source == "B"
    ]
    assert [Outcome] == [type(message) for source, _, message in world.sent if source == "A"]
    assert [] == world.done(MakePlan)
    for source, _, message in world.sent:
        envelope = PeerEnvelope(
            protocol=1, node_id="node-0123456789", incarnation="0" * 12, message=message
        )
        assert len(encode(envelope)) <= 1024 * len(
            world.nodes[source].roster.jobs["job"].ranks_here
        )


# --- plans


@scenario
def test_an_unknown_structure_is_planned_staged_and_committed() -> None:
    world = World((1, 1))
    world.offer(SAVE)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)
    (plan,) = world.done(MakePlan)
    assert isinstance(plan, MakePlan)
    assert [RankReport(0, "", "f", b"offer of 0"), RankReport(1, "", "f", b"offer of 1")] == list(
        plan.reports
    )
    for rank in (0, 1):
        assert LayoutReady(save_id="1-1", layout_id="new", assigned=b"\1") in world.heard[rank]


def test_ranks_that_have_staged_stay_as_they_are_when_another_one_needs_a_plan() -> None:
    world = World((2, 1))
    world.stage(SAVE, 0, 2)
    world.offer(SAVE, 1)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)
    (plan,) = world.done(MakePlan)
    assert isinstance(plan, MakePlan)
    assert ["old", "", "old"] == [report.layout_id for report in plan.reports]
    assert [1] == [
        rank
        for rank, heard in world.heard.items()
        if any(isinstance(message, LayoutReady) for message in heard)
    ]
    (built,) = world.done(BuildIndex)
    assert isinstance(built, BuildIndex)
    assert ["old", "new", "old"] == [file.layout_id for file in built.files]


def test_a_node_whose_ranks_have_staged_is_prepared_while_others_are_still_planned_for() -> None:
    world = World((1, 1))
    world.hold(MakePlan)
    world.offer(SAVE, 0)
    world.stage(SAVE, 1)
    world.run(1)
    assert Phase.PREPARED is world.nodes["B"].saves.participations[KEY].phase
    world.release()
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


def test_warnings_of_the_planner_reach_every_rank_that_asked() -> None:
    world = World((1, 1))
    warning = Cause("replicas-differ", "copies of w differ")
    world.hold(MakePlan)
    world.offer(SAVE)
    world.run(1)
    layouts = (RankLayout(0, "new", b"\1"), RankLayout(1, "new", b"\1"))
    world.post("A", PlanMade(save=SAVE, layouts=layouts, warnings=(warning,)))
    world.run()
    for rank in (0, 1):
        assert [(warning,)] == [
            message.warnings for message in world.heard[rank] if isinstance(message, LayoutReady)
        ]


def test_each_rank_gets_its_own_rota() -> None:
    world = World((1, 1))
    world.hold(MakePlan)
    world.offer(SAVE)
    world.run(1)
    layouts = (RankLayout(0, "new", b"\1", b"\1\0"), RankLayout(1, "new", b"\1", b"\3\0"))
    world.post("A", PlanMade(save=SAVE, layouts=layouts, warnings=()))
    world.run()
    for rank, rota in enumerate((b"\1\0", b"\3\0")):
        assert [rota] == [
            message.rota for message in world.heard[rank] if isinstance(message, LayoutReady)
        ]


def test_warnings_of_the_index_reach_every_rank_with_the_outcome() -> None:
    world = World((1, 1))
    warning = Cause("replicas-differ", "copies of w differ")
    world.hold(BuildIndex)
    world.stage(SAVE)
    world.run(1)
    world.post("A", IndexBuilt(save=SAVE, checkpoint_bytes=1, warnings=(warning,)))
    world.run()
    assert {"committed"} == world.outcomes(SAVE)
    for rank in (0, 1):
        concluded = world.concluded(rank, SAVE)
        assert concluded is not None
        assert (warning,) == concluded.warnings


def test_replicas_that_must_not_differ_end_the_save_and_void_the_plan() -> None:
    world = World((1, 1))
    world.hold(BuildIndex)
    world.stage(SAVE)
    world.run(1)
    world.post("A", IndexFailed(save=SAVE, cause=Cause("replicas-differ", "copies of w differ")))
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    for rank in (0, 1):
        concluded = world.concluded(rank, SAVE)
        assert concluded is not None
        assert not concluded.layout_valid


@scenario
def test_a_save_that_only_asks_for_layouts_ends_with_them_and_without_a_directory() -> None:
    world = World((1, 2))
    world.offer(PREPARE)
    world.run()
    assert {"none"} == world.outcomes(PREPARE)
    assert all(
        LayoutReady(save_id="1-1", layout_id="new", assigned=b"\1") in heard
        for heard in world.heard.values()
    )
    assert {"planned"} == world.verdicts(PREPARE)
    assert {} == world.disk
    assert [] == world.done(WriteImage) + world.done(GiveUp) + world.done(Discard)
    assert {} == world.timers
    # The first real save needs no plan, and its id is new.
    second = save_ref(2)
    world.stage(second, layout="new")
    world.run()
    assert {"committed"} == world.outcomes(second)
    assert 1 == len(world.done(MakePlan))


def test_a_lost_plan_for_a_save_that_only_asks_for_layouts_is_sent_again() -> None:
    world = World((1, 1), network=losing(Planned))
    world.offer(PREPARE)
    world.run()
    assert {"planned"} == world.verdicts(PREPARE)
    assert 2 == len(world.said(Planned))


@scenario
def test_a_plan_that_fails_fails_the_save_and_voids_all_layouts() -> None:
    world = World((1, 1))
    conflict = Cause("key-conflict", "rank 0 and rank 1 disagree about w")
    world.fail(MakePlan, conflict)
    world.offer(SAVE)
    world.run()
    for rank in (0, 1):
        message = world.concluded(rank, SAVE)
        assert message is not None
        assert ("failed", conflict, False) == (
            message.outcome,
            message.cause,
            message.layout_valid,
        )


def test_a_rank_that_stages_where_only_layouts_were_asked_for_ends_it() -> None:
    world = World((1, 1))
    world.offer(PREPARE, 0)
    world.stage(PREPARE, 1)
    world.run()
    assert {"failed"} == world.outcomes(PREPARE)
    assert "only asks for layouts" in world.cause(0, PREPARE).message
    assert [] == world.done(Publish)


def test_offers_are_dropped_once_the_save_has_ended() -> None:
    world = World((1,))
    world.offer(SAVE)
    world.run()
    assert b"" == world.nodes["A"].saves.participations[KEY].reports[0].offer
    assert {} == world.nodes["A"].saves.coordinations[KEY].gathered


# --- messages that are lost, late, doubled or out of order


@pytest.mark.parametrize("kind", [Gathered, Planned, Prepared, Outcome])
@pytest.mark.parametrize("offered", [True, False])
def test_each_message_may_be_lost_once(kind: type, offered: bool) -> None:
    world = World((1, 1, 1), network=losing(kind))
    (world.offer if offered else world.stage)(SAVE)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)
    assert world.now_s < 3 * RESEND_S


def test_every_message_may_be_lost_three_times() -> None:
    world = World((1, 1), network=losing(Gathered, Planned, Prepared, Outcome, first=3))
    world.offer(SAVE)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


def test_the_word_of_a_failing_node_may_be_lost() -> None:
    world = World((1, 1), network=losing(Fail))
    world.fail(WriteImage, rank=1)
    world.stage(SAVE)
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    assert NO_SPACE.code == world.cause(0, SAVE).code
    assert world.now_s < 2 * RESEND_S


def test_a_node_whose_first_word_was_lost_is_known_by_what_it_has_written() -> None:
    world = World((1, 1), network=losing(Gathered, first=100))
    world.stage(SAVE)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


def test_doubled_and_reordered_messages_change_nothing() -> None:
    delays = iter([2.5, 0.001, 0.9, 0.01, 1.7, 0.3, 0.02, 2.1] * 20)

    def network(source: str, target: str, message: PeerMessage) -> Sequence[float]:
        return (next(delays), next(delays))

    world = World((1, 2, 1), network=network)
    world.offer(SAVE)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)
    assert [1, 1, 1, 4] == [
        len(world.done(kind)) for kind in (MakePlan, BuildIndex, Publish, WriteImage)
    ]
    for rank in range(4):
        assert 1 == sum(isinstance(message, LayoutReady) for message in world.heard[rank])
        assert 1 == sum(isinstance(message, Concluded) for message in world.heard[rank])


def test_late_words_about_an_ended_save_are_answered_with_its_outcome() -> None:
    world = committed(1, 1)
    said = [message for source, _, message in world.sent if source == "B"]
    before = len(world.said(Outcome))
    for message in said:
        world.post("A", PeerSaid(node_id="B", message=message))
    world.run()
    assert before + 2 == len(world.said(Outcome))
    assert {"committed"} == world.verdicts(SAVE)


def test_a_rank_that_speaks_after_the_end_is_told_the_end_and_has_its_slot_back() -> None:
    world = World((2,))
    world.unable(SAVE, 0, NO_SPACE)
    world.run()
    world.stage(SAVE, 1)
    world.run()
    ends = [message for message in world.heard[1] if isinstance(message, Concluded)]
    assert 2 == len(ends)
    assert ends[0] == ends[1]
    assert ends[1].slot_free


# --- ranks that are lost, skip, cannot, or ask for an abort


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_lost_before_it_staged_fails_the_save_everywhere_by_name(lost: int) -> None:
    world = World((2, 1))
    world.stage(SAVE, *({0, 1, 2} - {lost}))
    world.run(1)
    world.lose(lost)
    world.run()
    for rank in {0, 1, 2} - {lost}:
        cause = world.cause(rank, SAVE)
        assert ("rank-missing", lost, world.node_of(lost)) == (cause.code, cause.rank, cause.node)
        assert f"rank {lost} (pid {1000 + lost}) was lost" in cause.message
    assert world.now_s < world.deadline_s / 2


def test_a_rank_lost_where_nobody_spoke_fails_a_save_that_no_node_has_gathered() -> None:
    """The others may wait for it in a collective, before they call save."""
    world = World((2, 1), network=losing(WordWanted, first=1))
    world.lose(2)
    world.stage(SAVE, 0)
    world.run(4 * RESEND_S)
    assert ("rank-missing", 2, "B") == (
        world.cause(0, SAVE).code,
        world.cause(0, SAVE).rank,
        world.cause(0, SAVE).node,
    )


def test_a_node_that_waits_for_its_ranks_is_asked_and_fails_nothing() -> None:
    world = World((1, 1))
    world.stage(SAVE, 0)
    world.run(10 * RESEND_S)
    assert [] != world.said(WordWanted)
    assert [] == world.done(GiveUp)
    world.stage(SAVE, 1)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)
    assert {} == world.timers


def test_a_rank_lost_between_saves_fails_the_next_one_at_once() -> None:
    world = World((2, 1))
    world.lose(1)
    world.run()
    world.stage(SAVE, 0, 2)
    world.run(1)
    assert ("rank-missing", 1) == (world.cause(2, SAVE).code, world.cause(2, SAVE).rank)
    assert world.cause(0, SAVE) == world.cause(2, SAVE)


def test_a_rank_that_has_left_is_missed_by_the_next_save_at_once() -> None:
    world = World((2,))
    world.leave(1)
    world.run()
    world.stage(SAVE, 0)
    world.run(1)
    assert "rank 1 (pid 1001) left" in world.cause(0, SAVE).message


def test_a_rank_that_leaves_while_others_save_is_missed_at_once() -> None:
    world = World((2,))
    world.stage(SAVE, 0)
    world.run(1)
    world.leave(1)
    world.run(1)
    assert "rank-missing" == world.cause(0, SAVE).code


def test_a_rank_lost_after_it_staged_does_not_keep_the_save_from_being_committed() -> None:
    world = World((2, 1))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(0)
    world.lose(1)
    world.release()
    world.run()
    assert {"committed"} == world.verdicts(SAVE)
    assert "committed" == world.disk[KEY]


def test_a_rank_whose_last_word_was_not_heard_is_heard_by_what_its_memory_holds() -> None:
    world = World((2,))
    world.stage(SAVE, 0)
    world.run(1)
    word = Staged(save=SAVE, layout_id="old", arena="/arenas/r1", slot=0, image_bytes=4096)
    session = world.session_of[1]
    world.post("A", SessionLost(session=session, reason="its process has ended", staged=(word,)))
    world.run()
    assert "committed" == world.disk[KEY]
    assert RemoveArenas(paths=("/arenas/r1",)) in world.done(RemoveArenas)


def test_the_memory_of_a_rank_that_was_lost_before_it_staged_anything_is_freed() -> None:
    world = World((1,))
    session = world.session_of[0]
    lost = SessionLost(session=session, reason="its process has ended", arenas=("/arenas/r0-g0",))
    world.post("A", lost)
    world.run()
    assert [RemoveArenas(paths=("/arenas/r0-g0",))] == world.done(RemoveArenas)


def test_a_skip_on_one_rank_ends_the_save_as_skipped_on_all() -> None:
    world = World((1, 1))
    world.stage(SAVE, 0)
    world.skip(SAVE, 1)
    world.run()
    assert {"skipped"} == world.outcomes(SAVE)
    assert ("busy", 1) == (world.cause(0, SAVE).code, world.cause(0, SAVE).rank)
    assert world.nodes["A"].roster.jobs["job"].history.outcome_counts == {"skipped": 1}


def test_a_rank_that_is_unable_fails_the_save_on_all_with_its_own_cause() -> None:
    world = World((1, 2))
    cause = Cause("unpicklable", "cannot pickle state.lock", "leave it out", "", 2)
    world.stage(SAVE, 0, 1)
    world.unable(SAVE, 2, cause)
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    for rank in range(3):
        told = world.cause(rank, SAVE)
        assert (cause.code, cause.message, cause.hint) == (told.code, told.message, told.hint)
        assert ("B", 2) == (told.node, told.rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_ends_the_save_on_all_ranks(rank: int) -> None:
    world = World((1, 1))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.abort(SAVE, rank)
    world.run(1)
    world.release()
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    assert "aborted" == world.cause(1 - rank, SAVE).code == world.disk[KEY]


def test_an_abort_on_a_prepared_node_still_ends_a_save_that_others_write() -> None:
    world = World((1, 1))
    world.hold(WriteImage, "B")
    world.stage(SAVE)
    world.run(1)
    assert Phase.PREPARED is world.nodes["A"].saves.participations[KEY].phase
    world.abort(SAVE, 0)
    world.run(1)
    assert {"failed"} == world.outcomes(SAVE)
    assert "aborted" == world.cause(1, SAVE).code


@pytest.mark.parametrize("node", ["A", "B"])
def test_an_abort_while_the_save_is_published_comes_too_late(node: str) -> None:
    world = World((1, 1))
    world.hold(Publish)
    world.stage(SAVE)
    world.run(1)
    world.abort(SAVE, 0 if node == "A" else 1)
    world.run(1)
    world.release()
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


def test_an_abort_before_anybody_staged_ends_the_save_for_those_who_come_later() -> None:
    world = World((1, 1))
    world.abort(SAVE, 1)
    world.run()
    world.stage(SAVE)
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    assert [] == world.done(WriteImage)


def test_ranks_that_call_different_saves_alike_fail_by_name() -> None:
    world = World((2,))
    other = save_ref(1, step=11, name="step_11")
    world.stage(SAVE, 0)
    world.stage(other, 1)
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    cause = world.cause(0, SAVE)
    assert ("save-mismatch", 1) == (cause.code, cause.rank)
    assert "step 11 as 'step_11', another rank step 10 as 'step_10'" in cause.message


def test_nodes_that_call_different_saves_alike_fail_by_name() -> None:
    world = World((1, 1))
    world.stage(SAVE, 0)
    world.stage(save_ref(1, step=11, name="step_11"), 1)
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    assert "save-mismatch" == world.cause(0, SAVE).code == world.cause(1, SAVE).code


def test_a_node_that_speaks_for_another_node_s_ranks_fails_the_save() -> None:
    world = World((1, 1))
    first, second = save_ref(1), save_ref(2)
    for message in (
        Gathered(save=first, reports=(RankReport(0, "old"),)),
        Prepared(save=second, files=(WrittenFile(7, "old", "f", 1),), fragment="f"),
    ):
        world.post("A", PeerSaid(node_id="B", message=message))
        world.run()
        outcome = outcome_of(world, message.save)
        assert outcome is not None
        assert outcome.cause is not None
        assert "not for its own" in outcome.cause.message


# --- disks


@scenario
def test_a_file_that_cannot_be_written_fails_the_save_on_all_with_one_cause() -> None:
    world = World((2, 1))
    world.fail(WriteImage, rank=1)
    world.stage(SAVE)
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    assert 1 == len({world.cause(rank, SAVE) for rank in range(3)})
    assert (NO_SPACE.code, "A") == (world.cause(2, SAVE).code, world.cause(2, SAVE).node)
    assert [] == world.done(Publish)


@pytest.mark.parametrize("kind", [WriteFragment, BuildIndex, Publish])
def test_a_disk_that_fails_later_fails_the_save_on_all_with_one_cause(kind: type) -> None:
    world = World((1, 1))
    world.fail(kind)
    world.stage(SAVE)
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    assert "aborted" == world.disk[KEY]
    assert world.cause(0, SAVE) == world.cause(1, SAVE)
    assert NO_SPACE.code == world.cause(0, SAVE).code


SCENARIOS += [
    partial(test_a_disk_that_fails_later_fails_the_save_on_all_with_one_cause, kind)
    for kind in (WriteFragment, BuildIndex, Publish)
]


def test_a_publication_that_failed_after_the_rename_is_committed_all_the_same() -> None:
    world = World((1, 1))
    world.fail(Publish)
    world.hold(GiveUp)
    world.stage(SAVE)
    world.run(1)
    world.disk[KEY] = "committed"
    world.release()
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


def test_a_save_whose_fate_the_coordinator_cannot_see_ends_as_unknown() -> None:
    world = World((1, 1))
    world.fail(Publish)
    world.fail(GiveUp)
    world.stage(SAVE)
    world.run()
    assert {"outcome-unknown"} == world.outcomes(SAVE)
    assert [] == world.done(Discard)


@pytest.mark.parametrize(("code", "may_take_effect"), [("read-only", False), ("io-error", True)])
def test_only_a_publication_that_was_not_refused_may_take_effect_later(
    code: str, may_take_effect: bool
) -> None:
    world = World((1, 1))
    world.fail(Publish, Cause(code, "it failed"))
    world.stage(SAVE)
    world.run()
    assert [may_take_effect] == [
        each.may_take_effect for each in world.done(GiveUp, "A") if isinstance(each, GiveUp)
    ]


def test_a_prepared_node_of_an_earlier_attempt_is_answered() -> None:
    """Its save is unknown to the coordinator, whose job has gone on."""
    world = World((1, 1))
    world.join(0, attempt=2)
    world.run()
    world.disk[KEY] = "partial"
    prepared = Prepared(save=SAVE, files=(WrittenFile(1, "old", "f", 1),), fragment="g")
    world.post("A", PeerSaid(node_id="B", message=prepared))
    world.run()
    (outcome,) = world.said(Outcome)
    assert isinstance(outcome, Outcome)
    assert outcome.cause is not None
    assert ("failed", "attempt-superseded") == (outcome.outcome, outcome.cause.code)
    assert [True] == [
        each.was_prepared for each in world.done(GiveUp, "A") if isinstance(each, GiveUp)
    ]


def test_a_daemon_told_to_end_waits_for_no_lost_peer_until_the_deadline() -> None:
    world = World((1, 1), deadline_s=600.0)
    world.stage(SAVE, 0)
    world.run(1)
    world.lose(0)
    world.crash("B")
    world.stop("A")
    world.run()
    assert {"A": "drained"} == world.halted
    assert world.now_s < PEER_LOST_S + 3 * RESEND_S


def test_a_daemon_told_to_end_waits_for_a_peer_that_is_still_writing() -> None:
    world = World((1, 1), deadline_s=600.0)
    world.hold(WriteImage, "B")
    world.stage(SAVE)
    world.run(1)
    world.stop("A")
    world.run(4 * PEER_LOST_S)
    assert {} == world.halted
    world.release()
    world.run()
    assert {"committed"} == world.outcomes(SAVE)
    assert {"A": "drained"} == world.halted


def test_a_slot_that_a_writer_reads_is_given_back_when_the_writer_has_ended() -> None:
    world = World((1, 1))
    world.hold(WriteImage, "A")
    world.fail(WriteImage, node="B")
    world.stage(SAVE)
    world.run(1)
    told = world.concluded(0, SAVE)
    assert told is not None
    assert ("failed", False) == (told.outcome, told.slot_free)
    assert SlotFreed(save_id="1-1") not in world.heard[0]
    assert [] == world.done(Discard, "A")
    role = world.nodes["A"].saves.participations[KEY]
    assert "ended as failed; a writer still reads the image of 1 of 1 rank: 0" == role.waits_for()
    world.release()
    world.run()
    assert SlotFreed(save_id="1-1") == world.heard[0][-1]
    assert 1 == len(world.done(Discard, "A"))
    other = world.concluded(1, SAVE)
    assert other is not None
    assert other.slot_free


def test_the_leftovers_are_discarded_only_after_all_writers_of_the_node_are_quiet() -> None:
    world = World((2,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.abort(SAVE, 0)
    world.run(1)
    first, second = world.held
    world.held = [second]
    world.execute(*first)
    world.run(1)
    assert [] == world.done(Discard)
    world.release()
    world.run()
    assert 1 == len(world.done(Discard))


@pytest.mark.parametrize("is_refused", [False, True], ids=["written", "refused"])
def test_the_leftovers_are_discarded_only_after_the_fragment_is_written(is_refused: bool) -> None:
    """A fragment written later would make the save's directory anew, and nobody would delete it."""
    world = World((1, 1))
    world.hold(WriteFragment, "A")
    world.fail(WriteImage, node="B")
    world.stage(SAVE)
    world.run(1)
    told = world.concluded(0, SAVE)
    assert told is not None
    assert ("failed", True) == (told.outcome, told.slot_free)
    assert [] == world.done(Discard, "A")
    role = world.nodes["A"].saves.participations[KEY]
    assert "ended as failed; its manifest fragment is still being written" == role.waits_for()
    if is_refused:
        world.fail(WriteFragment, node="A")
    world.release()
    world.run()
    assert 1 == len(world.done(Discard, "A"))
    assert not role.is_pending


# --- time


def test_a_rank_that_never_calls_save_is_named_at_the_deadline() -> None:
    world = World((2, 2))
    world.stage(SAVE, 0, 1, 3)
    world.run()
    assert {"failed"} == world.outcomes(SAVE)
    cause = world.cause(0, SAVE)
    assert ("rank-missing", "B", 2) == (cause.code, cause.node, cause.rank)
    assert "did not end within 60 s: waiting for 1 of 2 ranks: 2 to call save" in cause.message
    assert world.now_s < 60 + VERDICT_GRACE_S


def test_a_rank_that_never_stages_after_planning_is_named_at_the_deadline() -> None:
    world = World((1, 2))
    world.stages_when_planned = False
    world.offer(SAVE)
    world.run(1)
    world.stage(SAVE, 0, 2, layout="new")
    world.run()
    cause = world.cause(0, SAVE)
    assert ("rank-missing", "B", 1) == (cause.code, cause.node, cause.rank)
    assert "waiting for 1 of 2 ranks: 1 to stage" in cause.message


@pytest.mark.parametrize("offered", [True, False])
def test_a_node_of_which_no_rank_calls_save_is_named_at_the_deadline(offered: bool) -> None:
    world = World((1, 1, 1))
    (world.offer if offered else world.stage)(SAVE, 0, 2)
    world.run()
    for rank in (0, 2):
        cause = world.cause(rank, SAVE)
        assert ("node-missing", "B") == (cause.code, cause.node)
        assert "waiting for 1 of 3 nodes: B, where not every rank has called save" in cause.message
    assert world.now_s < 60 + RESOLVE_GRACE_S


@pytest.mark.parametrize(
    ("kind", "node", "sentence"),
    [
        (MakePlan, "A", "planning: dropping replicas"),
        (WriteImage, "B", "writing 0 of 4096 bytes"),
        (WriteFragment, "B", "writing the manifest fragment"),
        (BuildIndex, "A", "building the index and the manifest"),
    ],
)
def test_work_that_never_ends_fails_the_save_at_the_deadline(
    kind: type, node: str, sentence: str
) -> None:
    world = World((1, 1))
    world.hold(kind, node)
    world.offer(SAVE)
    world.run(600)
    assert {"failed"} == world.outcomes(SAVE)
    assert "timeout" == world.cause(0, SAVE).code == world.cause(1, SAVE).code
    assert sentence in world.cause(0, SAVE).message
    assert "aborted" == world.disk.get(KEY)
    # What comes back in the end changes nothing.
    world.release()
    world.run()
    assert "aborted" == world.disk[KEY]
    assert {"failed"} == world.verdicts(SAVE)


@scenario
def test_a_publication_that_never_returns_is_resolved_by_the_directory() -> None:
    world = World((1, 1))
    world.hold(Publish)
    world.stage(SAVE)
    world.run(59 + RESOLVE_GRACE_S)
    assert {"none"} == world.outcomes(SAVE)
    world.run(2)
    assert {"failed"} == world.outcomes(SAVE)
    assert "coordinator A gave no verdict within 75 s" in world.cause(1, SAVE).message
    # The rename comes too late: its source is gone.
    world.release()
    world.run()
    outcome = outcome_of(world, SAVE)
    assert outcome is not None
    assert "failed" == outcome.outcome


@scenario
def test_storage_that_never_answers_ends_the_save_as_unknown_in_bounded_time() -> None:
    world = World((1, 1))
    for kind in (Publish, GiveUp):
        world.hold(kind)
    world.stage(SAVE)
    world.run(60 + 2 * RESOLVE_GRACE_S + 1)
    assert {"outcome-unknown"} == world.outcomes(SAVE)
    assert "neither outcome shows in /data/run" in world.cause(0, SAVE).message
    world.release()
    world.run()
    assert {"outcome-unknown"} == world.verdicts(SAVE)


@pytest.mark.parametrize("seen", ["aborted", "committed"])
def test_a_prepared_node_whose_coordinator_died_finds_the_outcome_itself(seen: str) -> None:
    world = World((1, 1))
    world.hold(Publish)
    world.stage(SAVE)
    world.run(1)
    world.crash("A")
    if seen == "committed":
        world.disk[KEY] = "committed"
    world.run(60 + RESOLVE_GRACE_S)
    assert seen == world.disk[KEY]
    told = world.concluded(1, SAVE)
    assert told is not None
    assert ("committed" if seen == "committed" else "failed") == told.outcome


def test_what_a_node_has_given_up_by_itself_lies_there_until_all_others_have_looked() -> None:
    world = World((1, 1))
    world.hold(Publish)
    world.stage(SAVE)
    world.run(1)
    world.crash("A")
    world.run(60 + RESOLVE_GRACE_S)
    assert "aborted" == world.disk[KEY]
    assert {"failed"} == world.verdicts(SAVE)
    world.run(RESOLVE_GRACE_S - 1)
    assert [] == world.done(Discard), "a node that looks now must find what became of the save"
    assert not world.nodes["B"].is_idle
    world.run()
    assert 1 == len(world.done(Discard))
    assert world.nodes["B"].is_idle


def undecided() -> World:
    """A world in which node B hears nothing of A, and the directory shows neither outcome."""
    world = World((1, 1))
    world.hold(Publish)
    world.fail(GiveUp)
    world.stage(SAVE)
    world.run(1)
    world.crash("A")
    world.run(60 + RESOLVE_GRACE_S)
    assert Phase.UNDECIDED is world.nodes["B"].saves.participations[KEY].phase
    assert None is world.concluded(1, SAVE)
    return world


@scenario
def test_a_directory_that_shows_neither_outcome_is_looked_at_again() -> None:
    world = undecided()
    world.failures.clear()
    world.disk[KEY] = "committed"
    world.run(2 * RESEND_S)
    told = world.concluded(1, SAVE)
    assert told is not None
    assert "committed" == told.outcome


@scenario
def test_a_directory_that_never_shows_an_outcome_ends_the_save_as_unknown() -> None:
    world = undecided()
    world.run(RESOLVE_GRACE_S)
    assert {"outcome-unknown"} == world.verdicts(SAVE)
    assert 1 < len(world.done(GiveUp, "B"))
    assert [] == world.done(Discard)
    assert {} == {timer: at for timer, at in world.timers.items() if timer[0] == "B"}


@scenario
def test_a_coordinator_that_speaks_between_two_looks_at_the_directory_is_heard() -> None:
    world = undecided()
    world.post("B", PeerSaid(node_id="A", message=Outcome(save=SAVE, outcome=Ending.COMMITTED)))
    world.run(RESOLVE_GRACE_S)
    assert {"committed"} == world.verdicts(SAVE)


def test_a_directory_is_asked_once_at_a_time() -> None:
    world = World((1, 1))
    world.hold(Publish)
    world.hold(GiveUp)
    world.stage(SAVE)
    world.run(60 + RESOLVE_GRACE_S + 4 * RESEND_S)
    assert Phase.RESOLVING is world.nodes["B"].saves.participations[KEY].phase
    assert 1 == len(world.done(GiveUp, "B"))


def test_a_node_that_failed_ends_the_save_itself_if_the_coordinator_died() -> None:
    world = World((1, 1))
    world.crash("A")
    world.unable(SAVE, 1, NO_SPACE)
    world.run(RESOLVE_GRACE_S + 1)
    assert NO_SPACE.code == world.cause(1, SAVE).code


def test_a_node_that_waits_for_a_plan_ends_the_save_itself_if_the_coordinator_died() -> None:
    world = World((1, 1))
    world.offer(SAVE, 1)
    world.run(1)
    world.crash("A")
    world.run(60 + 2 * RESOLVE_GRACE_S)
    assert "timeout" == world.cause(1, SAVE).code
    assert (
        "waiting for the plan of coordinator A for 1 of 1 rank: 1" in world.cause(1, SAVE).message
    )


@scenario
def test_a_skip_that_a_dead_coordinator_never_hears_ends_as_skipped() -> None:
    world = World((1, 1))
    world.crash("A")
    world.skip(SAVE, 1)
    world.run()
    told = world.concluded(1, SAVE)
    assert told is not None
    assert "skipped" == told.outcome


# --- the tables


@scenario
def test_an_outcome_is_taken_in_every_phase_of_a_participant() -> None:
    prepared = (GiveUp, Publish, BuildIndex)
    for holding, says in (
        ((), "nothing"),
        ((MakePlan,), "offer"),
        ((WriteImage,), "stage"),
        ((WriteFragment,), "stage"),
        (prepared, "stage"),
    ):
        world = World((1, 2))
        for kind in holding:
            world.hold(kind)
        if says == "nothing":
            world.stage(SAVE, 1)
        else:
            (world.offer if says == "offer" else world.stage)(SAVE, 1, 2)
        world.run(1)
        cause = Cause("aborted", "an operator asked for it")
        outcome = Outcome(save=SAVE, outcome=Ending.FAILED, cause=cause)
        world.post("B", PeerSaid(node_id="A", message=outcome))
        world.run(1)
        assert cause == world.cause(1, SAVE)
    # Asking the directory, and then the coordinator speaks.
    world = World((1, 1))
    for kind in prepared:
        world.hold(kind)
    world.stage(SAVE)
    world.run(61 + RESOLVE_GRACE_S)
    assert Phase.RESOLVING is world.nodes["B"].saves.participations[KEY].phase
    world.post("B", PeerSaid(node_id="A", message=Outcome(save=SAVE, outcome=Ending.COMMITTED)))
    world.run(1)
    told = world.concluded(1, SAVE)
    assert told is not None
    assert "committed" == told.outcome


@scenario
def test_a_node_that_cannot_go_on_says_so_in_every_phase_before_it_is_prepared() -> None:
    for kind, says in ((None, "part"), (MakePlan, "offer"), (WriteImage, "stage")):
        world = World((1, 2))
        if kind is not None:
            world.hold(kind)
        if says == "part":
            world.stage(SAVE, 1)
        else:
            (world.offer if says == "offer" else world.stage)(SAVE)
        world.run(1)
        world.abort(SAVE, 2)
        world.run(1)
        assert "aborted" == world.cause(1, SAVE).code


def test_every_row_of_both_tables_is_taken_by_some_scenario(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: set[tuple[type, Phase, Trigger]] = set()
    move = Role.move

    def recording(self: Role, trigger: Trigger) -> bool:
        before = self.phase
        has_moved = move(self, trigger)
        if has_moved:
            taken.add((type(self), before, trigger))
        return has_moved

    monkeypatch.setattr(Role, "move", recording)
    for run in SCENARIOS:
        run()
    for role, table in ((Participation, PARTICIPANT), (Coordination, COORDINATOR)):
        assert set() == {row for row in table if (role, *row) not in taken}


@pytest.mark.parametrize("role", [Participation, Coordination])
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("trigger", Trigger)
def test_a_pair_that_is_not_listed_changes_nothing(
    role: type[Participation | Coordination], phase: Phase, trigger: Trigger
) -> None:
    job = World((1,)).nodes["A"].roster.jobs["job"]
    machine = role(job, SAVE, "A", 0)
    machine.phase = phase
    target = role.table.get((phase, trigger))
    assert (target is not None) == machine.move(trigger)
    assert (phase if target is None else target) == machine.phase


@pytest.mark.parametrize("table", [PARTICIPANT, COORDINATOR])
def test_every_phase_is_reached_and_ends(table: dict[tuple[Phase, Trigger], Phase]) -> None:
    reached = {Phase.GATHERING}
    while more := {to for (phase, _), to in table.items() if phase in reached} - reached:
        reached |= more
    assert {phase for phase, _ in table} | {*table.values()} == reached
    ending = {Phase.CONCLUDED}
    while more := {phase for (phase, _), to in table.items() if to in ending} - ending:
        ending |= more
    assert reached == ending
    assert Phase.CONCLUDED not in {phase for phase, _ in table}


def test_a_long_list_of_the_missing_is_counted_not_spelled_out() -> None:
    assert "2 of 8 ranks: 3, 5" == named("rank", [3, 5], 8)
    assert "1 of 1 node: A" == named("node", ["A"], 1)
    assert "10 of 16 ranks: 0, 1, 2, 3, 4, 5, 6, 7 and 2 more" == named("rank", [*range(10)], 16)


def test_a_plan_that_comes_twice_is_handed_on_once() -> None:
    world = World((1, 1))
    world.stages_when_planned = False
    world.offer(SAVE)
    world.run(1)
    (planned,) = world.said(Planned)
    world.post("B", PeerSaid(node_id="A", message=planned))
    world.run(1)
    assert 1 == sum(isinstance(message, LayoutReady) for message in world.heard[1])


def test_word_of_a_file_that_nobody_writes_changes_nothing() -> None:
    world = World((2,))
    world.stage(SAVE, 0)
    world.run(1)
    for rank in (0, 1, 7):
        file = WrittenFile(rank, "old", "f", 1)
        world.post("A", FileDurable(save=SAVE, file=file))
        world.post("A", FileFailed(save=SAVE, rank=rank, cause=NO_SPACE))
    world.run(1)
    assert Phase.GATHERING is world.nodes["A"].saves.participations[KEY].phase
    world.stage(SAVE, 1)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


# --- daemons that are restarted


@pytest.mark.parametrize("node", ["A", "B"])
@pytest.mark.parametrize("kind", [WriteImage, WriteFragment, BuildIndex, Publish])
@pytest.mark.parametrize("has_trainers", [True, False])
def test_a_restarted_daemon_goes_on_with_what_was_staged(
    node: str, kind: type, has_trainers: bool
) -> None:
    world = World((1, 1))
    world.hold(kind)
    world.stage(SAVE)
    world.run(1)
    if not has_trainers:
        world.lose(0)
        world.lose(1)
        world.run(1)
    world.restart(node)
    world.release()
    world.run()
    assert "committed" == world.disk[KEY]
    assert {"committed"} == world.verdicts(SAVE)
    if has_trainers:
        assert {"committed"} == world.outcomes(SAVE)
    assert {} == world.timers


@scenario
def test_a_restarted_daemon_that_fails_asks_whether_its_earlier_life_was_prepared() -> None:
    """Found by simulation: it said `failed` of a save that had been published with its part."""
    world = World((1, 1), network=losing(Outcome, first=9))
    world.stage(SAVE)
    world.run(1)
    assert "committed" == world.disk[KEY]
    world.crash("A")
    world.fail(WriteImage, Cause("already-committed", "save 1-1 was published"), node="B")
    world.restart("B")
    world.run()
    assert {"committed"} == world.verdicts(SAVE)
    assert "committed" == _told(world, 1)


def test_a_restarted_daemon_that_fails_ends_a_save_that_was_not_published_with_its_own_cause() -> (
    None
):
    world = World((1, 1))
    world.hold(BuildIndex)
    world.stage(SAVE)
    world.run(1)
    world.crash("A")
    world.fail(WriteImage, node="B")
    world.restart("B")
    world.run()
    assert "failed" == _told(world, 1)
    assert NO_SPACE.code == world.cause(1, SAVE).code


def test_a_coordinator_that_was_told_prepared_calls_no_missing_directory_aborted() -> None:
    """Found by simulation: the save had been published by its earlier life, and retained away."""
    world = World((1, 1))
    world.hold(WriteImage, "A")
    world.stage(SAVE)
    world.run(200)
    assert [True] == [
        each.was_prepared for each in world.done(GiveUp, "A") if isinstance(each, GiveUp)
    ]


def test_a_failure_of_an_earlier_attempt_is_no_proof_that_its_save_was_not_published() -> None:
    """Found by simulation: `Fail` of a restarted node was answered with `failed`, unseen."""
    world = World((1, 1), network=losing(Outcome, first=1))
    world.stage(SAVE)
    world.run(1)
    world.restart("A")
    world.killed.update((0, 1))
    for rank in (0, 1):
        world.join(rank, attempt=2)
    world.run(1)
    cause = Cause("already-committed", "save 1-1 was published")
    world.post("A", PeerSaid(node_id="B", message=Fail(save=SAVE, cause=cause)))
    world.run(1)
    (outcome,) = {m.outcome for m in world.said(Outcome) if isinstance(m, Outcome)}
    assert "committed" == outcome


def _told(world: World, rank: int) -> str:
    told = world.concluded(rank, SAVE)
    return "nothing" if told is None else told.outcome


def test_a_restarted_daemon_takes_trainers_that_do_not_come_back_for_dead() -> None:
    world = World((2, 1))
    world.stage(SAVE, 0, 2)
    world.run(1)
    world.killed.add(1)
    world.restart("A")
    world.run()
    assert {"failed"} == world.verdicts(SAVE)
    assert "rank-missing" == world.cause(0, SAVE).code


# --- every order of a small save


class Choice(NamedTuple):
    """What happens next: an item in flight, or a fault: the item, a message, is lost, a timer fires
    early, or a node's daemon is killed and started anew.
    """

    number: int = 0
    timer: str = ""
    node: str = ""
    is_lost: bool = False

    @property
    def is_restart(self) -> bool:
        return bool(self.node) and not self.timer

    @property
    def is_fault(self) -> bool:
        return self.is_lost or bool(self.node)


@dataclass
class Walk:
    """All orders in which one save's events can happen, with at most one fault of these kinds:
    `loss` of a message, a `resend` that comes before the answer, the `restart` of a daemon, after
    which things take their usual course.
    """

    begin: Callable[[], World]
    faults: tuple[str, ...]
    seen: set[str] = field(default_factory=set)
    ends: set[tuple[frozenset[str], str]] = field(default_factory=set)
    faulty: int = 0

    def explore(self) -> None:
        """Depth first, each path run anew from the start; states met before are not entered."""
        paths: list[tuple[Choice, ...]] = [()]
        while paths:
            path = paths.pop()
            world = self.replay(path)
            is_healthy = not any(choice.is_fault for choice in path)
            state = f"{is_healthy} {_state(world)}"
            if state in self.seen:
                continue
            self.seen.add(state)
            is_restarted = bool(path) and path[-1].is_restart
            if not world.in_flight or is_restarted:
                # Nothing is left but timers: they heal what was lost.
                world.run()
                ends = frozenset(world.outcomes(SAVE) | world.verdicts(SAVE))
                self.ends.add((ends, world.disk[KEY]))
                continue
            for choice in choices(world, self.faults):
                if is_healthy or not choice.is_fault:
                    self.faulty += choice.is_fault
                    paths.append((*path, choice))

    def replay(self, path: Sequence[Choice]) -> World:
        world = self.begin()
        for depth, choice in enumerate(path, 1):
            # All but the last step were checked when their own path was walked.
            world.is_checked = depth == len(path)
            if choice.timer:
                world.fire((choice.node, choice.timer))
                continue
            if choice.is_restart:
                world.restart(choice.node)
                continue
            item = next(item for item in world.in_flight if item.number == choice.number)
            world.in_flight.remove(item)
            heapq.heapify(world.in_flight)
            if not choice.is_lost:
                world.deliver(item)
        world.is_checked = True
        return world


def choices(world: World, faults: tuple[str, ...]) -> Iterator[Choice]:
    spoken: set[int] = set()
    for item in sorted(world.in_flight, key=lambda item: item.number):
        if isinstance(item.event, RankSaid):
            # What one rank says arrives in order.
            if item.event.session in spoken:
                continue
            spoken.add(item.event.session)
        yield Choice(item.number)
        if isinstance(item.event, PeerSaid) and "loss" in faults:
            yield Choice(item.number, is_lost=True)
    for node, timer in world.timers:
        if "resend" in faults and timer.startswith("participant.resend"):
            yield Choice(timer=timer, node=node)
    for node in world.nodes if "restart" in faults else ():
        yield Choice(node=node)


def _state(world: World) -> str:
    roles = [
        (name, type(role).__name__, [(key, _in_order(value)) for key, value in vars(role).items()
                                     if key not in ("job", "opened_at_ns", "elapsed_s")])
        for name, node in world.nodes.items()
        for role in (*node.saves.participations.values(), *node.saves.coordinations.values())
    ]  # fmt: skip
    in_flight = sorted(f"{item.node} {item.event!r}" for item in world.in_flight)
    return repr((roles, in_flight, sorted(world.disk.items()), sorted(world.timers)))


def _in_order(value: object) -> object:
    return sorted(value.items()) if isinstance(value, dict) else value


def _begin_staged() -> World:
    world = World((1, 1))
    world.stage(SAVE)
    return world


def _begin_mixed() -> World:
    world = World((1, 1))
    world.stage(SAVE, 0)
    world.offer(SAVE, 1)
    return world


def _begin_full_disk() -> World:
    world = World((1, 1))
    world.fail(WriteImage, rank=1)
    world.stage(SAVE)
    return world


def _begin_aborted() -> World:
    world = World((1, 1))
    world.stage(SAVE)
    world.abort(SAVE, 1)
    return world


@pytest.mark.parametrize(
    ("begin", "faults", "ends"),
    [
        (_begin_staged, ("loss", "resend"), {("committed", "committed")}),
        (_begin_mixed, ("loss", "resend"), {("committed", "committed")}),
        (_begin_full_disk, ("loss", "resend"), {("failed", "aborted")}),
        (_begin_aborted, ("loss",), {("failed", "aborted"), ("committed", "committed")}),
        (_begin_staged, ("restart",), {("committed", "committed")}),
        (_begin_full_disk, ("restart",), {("failed", "aborted")}),
    ],
)
def test_all_orders_of_a_save_with_one_fault_anywhere_end_alike_on_all_nodes(
    begin: Callable[[], World], faults: tuple[str, ...], ends: set[tuple[str, str]]
) -> None:
    walk = Walk(begin, faults)
    walk.explore()
    assert {(frozenset([outcome]), disk) for outcome, disk in ends} == walk.ends
    assert walk.faulty > 0
