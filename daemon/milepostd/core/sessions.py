"""Messages of trainers: they join a job, report to saves, are preempted, leave, or are lost."""

from __future__ import annotations

from typing import Final

from milepost.wire.messages import Cause, Join, Joined, Left, Refused
from milepostd.core.commands import Command, KeepJournal, Log, MeetPeers, Reply, StartPlanner
from milepostd.core.events import RankJoined, RankLeft, RankSaid, RankSignalled, SessionLost
from milepostd.core.halting import Halting
from milepostd.core.job import Job, save_order
from milepostd.core.joining import why_not
from milepostd.core.peers import Peers
from milepostd.core.preemption import Preemptions
from milepostd.core.roster import Roster, sweep
from milepostd.core.saves import NodeSaves, refused_save

JOBS_MAX: Final = 64
"""Most jobs that one node serves: many more than a host runs, and few enough that a leak shows."""


class Sessions:
    """The trainers of one node. Keeps nothing of its own.

    Args:
        roots: where checkpoints may be written, with all folders below; empty: anywhere.
    """

    def __init__(
        self,
        node_id: str,
        roots: tuple[str, ...],
        halting: Halting,
        roster: Roster,
        saves: NodeSaves,
        preemptions: Preemptions,
        peers: Peers,
    ) -> None:
        self.node_id = node_id
        self.roots = roots
        self.halting = halting
        self.roster = roster
        self.saves = saves
        self.preemptions = preemptions
        self.peers = peers

    # --- joining

    def joined(self, event: RankJoined, now_ns: int) -> list[Command]:
        """Let a session join a job as one of its ranks, or refuse it."""
        join = event.message
        if event.session not in self.roster.open_sessions:
            return []
        cause = self.why_not(join) or self._why_not_again(event.session, join)
        if cause is not None:
            return [
                Log(level="warning", event="session.refused", cause=cause,
                    fields={"job": join.job, "rank": join.rank}),
                Reply(session=event.session, message=Refused(cause=cause)),
            ]  # fmt: skip
        commands: list[Command] = []
        job = self.roster.jobs.get(join.job)
        if job is None or join.attempt > job.attempt:
            job, commands = self._begin(join, job, now_ns)
        self.roster.seat(job, join.rank, event.session, event.pid)
        if not job.is_journalled:
            job.is_journalled = True
            commands.append(KeepJournal(message=join))
        commands += [
            Reply(
                session=event.session,
                message=Joined(job=join.job, attempt=join.attempt, rank=join.rank),
            ),
            Log(level="info", event="session.joined",
                fields={"job": join.job, "rank": join.rank, "pid": event.pid,
                        "attempt": join.attempt, "root": join.root}),
        ]  # fmt: skip
        commands += self.preemptions.joined(job, join.rank)
        return commands + self.peers.replay(join.job, now_ns)

    def _begin(self, join: Join, previous: Job | None, now_ns: int) -> tuple[Job, list[Command]]:
        """Begin a new attempt of a job, in place of the previous one."""
        commands: list[Command] = []
        if previous is not None:
            commands += self.saves.supersede(previous, join.attempt, now_ns)
        job = Job(join, self.node_id, None if previous is None else previous.history)
        self.roster.jobs[join.job] = job
        commands.append(MeetPeers(nodes=job.peers()))
        if previous is not None:
            commands += self.saves.release_arenas(previous)
        if not self.saves.has_earlier_pending(job.job):
            commands.append(sweep(job, job.ranks_here))
        if job.is_coordinator:
            commands.append(StartPlanner())
        return job, commands

    def why_not(self, join: Join) -> Cause | None:
        """Return why a rank cannot join the job now; None if it can."""
        here, known = self.node_id, self.roster.jobs.get(join.job)
        if self.halting.is_draining:
            return Cause("daemon-lost", f"node {here} is shutting down", "", here, join.rank)
        cause = why_not(join, here, self.roots, known)
        if cause is None and known is None and not self._has_room():
            return Cause("busy", f"node {here} serves {JOBS_MAX} jobs already", "", here, join.rank)
        return cause

    def _why_not_again(self, session: int, join: Join) -> Cause | None:
        """Return why a session that has joined already cannot join so; None if it can."""
        held = self.roster.joined.get(session)
        if held is None or (held.job.job == join.job and held.rank == join.rank):
            # The rank repeats itself, or its process begins another attempt.
            return None
        return Cause(
            "protocol",
            f"the session is rank {held.rank} of job {held.job.job} already",
            "one session is one rank",
            self.node_id,
            join.rank,
        )

    def _has_room(self) -> bool:
        """Make room for another job, and return whether there is any. If need be, forget a job that
        has no ranks here and nothing pending.
        """
        jobs = self.roster.jobs
        if len(jobs) < JOBS_MAX:
            return True
        for name, job in jobs.items():
            is_left = all(seat.is_lost for seat in job.seats.values())
            if is_left and not self.saves.has_pending(job):
                del jobs[name]
                self.preemptions.forget(name)
                self.peers.forget_strangers()
                return True
        return False

    # --- having joined

    def said(self, event: RankSaid, now_ns: int) -> list[Command]:
        """Take a rank's message about a save."""
        joined = self.roster.joined.get(event.session)
        if joined is None:
            return []
        job, rank, message = joined.job, joined.rank, event.message
        if message.save.job != job.job or save_order(message.save)[0] != job.attempt:
            cause = Cause(
                "protocol",
                f"rank {rank} of job {job.job}, attempt {job.attempt}, speaks of save "
                f"{message.save.save_id!r} of job {message.save.job!r}",
                "",
                self.node_id,
                rank,
            )
            return [refused_save(event.session, message.save, cause)]
        return self.saves.rank_said(job, rank, message, now_ns, session=event.session)

    def signalled(self, event: RankSignalled, now_ns: int) -> list[Command]:
        """Take a rank's message about preemption."""
        joined = self.roster.joined.get(event.session)
        if joined is None:
            return []
        return self.preemptions.signalled(joined.job, joined.rank, event.message, now_ns)

    def left(self, event: RankLeft, now_ns: int) -> list[Command]:
        """Let a rank leave. It is answered when nothing of its job is pending."""
        joined = self.roster.joined.get(event.session)
        if joined is None:
            return [Reply(session=event.session, message=Left())]
        joined.seat.is_leaving = True
        joined.seat.reason = "it said goodbye"
        return self.saves.miss_ranks(joined.job, now_ns) + self.saves.settle(joined.job)

    def lost(self, event: SessionLost, now_ns: int) -> list[Command]:
        """Count a rank as lost. What its arenas hold completely counts as staged."""
        self.roster.open_sessions.discard(event.session)
        joined = self.roster.joined.pop(event.session, None)
        if joined is None:
            return []
        job, rank, seat = joined.job, joined.rank, joined.seat
        commands: list[Command] = []
        for staged in event.staged:
            if staged.save.job == job.job and save_order(staged.save)[0] == job.attempt:
                commands += self.saves.rank_said(job, rank, staged, now_ns)
        seat.arenas |= set(event.arenas)
        seat.is_lost = True
        seat.reason = event.reason
        commands += [
            Log(level="info" if seat.is_leaving else "warning", event="session.lost",
                fields={"job": job.job, "rank": rank, "pid": seat.pid, "reason": event.reason})
        ]  # fmt: skip
        return commands + self.saves.miss_ranks(job, now_ns) + self.saves.settle(job)
