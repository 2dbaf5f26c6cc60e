"""The saves of a node: those in flight, in both roles, and the last ones that have ended.

Begins a save's roles and hands them the events that concern them. When a save ends, it notes how,
has old checkpoints and leftovers removed, and lets go of the ranks that waited for it. `peers`
decides which messages of other nodes count.
"""

from __future__ import annotations

from typing import Final

from milepost.wire.messages import (
    Cause,
    Concluded,
    Ending,
    Fail,
    Keep,
    Outcome,
    RankMessage,
    SaveRef,
    Staged,
)
from milepostd.core.commands import Command, Discard, Log, Reply, Retain, Send
from milepostd.core.coordination import Coordination
from milepostd.core.events import CoordinatorEvent, ParticipantEvent, SaveEvent
from milepostd.core.halting import Halting
from milepostd.core.job import NO_SESSION, Job, LastCommitted
from milepostd.core.joining import why_not_there
from milepostd.core.participation import Participation
from milepostd.core.phases import Phase
from milepostd.core.role import Role, SaveKey
from milepostd.core.roster import Roster
from milepostd.core.timers import TimerKind

SAVES_MAX: Final = 256
"""Most saves in flight on one node in each role, over all jobs: a few slots for each of the jobs
that a node serves."""

ENDED_MAX: Final = 256
"""Most ended saves that are kept to answer late messages. The oldest are forgotten; late messages
about those are ignored."""


class NodeSaves:
    """The saves of one node, by job and save id.

    Args:
        roots: where checkpoints may be written, with all folders below; empty: anywhere.
    """

    def __init__(
        self, node_id: str, roots: tuple[str, ...], halting: Halting, roster: Roster
    ) -> None:
        self.node_id = node_id
        self.roots = roots
        self.roster = roster
        self.halting = halting
        self.participations: dict[SaveKey, Participation] = {}
        self.coordinations: dict[SaveKey, Coordination] = {}
        self.ended: dict[tuple[bool, SaveKey], None] = {}
        """The ended saves, oldest first, as (whether it is a participation, key)."""

    # --- beginning

    def why_not(self, job: Job, save: SaveRef) -> Cause | None:
        """Return why this save cannot begin here now; None if it can."""
        here = self.node_id
        if self.halting.is_draining:
            return Cause("daemon-lost", f"node {here} is shutting down", "", here)
        if not self.roster.is_newest(job):
            return Cause(
                "attempt-superseded",
                f"a newer attempt of job {job.job} has started; attempt {job.attempt} is history",
                "end the older run",
                here,
            )
        if sum(not role.has_ended for role in self.participations.values()) >= SAVES_MAX:
            return Cause("busy", f"node {here} has {SAVES_MAX} saves in flight", "", here)
        return why_not_there(save, here, self.roots)

    def take_part(
        self, job: Job, save: SaveRef, now_ns: int, *, is_recalled: bool = False
    ) -> tuple[Participation, list[Command]]:
        """Begin this node's part in a save. The save fails at once if a rank is gone for good."""
        role = Participation(job, save, self.node_id, now_ns, is_recalled=is_recalled)
        self.participations[role.key] = role
        return role, [*role.open(), *self._miss_lost_ranks(role, now_ns)]

    def note(self, job: Job, save: SaveRef, now_ns: int) -> Participation:
        """Keep a save whose outcome is known before any local rank has called it."""
        role = Participation(job, save, self.node_id, now_ns)
        self.participations[role.key] = role
        return role

    def coordinate(
        self, job: Job, save: SaveRef, now_ns: int
    ) -> tuple[Coordination, list[Command]] | None:
        """Begin the coordinator's part in a save. None: it may not be written in its place, or too
        many saves are in flight.
        """
        if (
            why_not_there(save, self.node_id, self.roots) is not None
            or sum(not role.has_ended for role in self.coordinations.values()) >= SAVES_MAX
        ):
            return None
        role = Coordination(job, save, self.node_id, now_ns)
        self.coordinations[role.key] = role
        return role, role.open()

    # --- events of a save

    def rank_said(
        self,
        job: Job,
        rank: int,
        message: RankMessage,
        now_ns: int,
        *,
        session: int = NO_SESSION,
        is_recalled: bool = False,
    ) -> list[Command]:
        """Take a local rank's message about a save, or what its arena shows in its stead.

        Args:
            session: to which a refusal is sent.
            is_recalled: the arena was staged in an earlier life of this daemon.
        """
        if isinstance(message, Staged):
            job.seats[rank].arenas.add(message.arena)
        commands: list[Command] = []
        role = self.participations.get((job.job, message.save.save_id))
        if role is None:
            refusal = self.why_not(job, message.save)
            if refusal is not None:
                return [
                    refused_save(session, message.save, refusal),
                    # So that the other nodes do not wait for this one until the deadline.
                    Send(node=job.coordinator, message=Fail(save=message.save, cause=refusal)),
                ]
            role, commands = self.take_part(job, message.save, now_ns, is_recalled=is_recalled)
        commands += role.rank_said(rank, message, now_ns)
        return commands + self.after(role)

    def handle(self, event: SaveEvent, now_ns: int) -> list[Command]:
        """Hand the completion of a command to the roles that gave it."""
        key = (event.save.job, event.save.save_id)
        commands: list[Command] = []
        participation = self.participations.get(key)
        if participation is not None and isinstance(event, ParticipantEvent):
            commands += participation.handle(event, now_ns)
            commands += self.after(participation)
        coordination = self.coordinations.get(key)
        if coordination is not None and isinstance(event, CoordinatorEvent):
            commands += coordination.handle(event, now_ns)
            commands += self.after(coordination)
        return commands

    def timer_fired(
        self, kind: TimerKind, key: SaveKey, heard_at_ns: dict[str, int], now_ns: int
    ) -> list[Command]:
        """Tell a role that its timer has run out.

        Args:
            heard_at_ns: when each peer was heard last.
        """
        if kind in (TimerKind.DEADLINE, TimerKind.RESEND):
            participation = self.participations.get(key)
            if participation is None:
                return []
            is_deadline = kind is TimerKind.DEADLINE
            commands = (
                participation.overdue(now_ns) if is_deadline else participation.resend(now_ns)
            )
            return commands + self.after(participation)
        coordination = self.coordinations.get(key)
        if coordination is None:
            return []
        commands = (
            coordination.overdue(now_ns)
            if kind is TimerKind.VERDICT
            else coordination.ask(heard_at_ns, is_draining=self.halting.is_draining, now_ns=now_ns)
        )
        return commands + self.after(coordination)

    def supersede(self, job: Job, attempt: int, now_ns: int) -> list[Command]:
        """Fail the saves of an attempt that some local ranks have not staged. They never will:
        a newer attempt has begun.
        """
        commands: list[Command] = []
        for role in [*self.participations.values()]:
            if role.job is job and not role.has_ended and len(role.staged) < len(job.ranks_here):
                cause = Cause(
                    "attempt-superseded",
                    f"attempt {attempt} of job {job.job} has started",
                    "",
                    self.node_id,
                )
                commands += role.cannot(cause, now_ns)
        return commands

    def miss_ranks(self, job: Job, now_ns: int) -> list[Command]:
        """Fail the saves of a job that wait for a rank which is gone for good."""
        commands: list[Command] = []
        for role in [*self.participations.values()]:
            if role.job is job and not role.has_ended:
                commands += self._miss_lost_ranks(role, now_ns)
        return commands

    def _miss_lost_ranks(self, role: Participation, now_ns: int) -> list[Command]:
        for rank, seat in role.job.seats.items():
            if (seat.is_lost or seat.is_leaving) and rank not in role.staged:
                save = role.save
                cause = Cause(
                    "rank-missing",
                    f"rank {rank} (pid {seat.pid}) {'left' if seat.is_leaving else 'was lost'} "
                    f"before it staged save {save.save_id} of step {save.step}: {seat.reason}",
                    "the last checkpoint stands; the next save works once all ranks are there",
                    self.node_id,
                    rank,
                )
                return role.cannot(cause, now_ns)
        return []

    # --- the end of a save

    def after(self, role: Participation | Coordination) -> list[Command]:
        """Return what follows from a role's move: for its end, once, and for its job."""
        is_new_end = role.has_ended and self._remember_end(role)
        if isinstance(role, Participation):
            commands: list[Command] = []
            if is_new_end and role.verdict is not None:
                commands += self._note_end(role, role.verdict)
            return commands + self.settle(role.job)
        if not is_new_end:
            return []
        return self.settle(role.job) + _removals(role)

    def _remember_end(self, role: Role) -> bool:
        """Keep an ended save for late messages, and forget the oldest one.

        Return False for a save whose end is known already.
        """
        ended = (isinstance(role, Participation), role.key)
        if ended in self.ended:
            return False
        self.ended[ended] = None
        for _ in range(len(self.ended) - ENDED_MAX):
            oldest = next(iter(self.ended))
            del self.ended[oldest]
            is_participation, key = oldest
            if not is_participation:
                self.coordinations.pop(key, None)
            elif self.participations[key].is_pending:
                # A writer still reads its image: keep it, and try the next one.
                self.ended[oldest] = None
            else:
                del self.participations[key]
        return True

    def _note_end(self, role: Participation, verdict: Outcome) -> list[Command]:
        save, history = role.save, role.job.history
        counts = history.outcome_counts
        counts[verdict.outcome] = counts.get(verdict.outcome, 0) + 1
        fields: dict[str, str | int | float] = {
            "outcome": verdict.outcome,
            "elapsed_s": role.elapsed_s,
            "bytes": verdict.checkpoint_bytes,
        }
        if verdict.outcome is Ending.COMMITTED:
            history.note_committed(
                LastCommitted(
                    save=save,
                    path=verdict.path,
                    checkpoint_bytes=verdict.checkpoint_bytes,
                    elapsed_s=role.elapsed_s,
                    at_ms=verdict.at_ms,
                )
            )
            return [Log(level="info", event="save.committed", save=save, fields=fields)]
        if verdict.cause is not None:
            history.note_failed(verdict.outcome, save, verdict.cause)
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

    def settle(self, job: Job) -> list[Command]:
        """Let ranks leave and free shared memory, unless a save of the job is pending."""
        if self.has_pending(job):
            return []
        return self.roster.release_leaving(job) + self.release_arenas(job)

    def release_arenas(self, job: Job) -> list[Command]:
        """Free the shared memory of lost ranks, unless a save of the job is pending."""
        if self.has_pending(job):
            return []
        may_sweep = not self.roster.is_newest(job) and not self.has_earlier_pending(job.job)
        return self.roster.release_arenas(job, may_sweep=may_sweep)

    # --- what is pending

    def has_pending(self, job: Job) -> bool:
        """Whether a save of this attempt, or one of its writers, goes on."""
        return any(
            role.job is job and role.is_pending for role in self.participations.values()
        ) or any(role.job is job and not role.has_ended for role in self.coordinations.values())

    def has_earlier_pending(self, name: str) -> bool:
        """Whether a save of an earlier attempt, or one of its writers, goes on."""
        newest = self.roster.jobs.get(name)
        return any(
            role.job.job == name and role.job is not newest and role.is_pending
            for role in self.participations.values()
        )

    @property
    def is_idle(self) -> bool:
        """Whether no save or writer goes on, and no aborted directory is kept for the peers."""
        return not any(
            role.is_pending or role.phase is Phase.SHOWING for role in self.participations.values()
        ) and all(role.has_ended for role in self.coordinations.values())


def refused_save(session: int, save: SaveRef, cause: Cause) -> Reply:
    """Tell a rank that its save was refused: nothing is kept of it."""
    concluded = Concluded(save_id=save.save_id, outcome=Ending.FAILED, cause=cause)
    return Reply(session=session, message=concluded)


def _removals(role: Coordination) -> list[Command]:
    """Return the commands that remove what is not needed after a save has ended."""
    save, job = role.save, role.job
    commands: list[Command] = []
    is_full = role.failure is not None and role.failure.cause.code == "no-space"
    if is_full and job.keep != Keep():
        # Checkpoints that no rule keeps may be what fills the file system.
        commands.append(Retain(job=job.job, root=job.root, keep=job.keep))
    if role.outcome is Ending.COMMITTED:
        # The checkpoint that this one replaced is still under `.partial`.
        commands.append(Discard(save=save, root=job.root))
        if job.keep != Keep():
            commands.append(Retain(job=job.job, root=job.root, keep=job.keep))
    return commands
