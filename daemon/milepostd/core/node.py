"""One node: sessions, peers, jobs and saves in flight. `Node.handle(event, now_ns) -> commands` is
its only entry.

Pure: no socket, file, clock, thread, log, environment or torch. Nothing depends on the order of
sets. An event that makes no sense where the node stands changes nothing and yields a log line at
most; it never raises for what somebody else did.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec

from milepost.wire.messages import (
    Cause,
    Concluded,
    CoordinatorMessage,
    Ending,
    Fail,
    Join,
    Joined,
    Keep,
    Left,
    NodeRef,
    Outcome,
    PeerMessage,
    Planned,
    PreemptionMessage,
    RankMessage,
    ReadsTold,
    Refused,
    SaveMessage,
    SaveRef,
    Staged,
    WordWanted,
)
from milepostd.core.commands import (
    AnyCommand,
    ClearTimer,
    Command,
    Discard,
    ForgetJournal,
    Halt,
    KeepJournal,
    Log,
    MeetPeers,
    RemoveArenas,
    Reply,
    Retain,
    Send,
    SetTimer,
    StartPlanner,
    SweepArenas,
)
from milepostd.core.coordination import Coordination
from milepostd.core.early import EarlyMessages
from milepostd.core.events import (
    AnyEvent,
    CoordinatorEvent,
    Discarded,
    JobRecalled,
    ParticipantEvent,
    PeerSaid,
    RankJoined,
    RankLeft,
    RankSaid,
    RankSignalled,
    Retained,
    SaveEvent,
    SessionLost,
    SessionOpened,
    Started,
    StopRequested,
    TimerFired,
)
from milepostd.core.job import NO_ORDER, Job, LastCommitted, Seat, save_order
from milepostd.core.joining import why_not, why_not_there
from milepostd.core.participation import Participation
from milepostd.core.phases import Phase
from milepostd.core.preemption import Preemption
from milepostd.core.role import SECOND_NS
from milepostd.core.timers import TimerKind, job_of_timer, save_of_timer, timer_kind, timer_name

JOBS_MAX: Final = 64
"""Jobs one node serves: many more than a host runs, few enough that a leak shows."""

SAVES_MAX: Final = 256
"""Saves in flight on one node in each role, over all jobs: JOBS_MAX jobs with a few slots each."""

ENDED_MAX: Final = 256
"""Ended saves kept to answer late messages; older ones are forgotten, and late messages about them
ignored."""

RECALL_S: Final = 60.0
"""How long a restarted daemon waits for the trainers it remembers before it takes them for dead:
they look for it every fraction of a second, and give up after as long themselves."""

NO_SESSION: Final = -1
"""The session of a rank that is remembered and has not come back yet."""

SaveKey = tuple[str, str]


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is told at its start and never changes."""

    node: NodeRef
    roots: tuple[str, ...] = ()
    """Roots that jobs may use, with all below them; empty: any."""
    is_embedded: bool = False
    """Started by a trainer: halts by itself when nothing is pending and nobody is there."""
    linger_s: float = 10.0
    """How long an embedded daemon stays after the last trainer."""


class Session(msgspec.Struct):
    """One joined rank's connection."""

    job: Job
    rank: int


class Node:
    """The state of one daemon; see the module's docstring."""

    def __init__(self, settings: NodeSettings) -> None:
        self.settings = settings
        self.node_id = settings.node.node_id
        self.jobs: dict[str, Job] = {}
        self.open_sessions: set[int] = set()
        """Every session that said hello and is not lost; `sessions` are those with a place in a
        job."""
        self.sessions: dict[int, Session] = {}
        self.participations: dict[SaveKey, Participation] = {}
        self.coordinations: dict[SaveKey, Coordination] = {}
        self.housekeeping = 0
        """Slow commands in flight that no save waits for: discards and retention."""
        self.preemptions: dict[str, Preemption] = {}
        """By job; at most one a job."""
        self.stops = 0
        self.peer_heard_at_ns: dict[str, int] = {}
        self.ended: deque[tuple[bool, SaveKey]] = deque()
        """Ended saves, oldest first, as (is a participation, key)."""
        self.early = EarlyMessages()
        self._is_lingering = False

    # --- the entry

    def handle(self, event: AnyEvent, now_ns: int) -> tuple[AnyCommand, ...]:
        """Take one event; return what to do, in this order."""
        pending: deque[AnyEvent] = deque([event])
        commands: list[Command] = []
        while pending:
            for command in self._dispatch(pending.popleft(), now_ns):
                if isinstance(command, Send) and command.node.node_id == self.node_id:
                    # The two roles of one node talk by the same messages, without a wire.
                    pending.append(PeerSaid(node_id=self.node_id, message=command.message))
                else:
                    # Slow commands that no save waits for; their completions count down again.
                    self.housekeeping += isinstance(command, Discard | Retain)
                    commands.append(command)
        commands += self._check_halt(now_ns)
        return tuple(commands)  # type: ignore[arg-type]

    def _dispatch(self, event: AnyEvent, now_ns: int) -> list[Command]:
        match event:
            case Started():
                return []
            case JobRecalled():
                return self._job_recalled(event, now_ns)
            case SessionOpened():
                self.open_sessions.add(event.session)
                return []
            case RankJoined():
                return self._rank_joined(event, now_ns)
            case RankSaid():
                return self._rank_said(event, now_ns)
            case RankSignalled():
                return self._rank_signalled(event, now_ns)
            case RankLeft():
                return self._rank_left(event, now_ns)
            case SessionLost():
                return self._session_lost(event, now_ns)
            case PeerSaid():
                return self._peer_said(event.node_id, event.message, now_ns)
            case TimerFired():
                return self._timer_fired(event.timer, now_ns)
            case StopRequested():
                return self._stop_requested(now_ns)
            case Retained():
                self.housekeeping = max(0, self.housekeeping - 1)
                return []
            case Discarded():
                self.housekeeping = max(0, self.housekeeping - 1)
                return self._save_moved(event, now_ns)
            case _:
                return self._save_moved(event, now_ns)

    # --- an earlier life

    def _job_recalled(self, event: JobRecalled, now_ns: int) -> list[Command]:
        """Go on where an earlier life of this daemon was cut off: what is staged is written, for
        trainers that come back and for those that are dead alike.
        """
        join = event.message
        cause = self._why_not(join)
        if cause is not None:
            # The daemon was given other roots, or another address: its saves are lost to it.
            return [
                Log(level="warning", event="job.unrecalled", cause=cause,
                    fields={"job": join.job, "attempt": join.attempt}),
                ForgetJournal(job=join.job, attempt=join.attempt),
            ]  # fmt: skip
        previous = self.jobs.get(join.job)
        job = Job(join, self.node_id, None if previous is None else previous.history)
        job.is_journalled = True
        self.jobs[join.job] = job
        for rank in job.ranks_here:
            arenas = {path for owner, path in event.arenas if owner == rank}
            job.seats[rank] = Seat(session=NO_SESSION, pid=0, arenas=arenas)
        commands: list[Command] = [
            MeetPeers(nodes=job.peers()),
            SetTimer(timer=timer_name(TimerKind.RECALL, job.job),
                     at_ns=now_ns + int(RECALL_S * SECOND_NS)),
            Log(level="warning", event="job.recalled",
                fields={"job": job.job, "attempt": job.attempt}),
        ]  # fmt: skip
        if previous is not None:
            # Its trainers are history, and what it had staged completely is being finished.
            for seat in previous.seats.values():
                seat.is_lost = True
            commands += self._supersede(previous, job.attempt, now_ns)
            commands += self._release_arenas(previous)
        for rank, staged in event.staged:
            is_ours = rank in job.seats and staged.save.job == job.job
            if is_ours and save_order(staged.save)[0] == job.attempt:
                commands += self._take_word(job, rank, staged, now_ns, is_recalled=True)
        return commands + self._replay_early(job.job, now_ns)

    def _recall_over(self, name: str, now_ns: int) -> list[Command]:
        """Ranks that were remembered and have not come back are dead."""
        job = self.jobs.get(name)
        if job is None:
            return []
        for seat in job.seats.values():
            if seat.session == NO_SESSION:
                seat.is_lost = True
                seat.reason = "it did not come back after the daemon was restarted"
        return self._miss_rank(job, now_ns) + self._settle(job)

    @property
    def _has_recalls(self) -> bool:
        """Whether a remembered rank may still come back."""
        return any(
            seat.session == NO_SESSION and not seat.is_lost
            for job in self.jobs.values()
            for seat in job.seats.values()
        )

    # --- sessions

    def _rank_joined(self, event: RankJoined, now_ns: int) -> list[Command]:
        join = event.message
        if event.session not in self.open_sessions:
            return []
        cause = self._why_not(join) or self._why_not_again(event.session, join)
        if cause is not None:
            return [
                Log(level="warning", event="session.refused", cause=cause,
                    fields={"job": join.job, "rank": join.rank}),
                Reply(session=event.session, message=Refused(cause=cause)),
            ]  # fmt: skip
        commands: list[Command] = []
        job = self.jobs.get(join.job)
        if job is None or join.attempt > job.attempt:
            previous = job
            if job is not None:
                commands += self._supersede(job, join.attempt, now_ns)
            job = Job(join, self.node_id, None if job is None else job.history)
            self.jobs[join.job] = job
            commands.append(MeetPeers(nodes=job.peers()))
            if previous is not None:
                commands += self._release_arenas(previous)
            if not self._has_earlier_pending(job):
                commands.append(self._sweep(job, job.ranks_here))
            if job.is_coordinator:
                commands.append(StartPlanner())
        old = job.seats.get(join.rank)
        if old is not None and not old.is_lost:
            self.sessions.pop(old.session, None)
        job.seats[join.rank] = Seat(
            session=event.session, pid=event.pid, arenas=old.arenas if old is not None else set()
        )
        self.sessions[event.session] = Session(job, join.rank)
        if not job.is_journalled:
            job.is_journalled = True
            commands.append(KeepJournal(message=join))
        commands.append(
            Reply(
                session=event.session,
                message=Joined(job=join.job, attempt=join.attempt, rank=join.rank),
            )
        )
        commands.append(
            Log(level="info", event="session.joined",
                fields={"job": join.job, "rank": join.rank, "pid": event.pid,
                        "attempt": join.attempt, "root": join.root})
        )  # fmt: skip
        preemption = self.preemptions.get(join.job)
        if preemption is not None and preemption.job is job:
            commands += preemption.joined(join.rank)
        return commands + self._replay_early(join.job, now_ns)

    def _why_not(self, join: Join) -> Cause | None:
        """Why this rank cannot join; None if it can."""
        here = self.node_id
        if self.stops:
            return Cause("daemon-lost", f"node {here} is shutting down", "", here, join.rank)
        job = self.jobs.get(join.job)
        cause = why_not(join, here, self.settings.roots, job)
        if cause is None and job is None and len(self.jobs) >= JOBS_MAX and not self._forget_job():
            return Cause("busy", f"node {here} serves {JOBS_MAX} jobs already", "", here, join.rank)
        return cause

    def _why_not_again(self, session: int, join: Join) -> Cause | None:
        """Why a session that has its place cannot take this one; asking twice is harmless."""
        held = self.sessions.get(session)
        if held is None or (held.job.job == join.job and held.rank == join.rank):
            # The same rank again: a repetition, or a further attempt of one process.
            return None
        return Cause(
            "protocol",
            f"the session is rank {held.rank} of job {held.job.job} already",
            "one session is one rank",
            self.node_id,
            join.rank,
        )

    def _forget_job(self) -> bool:
        """Make room for a job by forgetting one that nobody is connected to and that has nothing
        pending.
        """
        for name, job in self.jobs.items():
            if all(seat.is_lost for seat in job.seats.values()) and not self._has_pending(job):
                del self.jobs[name]
                self.preemptions.pop(name, None)
                known = {node_id for other in self.jobs.values() for node_id in other.nodes}
                self.peer_heard_at_ns = {
                    node_id: at_ns
                    for node_id, at_ns in self.peer_heard_at_ns.items()
                    if node_id in known
                }
                return True
        return False

    def _supersede(self, job: Job, attempt: int, now_ns: int) -> list[Command]:
        """A newer attempt begins: saves that not all local ranks have staged can never complete."""
        commands: list[Command] = []
        for participation in [*self.participations.values()]:
            if (
                participation.job is job
                and not participation.has_ended
                and len(participation.staged) < len(job.ranks_here)
            ):
                cause = Cause(
                    "attempt-superseded",
                    f"attempt {attempt} of job {job.job} has started",
                    "",
                    self.node_id,
                )
                commands += participation.cannot(cause, now_ns)
        return commands

    def _rank_said(self, event: RankSaid, now_ns: int) -> list[Command]:
        session = self.sessions.get(event.session)
        if session is None:
            return []
        job, message = session.job, event.message
        if message.save.job != job.job or save_order(message.save)[0] != job.attempt:
            cause = Cause(
                "protocol",
                f"rank {session.rank} of job {job.job}, attempt {job.attempt}, speaks of save "
                f"{message.save.save_id!r} of job {message.save.job!r}",
                "",
                self.node_id,
                session.rank,
            )
            return [self._end_save(event.session, message.save, cause)]
        return self._take_word(job, session.rank, message, now_ns, event.session)

    def _take_word(
        self,
        job: Job,
        rank: int,
        message: RankMessage,
        now_ns: int,
        session: int = NO_SESSION,
        *,
        is_recalled: bool = False,
    ) -> list[Command]:
        """Take what a local rank says about a save, or what its arena says for it."""
        if isinstance(message, Staged):
            job.seats[rank].arenas.add(message.arena)
        key = (job.job, message.save.save_id)
        participation = self.participations.get(key)
        commands: list[Command] = []
        if participation is None:
            refusal = self._why_no_save(job, message.save)
            if refusal is not None:
                return [
                    self._end_save(session, message.save, refusal),
                    # The other nodes need not wait for this one until the deadline.
                    Send(node=job.coordinator, message=Fail(save=message.save, cause=refusal)),
                ]
            participation = Participation(
                job, message.save, self.node_id, now_ns, is_recalled=is_recalled
            )
            self.participations[key] = participation
            commands += participation.open()
            commands += self._miss_lost_ranks(participation, now_ns)
        had_ended = participation.has_ended
        commands += participation.rank_said(rank, message, now_ns)
        return commands + self._after_participation(participation, had_ended)

    def _why_no_save(self, job: Job, save: SaveRef) -> Cause | None:
        """Why this save cannot begin here now."""
        here = self.node_id
        if self.stops:
            return Cause("daemon-lost", f"node {here} is shutting down", "", here)
        if self.jobs.get(job.job) is not job:
            return Cause(
                "attempt-superseded",
                f"a newer attempt of job {job.job} has started; attempt {job.attempt} is history",
                "end the older run",
                here,
            )
        if sum(not role.has_ended for role in self.participations.values()) >= SAVES_MAX:
            return Cause("busy", f"node {here} has {SAVES_MAX} saves in flight", "", here)
        return why_not_there(save, here, self.settings.roots)

    def _miss_lost_ranks(self, participation: Participation, now_ns: int) -> list[Command]:
        """Fail a save at once if a rank that is gone for good has not staged it."""
        for rank, seat in participation.job.seats.items():
            if (seat.is_lost or seat.is_leaving) and rank not in participation.staged:
                save = participation.save
                cause = Cause(
                    "rank-missing",
                    f"rank {rank} (pid {seat.pid}) {'left' if seat.is_leaving else 'was lost'} "
                    f"before it staged save {save.save_id} of step {save.step}: {seat.reason}",
                    "the last checkpoint stands; the next save works once all ranks are there",
                    self.node_id,
                    rank,
                )
                return participation.cannot(cause, now_ns)
        return []

    def _end_save(self, session: int, save: SaveRef, cause: Cause) -> Reply:
        concluded = Concluded(save_id=save.save_id, outcome=Ending.FAILED, cause=cause)
        return Reply(session=session, message=concluded)

    def _rank_left(self, event: RankLeft, now_ns: int) -> list[Command]:
        session = self.sessions.get(event.session)
        if session is None:
            return [Reply(session=event.session, message=Left())]
        seat = session.job.seats[session.rank]
        seat.is_leaving = True
        seat.reason = "it said goodbye"
        return self._miss_rank(session.job, now_ns) + self._settle(session.job)

    def _miss_rank(self, job: Job, now_ns: int) -> list[Command]:
        """A rank has gone: the saves of its job that it has not staged can never complete."""
        commands: list[Command] = []
        for participation in [*self.participations.values()]:
            if participation.job is job and not participation.has_ended:
                commands += self._miss_lost_ranks(participation, now_ns)
        return commands

    def _answer_leaving(self, job: Job) -> list[Command]:
        """Say goodbye to leaving ranks of which nothing is pending."""
        commands: list[Command] = []
        if self._has_pending(job):
            return commands
        for rank, seat in job.seats.items():
            if seat.is_leaving and not seat.is_lost:
                seat.is_lost = True
                self.sessions.pop(seat.session, None)
                commands.append(Reply(session=seat.session, message=Left()))
                commands.append(
                    Log(level="info", event="session.left", fields={"job": job.job, "rank": rank})
                )
        return commands

    def _has_pending(self, job: Job) -> bool:
        return any(
            role.job is job and role.is_pending for role in self.participations.values()
        ) or any(role.job is job and not role.has_ended for role in self.coordinations.values())

    def _session_lost(self, event: SessionLost, now_ns: int) -> list[Command]:
        self.open_sessions.discard(event.session)
        session = self.sessions.pop(event.session, None)
        if session is None:
            return []
        job, rank = session.job, session.rank
        seat = job.seats[rank]
        commands: list[Command] = []
        for staged in event.staged:
            if staged.save.job == job.job and save_order(staged.save)[0] == job.attempt:
                commands += self._take_word(job, rank, staged, now_ns)
        seat.arenas |= set(event.arenas)
        seat.is_lost = True
        seat.reason = event.reason
        commands += [
            Log(level="info" if seat.is_leaving else "warning", event="session.lost",
                fields={"job": job.job, "rank": rank, "pid": seat.pid, "reason": event.reason})
        ]  # fmt: skip
        return commands + self._miss_rank(job, now_ns) + self._settle(job)

    def _release_arenas(self, job: Job) -> list[Command]:
        """Unlink the arenas of lost ranks, once no save reads from them."""
        if self._has_pending(job):
            return []
        commands: list[Command] = []
        paths: list[str] = []
        for seat in job.seats.values():
            if seat.is_lost and seat.arenas:
                paths += sorted(seat.arenas)
                seat.arenas = set()
        if paths:
            commands.append(RemoveArenas(paths=tuple(paths)))
        newest = self.jobs.get(job.job)
        is_over = newest is not job or all(seat.is_lost for seat in job.seats.values())
        if job.is_journalled and is_over:
            job.is_journalled = False
            commands.append(ForgetJournal(job=job.job, attempt=job.attempt))
            if newest is not None and newest is not job and not self._has_earlier_pending(newest):
                # The last save of the earlier attempts has ended: what they left can go.
                commands.append(self._sweep(newest, job.ranks_here))
        return commands

    def _has_earlier_pending(self, job: Job) -> bool:
        """Whether a save of an earlier attempt of the job has not ended."""
        return any(
            role.job.job == job.job and role.job is not job and role.is_pending
            for role in self.participations.values()
        )

    def _sweep(self, job: Job, ranks: tuple[int, ...]) -> SweepArenas:
        return SweepArenas(job=job.job, below_attempt=job.attempt, ranks=ranks)

    # --- preemption

    def _rank_signalled(self, event: RankSignalled, now_ns: int) -> list[Command]:
        session = self.sessions.get(event.session)
        if session is None:
            return []
        preemption, commands = self._preemption_of(session.job, now_ns)
        if isinstance(event.message, ReadsTold):
            return commands + preemption.reads_told(session.rank, event.message.reads)
        return commands + preemption.noticed(session.rank)

    def _preemption_heard(
        self, node_id: str, message: PreemptionMessage, now_ns: int
    ) -> list[Command]:
        job = self.jobs.get(message.job)
        if job is None or job.attempt != message.attempt or not job.hears(node_id):
            # Repeated by its sender, or history.
            return []
        preemption, commands = self._preemption_of(job, now_ns)
        return commands + preemption.heard(node_id, message, now_ns)

    def _preemption_of(self, job: Job, now_ns: int) -> tuple[Preemption, list[Command]]:
        known = self.preemptions.get(job.job)
        if known is not None and known.job is job:
            return known, []
        made = self.preemptions[job.job] = Preemption(job, self.node_id, now_ns)
        return made, made.open()

    # --- peers

    def _peer_said(self, node_id: str, message: PeerMessage, now_ns: int) -> list[Command]:
        self.peer_heard_at_ns[node_id] = now_ns
        if isinstance(message, PreemptionMessage):
            return self._preemption_heard(node_id, message, now_ns)
        attempt, _ = save_order(message.save)
        if save_order(message.save) == NO_ORDER:
            return [self._stray(node_id, message)]
        job = self.jobs.get(message.save.job)
        key = (message.save.job, message.save.save_id)
        if isinstance(message, CoordinatorMessage):
            participation = self.participations.get(key)
            if participation is None:
                return self._outcome_unasked(node_id, message, now_ns)
            if node_id != participation.job.coordinator.node_id:
                return [self._stray(node_id, message)]
            had_ended = participation.has_ended
            commands = participation.coordinator_said(message, now_ns)
            return commands + self._after_participation(participation, had_ended)
        if isinstance(message, WordWanted) and job is not None and not job.is_coordinator:
            return self._word_wanted(node_id, message, now_ns)
        coordination = self.coordinations.get(key)
        if coordination is None:
            if job is None or attempt > job.attempt:
                self.early.keep(node_id, message, now_ns)
                return []
            if (
                # Of an earlier attempt a save can still be ended. How, the directory tells: an
                # earlier life of this daemon may have published it.
                not job.is_coordinator
                or node_id not in job.nodes
                or why_not_there(message.save, self.node_id, self.settings.roots) is not None
                or sum(not role.has_ended for role in self.coordinations.values()) >= SAVES_MAX
            ):
                return [self._stray(node_id, message)]
            coordination = Coordination(job, message.save, self.node_id, now_ns)
            self.coordinations[key] = coordination
            commands = coordination.open()
        else:
            commands = []
        if node_id not in coordination.job.nodes:
            return [*commands, self._stray(node_id, message)]
        had_ended = coordination.has_ended
        commands += coordination.node_said(node_id, message, now_ns)
        return commands + self._after_coordination(coordination, had_ended)

    def _outcome_unasked(
        self, node_id: str, message: CoordinatorMessage, now_ns: int
    ) -> list[Command]:
        """A verdict about a save that no local rank has spoken of yet: keep it for when one
        does.
        """
        job = self.jobs.get(message.save.job)
        if (
            isinstance(message, Planned)
            or job is None
            or node_id != job.coordinator.node_id
            or save_order(message.save)[0] != job.attempt
        ):
            return [self._stray(node_id, message)]
        participation = Participation(job, message.save, self.node_id, now_ns)
        self.participations[(job.job, message.save.save_id)] = participation
        commands = participation.coordinator_said(message, now_ns)
        return commands + self._after_participation(participation, had_ended=False)

    def _word_wanted(self, node_id: str, message: WordWanted, now_ns: int) -> list[Command]:
        """A save waits for this node: end it if it cannot have what it waits for."""
        job, save = self.jobs[message.save.job], message.save
        if node_id != job.coordinator.node_id:
            return [self._stray(node_id, message)]
        role = self.participations.get((job.job, save.save_id))
        if role is not None:
            return role.resend(now_ns)
        if save_order(save)[0] != job.attempt:
            return []
        refusal = self._why_no_save(job, save)
        if refusal is not None:
            return [Send(node=job.coordinator, message=Fail(save=save, cause=refusal))]
        if not any(seat.is_lost or seat.is_leaving for seat in job.seats.values()):
            return []
        # It may have been forgotten here: then only the directory knows.
        role = Participation(job, save, self.node_id, now_ns, is_recalled=True)
        self.participations[(job.job, save.save_id)] = role
        commands = role.open() + self._miss_lost_ranks(role, now_ns)
        return commands + self._after_participation(role, had_ended=False)

    def _stray(self, node_id: str, message: SaveMessage) -> Log:
        return Log(
            level="info",
            event="message.dropped",
            save=message.save,
            fields={"peer": node_id, "type": type(message).__name__},
        )

    def _replay_early(self, job: str, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        for node_id, message in self.early.take(job, now_ns):
            commands += self._peer_said(node_id, message, now_ns)
        return commands

    # --- completions and time

    def _save_moved(self, event: SaveEvent, now_ns: int) -> list[Command]:
        key = (event.save.job, event.save.save_id)
        commands: list[Command] = []
        participation = self.participations.get(key)
        if participation is not None and isinstance(event, ParticipantEvent):
            had_ended = participation.has_ended
            commands += participation.handle(event, now_ns)
            commands += self._after_participation(participation, had_ended)
        coordination = self.coordinations.get(key)
        if coordination is not None and isinstance(event, CoordinatorEvent):
            had_ended = coordination.has_ended
            commands += coordination.handle(event, now_ns)
            commands += self._after_coordination(coordination, had_ended)
        return commands

    def _after_participation(self, participation: Participation, had_ended: bool) -> list[Command]:
        commands: list[Command] = []
        if participation.has_ended and not had_ended:
            save = participation.save
            self._remember_ended(True, (save.job, save.save_id))
            if participation.verdict is not None:
                commands += self._note_end(participation, participation.verdict)
        return commands + self._settle(participation.job)

    def _note_end(self, role: Participation, verdict: Outcome) -> list[Command]:
        job, save = role.job, role.save
        counts = job.history.outcome_counts
        counts[verdict.outcome] = counts.get(verdict.outcome, 0) + 1
        fields: dict[str, str | int | float] = {
            "outcome": verdict.outcome,
            "elapsed_s": role.elapsed_s,
            "bytes": verdict.checkpoint_bytes,
        }
        if verdict.outcome is Ending.COMMITTED:
            self._note_committed(role, verdict)
            return [Log(level="info", event="save.committed", save=save, fields=fields)]
        if verdict.cause is not None:
            job.history.note(verdict.outcome, save, verdict.cause)
        is_skipped = verdict.outcome is Ending.SKIPPED
        return [
            Log(
                level="warning" if is_skipped else "error",
                event="save.skipped" if is_skipped else "save.failed",
                save=save,
                cause=verdict.cause,
                fields=fields,
            )
        ]

    def _note_committed(self, role: Participation, verdict: Outcome) -> None:
        newest = role.job.history.last_committed
        if newest is not None and save_order(newest.save) > save_order(role.save):
            return
        role.job.history.last_committed = LastCommitted(
            save=role.save,
            path=verdict.path,
            checkpoint_bytes=verdict.checkpoint_bytes,
            elapsed_s=role.elapsed_s,
            at_ms=verdict.at_ms,
        )

    def _after_coordination(self, coordination: Coordination, had_ended: bool) -> list[Command]:
        if not coordination.has_ended or had_ended:
            return []
        save, job = coordination.save, coordination.job
        self._remember_ended(False, (save.job, save.save_id))
        commands = self._settle(job)
        is_full = coordination.failure is not None and coordination.failure.cause.code == "no-space"
        if is_full and job.keep != Keep():
            # What no rule keeps may be what fills the file system.
            commands.append(Retain(job=job.job, root=job.root, keep=job.keep))
        if coordination.outcome is Ending.COMMITTED:
            # A checkpoint that this one replaced is still under `.partial`.
            commands.append(Discard(save=save, root=job.root))
            if job.keep != Keep():
                commands.append(Retain(job=job.job, root=job.root, keep=job.keep))
        return commands

    def _remember_ended(self, is_participation: bool, key: SaveKey) -> None:
        self.ended.append((is_participation, key))
        for _ in range(len(self.ended) - ENDED_MAX):
            was_participation, old = self.ended.popleft()
            if not was_participation:
                self.coordinations.pop(old, None)
            elif self.participations[old].is_pending:
                # A writer still holds its image: keep it until that ends, and try the next one.
                self.ended.append((was_participation, old))
            else:
                del self.participations[old]

    def _settle(self, job: Job) -> list[Command]:
        """Something of this job may have become quiet: answer leaving ranks, free shared memory."""
        return self._answer_leaving(job) + self._release_arenas(job)

    def _timer_fired(self, timer: str, now_ns: int) -> list[Command]:
        kind = timer_kind(timer)
        match kind:
            case None:
                return []
            case TimerKind.LINGER:
                return self._linger_over()
            case TimerKind.PREEMPTION:
                preemption = self.preemptions.get(job_of_timer(timer))
                return [] if preemption is None else preemption.repeat(now_ns)
            case TimerKind.RECALL:
                return self._recall_over(job_of_timer(timer), now_ns)
            case TimerKind.DEADLINE | TimerKind.RESEND:
                participation = self.participations.get(save_of_timer(timer))
                if participation is None:
                    return []
                had_ended = participation.has_ended
                commands = (
                    participation.resend(now_ns)
                    if kind is TimerKind.RESEND
                    else participation.overdue(now_ns)
                )
                return commands + self._after_participation(participation, had_ended)
            case TimerKind.VERDICT | TimerKind.ASK:
                coordination = self.coordinations.get(save_of_timer(timer))
                if coordination is None:
                    return []
                had_ended = coordination.has_ended
                commands = (
                    coordination.ask(
                        self.peer_heard_at_ns, is_draining=self.stops > 0, now_ns=now_ns
                    )
                    if kind is TimerKind.ASK
                    else coordination.overdue(now_ns)
                )
                return commands + self._after_coordination(coordination, had_ended)

    # --- the end

    @property
    def is_idle(self) -> bool:
        """Nothing is pending: no save in flight, no writer at work, no housekeeping."""
        return (
            not self.housekeeping
            and not any(
                role.is_pending or role.phase is Phase.SHOWING
                for role in self.participations.values()
            )
            and all(role.has_ended for role in self.coordinations.values())
            and not self._has_recalls
        )

    def _stop_requested(self, now_ns: int) -> list[Command]:
        self.stops += 1
        if self.stops > 1:
            return [Halt(reason="told to stop at once")]
        commands: list[Command] = [Log(level="info", event="daemon.draining")]
        for name in self.jobs:
            # Who has not come back by now would not be served any more.
            commands += self._recall_over(name, now_ns)
        return commands

    def _check_halt(self, now_ns: int) -> list[Command]:
        if self.stops == 1 and self.is_idle:
            return [Halt(reason="drained")]
        if not self.settings.is_embedded:
            return []
        may_linger = not self.open_sessions and self.is_idle
        if may_linger and not self._is_lingering:
            self._is_lingering = True
            at_ns = now_ns + int(self.settings.linger_s * SECOND_NS)
            return [SetTimer(timer=timer_name(TimerKind.LINGER), at_ns=at_ns)]
        if not may_linger and self._is_lingering:
            self._is_lingering = False
            return [ClearTimer(timer=timer_name(TimerKind.LINGER))]
        return []

    def _linger_over(self) -> list[Command]:
        if self.open_sessions or not self.is_idle:
            return []
        return [Halt(reason="nothing is pending and no trainer is here")]
