"""An earlier life of this daemon: it goes on with what was staged, for trainers that come back and
for dead ones alike.
"""

from __future__ import annotations

from typing import Final

from milepostd.core.commands import Command, ForgetJournal, Log, MeetPeers, SetTimer
from milepostd.core.events import JobRecalled
from milepostd.core.job import NO_SESSION, Job, Seat, save_order
from milepostd.core.peers import Peers
from milepostd.core.role import SECOND_NS
from milepostd.core.roster import Roster
from milepostd.core.saves import NodeSaves
from milepostd.core.sessions import Sessions
from milepostd.core.timers import TimerKind, timer_name

RECALL_S: Final = 60.0
"""How long a restarted daemon waits for the trainers it remembers before it takes them for dead:
they look for it every fraction of a second, and give up after as long themselves."""


class Recall:
    """What a node takes over from its earlier life."""

    def __init__(
        self, node_id: str, roster: Roster, saves: NodeSaves, peers: Peers, sessions: Sessions
    ) -> None:
        self.node_id = node_id
        self.roster = roster
        self.saves = saves
        self.peers = peers
        self.sessions = sessions

    def job_recalled(self, event: JobRecalled, now_ns: int) -> list[Command]:
        """The journal knows a job, and its arenas hold what was staged."""
        join = event.message
        cause = self.sessions.why_not(join)
        if cause is not None:
            # The daemon was given other roots, or another address: its saves are lost to it.
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
            SetTimer(timer=timer, at_ns=now_ns + int(RECALL_S * SECOND_NS)),
            Log(level="warning", event="job.recalled",
                fields={"job": job.job, "attempt": job.attempt}),
        ]  # fmt: skip
        if previous is not None:
            # Its trainers are history, and what it had staged completely is being finished.
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
        """Ranks of a job that were remembered and have not come back are dead."""
        job = self.roster.jobs.get(name)
        if job is None:
            return []
        for seat in job.seats.values():
            if seat.session == NO_SESSION:
                seat.is_lost = True
                seat.reason = "it did not come back after the daemon was restarted"
        return self.saves.miss_ranks(job, now_ns) + self.saves.settle(job)
