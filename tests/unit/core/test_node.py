"""A node beside its saves: who may join, what waits for whom, how it ends, and what it forgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.core_world import NO_SPACE, World, save_ref

from milepost.storage.fate import Fate
from milepost.wire.messages import (
    AbortWanted,
    Cause,
    Concluded,
    Ending,
    Fail,
    Gathered,
    Join,
    Joined,
    Keep,
    Leave,
    Left,
    NodeRef,
    Offered,
    Outcome,
    PeerMessage,
    Planned,
    Prepared,
    RankLayout,
    RankReport,
    Refused,
    SaveRef,
    Skipped,
    Staged,
    Unable,
    WordWanted,
    WrittenFile,
)
from milepostd.core.commands import (
    BuildIndex,
    Discard,
    MakePlan,
    MeetPeers,
    Publish,
    RemoveArenas,
    Reply,
    Retain,
    Send,
    StartPlanner,
    WriteFragment,
    WriteImage,
)
from milepostd.core.early import EARLY_MAX, EARLY_S
from milepostd.core.events import (
    AnyEvent,
    BytesWritten,
    Discarded,
    FileDurable,
    FileFailed,
    FragmentDurable,
    FragmentFailed,
    IndexBuilt,
    IndexFailed,
    JobRecalled,
    OutcomeFound,
    PeerSaid,
    PlanFailed,
    PlanMade,
    Published,
    PublishFailed,
    RankJoined,
    RankLeft,
    RankSaid,
    Retained,
    SessionLost,
    SessionOpened,
    Started,
    StopRequested,
    TimerFired,
)
from milepostd.core.invariants import broken_invariants
from milepostd.core.job import NO_ORDER, save_order
from milepostd.core.node import Node, NodeSettings
from milepostd.core.sessions import JOBS_MAX
from milepostd.core.status import status_of
from milepostd.core.timers import SECOND_NS

SAVE = save_ref(1)
KEY = (SAVE.job, SAVE.save_id)
HERE = NodeRef("A", "tcp://A:1", "key-A")


def refusal(world: World, rank: int = 0) -> Cause | None:
    """Why the rank was refused last."""
    for message in reversed(world.heard[rank]):
        if isinstance(message, Refused):
            return message.cause
    return None


# --- joining


def test_a_rank_that_joins_is_given_its_place_and_its_node_meets_the_peers() -> None:
    world = World((1, 1))
    assert [Joined(job="job", attempt=1, rank=1)] == world.heard[1]
    assert [MeetPeers(nodes=world.cohort)] == world.done(MeetPeers, "B")
    assert [StartPlanner()] == world.done(StartPlanner)


@pytest.mark.parametrize("root", ["relative", "/data/../etc", "/other", "/data/runs"])
def test_a_root_that_the_daemon_was_not_given_is_refused(root: str) -> None:
    world = World((1,), joined=False)
    world.nodes["A"] = Node(NodeSettings(node=HERE, roots=("/data/run", "/scratch")))
    world.join(0, root=root)
    world.run()
    cause = refusal(world)
    assert cause is not None
    assert "root-refused" == cause.code
    assert root in cause.message


@pytest.mark.parametrize("root", ["/data/run", "/data/run/deeper", "/scratch/x"])
def test_a_root_that_the_daemon_was_given_is_taken_with_all_below_it(root: str) -> None:
    world = World((1,), joined=False)
    world.nodes["A"] = Node(NodeSettings(node=HERE, roots=("/data/run", "/scratch")))
    world.join(0, root=root)
    world.run()
    assert None is refusal(world)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": 1},
        {"rank": -1},
        {"node_of_rank": ()},
        {"node_of_rank": (1,)},
        {"node_of_rank": (-1,)},
        {"cohort": ()},
        {"cohort": (HERE, HERE)},
        {"cohort": (NodeRef("B", "tcp://B:1", ""),)},
        {"attempt": -1},
        {"deadline_s": math.nan},
        {"deadline_s": math.inf},
        {"deadline_s": 0.0},
        {"deadline_s": -1.0},
    ],
)
def test_a_join_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    node = Node(NodeSettings(node=HERE))
    node.handle(SessionOpened(session=1), 0)
    fields: dict[str, Any] = {
        "job": "job", "attempt": 1, "root": "/r", "rank": 0, "node_of_rank": (0,), "cohort": (HERE,)
    }  # fmt: skip
    join = Join(**(fields | changes))
    commands = node.handle(RankJoined(session=1, pid=1, message=join), 0)
    (answer,) = (command.message for command in commands if isinstance(command, Reply))
    assert isinstance(answer, Refused)
    assert {} == node.roster.jobs
    assert [] == broken_invariants(node)


def test_an_older_attempt_is_history() -> None:
    world = World((1,))
    world.join(0, attempt=2)
    world.run()
    world.join(0, attempt=1)
    world.run()
    cause = refusal(world)
    assert cause is not None
    assert "attempt-superseded" == cause.code


def test_ranks_of_one_attempt_must_describe_one_cohort() -> None:
    world = World((2,), joined=False)
    world.join(0)
    world.join(1, node_of_rank=(0, 0, 0))
    world.run()
    cause = refusal(world, 1)
    assert cause is not None
    assert "another cohort" in cause.message


def test_one_session_is_one_rank() -> None:
    world = World((2,), joined=False)
    session = world.join(0)
    world.run()
    fields = {"root": "/data/run", "node_of_rank": (0, 0), "cohort": world.cohort}
    for rank, job in ((1, "job"), (0, "other"), (0, "job")):
        message = Join(job=job, attempt=1, rank=rank, **fields)  # type: ignore[arg-type]
        world.post("A", RankJoined(session=session, pid=1, message=message))
        world.run()
    assert [Joined, Refused, Refused, Joined] == [type(message) for message in world.heard[0]]


def test_a_session_that_is_gone_cannot_join() -> None:
    world = World((1,), joined=False)
    session = world.join(0)
    world.run()
    world.lose(0)
    world.run()
    fields = {"root": "/data/run", "node_of_rank": (0,), "cohort": world.cohort}
    message = Join(job="job", attempt=1, rank=0, **fields)  # type: ignore[arg-type]
    world.post("A", RankJoined(session=session, pid=1, message=message))
    world.run()
    assert {} == world.nodes["A"].roster.joined


def test_too_many_jobs_are_refused_until_one_of_them_has_nobody_left() -> None:
    world = World((1,), joined=False)
    for number in range(JOBS_MAX):
        world.join(0, job=f"job-{number}")
        world.run()
    first = min(world.nodes["A"].roster.joined)
    world.join(0, job="one too many")
    world.run()
    cause = refusal(world)
    assert cause is not None
    assert ("busy", f"node A serves {JOBS_MAX} jobs already") == (cause.code, cause.message)
    world.post("A", SessionLost(session=first, reason="ended"))
    world.join(0, job="one too many")
    world.run()
    assert Joined(job="one too many", attempt=1, rank=0) == world.heard[0][-1]
    assert JOBS_MAX == len(world.nodes["A"].roster.jobs)
    assert first not in world.nodes["A"].roster.joined


def test_a_rank_that_comes_back_takes_its_place_over() -> None:
    world = World((1,))
    old = world.session_of[0]
    world.join(0)
    world.run()
    world.post("A", SessionLost(session=old, reason="its connection was replaced"))
    world.stage(SAVE)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


# --- attempts


def test_a_newer_attempt_ends_the_saves_that_the_older_one_can_no_longer_complete() -> None:
    world = World((2,))
    world.stage(SAVE, 0)
    world.run(1)
    old = world.session_of[0]
    world.join(1, attempt=2)
    world.run(1)
    assert "attempt-superseded" == world.cause(0, SAVE).code
    assert old == world.session_of[0]


def test_what_all_ranks_have_staged_is_committed_although_a_newer_attempt_began() -> None:
    world = World((2,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    for rank in (0, 1):
        world.lose(rank)
    world.run(1)
    for rank in (0, 1):
        world.join(rank, attempt=2)
    world.run(1)
    assert [] == world.done(RemoveArenas)
    world.release()
    world.run()
    assert {"committed"} == world.verdicts(SAVE)
    # The older attempt's memory is freed, and its checkpoint is in the newer one's history.
    removed = world.done(RemoveArenas)
    assert [("/arenas/r0-old", "/arenas/r1-old")] == [
        command.paths for command in removed if isinstance(command, RemoveArenas)
    ]
    committed = world.nodes["A"].roster.jobs["job"].history.last_committed
    assert committed is not None
    assert SAVE == committed.save


def test_an_older_attempt_that_ends_late_is_not_the_last_committed() -> None:
    world = World((1,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.join(0, attempt=2)
    world.run(1)
    world.holding.clear()
    newer = save_ref(1, attempt=2)
    world.stage(newer)
    world.run(1)
    world.release()
    world.run()
    committed = world.nodes["A"].roster.jobs["job"].history.last_committed
    assert committed is not None
    assert newer == committed.save


def test_a_rank_of_a_superseded_attempt_is_told_so_at_once() -> None:
    world = World((2,))
    world.join(1, attempt=2)
    world.run()
    world.stage(SAVE, 0)
    world.run(1)
    assert "attempt-superseded" == world.cause(0, SAVE).code


@pytest.mark.parametrize(
    "save_id", ["", "1", "-1", "1-", "x-1", "1-x", "2-1", "1-1/2", "1" * 50 + "-1"]
)
def test_a_save_id_that_is_none_of_this_attempt_fails_that_save_only(save_id: str) -> None:
    world = World((1,))
    save = SaveRef(job="job", save_id=save_id, step=1, name="step_1")
    world.stage(save)
    world.run()
    assert "protocol" == world.cause(0, save).code
    assert {} == world.nodes["A"].saves.participations


def test_save_ids_are_ordered_by_attempt_and_count() -> None:
    ids = ["nonsense", "1-2", "1-10", "2-1"]
    assert ids == sorted(ids, key=lambda save_id: save_order(SaveRef("job", save_id, 0, "x")))
    assert NO_ORDER == save_order(SaveRef("job", "\u0661-\u0661", 0, "x"))


def test_a_rank_that_speaks_of_another_job_fails_that_save_only() -> None:
    world = World((1,))
    save = save_ref(1, job="other")
    world.stage(save)
    world.run()
    assert "protocol" == world.cause(0, save).code


# --- peers that are early, late or strange


def test_words_that_come_before_any_local_rank_has_joined_are_kept() -> None:
    world = World((1, 1), joined=False)
    world.join(1)
    world.run()
    world.stage(SAVE, 1)
    world.run(5)
    world.join(0)
    world.run(0.01)
    assert {"B": Gathered} == {
        name: type(message)
        for name, message in world.nodes["A"].saves.coordinations[KEY].gathered.items()
    }
    world.stage(SAVE, 0)
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


def test_a_word_of_a_newer_attempt_waits_for_it() -> None:
    world = World((1, 1))
    world.join(1, attempt=2)
    world.run()
    save = save_ref(1, attempt=2)
    world.stage(save, 1)
    world.run(1)
    assert {} == world.nodes["A"].saves.coordinations
    world.join(0, attempt=2)
    world.run(1)
    world.stage(save, 0)
    world.run()
    assert {"committed"} == world.outcomes(save)


def test_of_a_word_that_is_repeated_one_is_kept_and_not_for_ever() -> None:
    world = World((1, 1), joined=False)
    node = world.nodes["A"]
    gathered = Gathered(save=SAVE, reports=(RankReport(1, "old"),))
    for second in range(10):
        node.handle(PeerSaid(node_id="B", message=gathered), second * SECOND_NS)
    assert 1 == len(node.peers.early.kept)
    world.now_ns = int((11 + EARLY_S) * SECOND_NS)
    world.join(0)
    world.run()
    assert {} == node.peers.early.kept
    assert {} == node.saves.coordinations


def test_early_words_are_bounded() -> None:
    node = Node(NodeSettings(node=HERE))
    for number in (*range(EARLY_MAX), 0, *range(EARLY_MAX, EARLY_MAX + 10)):
        message = Gathered(save=save_ref(number), reports=())
        node.handle(PeerSaid(node_id="B", message=message), 0)
    assert EARLY_MAX == len(node.peers.early.kept)
    # The oldest are dropped; what was repeated is not old.
    assert ("B", "job", "1-10", "Gathered") not in node.peers.early.kept
    assert ("B", "job", "1-0", "Gathered") in node.peers.early.kept


def test_an_outcome_that_comes_before_any_local_rank_spoke_waits_for_them() -> None:
    world = World((1, 2))
    world.unable(SAVE, 0, NO_SPACE)
    world.run()
    world.stage(SAVE, 1)
    world.run()
    assert NO_SPACE.code == world.cause(1, SAVE).code == world.cause(2, SAVE).code
    assert [] == world.done(WriteImage)


@pytest.mark.parametrize(
    "message",
    [
        Planned(save=SAVE, layouts=(RankLayout(1, "evil", b"\1"),)),
        Outcome(save=SAVE, outcome=Ending.COMMITTED, path="/evil"),
    ],
)
def test_only_the_coordinator_s_word_counts(message: Planned | Outcome) -> None:
    world = World((1, 1, 1))
    world.hold(MakePlan)
    world.offer(SAVE)
    world.run(1)
    world.post("B", PeerSaid(node_id="C", message=message))
    world.run(1)
    assert {"none"} == world.outcomes(SAVE)
    world.release()
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


@pytest.mark.parametrize(
    "message",
    [
        Gathered(save=SAVE, reports=()),
        Prepared(save=SAVE, files=(), fragment=""),
        Fail(save=SAVE, cause=NO_SPACE),
    ],
)
def test_a_node_outside_the_cohort_cannot_begin_or_end_a_save(
    message: Gathered | Prepared | Fail,
) -> None:
    world = World((1,))
    world.post("A", PeerSaid(node_id="Z", message=message))
    world.run()
    assert {} == world.nodes["A"].saves.coordinations
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.post("A", PeerSaid(node_id="Z", message=message))
    world.release()
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


def test_a_node_that_is_not_the_coordinator_takes_no_reports() -> None:
    world = World((1, 1))
    message = Gathered(save=SAVE, reports=(RankReport(0, "old"),))
    world.post("B", PeerSaid(node_id="A", message=message))
    world.run()
    assert {} == world.nodes["B"].saves.coordinations


@pytest.mark.parametrize("save_id", ["", "nonsense", "-", "9" * 60 + "-1"])
def test_a_peer_s_nonsense_is_dropped(save_id: str) -> None:
    world = World((1,))
    save = SaveRef(job="job", save_id=save_id, step=1, name="step_1")
    for message in (Gathered(save=save, reports=()), Outcome(save=save, outcome=Ending.COMMITTED)):
        world.post("A", PeerSaid(node_id="A", message=message))
        world.run()
    assert {} == world.nodes["A"].saves.coordinations
    assert {} == world.nodes["A"].saves.participations


# --- limits and forgetting


def test_ended_saves_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, ENDED_MAX=8)
    world = World((1, 1))
    for number in range(1, 20):
        world.stage(save_ref(number))
        world.run()
    for node in world.nodes.values():
        assert len(node.saves.participations) + len(node.saves.coordinations) == 8
    assert 19 == world.nodes["B"].roster.jobs["job"].history.outcome_counts[Ending.COMMITTED]
    assert {} == world.timers


def test_an_ended_save_is_not_forgotten_while_a_writer_reads_its_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few(monkeypatch, ENDED_MAX=8)
    world = World((1,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.abort(SAVE, 0)
    world.run(1)
    world.holding.clear()
    for number in range(2, 20):
        world.stage(save_ref(number))
        world.run()
    assert KEY in world.nodes["A"].saves.participations
    world.release()
    world.run()
    assert Discard(save=SAVE, root="/data/run") in world.done(Discard)


def test_too_many_saves_in_flight_are_refused_on_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, SAVES_MAX=5)
    world = World((1, 1))
    world.hold(WriteImage)
    for number in range(1, 6):
        world.stage(save_ref(number))
    world.run(1)
    last = save_ref(6)
    world.stage(last, 0)
    world.run(1)
    assert "busy" == world.cause(0, last).code
    world.release()
    world.run()
    assert {"committed"} == world.outcomes(SAVE)
    # Those that have ended do not count.
    world.stage(save_ref(7))
    world.run()
    assert {"committed"} == world.outcomes(save_ref(7))


def few(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Make limits of the node small, so that a test reaches them."""
    for name, limit in limits.items():
        owner = "sessions" if name == "JOBS_MAX" else "saves"
        monkeypatch.setattr(f"milepostd.core.{owner}.{name}", limit)
        monkeypatch.setattr(f"milepostd.core.invariants.{name}", limit)


def test_a_save_that_one_node_refuses_does_not_wait_on_the_others() -> None:
    world = World((1, 1))
    world.hold(WriteImage, "B")
    world.stage(SAVE)
    world.run(1)
    world.stop("B")
    second = save_ref(2)
    world.stage(second)
    world.run(1)
    assert "daemon-lost" == world.cause(0, second).code == world.cause(1, second).code
    world.release()
    world.run()
    assert {"committed"} == world.outcomes(SAVE)


# --- retention and shared memory


def test_retention_runs_after_a_commit_and_only_at_the_coordinator() -> None:
    world = World((1, 1), keep=Keep(last=2))
    world.stage(SAVE)
    world.run()
    assert [Retain(job="job", root="/data/run", keep=Keep(last=2))] == world.done(Retain, "A")
    assert [] == world.done(Retain, "B")


def test_no_retention_after_a_failure_or_without_a_rule() -> None:
    world = World((1,), keep=Keep(last=2))
    world.fail(Publish, Cause("io-error", "it broke"))
    world.stage(SAVE)
    world.run()
    other = World((1,))
    other.stage(SAVE)
    other.run()
    assert [] == world.done(Retain) + other.done(Retain)


def test_a_full_file_system_is_freed_of_what_no_rule_keeps() -> None:
    world = World((1,), keep=Keep(last=2))
    world.fail(Publish, Cause("no-space", "it is full"))
    world.stage(SAVE)
    world.run()
    assert 1 == len(world.done(Retain))


def test_a_lost_rank_s_memory_is_freed_when_no_save_reads_it() -> None:
    world = World((2,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.lose(1)
    world.run(1)
    assert [] == world.done(RemoveArenas)
    world.release()
    world.run()
    assert [RemoveArenas(paths=("/arenas/r1-old",))] == world.done(RemoveArenas)


def test_memory_that_a_rank_named_for_a_save_that_had_failed_is_freed_too() -> None:
    world = World((2,))
    world.unable(SAVE, 0, NO_SPACE)
    world.run()
    world.stage(SAVE, 1)
    world.run()
    world.lose(1)
    world.run()
    assert [RemoveArenas(paths=("/arenas/r1-old",))] == world.done(RemoveArenas)


# --- leaving


def test_goodbye_is_answered_at_once_if_nothing_is_pending() -> None:
    world = World((1,))
    world.stage(SAVE)
    world.run()
    world.leave(0)
    world.run()
    assert Left() == world.heard[0][-1]
    assert {} == world.nodes["A"].roster.joined


def test_goodbye_is_answered_only_when_nothing_is_pending() -> None:
    world = World((1,))
    world.hold(Publish)
    world.stage(SAVE)
    world.run(1)
    world.leave(0)
    world.run(1)
    assert Left() not in world.heard[0]
    world.release()
    world.run()
    assert [Concluded, Left] == [type(message) for message in world.heard[0][-2:]]


def test_goodbye_waits_for_a_writer_that_still_reads_the_image() -> None:
    world = World((1,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.abort(SAVE, 0)
    world.leave(0)
    world.run(1)
    assert Left() not in world.heard[0]
    world.release()
    world.run()
    assert Left() == world.heard[0][-1]


def test_a_session_without_a_place_may_leave_at_any_time() -> None:
    world = World((1,), joined=False)
    session = world.join(0)
    world.run()
    world.lose(0)
    world.run()
    world.post("A", RankLeft(session=session, message=Leave()))
    world.run()
    assert Left() == world.heard[0][-1]


def test_goodbye_of_a_superseded_attempt_is_answered_too() -> None:
    world = World((2,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.leave(0)
    world.run(1)
    world.join(1, attempt=2)
    world.run(1)
    world.release()
    world.run()
    assert Left() == world.heard[0][-1]


# --- the end


def test_a_node_without_work_halts_as_soon_as_it_is_told_to() -> None:
    world = World((1,))
    world.stop("A")
    world.run()
    assert {"A": "drained"} == world.halted


def test_a_node_that_drains_finishes_what_was_staged_and_takes_nothing_new() -> None:
    world = World((1,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.stop("A")
    world.run(1)
    assert {} == world.halted
    second = save_ref(2)
    world.stage(second)
    world.run(1)
    world.join(0)
    world.run(1)
    assert "daemon-lost" == world.cause(0, second).code
    cause = refusal(world)
    assert cause is not None
    assert "shutting down" in cause.message
    world.release()
    world.run()
    assert "committed" == world.disk[KEY]
    assert {"A": "drained"} == world.halted


def test_a_node_that_drains_ends_its_housekeeping_first() -> None:
    world = World((1,), keep=Keep(last=1))
    world.hold(Retain)
    world.stage(SAVE)
    world.run(1)
    world.stop("A")
    world.run(1)
    assert {} == world.halted
    world.release()
    world.run()
    assert {"A": "drained"} == world.halted


def test_a_second_request_to_stop_halts_at_once() -> None:
    world = World((1,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.stop("A")
    world.stop("A")
    world.run(0)
    assert {"A": "told to stop at once"} == world.halted


def test_an_embedded_node_halts_some_time_after_the_last_trainer() -> None:
    world = World((2,), is_embedded=True)
    world.stage(SAVE)
    world.run(1)
    world.lose(0)
    world.run(60)
    assert {} == world.halted
    world.lose(1)
    world.run(9)
    assert {} == world.halted
    world.run(2)
    assert {"A": "nothing is pending and no trainer is here"} == world.halted


def test_an_embedded_node_stays_for_its_saves_and_for_a_trainer_that_comes_back() -> None:
    world = World((1,), is_embedded=True)
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.lose(0)
    world.run(30)
    assert {} == world.halted
    world.release()
    world.run(5)
    world.join(0)
    world.run(30)
    assert {} == world.halted
    assert "committed" == world.disk[KEY]


def test_an_embedded_node_that_nobody_greets_goes_away() -> None:
    world = World((1,), is_embedded=True, joined=False)
    world.run()
    assert ["A"] == list(world.halted)


def test_a_node_that_is_no_trainer_s_stays() -> None:
    world = World((1,))
    world.lose(0)
    world.run(3600)
    assert {} == world.halted


# --- anything at all


def words() -> st.SearchStrategy[AnyEvent]:
    """Every event, from a world small enough that they meet."""
    job = st.sampled_from(["job", "job", "job", "other"])
    save_id = st.sampled_from(["1-1", "1-1", "1-2", "2-1", "0-0", "", "1-", "nonsense"])
    save = st.builds(
        SaveRef,
        job=job,
        save_id=save_id,
        step=st.sampled_from([1, 1, 1, 2]),
        name=st.sampled_from(["step_1", "../evil"]),
        is_plan_only=st.sampled_from([False, False, False, True]),
    )
    session = st.integers(1, 4)
    rank = st.integers(-1, 3)
    node = st.sampled_from(["A", "B", "Z"])
    text = st.sampled_from(["", "x", "old", "new"])
    blob = st.sampled_from([b"", b"x"])
    cause = st.builds(Cause, code=st.just("internal"), message=text)
    layout = st.builds(RankLayout, rank=rank, layout_id=text, assigned=blob)
    report = st.builds(RankReport, rank=rank, layout_id=text, fingerprint=text, offer=blob)
    written = st.builds(WrittenFile, rank=rank, layout_id=text, file=text, file_bytes=rank)

    def several(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
        return st.lists(of, max_size=3).map(tuple)

    cohort = tuple(NodeRef(name, f"tcp://{name}:1", "") for name in "AB")
    join = st.builds(
        Join,
        job=job,
        attempt=st.integers(0, 2),
        root=st.sampled_from(["/r", "r"]),
        rank=rank,
        node_of_rank=st.sampled_from([(0, 0, 1), (0, 0, 1), (1, 1, 0), (5,), ()]),
        cohort=st.sampled_from([cohort, cohort, cohort[::-1], cohort[:1]]),
        keep=st.sampled_from([Keep(), Keep(last=1)]),
        deadline_s=st.sampled_from([60.0, 0.0]),
    )
    from_rank = st.one_of(
        st.builds(Offered, save=save, fingerprint=text, offer=blob),
        st.builds(
            Staged, save=save, layout_id=text, arena=text, slot=rank, image_bytes=st.integers(0, 9)
        ),
        st.builds(Skipped, save=save, reason=text),
        st.builds(Unable, save=save, cause=cause),
        st.builds(AbortWanted, save=save),
    )
    from_peer = st.one_of(
        st.builds(Gathered, save=save, reports=several(report)),
        st.builds(Planned, save=save, layouts=several(layout)),
        st.builds(Prepared, save=save, files=several(written), fragment=text),
        st.builds(Fail, save=save, cause=cause, skip=st.booleans()),
        st.builds(Outcome, save=save, outcome=st.sampled_from(Ending), cause=cause),
        st.builds(WordWanted, save=save),
    )
    timer = st.builds(
        "{}/{}/{}".format,
        st.sampled_from(
            [
                "participant.deadline",
                "participant.resend",
                "coordinator.deadline",
                "coordinator.ask",
                "x",
            ]
        ),
        job,
        save_id,
    )
    return st.one_of(
        st.just(Started()),
        st.builds(SessionOpened, session=session),
        st.builds(RankJoined, session=session, pid=session, message=join),
        st.builds(RankSaid, session=session, message=from_rank),
        st.builds(RankLeft, session=session, message=st.just(Leave())),
        st.builds(SessionLost, session=session, reason=text),
        st.builds(PeerSaid, node_id=node, message=from_peer),
        st.builds(BytesWritten, save=save, count=st.integers(0, 9)),
        st.builds(FileDurable, save=save, file=written),
        st.builds(FileFailed, save=save, rank=rank, cause=cause),
        st.builds(FragmentDurable, save=save, fragment=st.just("f")),
        st.builds(FragmentFailed, save=save, cause=cause),
        st.builds(PlanMade, save=save, layouts=several(layout), warnings=several(cause)),
        st.builds(PlanFailed, save=save, cause=cause),
        st.builds(IndexBuilt, save=save, checkpoint_bytes=session),
        st.builds(IndexFailed, save=save, cause=cause),
        st.builds(Published, save=save, path=text, at_ms=session),
        st.builds(PublishFailed, save=save, cause=cause),
        st.builds(OutcomeFound, save=save, fate=st.sampled_from(Fate), path=text),
        st.builds(Retained, job=job, removed=st.just(())),
        st.builds(Discarded, save=save),
        st.builds(TimerFired, timer=timer | text | st.just("linger/")),
        st.just(StopRequested()),
    )


def node_with(past: str) -> Node:
    """A node that two ranks have joined, or that remembers them, or that knows nothing."""
    node = Node(NodeSettings(node=HERE, is_embedded=past == "none"))
    cohort = tuple(NodeRef(name, f"tcp://{name}:1", "") for name in "AB")
    for rank in (0, 1) if past == "joined" else ():
        join = Join(
            job="job", attempt=1, root="/r", rank=rank, node_of_rank=(0, 0, 1), cohort=cohort
        )
        node.handle(SessionOpened(session=rank + 1), 0)
        node.handle(RankJoined(session=rank + 1, pid=1, message=join), 0)
    if past == "recalled":
        join = Join(job="job", attempt=1, root="/r", rank=0, node_of_rank=(0, 0, 1), cohort=cohort)
        word = Staged(save=SAVE, layout_id="old", arena="x", slot=0, image_bytes=1)
        staged = ((0, word), (1, word), (2, word), (9, word))
        node.handle(JobRecalled(message=join, staged=staged, arenas=((0, "x"), (9, "y"))), 0)
    return node


@settings(max_examples=150)
@given(
    events=st.lists(st.tuples(words(), st.sampled_from([0.001, 1.0, 70.0])), max_size=40),
    past=st.sampled_from(["joined", "joined", "recalled", "none"]),
)
def test_nothing_that_others_do_in_any_order_breaks_a_node(
    events: list[tuple[AnyEvent, float]], past: str
) -> None:
    node = node_with(past)
    now_ns = 0
    for event, after_s in events:
        now_ns += int(after_s * SECOND_NS)
        before = set(node.saves.participations) | set(node.saves.coordinations)
        commands = node.handle(event, now_ns)
        assert [] == broken_invariants(node)
        assert all(command.node != HERE for command in commands if isinstance(command, Send))
        assert status_of(node, now_ns)
        assert len(before | set(node.saves.participations)) <= len(before) + 1


@given(event=words())
def test_every_event_can_be_written_down_and_read_back(event: AnyEvent) -> None:
    assert event == msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=AnyEvent)


@settings(max_examples=60)
@given(data=st.data())
def test_every_save_ends_and_alike_on_all_nodes_whatever_the_network_and_the_disks_do(
    data: st.DataObject,
) -> None:
    def network(source: str, target: str, message: PeerMessage) -> Sequence[float]:
        delays = st.lists(st.sampled_from([0.001, 0.5, 3.0, 20.0]), max_size=2)
        return data.draw(st.just([0.001]) | delays, label=f"{source} to {target}")

    world = World((2, 1, 1), network=network)
    kinds = [WriteImage, WriteFragment, MakePlan, BuildIndex, Publish]
    for kind in data.draw(st.lists(st.sampled_from(kinds), max_size=1), label="failing"):
        world.fail(kind, node=data.draw(st.sampled_from(["", "A", "B"])))
    saves = [save_ref(number) for number in (1, 2, 3)]
    for save in saves:
        for rank in data.draw(st.permutations(range(4)), label="order"):
            says = data.draw(
                st.sampled_from(
                    ["stage"] * 9 + ["offer"] * 3 + ["skip", "abort", "lose", "leave", ""]
                )
            )
            act: dict[str, Callable[[], None]] = {
                "stage": partial(world.stage, save, rank),
                "offer": partial(world.offer, save, rank),
                "skip": partial(world.skip, save, rank),
                "abort": partial(world.abort, save, rank),
                "lose": partial(world.lose, rank),
                "leave": partial(world.leave, rank),
                "": lambda: None,
            }  # fmt: skip
            act[says]()
            world.run(data.draw(st.sampled_from([0, 0.002, 0.5, 30])))
    world.run()
    assert {} == world.timers
    for save in saves:
        verdicts = world.verdicts(save)
        assert "" not in verdicts
        assert len(verdicts) <= 1 or {"failed", "skipped"} == verdicts
        assert ("committed" in verdicts) == (
            "committed" == world.disk.get((save.job, save.save_id))
        )
    for node in world.nodes.values():
        assert node.is_idle
