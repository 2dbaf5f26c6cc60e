"""One node: sessions, peers, jobs and saves in flight. `Node.handle(event, now_ns) -> commands` is
its only entry.

Pure: no socket, file, clock, thread, log, environment or torch. Nothing depends on the order of
sets. An event that makes no sense where the node stands changes nothing and yields a log line at
most; it never raises for what somebody else did.
"""

from __future__ import annotations

from collections import deque
from pathlib import PurePosixPath
from typing import Final

import msgspec

from milepost.protocol import (
    Cause,
    Concluded,
    Join,
    Joined,
    Keep,
    Left,
    NodeRef,
    Outcome,
    PeerMessage,
    Planned,
    Refused,
    SaveRef,
)
from milepostd.core.commands import (
    AnyCommand,
    ClearTimer,
    Command,
    Discard,
    Halt,
    Log,
    MeetPeers,
    RemoveArenas,
    Reply,
    Retain,
    Send,
    SetTimer,
    WarmPlanner,
)
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
from milepostd.core.job import Job, LastCommitted, LastFailed, Seat
from milepostd.core.save import SECOND_NS, Coordination, Participation

JOBS_MAX: Final = 64
"""Jobs one node serves: many more than a host runs, few enough that a leak shows."""

SAVES_MAX: Final = 256
"""Saves in flight on one node, over all jobs: JOBS_MAX jobs with a few slots each."""

ENDED_MAX: Final = 256
"""Ended saves kept to answer late messages; older ones are forgotten, and late messages about them
ignored."""

EARLY_MAX: Final = 1024
"""Messages kept for jobs that no local rank has joined yet: a peer may be faster by the start-up of
a process."""

EARLY_S: Final = 60.0
"""How long such messages are kept; their senders repeat them anyway."""

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
        self.stops = 0
        self.peer_heard_at_ns: dict[str, int] = {}
        self._ended: deque[tuple[bool, SaveKey]] = deque()
        self._early: deque[tuple[int, str, PeerMessage]] = deque()
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
            case SessionOpened():
                self.open_sessions.add(event.session)
                return []
            case RankJoined():
                return self._rank_joined(event, now_ns)
            case RankSaid():
                return self._rank_said(event, now_ns)
            case RankLeft():
                return self._rank_left(event)
            case SessionLost():
                return self._session_lost(event, now_ns)
            case PeerSaid():
                return self._peer_said(event.node_id, event.message, now_ns)
            case TimerFired():
                return self._timer_fired(event.timer, now_ns)
            case StopRequested():
                return self._stop_requested()
            case Retained():
                self.housekeeping -= 1
                return []
            case Discarded():
                self.housekeeping -= 1
                return self._settle(event.save)
            case _:
                return self._save_moved(event, now_ns)

    # --- sessions

    def _rank_joined(self, event: RankJoined, now_ns: int) -> list[Command]:
        join = event.message
        cause = self._why_not(join)
        if cause is not None:
            return [
                Log(level="warning", event="session.refused", cause=cause,
                    fields={"job": join.job, "rank": join.rank}),
                Reply(session=event.session, message=Refused(cause=cause)),
            ]  # fmt: skip
        commands: list[Command] = []
        job = self.jobs.get(join.job)
        if job is None or join.attempt > job.attempt:
            if job is not None:
                commands += self._supersede(job, join.attempt, now_ns)
            previous = job
            job = Job(join, self.node_id)
            if previous is not None:
                job.last_committed = previous.last_committed
                job.last_failed = previous.last_failed
                job.latest_order = previous.latest_order
                job.outcome_counts = previous.outcome_counts
            self.jobs[join.job] = job
            commands.append(MeetPeers(nodes=tuple(job.nodes.values())))
            if job.is_coordinator:
                commands.append(WarmPlanner())
        old = job.seats.get(join.rank)
        if old is not None and not old.is_lost:
            self.sessions.pop(old.session, None)
        job.seats[join.rank] = Seat(
            session=event.session, pid=event.pid, arenas=old.arenas if old is not None else set()
        )
        self.sessions[event.session] = Session(job, join.rank)
        commands.append(
            Reply(
                session=event.session,
                message=Joined(job=join.job, attempt=join.attempt, rank=join.rank),
            )
        )
        commands.append(
            Log(level="info", event="session.joined",
                fields={"job": join.job, "rank": join.rank, "pid": event.pid,
                        "attempt": join.attempt})
        )  # fmt: skip
        return commands + self._replay_early(join.job, now_ns)

    def _why_not(self, join: Join) -> Cause | None:
        """Why this rank cannot join; None if it can."""
        here = self.node_id
        if self.stops:
            return Cause("daemon-lost", f"node {here} is shutting down", "", here, join.rank)
        world = len(join.node_of_rank)
        if not (
            0 <= join.rank < world
            and all(0 <= index < len(join.cohort) for index in join.node_of_rank)
            and len({node.node_id for node in join.cohort}) == len(join.cohort)
            and join.cohort[join.node_of_rank[join.rank]].node_id == here
        ):
            return Cause(
                "protocol",
                f"rank {join.rank} of {world} describes a cohort that does not place it on {here}",
                "a restarted daemon needs a new Checkpointer on every rank",
                here,
                join.rank,
            )
        if not self._is_root_allowed(join.root):
            return Cause(
                "root-refused",
                f"root {join.root} lies under none of this daemon's roots: "
                + ", ".join(self.settings.roots),
                "start milepostd with --root for it",
                here,
                join.rank,
            )
        job = self.jobs.get(join.job)
        if job is None:
            if len(self.jobs) >= JOBS_MAX and not self._forget_job():
                return Cause(
                    "busy", f"node {here} serves {JOBS_MAX} jobs already", "", here, join.rank
                )
            return None
        if join.attempt < job.attempt:
            return Cause(
                "attempt-superseded",
                f"job {join.job} is at attempt {job.attempt}; attempt {join.attempt} is history",
                "end the older run",
                here,
                join.rank,
            )
        if join.attempt == job.attempt and not job.agrees_with(join):
            return Cause(
                "protocol",
                f"rank {join.rank} of job {join.job} describes another cohort than its fellows",
                "",
                here,
                join.rank,
            )
        return None

    def _is_root_allowed(self, root: str) -> bool:
        path = PurePosixPath(root)
        if not path.is_absolute() or ".." in path.parts:
            return False
        return not self.settings.roots or any(
            path.is_relative_to(allowed) for allowed in self.settings.roots
        )

    def _forget_job(self) -> bool:
        """Make room for a job by forgetting one that nobody is connected to and that has nothing
        pending.
        """
        for name, job in self.jobs.items():
            if all(seat.is_lost for seat in job.seats.values()) and not self._has_pending(job):
                del self.jobs[name]
                return True
        return False

    def _supersede(self, job: Job, attempt: int, now_ns: int) -> list[Command]:
        """A newer attempt begins: saves that not all local ranks have staged can never complete."""
        commands: list[Command] = []
        for participation in [*self.participations.values()]:
            if (
                participation.job is job
                and not participation.is_concluded
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
        if message.save.job != job.job:
            cause = Cause("protocol", f"rank {session.rank} speaks of job {message.save.job!r}")
            return [Reply(session=event.session, message=Refused(cause=cause))]
        key = (job.job, message.save.save_id)
        participation = self.participations.get(key)
        commands: list[Command] = []
        if participation is None:
            if self.stops:
                cause = Cause(
                    "daemon-lost", f"node {self.node_id} is shutting down", "", self.node_id
                )
                return [self._refuse_save(event.session, message.save, cause)]
            if len(self.participations) - len(self._ended) >= SAVES_MAX:
                cause = Cause(
                    "busy", f"node {self.node_id} has {SAVES_MAX} saves in flight", "", self.node_id
                )
                return [self._refuse_save(event.session, message.save, cause)]
            participation = Participation(job, message.save, self.node_id, now_ns)
            self.participations[key] = participation
            commands += participation.open()
        was_concluded = participation.is_concluded
        commands += participation.rank_said(session.rank, message, now_ns)
        return commands + self._after_participation(participation, was_concluded)

    def _refuse_save(self, session: int, save: SaveRef, cause: Cause) -> Reply:
        concluded = Concluded(save_id=save.save_id, outcome="failed", cause=cause)
        return Reply(session=session, message=concluded)

    def _rank_left(self, event: RankLeft) -> list[Command]:
        session = self.sessions.get(event.session)
        if session is None:
            return [Reply(session=event.session, message=Left())]
        session.job.seats[session.rank].is_leaving = True
        return self._answer_leaving(session.job)

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
        ) or any(role.job is job and not role.is_concluded for role in self.coordinations.values())

    def _session_lost(self, event: SessionLost, now_ns: int) -> list[Command]:
        self.open_sessions.discard(event.session)
        session = self.sessions.pop(event.session, None)
        if session is None:
            return []
        job, rank = session.job, session.rank
        seat = job.seats[rank]
        seat.is_lost = True
        commands: list[Command] = [
            Log(level="info" if seat.is_leaving else "warning", event="session.lost",
                fields={"job": job.job, "rank": rank, "pid": seat.pid, "reason": event.reason})
        ]  # fmt: skip
        for participation in [*self.participations.values()]:
            if participation.job is not job or participation.is_concluded:
                continue
            if rank not in participation.staged:
                cause = Cause(
                    "rank-missing",
                    f"rank {rank} (pid {seat.pid}) was lost before it staged save "
                    f"{participation.save.save_id} of step {participation.save.step}: "
                    f"{event.reason}",
                    "the last checkpoint stands; the next save works once all ranks are there",
                    self.node_id,
                    rank,
                )
                commands += participation.cannot(cause, now_ns)
        return commands + self._release_arenas(job)

    def _release_arenas(self, job: Job) -> list[Command]:
        """Unlink the arenas of lost ranks, once no save reads from them."""
        if self._has_pending(job):
            return []
        paths: list[str] = []
        for seat in job.seats.values():
            if seat.is_lost and seat.arenas:
                paths += sorted(seat.arenas)
                seat.arenas = set()
        return [RemoveArenas(paths=tuple(paths))] if paths else []

    # --- peers

    def _peer_said(self, node_id: str, message: PeerMessage, now_ns: int) -> list[Command]:
        self.peer_heard_at_ns[node_id] = now_ns
        job = self.jobs.get(message.save.job)
        key = (message.save.job, message.save.save_id)
        if isinstance(message, Planned | Outcome):
            participation = self.participations.get(key)
            if participation is None:
                return self._outcome_unasked(node_id, message, now_ns)
            if node_id != participation.job.coordinator.node_id:
                return [self._stray(node_id, message)]
            was_concluded = participation.is_concluded
            commands = (
                participation.planned(message)
                if isinstance(message, Planned)
                else participation.heard_outcome(message, now_ns)
            )
            return commands + self._after_participation(participation, was_concluded)
        coordination = self.coordinations.get(key)
        if coordination is None:
            attempt = int(message.save.save_id.partition("-")[0] or 0)
            if job is None or attempt > job.attempt:
                return self._keep_early(node_id, message, now_ns)
            if attempt < job.attempt or not job.is_coordinator:
                return [self._stray(node_id, message)]
            coordination = Coordination(job, message.save, self.node_id, now_ns)
            self.coordinations[key] = coordination
            commands = coordination.open()
        else:
            commands = []
        if node_id not in coordination.job.nodes:
            return [*commands, self._stray(node_id, message)]
        was_concluded = coordination.is_concluded
        commands += coordination.node_said(node_id, message, now_ns)
        return commands + self._after_coordination(coordination, was_concluded)

    def _outcome_unasked(
        self, node_id: str, message: Planned | Outcome, now_ns: int
    ) -> list[Command]:
        """A verdict about a save that no local rank has spoken of yet: keep it for when one
        does.
        """
        job = self.jobs.get(message.save.job)
        if (
            isinstance(message, Planned)
            or job is None
            or node_id != job.coordinator.node_id
            or not message.save.save_id.startswith(f"{job.attempt}-")
        ):
            return [self._stray(node_id, message)]
        participation = Participation(job, message.save, self.node_id, now_ns)
        self.participations[(job.job, message.save.save_id)] = participation
        commands = participation.heard_outcome(message, now_ns)
        return commands + self._after_participation(participation, was_concluded=False)

    def _stray(self, node_id: str, message: PeerMessage) -> Log:
        return Log(
            level="info",
            event="message.dropped",
            save=message.save,
            fields={"peer": node_id, "type": type(message).__name__},
        )

    def _keep_early(self, node_id: str, message: PeerMessage, now_ns: int) -> list[Command]:
        while self._early and (
            len(self._early) >= EARLY_MAX or now_ns - self._early[0][0] > int(EARLY_S * SECOND_NS)
        ):
            self._early.popleft()
        self._early.append((now_ns, node_id, message))
        return []

    def _replay_early(self, job: str, now_ns: int) -> list[Command]:
        mine = [entry for entry in self._early if entry[2].save.job == job]
        self._early = deque(entry for entry in self._early if entry[2].save.job != job)
        commands: list[Command] = []
        for _, node_id, message in mine:
            commands += self._peer_said(node_id, message, now_ns)
        return commands

    # --- completions and time

    def _save_moved(
        self,
        event: BytesWritten
        | FileDurable
        | FileFailed
        | FragmentDurable
        | FragmentFailed
        | PlanMade
        | PlanFailed
        | IndexBuilt
        | IndexFailed
        | Published
        | PublishFailed
        | OutcomeFound,
        now_ns: int,
    ) -> list[Command]:
        key = (event.save.job, event.save.save_id)
        commands: list[Command] = []
        participation = self.participations.get(key)
        if participation is not None:
            was_concluded = participation.is_concluded
            match event:
                case BytesWritten():
                    return participation.bytes_moved(event)
                case FileDurable():
                    commands += participation.file_durable(event, now_ns)
                case FileFailed():
                    commands += participation.file_failed(event, now_ns)
                case FragmentDurable():
                    commands += participation.fragment_durable(event, now_ns)
                case FragmentFailed():
                    commands += participation.fragment_failed(event, now_ns)
                case OutcomeFound():
                    commands += participation.outcome_found(event, now_ns)
                case _:
                    pass
            commands += self._after_participation(participation, was_concluded)
        coordination = self.coordinations.get(key)
        if coordination is not None:
            was_concluded = coordination.is_concluded
            match event:
                case PlanMade():
                    commands += coordination.plan_made(event)
                case PlanFailed():
                    commands += coordination.plan_failed(event, now_ns)
                case IndexBuilt():
                    commands += coordination.index_built(event)
                case IndexFailed():
                    commands += coordination.index_failed(event, now_ns)
                case Published():
                    commands += coordination.published(event, now_ns)
                case PublishFailed():
                    commands += coordination.publish_failed(event, now_ns)
                case OutcomeFound():
                    commands += coordination.outcome_found(event, now_ns)
                case _:
                    pass
            commands += self._after_coordination(coordination, was_concluded)
        return commands

    def _after_participation(
        self, participation: Participation, was_concluded: bool
    ) -> list[Command]:
        commands: list[Command] = []
        if participation.is_concluded and not was_concluded:
            job, save = participation.job, participation.save
            self._remember_ended(True, (save.job, save.save_id))
            if participation.outcome == "planned":
                return self._settle(save)
            counts = job.outcome_counts
            counts[participation.outcome] = counts.get(participation.outcome, 0) + 1
            message = participation.message
            fields: dict[str, str | int | float] = {
                "outcome": participation.outcome,
                "elapsed_s": message.elapsed_s,
                "bytes": message.checkpoint_bytes,
            }
            if participation.outcome == "committed":
                self._note_committed(participation)
                commands.append(Log(level="info", event="save.committed", save=save, fields=fields))
            else:
                if message.cause is not None:
                    job.last_failed = LastFailed(save=save, cause=message.cause)
                level = "warning" if participation.outcome == "skipped" else "error"
                event = "save.skipped" if participation.outcome == "skipped" else "save.failed"
                commands.append(
                    Log(level=level, event=event, save=save, cause=message.cause, fields=fields)
                )
        return commands + self._settle(participation.save)

    def _note_committed(self, participation: Participation) -> None:
        job, message = participation.job, participation.message
        job.last_committed = LastCommitted(
            save=participation.save,
            path=message.path,
            checkpoint_bytes=message.checkpoint_bytes,
            elapsed_s=message.elapsed_s,
            at_ms=participation.at_ms,
        )

    def _after_coordination(self, coordination: Coordination, was_concluded: bool) -> list[Command]:
        if not coordination.is_concluded or was_concluded:
            return []
        save, job = coordination.save, coordination.job
        self._remember_ended(False, (save.job, save.save_id))
        if coordination.outcome is None:
            return self._settle(save)
        if coordination.outcome.outcome != "committed":
            return self._settle(save)
        # A checkpoint that this one replaced is still under `.partial`.
        discard = Discard(save=save, root=job.root)
        if job.keep == Keep():
            return [discard]
        return [discard, Retain(job=job.job, root=job.root, keep=job.keep)]

    def _remember_ended(self, is_participation: bool, key: SaveKey) -> None:
        self._ended.append((is_participation, key))
        while len(self._ended) > ENDED_MAX:
            was_participation, old = self._ended.popleft()
            if was_participation:
                ended = self.participations.get(old)
                if ended is not None and ended.is_pending:
                    # A writer still holds its image: keep it until that ends.
                    self._ended.append((was_participation, old))
                    break
                self.participations.pop(old, None)
            else:
                self.coordinations.pop(old, None)

    def _settle(self, save: SaveRef) -> list[Command]:
        """Something of this job may have become quiet: answer leaving ranks, free shared memory."""
        job = self.jobs.get(save.job)
        if job is None:
            return []
        return self._answer_leaving(job) + self._release_arenas(job)

    def _timer_fired(self, timer: str, now_ns: int) -> list[Command]:
        kind, _, rest = timer.partition("/")
        if kind == "linger":
            return self._linger_over()
        job, _, save_id = rest.rpartition("/")
        key = (job, save_id)
        if kind.startswith("participant"):
            participation = self.participations.get(key)
            if participation is None:
                return []
            was_concluded = participation.is_concluded
            commands = (
                participation.resend(now_ns)
                if kind == "participant.resend"
                else participation.overdue(now_ns)
            )
            return commands + self._after_participation(participation, was_concluded)
        coordination = self.coordinations.get(key)
        if coordination is None:
            return []
        was_concluded = coordination.is_concluded
        commands = coordination.overdue(now_ns)
        return commands + self._after_coordination(coordination, was_concluded)

    # --- the end

    @property
    def is_idle(self) -> bool:
        """Nothing is pending: no save in flight, no writer at work, no housekeeping."""
        return (
            not self.housekeeping
            and not any(role.is_pending for role in self.participations.values())
            and all(role.is_concluded for role in self.coordinations.values())
        )

    def _stop_requested(self) -> list[Command]:
        self.stops += 1
        if self.stops > 1:
            return [Halt(reason="told to stop at once")]
        return [Log(level="info", event="daemon.draining")]

    def _check_halt(self, now_ns: int) -> list[Command]:
        if self.stops == 1 and self.is_idle:
            return [Halt(reason="drained")]
        if not self.settings.is_embedded:
            return []
        may_linger = not self.open_sessions and self.is_idle
        if may_linger and not self._is_lingering:
            self._is_lingering = True
            at_ns = now_ns + int(self.settings.linger_s * SECOND_NS)
            return [SetTimer(timer="linger/", at_ns=at_ns)]
        if not may_linger and self._is_lingering:
            self._is_lingering = False
            return [ClearTimer(timer="linger/")]
        return []

    def _linger_over(self) -> list[Command]:
        if self.open_sessions or not self.is_idle:
            return []
        return [Halt(reason="nothing is pending and no trainer is here")]
