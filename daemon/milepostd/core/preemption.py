"""Preemption: after one rank got SIGTERM, `preempted` turns true on all ranks at the same read.

The ranks of a training loop read the flag once a step, in lockstep by their collectives, but not at
the same instant. If each rank's flag turned true as soon as the rank heard of the signal, one rank
would save step 100 and leave while another goes on to step 101. So each rank is asked how often it
has read the flag, and holds its next read after the answer. The coordinator then decides for the
read after the greatest count, which no rank has made yet. Messages are repeated until they are
answered.
"""

from __future__ import annotations

from typing import Final

from milepost.wire.messages import (
    Preempted,
    PreemptionAsked,
    PreemptionDecided,
    PreemptionMessage,
    PreemptionSaid,
    RankReads,
    ReadsTold,
    ReadsWanted,
    SignalMessage,
)
from milepostd.core.commands import ClearTimer, Command, Log, Reply, Send, SetTimer
from milepostd.core.job import Job
from milepostd.core.timers import TimerKind, timer_name

REPEAT_NS: Final = 1_000_000_000
"""How long to wait for an answer before a message is repeated."""

DECIDE_NS: Final = 5_000_000_000
"""How long the coordinator waits for all ranks. A preempted node may be gone already, while the
others hold their reads and their time to leave runs out."""


class Preemption:
    """One job's preemption at one node, in both roles: as a node, and as the coordinator."""

    def __init__(self, job: Job, node_id: str, now_ns: int) -> None:
        self.job = job
        self.node_id = node_id
        self.opened_at_ns = now_ns
        self.at_read: int | None = None
        """The decision: the first read at which the flag is true."""
        self.told: dict[int, int] = {}
        """How often each local rank has read, of those that have answered."""
        self.is_asked = False
        """Whether the coordinator has asked for these counts."""
        self.known: dict[int, int] = {}
        """At the coordinator: the counts of all ranks that have answered, on any node."""
        self.has_asked = False
        """At the coordinator: whether the nodes were asked."""

    def open(self) -> list[Command]:
        """Start the timer."""
        return [self._timer(self.opened_at_ns)]

    def noticed(self, rank: int) -> list[Command]:
        """Take a local rank's message that it was told to go."""
        if self.at_read is not None:
            return self._reply(rank)
        return self._say()

    def reads_told(self, rank: int, reads: int) -> list[Command]:
        """Take a local rank's count; the rank holds its next read now."""
        if self.at_read is not None:
            return self._reply(rank)
        self.told.setdefault(rank, reads)
        return self._say() if not self._untold() else []

    def joined(self, rank: int) -> list[Command]:
        """Tell a rank that has just joined what the others were told."""
        return self._reply(rank) if self.at_read is not None or self.is_asked else []

    def heard(self, node_id: str, message: PreemptionMessage, now_ns: int) -> list[Command]:
        """Take a node's message, or this node's own in its other role."""
        match message:
            case PreemptionSaid():
                return self._said(node_id, message, now_ns)
            case PreemptionAsked() if node_id == self.job.coordinator.node_id:
                self.is_asked = True
                if self._untold():
                    return [each for rank in self._untold() for each in self._reply(rank)]
                return self._say()
            case PreemptionDecided() if node_id == self.job.coordinator.node_id:
                return self._decided(message.at_read)
            case _:
                return []

    def repeat(self, now_ns: int) -> list[Command]:
        """Repeat what may have been lost, unless it is decided."""
        if self.at_read is not None:
            return []
        commands: list[Command] = [self._timer(now_ns)]
        if self.has_asked:
            if now_ns - self.opened_at_ns >= DECIDE_NS:
                return self._decide()
            commands += self._ask()
        if self.is_asked:
            commands += [each for rank in self._untold() for each in self._reply(rank)]
        return commands + self._say()

    # --- the node's part

    def _say(self) -> list[Command]:
        """Tell the coordinator the counts of the local ranks; none, as long as one is missing."""
        counts = [] if self._untold() else sorted(self.told.items())
        reads = tuple(RankReads(rank, count) for rank, count in counts)
        said = PreemptionSaid(job=self.job.job, attempt=self.job.attempt, reads=reads)
        return [Send(node=self.job.coordinator, message=said)]

    def _untold(self) -> list[int]:
        return [
            rank
            for rank, seat in self.job.seats.items()
            if not seat.is_lost and rank not in self.told
        ]

    def _reply(self, rank: int) -> list[Command]:
        seat = self.job.seats.get(rank)
        if seat is None or seat.is_lost:
            return []
        message = ReadsWanted() if self.at_read is None else Preempted(at_read=self.at_read)
        return [Reply(session=seat.session, message=message)]

    def _decided(self, at_read: int) -> list[Command]:
        if self.at_read is not None:
            return []
        self.at_read = at_read
        commands: list[Command] = [
            ClearTimer(timer=timer_name(TimerKind.PREEMPTION, self.job.job)),
            Log(level="warning", event="job.preempted", fields={"job": self.job.job}),
        ]
        for rank in self.job.seats:
            commands += self._reply(rank)
        return commands

    # --- the coordinator's part

    def _said(self, node_id: str, message: PreemptionSaid, now_ns: int) -> list[Command]:
        if self.job.coordinator.node_id != self.node_id or node_id not in self.job.nodes:
            return []
        if self.at_read is not None:
            return self._send_all(self._decision(self.at_read), [node_id])
        ranks = self.job.ranks_of[node_id]
        self.known |= {each.rank: each.reads for each in message.reads if each.rank in ranks}
        if len(self.known) == self.job.world:
            return self._decide()
        if self.has_asked:
            return []
        self.has_asked = True
        return self._ask()

    def _ask(self) -> list[Command]:
        asked = PreemptionAsked(job=self.job.job, attempt=self.job.attempt)
        silent = [
            node_id
            for node_id, ranks in self.job.ranks_of.items()
            if any(rank not in self.known for rank in ranks)
        ]
        return self._send_all(asked, silent)

    def _decide(self) -> list[Command]:
        # A rank that has not answered may have read more often. Then its flag turns true at once;
        # nothing better is possible.
        at_read = max([*self.known.values(), *self.told.values()], default=0) + 1
        return self._send_all(self._decision(at_read), list(self.job.nodes))

    def _decision(self, at_read: int) -> PreemptionDecided:
        return PreemptionDecided(job=self.job.job, attempt=self.job.attempt, at_read=at_read)

    def _send_all(self, message: PreemptionMessage, nodes: list[str]) -> list[Command]:
        return [Send(node=self.job.nodes[node_id], message=message) for node_id in nodes]

    def _timer(self, now_ns: int) -> SetTimer:
        return SetTimer(
            timer=timer_name(TimerKind.PREEMPTION, self.job.job), at_ns=now_ns + REPEAT_NS
        )


class Preemptions:
    """The preemptions of one node's jobs: at most one for each job, in its newest attempt."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.by_job: dict[str, Preemption] = {}

    def signalled(self, job: Job, rank: int, message: SignalMessage, now_ns: int) -> list[Command]:
        """Take a local rank's message: it was told to go, or says how often it has read."""
        preemption, commands = self._of(job, now_ns)
        if isinstance(message, ReadsTold):
            return commands + preemption.reads_told(rank, message.reads)
        return commands + preemption.noticed(rank)

    def joined(self, job: Job, rank: int) -> list[Command]:
        """Tell a rank that has just joined its job what the others were told."""
        preemption = self.by_job.get(job.job)
        if preemption is None or preemption.job is not job:
            return []
        return preemption.joined(rank)

    def heard(
        self, job: Job | None, node_id: str, message: PreemptionMessage, now_ns: int
    ) -> list[Command]:
        """Take a node's message about a job's preemption.

        Args:
            job: the newest attempt here, if there is one.
        """
        if job is None or job.attempt != message.attempt or not job.hears(node_id):
            # Of an older attempt, or too early: then its sender repeats it.
            return []
        preemption, commands = self._of(job, now_ns)
        return commands + preemption.heard(node_id, message, now_ns)

    def repeat(self, job: str, now_ns: int) -> list[Command]:
        """Repeat a job's messages that may have been lost, unless it is decided."""
        preemption = self.by_job.get(job)
        return [] if preemption is None else preemption.repeat(now_ns)

    def forget(self, job: str) -> None:
        """Forget a job."""
        self.by_job.pop(job, None)

    def _of(self, job: Job, now_ns: int) -> tuple[Preemption, list[Command]]:
        known = self.by_job.get(job.job)
        if known is not None and known.job is job:
            return known, []
        made = self.by_job[job.job] = Preemption(job, self.node_id, now_ns)
        return made, made.open()
