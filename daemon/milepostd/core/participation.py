"""One node's part in one save: it gathers what its local ranks say, has their images written, and
tells the coordinator.

Every node of the cohort takes part, the coordinator's too: there the two roles talk by the same
messages as between nodes, so there is one behaviour, not two.
"""

from __future__ import annotations

import msgspec

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
    WriteFragment,
    WriteImage,
)
from milepostd.core.events import (
    BytesWritten,
    Discarded,
    Fate,
    FileDurable,
    FileFailed,
    FragmentDurable,
    FragmentFailed,
    OutcomeFound,
    ParticipantEvent,
)
from milepostd.core.job import Job
from milepostd.core.phases import PARTICIPANT, Phase, Trigger
from milepostd.core.role import RESEND_S, RESOLVE_GRACE_S, SECOND_NS, Role, failed_outcome
from milepostd.core.timers import TimerKind


class Participation(Role):
    """One node's part in one save.

    Args:
        is_recalled: an earlier life of this daemon took part, and may have been prepared.
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
        self.staged: dict[int, Staged] = {}
        self.files: dict[int, WrittenFile] = {}
        self.is_writing: set[int] = set()
        """Ranks whose image a writer may be touching."""
        self.is_sealing = False
        """Whether the manifest fragment is being written."""
        self.layouts_given: set[int] = set()
        self.fragment = ""
        self.failure: Fail | None = None
        self.is_recalled = is_recalled
        self.bytes_total = 0
        self.bytes_written = 0
        self.elapsed_s = 0.0
        """From the first report to the end."""

    def open(self) -> list[Command]:
        """First report of the save on this node."""
        return [
            self.set_timer(self.deadline_timer, self.deadline_at_ns()),
            self.set_timer(self.repeat_timer, self.opened_at_ns + int(RESEND_S * SECOND_NS)),
            Log(level="debug", event="save.opened", save=self.save),
        ]

    # --- what local ranks say

    def rank_said(self, rank: int, message: RankMessage, now_ns: int) -> list[Command]:
        """Take one rank's word; each says one thing, or offers and then stages."""
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
                    # This node's part is done and stands; the coordinator may still end the save.
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
        # An offer that has been answered need not be repeated to the coordinator.
        self.reports[rank] = RankReport(rank, message.layout_id)
        commands: list[Command] = []
        if self.phase in (Phase.GATHERING, Phase.PLANNING):
            self.bytes_total += message.image_bytes
            self.is_writing.add(rank)
            commands.append(
                WriteImage(
                    save=self.save,
                    root=self.job.root,
                    rank=rank,
                    arena=message.arena,
                    slot=message.slot,
                    layout_id=message.layout_id,
                    until_ns=self.deadline_at_ns(),
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

    # --- what its own commands came to

    def handle(self, event: ParticipantEvent, now_ns: int) -> list[Command]:
        """Take the completion of a command, or its progress."""
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
        """Progress, for people. Files end on a page, so the last block may be a little longer."""
        self.bytes_written = min(self.bytes_total, self.bytes_written + event.count)
        return []

    def _file_durable(self, event: FileDurable, now_ns: int) -> list[Command]:
        """One rank's file is synced."""
        rank = event.file.rank
        if rank not in self.is_writing:
            return []
        self.files[rank] = event.file
        return self._writer_done(rank) + self._check_files(now_ns)

    def _file_failed(self, event: FileFailed, now_ns: int) -> list[Command]:
        """One rank's file could not be written."""
        if event.rank not in self.is_writing:
            return []
        return self._writer_done(event.rank) + self.cannot(event.cause, now_ns)

    def _writer_done(self, rank: int) -> list[Command]:
        self.is_writing.discard(rank)
        if not self.has_ended:
            return []
        # The rank was told the outcome while the writer still read its slot.
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
                save=self.save, root=self.job.root, files=files, until_ns=self.deadline_at_ns()
            )
        ]

    def _fragment_durable(self, event: FragmentDurable, now_ns: int) -> list[Command]:
        """Everything of this node is durable: say so."""
        self.fragment = event.fragment
        released = self._sealing_done()
        if not self.move(Trigger.SEALED):
            return released
        return [Log(level="debug", event="save.prepared", save=self.save), *self._tell(now_ns)]

    # --- what the coordinator says

    def coordinator_said(self, message: CoordinatorMessage, now_ns: int) -> list[Command]:
        """Take the coordinator's word."""
        match message:
            case Planned():
                return self._planned(message)
            case Outcome():
                return self._verdict_heard(message, now_ns)

    def _planned(self, message: Planned) -> list[Command]:
        """Layouts for local ranks that offered."""
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
                ),
            )
        if self.save.is_plan_only and self.move(Trigger.PLAN_SUFFICES):
            # The layouts are the answer: the ranks expect no other.
            self.reports = {}
            commands += self.clear_timers()
        return commands

    def _verdict_heard(self, message: Outcome, now_ns: int) -> list[Command]:
        """The coordinator's verdict."""
        if not self.move(Trigger.OUTCOME):
            return []
        return self._conclude(message, now_ns)

    # --- failures and time

    def cannot(self, cause: Cause, now_ns: int, *, skip: bool = False) -> list[Command]:
        """This node cannot go on: the coordinator is told, and ends the save for all."""
        if not self.move(Trigger.CANNOT):
            return []
        self.failure = Fail(save=self.save, cause=placed(cause, self.node_id), skip=skip)
        # Not prepared means not published: if the coordinator stays silent, this node may end it by
        # itself.
        grace = self.set_timer(self.deadline_timer, now_ns + int(RESOLVE_GRACE_S * SECOND_NS))
        return [*self._tell(now_ns), grace]

    def resend(self, now_ns: int) -> list[Command]:
        """Nothing was heard for a while: say it again."""
        if self.has_ended:
            return []
        commands = self._tell(now_ns)
        if self.move(Trigger.LOOK_AGAIN):
            commands.append(self._ask_directory())
        return commands

    def overdue(self, now_ns: int) -> list[Command]:
        """The deadline has passed on this node, or a grace after it."""
        if self.phase is Phase.SHOWING and self.move(Trigger.OVERDUE):
            return self._check_writers()
        if self.phase in (Phase.GATHERING, Phase.PLANNING, Phase.WRITING, Phase.SEALING):
            verdict_at_ns = self.deadline_at_ns() + int(RESOLVE_GRACE_S * SECOND_NS)
            missing = self._silent_ranks()
            if self.phase is Phase.PLANNING and not missing and now_ns < verdict_at_ns:
                # Only the coordinator knows for whom its plan waits; it has the same deadline.
                return [self.set_timer(self.deadline_timer, verdict_at_ns)]
            code = "rank-missing" if missing else "timeout"
            cause = Cause(
                code,
                f"save {self.save.save_id} of step {self.save.step} did not end within "
                f"{self.job.deadline_s:g} s: {self.waits_for()}",
                "see `milepost status`; every rank has to call save()",
                self.node_id,
                missing[0] if missing else -1,
            )
            return self.cannot(cause, now_ns)
        if self.phase is Phase.FAILING and self.is_recalled and self.move(Trigger.UNSURE):
            at_ns = now_ns + int(RESOLVE_GRACE_S * SECOND_NS)
            return [self._ask_directory(), self.set_timer(self.deadline_timer, at_ns)]
        if self.phase is Phase.FAILING and self.move(Trigger.OVERDUE):
            # Never prepared, so the coordinator cannot have published: this is certain without its
            # word.
            assert self.failure is not None
            return self._conclude_alone(self.failure, now_ns)
        if self.phase is Phase.PREPARED:
            if now_ns < self.deadline_at_ns() + int(RESOLVE_GRACE_S * SECOND_NS):
                # The coordinator has the same deadline and decides for all; give it the first word.
                at_ns = self.deadline_at_ns() + int(RESOLVE_GRACE_S * SECOND_NS)
                return [self.set_timer(self.deadline_timer, at_ns)]
            if self.move(Trigger.OVERDUE):
                at_ns = now_ns + int(RESOLVE_GRACE_S * SECOND_NS)
                return [self._ask_directory(), self.set_timer(self.deadline_timer, at_ns)]
        if self.phase in (Phase.RESOLVING, Phase.UNDECIDED) and self.move(Trigger.OVERDUE):
            # The directory gives no answer, or storage none at all: the handle ends, the save's
            # fate shows later.
            unknown = Outcome(save=self.save, outcome=Ending.UNKNOWN, cause=self._unknown())
            return self._conclude(unknown, now_ns)
        return []

    def _silent_ranks(self) -> list[int]:
        """Local ranks that owe the next word: a report, or an image for their layout."""
        return [
            rank
            for rank in self.job.ranks_here
            if rank not in self.reports or (rank in self.layouts_given and rank not in self.staged)
        ]

    def _ask_directory(self) -> GiveUp:
        return GiveUp(save=self.save, root=self.job.root, is_coordinator=False)

    def _outcome_found(self, event: OutcomeFound, now_ns: int) -> list[Command]:
        """The shared directory has told how the save ended."""
        if event.fate is Fate.ABORTED and self.move(Trigger.ABORT_SEEN):
            cause = Cause(
                "node-missing", f"{self._no_verdict()}; the save was given up", "", self.node_id
            )
            return self._conclude_alone(self.failure or Fail(save=self.save, cause=cause), now_ns)
        if event.fate is Fate.COMMITTED and self.move(Trigger.COMMIT_SEEN):
            committed = Outcome(save=self.save, outcome=Ending.COMMITTED, path=event.path)
            return self._conclude(committed, now_ns)
        if event.fate is Fate.UNKNOWN:
            # Neither name shows, which is no outcome: the next resend looks again.
            self.move(Trigger.NEITHER_SEEN)
        return []

    def _conclude_alone(self, failure: Fail, now_ns: int) -> list[Command]:
        """End without the coordinator's word; what is given up stays a grace for others to find."""
        return [
            *self._conclude(failed_outcome(failure), now_ns),
            self.set_timer(self.deadline_timer, now_ns + int(RESOLVE_GRACE_S * SECOND_NS)),
        ]

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
        commands += [AbandonWrite(save=self.save, rank=rank) for rank in sorted(self.is_writing)]
        # Offers can be megabytes; an ended save is kept only to answer late messages.
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
            slot_free=rank not in self.is_writing,
        )
        return self._reply(rank, concluded)

    def _late(self, rank: int, message: RankMessage) -> list[Command]:
        """A rank speaks of a save that has ended for its node: tell it how."""
        if isinstance(message, AbortWanted) or self.verdict is None:
            return []
        return self._tell_outcome(rank, self.verdict)

    def _check_writers(self) -> list[Command]:
        """Delete what a failed save left, once no writer can add to it and its peers have had time
        to see it.
        """
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
        """Say to the coordinator where this node stands."""
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
            # A rank of another node may be gone, and this one's wait for it in a collective.
            message = WordWanted(save=self.save)
        return [
            Send(node=self.job.coordinator, message=message),
            self.set_timer(self.repeat_timer, now_ns + int(RESEND_S * SECOND_NS)),
        ]

    @property
    def is_pending(self) -> bool:
        """Whether this node still has to do something for the save."""
        return not self.has_ended or self.has_writers

    @property
    def has_writers(self) -> bool:
        """Whether a writer of this node may still add to the save's directory."""
        return bool(self.is_writing) or self.is_sealing

    def waits_for(self) -> str:
        """Say in one sentence what the save waits for on this node."""
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
            case _ if self.is_writing:
                ranks = named("rank", sorted(self.is_writing), len(self.job.ranks_here))
                return f"ended as {self.outcome}; a writer still reads the image of {ranks}"
            case _ if self.is_sealing:
                return f"ended as {self.outcome}; its manifest fragment is still being written"
            case _:
                return f"ended as {self.outcome}"
