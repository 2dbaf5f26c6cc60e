"""The coordinator's part in one save: it asks for a plan if a rank needs one, waits until all nodes
are prepared, asks for the index, and publishes.

The node of rank 0 is the coordinator. It is also a participant, like every other node.
"""

from __future__ import annotations

import msgspec

from milepost.storage.fate import Fate
from milepost.wire.messages import (
    Cause,
    CoordinatorMessage,
    Ending,
    Fail,
    Gathered,
    Outcome,
    ParticipantMessage,
    Planned,
    Prepared,
    RankLayout,
    RankReport,
    SaveRef,
    WordWanted,
)
from milepostd.core.causes import MISMATCH_HINT, REFUSALS, named, placed
from milepostd.core.commands import (
    BuildIndex,
    Command,
    GiveUp,
    Log,
    MakePlan,
    Publish,
    Send,
    SetTimer,
    WarmPlanner,
)
from milepostd.core.events import (
    CoordinatorEvent,
    IndexBuilt,
    IndexFailed,
    OutcomeFound,
    PlanFailed,
    PlanMade,
    Published,
    PublishFailed,
)
from milepostd.core.job import Job, save_order
from milepostd.core.phases import COORDINATOR, Phase, Trigger
from milepostd.core.role import (
    PEER_LOST_S,
    RESEND_S,
    RESOLVE_GRACE_S,
    VERDICT_GRACE_S,
    Role,
    failed_outcome,
)
from milepostd.core.timers import SECOND_NS, TimerKind, later


class Coordination(Role):
    """The coordinator's part in one save."""

    table = COORDINATOR
    deadline_timer = TimerKind.VERDICT
    repeat_timer = TimerKind.ASK

    def __init__(self, job: Job, save: SaveRef, node_id: str, now_ns: int) -> None:
        super().__init__(job, save, now_ns)
        self.node_id = node_id
        self.gathered: dict[str, Gathered] = {}
        """By node, like `prepared`."""
        self.planned: Planned | None = None
        self.layout_of: dict[int, RankLayout] = {}
        self.prepared: dict[str, Prepared] = {}
        self.failure: Fail | None = None
        self.checkpoint_bytes = 0
        self.warnings: tuple[Cause, ...] = ()
        """What the index has found."""

    def open(self) -> list[Command]:
        """Start the timers."""
        at_ns = later(self.deadline_at_ns(), VERDICT_GRACE_S)
        return [self.set_timer(self.deadline_timer, at_ns), self._set_ask(self.opened_at_ns)]

    def _set_ask(self, now_ns: int) -> SetTimer:
        return self.set_timer(self.repeat_timer, later(now_ns, RESEND_S))

    def ask(self, heard_at_ns: dict[str, int], *, is_draining: bool, now_ns: int) -> list[Command]:
        """Ask the silent nodes that the save waits for: only they know if a rank of theirs is gone.

        A daemon that was told to end gives up on nodes that stay silent, instead of waiting for the
        deadline.

        Args:
            heard_at_ns: when each node was heard last, about any save.
        """
        if self.phase not in (Phase.GATHERING, Phase.PLANNING, Phase.COLLECTING):
            return []
        quiet_s = {
            node_id: (now_ns - max(heard_at_ns.get(node_id, 0), self.opened_at_ns)) / SECOND_NS
            for node_id in self._silent_nodes()
            if node_id != self.node_id
        }
        lost = [node_id for node_id, age_s in quiet_s.items() if age_s >= PEER_LOST_S]
        if lost and is_draining:
            cause = Cause(
                "node-missing",
                f"node {self.node_id} is shutting down, and nothing was heard for "
                f"{PEER_LOST_S:g} s of {named('node', lost, len(self.job.nodes))}",
                "see that milepostd runs on the named nodes",
                lost[0],
            )
            return self.refuse(cause, now_ns)
        commands: list[Command] = [
            Send(node=self.job.nodes[node_id], message=WordWanted(save=self.save))
            for node_id, age_s in quiet_s.items()
            if self.phase is Phase.GATHERING or age_s > 2 * RESEND_S
        ]
        return [*commands, self._set_ask(now_ns)]

    # --- what the nodes say

    def node_said(self, node_id: str, message: ParticipantMessage, now_ns: int) -> list[Command]:
        """Take a node's message. One that is repeated is answered again and changes nothing."""
        if self.verdict is not None:
            return self._send(node_id, self.verdict)
        if self.has_ended and self.planned is not None:
            return self._send_plan(node_id, self.planned)
        if self.phase is Phase.PUBLISHING:
            # The rename may have happened, so only its completion counts now.
            return []
        if isinstance(message, Prepared):
            # Also one that is refused proves that the save's directory was there.
            self.prepared.setdefault(node_id, message)
        if message.save != self.save:
            cause = Cause(
                "save-mismatch",
                f"node {node_id} calls save {self.save.save_id} step {message.save.step} as "
                f"{message.save.name!r}, another node step {self.save.step} as {self.save.name!r}",
                MISMATCH_HINT,
                node_id,
            )
            return self.refuse(cause, now_ns)
        if isinstance(message, Fail):
            return self.refuse(message.cause, now_ns, skip=message.skip)
        if save_order(self.save)[0] < self.job.attempt:
            cause = Cause(
                "attempt-superseded",
                f"attempt {self.job.attempt} of job {self.job.job} has started, and its "
                f"coordinator knows nothing of save {self.save.save_id}",
                "",
                self.node_id,
            )
            return self.refuse(cause, now_ns)
        if isinstance(message, WordWanted):
            return []
        parts = message.reports if isinstance(message, Gathered) else message.files
        ranks = tuple(part.rank for part in parts)
        if ranks != self.job.ranks_of[node_id]:
            text = f"node {node_id} speaks for ranks {ranks}, not for its own"
            cause = Cause("protocol", text, "", node_id)
            return self.refuse(cause, now_ns)
        if isinstance(message, Gathered):
            return self._gathered(node_id, message)
        return self._prepared(node_id, message)

    def _gathered(self, node_id: str, message: Gathered) -> list[Command]:
        if node_id in self.gathered:
            # The node repeats itself, so the answer may have been lost.
            return [] if self.planned is None else self._send_plan(node_id, self.planned)
        self.gathered[node_id] = message
        return self._check_gathered()

    def _check_gathered(self) -> list[Command]:
        if len(self.gathered) < len(self.job.nodes):
            return []
        reports = tuple(
            report
            for _, report in sorted(
                (report.rank, report)
                for gathered in self.gathered.values()
                for report in gathered.reports
            )
        )
        if any(not report.layout_id for report in reports):
            if self.move(Trigger.NEEDS_PLAN):
                return [
                    Log(level="debug", event="plan.requested", save=self.save),
                    MakePlan(save=self.save, reports=reports),
                ]
        elif self.move(Trigger.ALL_GATHERED):
            return self._check_prepared()
        return []

    def _prepared(self, node_id: str, message: Prepared) -> list[Command]:
        if node_id not in self.gathered:
            # Its `Gathered` was lost. `Prepared` says the same, and more.
            reports = tuple(RankReport(file.rank, file.layout_id) for file in message.files)
            self.gathered[node_id] = Gathered(save=self.save, reports=reports)
            return self._check_gathered()
        return self._check_prepared()

    def _check_prepared(self) -> list[Command]:
        if len(self.prepared) < len(self.job.nodes) or not self.move(Trigger.ALL_PREPARED):
            return []
        files = sorted(
            (file for prepared in self.prepared.values() for file in prepared.files),
            key=lambda file: file.rank,
        )
        fragments = tuple(sorted(prepared.fragment for prepared in self.prepared.values()))
        return [
            BuildIndex(
                save=self.save,
                root=self.job.root,
                files=tuple(files),
                fragments=fragments,
                until_ns=self.deadline_at_ns(),
                umask=self.job.umask,
            )
        ]

    # --- completions of its commands

    def handle(self, event: CoordinatorEvent, now_ns: int) -> list[Command]:
        """Take the completion of a command."""
        match event:
            case PlanMade():
                return self._plan_made(event)
            case IndexBuilt():
                return self._index_built(event)
            case Published():
                return self._published(event)
            case PublishFailed():
                return self._publish_failed(event, now_ns)
            case PlanFailed():
                return self.refuse(event.cause, now_ns)
            case IndexFailed():
                # The planner's process does not know its node.
                cause = placed(event.cause, self.node_id)
                return self.refuse(cause, now_ns)
            case OutcomeFound():
                return self._outcome_found(event)

    def _plan_made(self, event: PlanMade) -> list[Command]:
        """Send the layouts to the nodes whose ranks offered."""
        enough = Trigger.PLAN_SUFFICES if self.save.is_plan_only else Trigger.PLAN_MADE
        if not self.move(enough):
            return []
        self.planned = Planned(save=self.save, layouts=event.layouts, warnings=event.warnings)
        self.layout_of = {layout.rank: layout for layout in event.layouts}
        # Offers can be megabytes a rank, and are no longer needed.
        self.gathered = {
            node_id: msgspec.structs.replace(gathered, reports=())
            for node_id, gathered in self.gathered.items()
        }
        commands: list[Command] = [
            Log(level="warning", event="plan.warned", save=self.save, cause=warning)
            for warning in event.warnings
        ]
        commands.append(Log(level="info", event="plan.made", save=self.save))
        commands.append(WarmPlanner())
        for node_id in self.job.nodes:
            commands += self._send_plan(node_id, self.planned)
        if self.has_ended:
            self.gathered = {}
            return commands + self.clear_timers()
        return commands + self._check_prepared()

    def _send_plan(self, node_id: str, planned: Planned) -> list[Command]:
        layouts = tuple(
            self.layout_of[rank] for rank in self.job.ranks_of[node_id] if rank in self.layout_of
        )
        if not layouts:
            return []
        return self._send(node_id, msgspec.structs.replace(planned, layouts=layouts))

    def _index_built(self, event: IndexBuilt) -> list[Command]:
        """Publish: the directory is complete and durable, under `.partial`."""
        if not self.move(Trigger.INDEX_BUILT):
            return []
        self.checkpoint_bytes = event.checkpoint_bytes
        self.warnings = event.warnings
        return [
            *(
                Log(level="warning", event="save.warned", save=self.save, cause=warning)
                for warning in event.warnings
            ),
            Publish(save=self.save, root=self.job.root, until_ns=self.deadline_at_ns()),
        ]

    def _published(self, event: Published) -> list[Command]:
        """Tell all nodes that the save is a checkpoint."""
        if not self.move(Trigger.PUBLISHED):
            return []
        return self._conclude(
            Outcome(
                save=self.save,
                outcome=Ending.COMMITTED,
                path=event.path,
                checkpoint_bytes=self.checkpoint_bytes,
                at_ms=event.at_ms,
                warnings=self.warnings,
            )
        )

    def _publish_failed(self, event: PublishFailed, now_ns: int) -> list[Command]:
        """Let the directory decide: perhaps the rename happened all the same."""
        may_take_effect = event.cause.code not in REFUSALS
        return self.refuse(event.cause, now_ns, may_take_effect=may_take_effect)

    def _outcome_found(self, event: OutcomeFound) -> list[Command]:
        """End the save as the directory shows."""
        if not self.move(Trigger.GIVEN_UP):
            return []
        return self._conclude(self._outcome_by(event))

    def _outcome_by(self, event: OutcomeFound) -> Outcome:
        assert self.failure is not None
        match event.fate:
            case Fate.COMMITTED:
                return Outcome(
                    save=self.save,
                    outcome=Ending.COMMITTED,
                    path=event.path,
                    checkpoint_bytes=self.checkpoint_bytes,
                    warnings=self.warnings,
                )
            case Fate.ABORTED:
                return failed_outcome(self.failure)
            case Fate.UNKNOWN:
                return Outcome(save=self.save, outcome=Ending.UNKNOWN, cause=self.failure.cause)

    # --- failures and time

    def refuse(
        self, cause: Cause, now_ns: int, *, skip: bool = False, may_take_effect: bool = False
    ) -> list[Command]:
        """Give the save up for all nodes, unless it is published or ending already.

        Args:
            skip: the save ends as skipped, not as failed.
            may_take_effect: a publication failed in a way that does not prove that it will never
                happen.
        """
        if not self.move(Trigger.REFUSED):
            return []
        self.failure = Fail(save=self.save, cause=cause, skip=skip)
        return [
            GiveUp(
                save=self.save,
                root=self.job.root,
                is_coordinator=True,
                until_ns=later(now_ns, RESOLVE_GRACE_S),
                # An earlier life of this daemon may have published what was prepared, and retention
                # may have removed it since.
                was_prepared=bool(self.prepared),
                may_take_effect=may_take_effect,
            )
        ]

    def overdue(self, now_ns: int) -> list[Command]:
        """Give the save up at the deadline, unless its outcome is being decided already."""
        if self.phase in (Phase.PUBLISHING, Phase.ABORTING, Phase.CONCLUDED):
            return []
        silent = self._silent_nodes()
        cause = Cause(
            "node-missing" if silent else "timeout",
            f"save {self.save.save_id} of step {self.save.step} did not end within "
            f"{self.job.deadline_s:g} s: {self.waits_for()}",
            "see `milepost status` on the named nodes",
            silent[0] if silent else self.node_id,
        )
        return self.refuse(cause, now_ns)

    def _conclude(self, outcome: Outcome) -> list[Command]:
        self.verdict = outcome
        self.gathered = {}
        self.planned = None
        self.layout_of = {}
        self.prepared = {}
        commands = self.clear_timers()
        for node_id in self.job.nodes:
            commands += self._send(node_id, outcome)
        return commands

    def _send(self, node_id: str, message: CoordinatorMessage) -> list[Command]:
        return [Send(node=self.job.nodes[node_id], message=message)]

    def _silent_nodes(self) -> list[str]:
        """Return the nodes whose message the present phase waits for."""
        heard = self.gathered if self.phase is Phase.GATHERING else self.prepared
        if self.phase not in (Phase.GATHERING, Phase.COLLECTING):
            return []
        return [node_id for node_id in self.job.nodes if node_id not in heard]

    def waits_for(self) -> str:
        """Return one sentence that says what the save waits for at the coordinator."""
        silent = self._silent_nodes()
        match self.phase:
            case Phase.GATHERING:
                ranks = [rank for node_id in silent for rank in self.job.ranks_of[node_id]]
                return (
                    f"waiting for {named('node', silent, len(self.job.nodes))}, where not "
                    f"every rank has called save: {named('rank', ranks, self.job.world)}"
                )
            case Phase.PLANNING:
                return "planning: dropping replicas, balancing bytes, checking coverage"
            case Phase.COLLECTING:
                return f"waiting for {named('node', silent, len(self.job.nodes))} to be durable"
            case Phase.INDEXING:
                return "building the index and the manifest"
            case Phase.PUBLISHING:
                return "publishing"
            case Phase.ABORTING:
                return "moving the save's directory out of the way"
            case _:
                return "ended"
