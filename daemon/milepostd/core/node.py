"""One node. `Node.handle(event, now_ns) -> commands` is its only entry.

Pure: no socket, file, clock, thread, log, environment or torch. Nothing depends on the order of
sets. An event that makes no sense in the node's state changes nothing and yields at most a log
line; a node never raises because of what somebody else did.

A node owns one object for each subject. Each object knows only those before it:

    halting      whether the daemon ends
    roster       the jobs and ranks that are here
    saves        the saves in flight, in both roles
    preemptions  the jobs of which a rank was told to go
    peers        messages of other nodes
    sessions     messages of trainers
    recall       what an earlier life of the daemon has left
"""

from __future__ import annotations

from collections import deque

import msgspec

from milepost.wire.messages import NodeRef
from milepostd.core.commands import AnyCommand, Command, Discard, Retain, Send
from milepostd.core.events import (
    AnyEvent,
    Discarded,
    JobRecalled,
    PeerSaid,
    RankJoined,
    RankLeft,
    RankSaid,
    RankSignalled,
    Retained,
    SessionLost,
    SessionOpened,
    Started,
    StopRequested,
    TimerFired,
)
from milepostd.core.halting import Halting
from milepostd.core.peers import Peers
from milepostd.core.preemption import Preemptions
from milepostd.core.recall import Recall
from milepostd.core.roster import Roster
from milepostd.core.saves import NodeSaves
from milepostd.core.sessions import Sessions
from milepostd.core.timers import TimerKind, job_of_timer, save_of_timer, timer_kind


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is told at its start."""

    node: NodeRef
    roots: tuple[str, ...] = ()
    """Where checkpoints may be written, with all folders below; empty: anywhere."""
    is_embedded: bool = False
    """A trainer started the daemon, so it ends when nothing is pending and no trainer is here."""
    linger_s: float = 10.0
    """How long an embedded daemon stays after the last trainer."""


class Node:
    """The state of one daemon."""

    def __init__(self, settings: NodeSettings) -> None:
        here = self.node_id = settings.node.node_id
        self.halting = Halting(is_embedded=settings.is_embedded, linger_s=settings.linger_s)
        self.roster = Roster()
        self.saves = NodeSaves(here, settings.roots, self.halting, self.roster)
        self.preemptions = Preemptions(here)
        self.peers = Peers(here, self.roster, self.saves, self.preemptions)
        self.sessions = Sessions(
            here,
            settings.roots,
            self.halting,
            self.roster,
            self.saves,
            self.preemptions,
            self.peers,
        )
        self.recall = Recall(here, self.roster, self.saves, self.peers, self.sessions)
        self.housekeeping = 0
        """Discards and retentions in flight, for which no save waits."""

    def handle(self, event: AnyEvent, now_ns: int) -> tuple[AnyCommand, ...]:
        """Take an event; return the commands to carry out, in this order."""
        pending: deque[AnyEvent] = deque([event])
        commands: list[Command] = []
        while pending:
            for command in self._dispatch(pending.popleft(), now_ns):
                if isinstance(command, Send) and command.node.node_id == self.node_id:
                    # A message to this node's other role never leaves the node.
                    pending.append(PeerSaid(node_id=self.node_id, message=command.message))
                else:
                    self.housekeeping += isinstance(command, Discard | Retain)
                    commands.append(command)
        commands += self._check_halt(now_ns)
        return tuple(commands)  # type: ignore[arg-type]

    def _dispatch(self, event: AnyEvent, now_ns: int) -> list[Command]:
        match event:
            case Started():
                return []
            case JobRecalled():
                return self.recall.job_recalled(event, now_ns)
            case SessionOpened():
                self.roster.open_sessions.add(event.session)
                return []
            case RankJoined():
                return self.sessions.joined(event, now_ns)
            case RankSaid():
                return self.sessions.said(event, now_ns)
            case RankSignalled():
                return self.sessions.signalled(event, now_ns)
            case RankLeft():
                return self.sessions.left(event, now_ns)
            case SessionLost():
                return self.sessions.lost(event, now_ns)
            case PeerSaid():
                return self.peers.said(event.node_id, event.message, now_ns)
            case TimerFired():
                return self._timer_fired(event.timer, now_ns)
            case StopRequested():
                return self._stop_requested(now_ns)
            case Retained():
                self.housekeeping = max(0, self.housekeeping - 1)
                return []
            case Discarded():
                self.housekeeping = max(0, self.housekeeping - 1)
                return self.saves.handle(event, now_ns)
            case _:
                return self.saves.handle(event, now_ns)

    def _timer_fired(self, timer: str, now_ns: int) -> list[Command]:
        kind = timer_kind(timer)
        match kind:
            case None:
                return []
            case TimerKind.LINGER:
                has_sessions = bool(self.roster.open_sessions)
                return self.halting.linger_over(is_idle=self.is_idle, has_sessions=has_sessions)
            case TimerKind.PREEMPTION:
                return self.preemptions.repeat(job_of_timer(timer), now_ns)
            case TimerKind.RECALL:
                return self.recall.over(job_of_timer(timer), now_ns)
            case _:
                key, heard_at_ns = save_of_timer(timer), self.peers.heard_at_ns
                return self.saves.timer_fired(kind, key, heard_at_ns, now_ns)

    # --- the end

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending: no save, writer or housekeeping, and no rank that may come
        back.
        """
        return not self.housekeeping and self.saves.is_idle and not self.roster.has_recalls()

    def _stop_requested(self, now_ns: int) -> list[Command]:
        commands = self.halting.stop()
        if self.halting.stops == 1:
            for name in self.roster.jobs:
                # Ranks that have not come back yet would be refused.
                commands += self.recall.over(name, now_ns)
        return commands

    def _check_halt(self, now_ns: int) -> list[Command]:
        has_sessions = bool(self.roster.open_sessions)
        is_idle = self.halting.needs_idle(has_sessions=has_sessions) and self.is_idle
        return self.halting.check(is_idle=is_idle, has_sessions=has_sessions, now_ns=now_ns)
