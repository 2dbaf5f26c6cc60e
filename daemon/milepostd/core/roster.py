"""The jobs of a node, the sessions of their ranks, and the shared memory that ranks leave behind.

Owns jobs, sessions and seats. Knows no saves: the caller says whether any is pending.
"""

from __future__ import annotations

import msgspec

from milepost.wire.messages import Left
from milepostd.core.commands import Command, ForgetJournal, Log, RemoveArenas, Reply, SweepArenas
from milepostd.core.job import NO_SESSION, Job, Seat


class JoinedRank(msgspec.Struct):
    """Which rank of which job a session is."""

    job: Job
    rank: int

    @property
    def seat(self) -> Seat:
        """What the job knows of the rank."""
        return self.job.seats[self.rank]


class Roster:
    """The jobs of a node and the ranks that have joined them."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        """The newest attempt of each job."""
        self.open_sessions: set[int] = set()
        """Sessions that have said hello and have not been lost."""
        self.joined: dict[int, JoinedRank] = {}
        """The open sessions that have joined a job."""

    def is_newest(self, job: Job) -> bool:
        """Whether this is the newest attempt of its job."""
        return self.jobs.get(job.job) is job

    def has_recalls(self) -> bool:
        """Whether a rank of the daemon's earlier life may still come back."""
        return any(
            seat.session == NO_SESSION and not seat.is_lost
            for job in self.jobs.values()
            for seat in job.seats.values()
        )

    def seat(self, job: Job, rank: int, session: int, pid: int) -> None:
        """Make this session the rank's, in place of an earlier one."""
        old = job.seats.get(rank)
        if old is not None and not old.is_lost:
            self.joined.pop(old.session, None)
        job.seats[rank] = Seat(
            session=session, pid=pid, arenas=old.arenas if old is not None else set()
        )
        self.joined[session] = JoinedRank(job, rank)

    def release_leaving(self, job: Job) -> list[Command]:
        """Say goodbye to the ranks that are leaving; nothing of their job may be pending."""
        commands: list[Command] = []
        for rank, seat in job.seats.items():
            if seat.is_leaving and not seat.is_lost:
                seat.is_lost = True
                self.joined.pop(seat.session, None)
                commands.append(Reply(session=seat.session, message=Left()))
                commands.append(
                    Log(level="info", event="session.left", fields={"job": job.job, "rank": rank})
                )
        return commands

    def release_arenas(self, job: Job, *, may_sweep: bool) -> list[Command]:
        """Unlink the arenas of lost ranks, and forget the attempt if it is over; no save of the
        attempt may be pending.

        Args:
            may_sweep: no save of another earlier attempt is pending either.
        """
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
            if newest is not None and newest is not job and may_sweep:
                commands.append(sweep(newest, job.ranks_here))
        return commands


def sweep(job: Job, ranks: tuple[int, ...]) -> SweepArenas:
    """Unlink what earlier attempts of these ranks left in shared memory."""
    return SweepArenas(job=job.job, below_attempt=job.attempt, ranks=ranks)
