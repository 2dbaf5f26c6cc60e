"""Messages of other nodes: which of them count, and which save each is for.

The messages between the two roles of this node come here too. Messages about jobs that no local
rank has joined yet wait in `early`.
"""

from __future__ import annotations

from milepost.wire.messages import (
    CoordinatorMessage,
    Fail,
    Outcome,
    ParticipantMessage,
    PeerMessage,
    PreemptionMessage,
    SaveMessage,
    WordWanted,
)
from milepostd.core.commands import Command, Log, Send
from milepostd.core.early import EarlyMessages
from milepostd.core.job import NO_ORDER, Job, save_order
from milepostd.core.preemption import Preemptions
from milepostd.core.roster import Roster
from milepostd.core.saves import NodeSaves


class Peers:
    """What one node hears from the others."""

    def __init__(
        self, node_id: str, roster: Roster, saves: NodeSaves, preemptions: Preemptions
    ) -> None:
        self.node_id = node_id
        self.roster = roster
        self.saves = saves
        self.preemptions = preemptions
        self.heard_at_ns: dict[str, int] = {}
        self.early = EarlyMessages()

    def said(self, node_id: str, message: PeerMessage, now_ns: int) -> list[Command]:
        """Take a peer's message. One that makes no sense here yields only a log line."""
        self.heard_at_ns[node_id] = now_ns
        if isinstance(message, PreemptionMessage):
            return self.preemptions.heard(
                self.roster.jobs.get(message.job), node_id, message, now_ns
            )
        if save_order(message.save) == NO_ORDER:
            return [_stray(node_id, message)]
        if isinstance(message, CoordinatorMessage):
            return self._coordinator_said(node_id, message, now_ns)
        job = self.roster.jobs.get(message.save.job)
        if isinstance(message, WordWanted) and job is not None and not job.is_coordinator:
            return self._word_wanted(node_id, job, message, now_ns)
        return self._participant_said(node_id, job, message, now_ns)

    def replay(self, job: str, now_ns: int) -> list[Command]:
        """Take the messages that came before a local rank had joined the job."""
        commands: list[Command] = []
        for node_id, message in self.early.take(job, now_ns):
            commands += self.said(node_id, message, now_ns)
        return commands

    def forget_strangers(self) -> None:
        """Forget the nodes that are in no job here."""
        known = {node_id for job in self.roster.jobs.values() for node_id in job.nodes}
        self.heard_at_ns = {
            node_id: at_ns for node_id, at_ns in self.heard_at_ns.items() if node_id in known
        }

    # --- for this node as a participant

    def _coordinator_said(
        self, node_id: str, message: CoordinatorMessage, now_ns: int
    ) -> list[Command]:
        role = self.saves.participations.get((message.save.job, message.save.save_id))
        commands: list[Command] = []
        if role is None:
            job = self.roster.jobs.get(message.save.job)
            if (
                not isinstance(message, Outcome)
                or job is None
                or node_id != job.coordinator.node_id
                or save_order(message.save)[0] != job.attempt
            ):
                return [_stray(node_id, message)]
            # No local rank has called the save yet. Keep its outcome until one does.
            role = self.saves.note(job, message.save, now_ns)
        elif node_id != role.job.coordinator.node_id:
            return [_stray(node_id, message)]
        commands += role.coordinator_said(message, now_ns)
        return commands + self.saves.after(role)

    def _word_wanted(
        self, node_id: str, job: Job, message: WordWanted, now_ns: int
    ) -> list[Command]:
        """Answer a coordinator whose save waits for this node: fail the save if a rank is gone."""
        save = message.save
        if node_id != job.coordinator.node_id:
            return [_stray(node_id, message)]
        role = self.saves.participations.get((job.job, save.save_id))
        if role is not None:
            return role.resend(now_ns)
        if save_order(save)[0] != job.attempt:
            return []
        refusal = self.saves.why_not(job, save)
        if refusal is not None:
            return [Send(node=job.coordinator, message=Fail(save=save, cause=refusal))]
        if not any(seat.is_lost or seat.is_leaving for seat in job.seats.values()):
            return []
        # This node may have taken part and forgotten it. Then only the directory knows the outcome.
        role, commands = self.saves.take_part(job, save, now_ns, is_recalled=True)
        return commands + self.saves.after(role)

    # --- for this node as a coordinator

    def _participant_said(
        self, node_id: str, job: Job | None, message: ParticipantMessage, now_ns: int
    ) -> list[Command]:
        role = self.saves.coordinations.get((message.save.job, message.save.save_id))
        commands: list[Command] = []
        if role is None:
            if job is None or save_order(message.save)[0] > job.attempt:
                self.early.keep(node_id, message, now_ns)
                return []
            # A save of an earlier attempt is begun too, but only to be given up: the directory
            # shows if an earlier life of this daemon has published it.
            if not job.is_coordinator or node_id not in job.nodes:
                return [_stray(node_id, message)]
            begun = self.saves.coordinate(job, message.save, now_ns)
            if begun is None:
                return [_stray(node_id, message)]
            role, commands = begun
        if node_id not in role.job.nodes:
            return [*commands, _stray(node_id, message)]
        commands += role.node_said(node_id, message, now_ns)
        return commands + self.saves.after(role)


def _stray(node_id: str, message: SaveMessage) -> Log:
    return Log(
        level="info",
        event="message.dropped",
        save=message.save,
        fields={"peer": node_id, "type": type(message).__name__},
    )
