"""A restarted daemon takes over from its earlier life: it finishes the saves that were staged, for
trainers that come back and for dead ones alike.
"""

from __future__ import annotations

from typing import Final

from milepostd.core.commands import Command, ForgetJournal, Log, MeetPeers, SetTimer
from milepostd.core.events import JobRecalled
from milepostd.core.job import NO_SESSION, Job, Seat, save_order
from milepostd.core.peers import Peers
from milepostd.core.roster import Roster
from milepostd.core.saves import NodeSaves
from milepostd.core.sessions import Sessions
from milepostd.core.timers import TimerKind, later, timer_name

RECALL_S: Final = 60.0
"""How long a restarted daemon waits for the trainers in its journal before it takes them for dead.
Trainers look for their daemon several times a second, and give up after the same time."""


class Recall:
    """What a node takes over from its earlier life. Keeps nothing of its own."""

    def __init__(
        self, node_id: str, roster: Roster, saves: NodeSaves, peers: Peers, sessions: Sessions
    ) -> None:
        self.node_id = node_id
        self.roster = roster
        self.saves = saves
        self.peers = peers
        self.sessions = sessions

    def job_recalled(self, event: JobRecalled, now_ns: int) -> list[Command]:
        """Take over a job of the journal, with what its arenas hold."""
        join = event.message
        cause = self.sessions.why_not(join)
        if cause is not None:
            # The daemon was started with other roots or another address: it cannot finish them.
            return [
                Log(level="warning", event="job.unrecalled", cause=cause,
                    fields={"job": join.job, "attempt": join.attempt}),
                ForgetJournal(job=join.job, attempt=join.attempt),
            ]  # fmt: skip
        previous = self.roster.jobs.get(join.job)
        job = Job(join, self.node_id, None if previous is None else previous.history)
        job.is_journalled = True
        self.roster.jobs[join.job] = job
        for rank in job.ranks_here:
            arenas = {path for owner, path in event.arenas if owner == rank}
            job.seats[rank] = Seat(session=NO_SESSION, pid=0, arenas=arenas)
        timer = timer_name(TimerKind.RECALL, job.job)
        commands: list[Command] = [
            MeetPeers(nodes=job.peers()),
            SetTimer(timer=timer, at_ns=later(now_ns, RECALL_S)),
            Log(level="warning", event="job.recalled",
                fields={"job": job.job, "attempt": job.attempt}),
        ]  # fmt: skip
        if previous is not None:
            # The trainers of the older attempt are gone; what all of them had staged is finished.
            for seat in previous.seats.values():
                seat.is_lost = True
            commands += self.saves.supersede(previous, job.attempt, now_ns)
            commands += self.saves.release_arenas(previous)
        for rank, staged in event.staged:
            is_ours = rank in job.seats and staged.save.job == job.job
            if is_ours and save_order(staged.save)[0] == job.attempt:
                commands += self.saves.rank_said(job, rank, staged, now_ns, is_recalled=True)
        return commands + self.peers.replay(job.job, now_ns)

    def over(self, name: str, now_ns: int) -> list[Command]:
        """Take the ranks of a job for dead that have not come back."""
        job = self.roster.jobs.get(name)
        if job is None:
            return []
        for seat in job.seats.values():
            if seat.session == NO_SESSION:
                seat.is_lost = True
                seat.reason = "it did not come back after the daemon was restarted"
        return self.saves.miss_ranks(job, now_ns) + self.saves.settle(job)
