"""One node's part in one save: it collects the reports of its ranks, has their images written, and
tells the coordinator.

Every node of the cohort takes part, also the coordinator's own. There the two roles talk by the
same messages as two nodes do, so there is one behaviour, not two.
"""

from __future__ import annotations

import msgspec

from milepost.storage.fate import Fate
from milepost.wire.messages import (
    AbortWanted,
    Cause,
    Concluded,
    CoordinatorMessage,
    DaemonMessage,
    Ending,
    Fail,
    Gathered,
    LayoutReady,
    Offered,
    Outcome,
    ParticipantMessage,
    Planned,
    Prepared,
    Progress,
    RankMessage,
    RankReport,
    SaveRef,
    Skipped,
    SlotFreed,
    Staged,
    Unable,
    WordWanted,
    WrittenFile,
)
from milepostd.core.causes import MISMATCH_HINT, named, placed
from milepostd.core.commands import (
    AbandonWrite,
    Command,
    Discard,
    GiveUp,
    Log,
    Reply,
    Send,
    SetTimer,
    WriteFragment,
    WriteImage,
)
from milepostd.core.events import (
    BytesWritten,
    Discarded,
    FileDurable,
    FileFailed,
    FragmentDurable,
    FragmentFailed,
    OutcomeFound,
    ParticipantEvent,
)
from milepostd.core.job import Job
from milepostd.core.phases import PARTICIPANT, Phase, Trigger
from milepostd.core.role import RESEND_S, RESOLVE_GRACE_S, Role, failed_outcome
from milepostd.core.timers import SECOND_NS, TimerKind, later


class Participation(Role):
    """One node's part in one save.

    Args:
        is_recalled: an earlier life of this daemon took part and may have been prepared, so that
            the save may be published already.
    """

    table = PARTICIPANT
    deadline_timer = TimerKind.DEADLINE
    repeat_timer = TimerKind.RESEND

    def __init__(
        self, job: Job, save: SaveRef, node_id: str, now_ns: int, *, is_recalled: bool = False
    ) -> None:
        super().__init__(job, save, now_ns)
        self.node_id = node_id
        self.reports: dict[int, RankReport] = {}
        """What each rank has reported last, as the coordinator is told."""
        self.staged: dict[int, Staged] = {}
        self.files: dict[int, WrittenFile] = {}
        self.writing: set[int] = set()
        """Ranks whose image a writer still reads."""
        self.is_sealing = False
        """Whether the manifest fragment is being written."""
        self.layouts_given: set[int] = set()
        """Ranks that were told their layout."""
        self.fragment = ""
        self.failure: Fail | None = None
        self.is_recalled = is_recalled
        self.bytes_total = 0
        self.bytes_written = 0
        self.elapsed_s = 0.0
        """From the first report on this node to the outcome."""

    def open(self) -> list[Command]:
        """Start the timers."""
        return [
            self.set_timer(self.deadline_timer, self.deadline_at_ns()),
            self.set_timer(self.repeat_timer, later(self.opened_at_ns, RESEND_S)),
            Log(level="debug", event="save.opened", save=self.save),
        ]

    # --- what local ranks say

    def rank_said(self, rank: int, message: RankMessage, now_ns: int) -> list[Command]:
        """Take a rank's message. A rank sends one for a save, or offers and then stages."""
        if self.has_ended:
            return self._late(rank, message)
        if message.save != self.save:
            cause = Cause(
                "save-mismatch",
                f"rank {rank} calls save {self.save.save_id} step {message.save.step} as "
                f"{message.save.name!r}, another rank step {self.save.step} as {self.save.name!r}",
                MISMATCH_HINT,
                self.node_id,
                rank,
            )
            return self.cannot(cause, now_ns)
        match message:
            case Offered():
                return self._offered(rank, message, now_ns)
            case Staged() if self.save.is_plan_only:
                cause = Cause(
                    "protocol",
                    f"rank {rank} staged save {self.save.save_id}, which only asks for layouts",
                    "",
                    self.node_id,
                    rank,
                )
                return self.cannot(cause, now_ns)
            case Staged():
                return self._staged(rank, message, now_ns)
            case Skipped():
                return self.cannot(
                    Cause("busy", message.reason, "", self.node_id, rank), now_ns, skip=True
                )
            case Unable():
                return self.cannot(message.cause, now_ns)
            case AbortWanted():
                cause = Cause("aborted", f"rank {rank} asked for an abort", "", self.node_id, rank)
                if self.phase is Phase.PREPARED:
                    # This node has done its part; the coordinator may still end the save.
                    fail = Fail(save=self.save, cause=cause)
                    return [Send(node=self.job.coordinator, message=fail)]
                return self.cannot(cause, now_ns)

    def _offered(self, rank: int, message: Offered, now_ns: int) -> list[Command]:
        if rank in self.reports:
            return []
        self.reports[rank] = RankReport(rank, "", message.fingerprint, message.offer)
        return self._check_reports(now_ns)

    def _staged(self, rank: int, message: Staged, now_ns: int) -> list[Command]:
        if rank in self.staged:
            return []
        self.staged[rank] = message
        # The offer has been answered, so the coordinator need not hear it again.
        self.reports[rank] = RankReport(rank, message.layout_id)
        commands: list[Command] = []
        if self.phase in (Phase.GATHERING, Phase.PLANNING):
            self.bytes_total += message.image_bytes
            self.writing.add(rank)
            commands.append(
                WriteImage(
                    save=self.save,
                    root=self.job.root,
                    rank=rank,
                    arena=message.arena,
                    slot=message.slot,
                    layout_id=message.layout_id,
                    until_ns=self.deadline_at_ns(),
                    umask=self.job.umask,
                )
            )
        return commands + self._check_reports(now_ns)

    def _check_reports(self, now_ns: int) -> list[Command]:
        commands: list[Command] = []
        if len(self.reports) < len(self.job.ranks_here):
            return commands
        if len(self.staged) == len(self.job.ranks_here):
            had_gathered = self.phase is Phase.PLANNING
            if self.move(Trigger.ALL_STAGED):
                if not had_gathered:
                    commands += self._tell(now_ns)
                commands.append(
                    Log(level="info", event="save.staged", save=self.save,
                        fields={"bytes": self.bytes_total})
                )  # fmt: skip
                commands += self._progress(Phase.WRITING)
                commands += self._check_files(now_ns)
        elif self.move(Trigger.ALL_REPORTED):
            commands += self._tell(now_ns)
        return commands

    def _progress(self, phase: Phase) -> list[Command]:
        return [
            Reply(session=seat.session, message=Progress(save_id=self.save.save_id, phase=phase))
            for seat in self.job.seats.values()
            if not seat.is_lost
        ]

    # --- completions of its commands

    def handle(self, event: ParticipantEvent, now_ns: int) -> list[Command]:
        """Take the completion of a command, or the progress of a write."""
        match event:
            case BytesWritten():
                return self._bytes_written(event)
            case FileDurable():
                return self._file_durable(event, now_ns)
            case FileFailed():
                return self._file_failed(event, now_ns)
            case FragmentDurable():
                return self._fragment_durable(event, now_ns)
            case FragmentFailed():
                return self._sealing_done() + self.cannot(event.cause, now_ns)
            case OutcomeFound():
                return self._outcome_found(event, now_ns)
            case Discarded():
                self.move(Trigger.DISCARDED)
                return []

    def _bytes_written(self, event: BytesWritten) -> list[Command]:
        """Count, for people. A file ends on a full page, so its last block may be a bit longer."""
        self.bytes_written = min(self.bytes_total, self.bytes_written + event.count)
        return []

    def _file_durable(self, event: FileDurable, now_ns: int) -> list[Command]:
        rank = event.file.rank
        if rank not in self.writing:
            return []
        self.files[rank] = event.file
        return self._writer_done(rank) + self._check_files(now_ns)

    def _file_failed(self, event: FileFailed, now_ns: int) -> list[Command]:
        if event.rank not in self.writing:
            return []
        return self._writer_done(event.rank) + self.cannot(event.cause, now_ns)

    def _writer_done(self, rank: int) -> list[Command]:
        self.writing.discard(rank)
        if not self.has_ended:
            return []
        # The rank knows the outcome, but not yet that its slot is free.
        freed = self._reply(rank, SlotFreed(save_id=self.save.save_id))
        return freed + self._check_writers()

    def _sealing_done(self) -> list[Command]:
        self.is_sealing = False
        return self._check_writers() if self.has_ended else []

    def _check_files(self, now_ns: int) -> list[Command]:
        if len(self.files) < len(self.job.ranks_here) or not self.move(Trigger.ALL_WRITTEN):
            return []
        files = tuple(self.files[rank] for rank in sorted(self.files))
        self.is_sealing = True
        return [
            WriteFragment(
                save=self.save,
                root=self.job.root,
                files=files,
                until_ns=self.deadline_at_ns(),
                umask=self.job.umask,
            )
        ]

    def _fragment_durable(self, event: FragmentDurable, now_ns: int) -> list[Command]:
        """Tell the coordinator that all of this node is durable."""
        self.fragment = event.fragment
        released = self._sealing_done()
        if not self.move(Trigger.SEALED):
            return released
        return [Log(level="debug", event="save.prepared", save=self.save), *self._tell(now_ns)]

    # --- what the coordinator says

    def coordinator_said(self, message: CoordinatorMessage, now_ns: int) -> list[Command]:
        """Take the coordinator's message."""
        match message:
            case Planned():
                return self._planned(message)
            case Outcome():
                return self._verdict_heard(message, now_ns)

    def _planned(self, message: Planned) -> list[Command]:
        """Hand the layouts to the ranks that offered."""
        commands: list[Command] = []
        if self.phase is not Phase.PLANNING:
            return commands
        for layout in message.layouts:
            if layout.rank in self.staged or layout.rank in self.layouts_given:
                continue
            self.layouts_given.add(layout.rank)
            commands += self._reply(
                layout.rank,
                LayoutReady(
                    save_id=self.save.save_id,
                    layout_id=layout.layout_id,
                    assigned=layout.assigned,
                    warnings=message.warnings,
                    rota=layout.rota,
                ),
            )
        if self.save.is_plan_only and self.move(Trigger.PLAN_SUFFICES):
            # The ranks asked for layouts only, and have them.
            self.reports = {}
            commands += self.clear_timers()
        return commands

    def _verdict_heard(self, message: Outcome, now_ns: int) -> list[Command]:
        if not self.move(Trigger.OUTCOME):
            return []
        return self._conclude(message, now_ns)

    # --- failures and time

    def cannot(self, cause: Cause, now_ns: int, *, skip: bool = False) -> list[Command]:
        """Tell the coordinator that this node cannot go on; it then ends the save for all."""
        if not self.move(Trigger.CANNOT):
            return []
        self.failure = Fail(save=self.save, cause=placed(cause, self.node_id), skip=skip)
        # Without this node's `Prepared` nobody can publish, so the node may end the save alone if
        # the coordinator stays silent.
        return [*self._tell(now_ns), self._set_grace(now_ns)]

    def resend(self, now_ns: int) -> list[Command]:
        """Repeat the last message: it or its answer may have been lost."""
        if self.has_ended:
            return []
        commands = self._tell(now_ns)
        if self.move(Trigger.LOOK_AGAIN):
            commands.append(self._ask_directory())
        return commands

    def overdue(self, now_ns: int) -> list[Command]:
        """The deadline has passed, or the grace that followed it."""
        match self.phase:
            case Phase.GATHERING | Phase.PLANNING | Phase.WRITING | Phase.SEALING:
                return self._unfinished(now_ns)
            case Phase.PREPARED:
                return self._without_verdict(now_ns)
            case Phase.FAILING if self.is_recalled:
                # The coordinator may have published what the earlier life had prepared.
                self.move(Trigger.UNSURE)
                return [self._ask_directory(), self._set_grace(now_ns)]
            case Phase.FAILING:
                # This node was never prepared, so the coordinator cannot have published.
                self.move(Trigger.OVERDUE)
                assert self.failure is not None
                return self._conclude_alone(self.failure, now_ns)
            case Phase.RESOLVING | Phase.UNDECIDED:
                # The handles end now. What became of the save shows when storage answers.
                self.move(Trigger.OVERDUE)
                unknown = Outcome(save=self.save, outcome=Ending.UNKNOWN, cause=self._unknown())
                return self._conclude(unknown, now_ns)
            case Phase.SHOWING:
                self.move(Trigger.OVERDUE)
                return self._check_writers()
            case _:
                return []

    def _unfinished(self, now_ns: int) -> list[Command]:
        """The deadline has passed before this node was prepared."""
        verdict_at_ns = later(self.deadline_at_ns(), RESOLVE_GRACE_S)
        missing = self._silent_ranks()
        if self.phase is Phase.PLANNING and not missing and now_ns < verdict_at_ns:
            # The plan is late. The coordinator has the same deadline, and knows what it waits for.
            return [self.set_timer(self.deadline_timer, verdict_at_ns)]
        cause = Cause(
            "rank-missing" if missing else "timeout",
            f"save {self.save.save_id} of step {self.save.step} did not end within "
            f"{self.job.deadline_s:g} s: {self.waits_for()}",
            "see `milepost status`; every rank has to call save()",
            self.node_id,
            missing[0] if missing else -1,
        )
        return self.cannot(cause, now_ns)

    def _without_verdict(self, now_ns: int) -> list[Command]:
        """This node is prepared, and the coordinator is silent."""
        verdict_at_ns = later(self.deadline_at_ns(), RESOLVE_GRACE_S)
        if now_ns < verdict_at_ns:
            # The coordinator has the same deadline and decides for all nodes, so it goes first.
            return [self.set_timer(self.deadline_timer, verdict_at_ns)]
        self.move(Trigger.OVERDUE)
        return [self._ask_directory(), self._set_grace(now_ns)]

    def _set_grace(self, now_ns: int) -> SetTimer:
        return self.set_timer(self.deadline_timer, later(now_ns, RESOLVE_GRACE_S))

    def _silent_ranks(self) -> list[int]:
        """Return the ranks that owe something: a report, or an image for their layout."""
        return [
            rank
            for rank in self.job.ranks_here
            if rank not in self.reports or (rank in self.layouts_given and rank not in self.staged)
        ]

    def _ask_directory(self) -> GiveUp:
        return GiveUp(save=self.save, root=self.job.root, is_coordinator=False)

    def _outcome_found(self, event: OutcomeFound, now_ns: int) -> list[Command]:
        """Take what the shared directory shows."""
        if event.fate is Fate.ABORTED and self.move(Trigger.ABORT_SEEN):
            cause = Cause(
                "node-missing", f"{self._no_verdict()}; the save was given up", "", self.node_id
            )
            return self._conclude_alone(self.failure or Fail(save=self.save, cause=cause), now_ns)
        if event.fate is Fate.COMMITTED and self.move(Trigger.COMMIT_SEEN):
            committed = Outcome(save=self.save, outcome=Ending.COMMITTED, path=event.path)
            return self._conclude(committed, now_ns)
        if event.fate is Fate.UNKNOWN:
            # Neither name shows, which proves nothing. `resend` looks again.
            self.move(Trigger.NEITHER_SEEN)
        return []

    def _conclude_alone(self, failure: Fail, now_ns: int) -> list[Command]:
        """End the save without the coordinator. Keep the aborted directory for a grace, until the
        peers have seen it.
        """
        return [*self._conclude(failed_outcome(failure), now_ns), self._set_grace(now_ns)]

    def _no_verdict(self) -> str:
        return (
            f"the coordinator {self.job.coordinator.node_id} gave no verdict within "
            f"{self.job.deadline_s + RESOLVE_GRACE_S:g} s"
        )

    def _unknown(self) -> Cause:
        return Cause(
            "outcome-unknown",
            f"{self._no_verdict()}, and neither outcome shows in {self.job.root}",
            "`milepost list` tells once the file system answers",
            self.node_id,
        )

    def _conclude(self, verdict: Outcome, now_ns: int) -> list[Command]:
        self.verdict = verdict
        self.elapsed_s = round((now_ns - self.opened_at_ns) / SECOND_NS, 6)
        commands = self.clear_timers()
        for rank in self.job.ranks_here:
            commands += self._tell_outcome(rank, verdict)
        commands += [AbandonWrite(save=self.save, rank=rank) for rank in sorted(self.writing)]
        # Offers can be megabytes, and an ended save is kept only to answer late messages.
        self.reports = {
            rank: msgspec.structs.replace(report, fingerprint="", offer=b"")
            for rank, report in self.reports.items()
        }
        return commands + self._check_writers()

    def _tell_outcome(self, rank: int, verdict: Outcome) -> list[Command]:
        concluded = Concluded(
            save_id=self.save.save_id,
            outcome=verdict.outcome,
            path=verdict.path,
            checkpoint_bytes=verdict.checkpoint_bytes,
            elapsed_s=self.elapsed_s,
            cause=verdict.cause,
            layout_valid=verdict.layout_valid,
            slot_free=rank not in self.writing,
            warnings=verdict.warnings,
        )
        return self._reply(rank, concluded)

    def _late(self, rank: int, message: RankMessage) -> list[Command]:
        """Answer a rank whose message came after the end: tell it the outcome."""
        if isinstance(message, AbortWanted) or self.verdict is None:
            return []
        return self._tell_outcome(rank, self.verdict)

    def _check_writers(self) -> list[Command]:
        """Once all writers are quiet, delete what a failed save left."""
        if self.has_writers:
            return []
        if self.outcome not in (Ending.FAILED, Ending.SKIPPED):
            self.move(Trigger.NOTHING_LEFT)
        elif self.move(Trigger.QUIET):
            return [Discard(save=self.save, root=self.job.root)]
        return []

    def _reply(self, rank: int, message: DaemonMessage) -> list[Command]:
        seat = self.job.seats.get(rank)
        if seat is None or seat.is_lost:
            return []
        return [Reply(session=seat.session, message=message)]

    def _tell(self, now_ns: int) -> list[Command]:
        """Tell the coordinator where this node stands, and set the timer that repeats it."""
        message: ParticipantMessage
        if self.failure is not None:
            message = self.failure
        elif self.phase in (Phase.PREPARED, Phase.RESOLVING, Phase.UNDECIDED):
            message = Prepared(
                save=self.save,
                files=tuple(self.files[rank] for rank in sorted(self.files)),
                fragment=self.fragment,
            )
        elif len(self.reports) == len(self.job.ranks_here):
            message = Gathered(
                save=self.save,
                reports=tuple(self.reports[rank] for rank in sorted(self.reports)),
            )
        else:
            # A rank of another node may be gone, and the local ranks wait for it in a collective.
            message = WordWanted(save=self.save)
        return [
            Send(node=self.job.coordinator, message=message),
            self.set_timer(self.repeat_timer, later(now_ns, RESEND_S)),
        ]

    @property
    def is_pending(self) -> bool:
        """Whether the save goes on, or one of its writers does."""
        return not self.has_ended or self.has_writers

    @property
    def has_writers(self) -> bool:
        """Whether a writer of this node may still add to the save's directory."""
        return bool(self.writing) or self.is_sealing

    def waits_for(self) -> str:
        """Return one sentence that says what the save waits for on this node."""
        match self.phase:
            case Phase.GATHERING:
                missing = [rank for rank in self.job.ranks_here if rank not in self.reports]
                return (
                    f"waiting for {named('rank', missing, len(self.job.ranks_here))} to call save"
                )
            case Phase.PLANNING:
                missing = [rank for rank in self.job.ranks_here if rank not in self.staged]
                ungiven = [rank for rank in missing if rank not in self.layouts_given]
                if ungiven:
                    return (
                        f"waiting for the plan of coordinator {self.job.coordinator.node_id} for "
                        f"{named('rank', ungiven, len(self.job.ranks_here))}"
                    )
                return f"waiting for {named('rank', missing, len(self.job.ranks_here))} to stage"
            case Phase.WRITING:
                return f"writing {self.bytes_written} of {self.bytes_total} bytes"
            case Phase.SEALING:
                return "writing the manifest fragment"
            case Phase.PREPARED:
                return f"durable here; waiting for coordinator {self.job.coordinator.node_id}"
            case Phase.FAILING:
                return (
                    f"failed here; waiting for coordinator {self.job.coordinator.node_id} to end it"
                )
            case Phase.RESOLVING | Phase.UNDECIDED:
                return "the coordinator is silent; asking the shared directory"
            case _ if self.writing:
                ranks = named("rank", sorted(self.writing), len(self.job.ranks_here))
                return f"ended as {self.outcome}; a writer still reads the image of {ranks}"
            case _ if self.is_sealing:
                return f"ended as {self.outcome}; its manifest fragment is still being written"
            case _:
                return f"ended as {self.outcome}"
