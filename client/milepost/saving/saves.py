"""The saves of one rank: the ledger behind its lock, and its decisions carried out.

Owns the lock that guards the ledger and the slots, and the waits for changes of the ledger. It must
not know of states, tensors or plans.

Threads: any thread may call everything here. Decisions are carried out after the lock was released,
so callbacks of a handle run without the lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.concurrency.waiting import make_condition, wait_telling
from milepost.errors import MilepostError, SaveFailed, UsageError
from milepost.handle import Checkpoint, Save
from milepost.ledger import (
    Advance,
    Decision,
    EndCommitted,
    EndUncommitted,
    ForgetWords,
    FreeSlot,
    KnownPlan,
    Ledger,
    LoseArena,
)
from milepost.wire.causes import error_of
from milepost.wire.messages import (
    AbortWanted,
    Cause,
    DaemonMessage,
    LayoutReady,
    SaveRef,
    Skipped,
    Staged,
    Unable,
)

if TYPE_CHECKING:
    from milepost.link.session import Session
    from milepost.staging.slots import Slots
    from milepost.staging.stager import StagedImage

log = logging.getLogger("milepost")


def not_staged(rank: int, error: BaseException) -> SaveFailed:
    """Return the failure of a rank that could not stage because of any exception."""
    code = "internal" if isinstance(error, Exception) else "aborted"
    return SaveFailed(code, f"rank {rank} could not stage: {error!r}")


class Handover:
    """Tells the ledger whether the image of one save was staged; a `Listener` of its staging."""

    def __init__(self, saves: Saves, ref: SaveRef, handle: Save) -> None:
        self._saves = saves
        self._ref = ref
        self._handle = handle

    def staged(self, image: StagedImage) -> None:
        """Hand the slot over to the daemon."""
        self._saves.hand_over(self._ref, image)

    def failed(self, error: MilepostError) -> None:
        """Give up the save, unless it has ended."""
        if not self._saves.is_over(self._ref):
            self._saves.give_up(self._ref, error)

    def waited(self, waited_s: float) -> None:
        """Note how long the guard has kept a thread waiting."""
        self._handle.add_guard(waited_s)


class Saves:
    """See the module's docstring.

    Args:
        session: where messages about saves go.
        rank: this rank.
        is_raising: whether to keep failures until `take_failures`.

    Attributes:
        changed: guards the ledger, `slots`, and who holds each slot. Notified whenever a save has
            ended, a layout has arrived or a slot is free.
    """

    def __init__(self, session: Session, rank: int, *, is_raising: bool) -> None:
        self._session = session
        self._rank = rank
        self.changed = make_condition()
        # `changed` guards the fields below; the fields above never change.
        self._ledger: Ledger[Save] = Ledger(is_raising=is_raising)
        self._slots: Slots | None = None

    def begin(self, job: str, attempt: int, slots: Slots) -> None:
        """Go on as this attempt, with slots of its own. No save is under way."""
        with self.changed:
            self._slots = slots
        self._decide(lambda ledger: ledger.begin(job, attempt))

    # --- what a call does

    def open(
        self,
        step: int,
        name: str,
        *,
        is_plan_only: bool = False,
        place: str = "",
        overwrite: bool = True,
    ) -> tuple[SaveRef, Save]:
        """Name the next save and open it, so that messages about it reach its handle."""
        with self.changed:
            ref = self._ledger.name_save(
                step, name, is_plan_only=is_plan_only, place=place, overwrite=overwrite
            )
        save = Save(step, name, ref.save_id, lambda: self._session.send(AbortWanted(save=ref)))
        self._decide(lambda ledger: ledger.open(ref, save))
        return ref, save

    def take_turn(self, ref: SaveRef, *, may_wait: bool) -> bool:
        """Wait for a free slot, or skip the save if it may not wait. False: the save has ended, or
        will end.

        Raises Rejected("busy").
        """
        held = self.slots.held
        busy = self._told(held)
        if len(held) >= self.slots.count and not may_wait:
            reason = f"rank {self._rank} has all {self.slots.count} slots in use: {busy}"
            with self.changed:
                self._ledger.skip(ref.save_id)
            self._session.say(Skipped(save=ref, reason=reason))
            return False
        return self.slots.await_one(lambda: self.is_over(ref), busy)

    def await_layout(self, ref: SaveRef, timeout_s: float, what: str) -> LayoutReady | None:
        """Wait for the layout of an open save; None: the save has ended, or no layout came in
        time.
        """
        with self.changed:
            wait_telling(
                self.changed,
                lambda: (
                    self._ledger.layout_of(ref.save_id) is not None
                    or not self._ledger.is_open(ref.save_id)
                ),
                timeout_s,
                what,
            )
            return self._ledger.layout_of(ref.save_id)

    def hand_over(self, ref: SaveRef, staged: StagedImage) -> None:
        """Hand the slot over to the daemon, unless the save has ended."""
        with self.changed:
            decisions = self._ledger.stage(ref.save_id)
            if not decisions:
                # Another rank could not go on, so nobody will read this image.
                staged.slot.release()
                return
            self.slots.hold(ref.save_id, staged.slot)
        self._carry_out(decisions)
        self._session.say(
            Staged(
                save=ref,
                layout_id=staged.record.layout_id,
                arena=str(staged.arena),
                slot=staged.slot.index,
                image_bytes=staged.record.image_bytes,
            )
        )

    def give_up(self, ref: SaveRef, error: BaseException) -> None:
        """End a save that this rank cannot complete. The daemon ends it on all ranks."""
        told = error if isinstance(error, MilepostError) else not_staged(self._rank, error)
        cause = Cause(told.code, told.message, told.hint, self._session.node_id, self._rank)
        self._session.say(Unable(save=ref, cause=cause))
        is_raised = isinstance(error, UsageError)
        self._decide(lambda ledger: ledger.give_up(ref.save_id, cause, is_raised=is_raised))

    def refuse(self, step: int, name: str, error: MilepostError) -> Save:
        """Return the handle of a save that failed before any daemon could hear of it."""
        ref, save = self.open(step, name)
        self.give_up(ref, error)
        self._session.settle(ref.save_id)
        return save

    def give_up_left(self) -> None:
        """Give up the saves that an interrupted call has left open
        (docs/design/0010-interrupts.md). Only while no call and no copy is at work.
        """
        with self.changed:
            left = self._ledger.in_hand
        for ref in left:
            self.give_up(ref, SaveFailed("aborted", f"rank {self._rank} was interrupted"))

    def close_plan(self, ref: SaveRef) -> None:
        """End a save that was opened only to get a layout."""
        self._session.settle(ref.save_id)
        self._decide(lambda ledger: ledger.close_plan(ref.save_id))

    def keep_plan(self, structure: str, plan: KnownPlan) -> None:
        """Remember the layout of a structure."""
        with self.changed:
            self._ledger.keep_plan(structure, plan)

    def resume(self, step: int, name: str) -> None:
        """Note that this attempt goes on from a checkpoint."""
        with self.changed:
            self._ledger.resume(step, name)

    # --- what is asked

    def is_over(self, ref: SaveRef) -> bool:
        """Whether the save has ended."""
        with self.changed:
            return not self._ledger.is_open(ref.save_id)

    def plan_of(self, structure: str) -> KnownPlan | None:
        """Return the known layout of a structure if it is still valid, or None."""
        with self.changed:
            return self._ledger.plan_of(structure)

    def taken_by(self, name: str) -> str | None:
        """Return in words which checkpoint of this attempt has a directory's name; None: it is
        free.
        """
        with self.changed:
            return self._ledger.taken_by(name)

    @property
    def last_step(self) -> int:
        """The greatest step that this attempt has committed or may still commit; -1: none."""
        with self.changed:
            return self._ledger.last_step

    def await_ends(self, timeout_s: float | None) -> None:
        """Return once all saves that are open now have ended, in whatever way.

        Raises TimeoutError, which names one that has not ended.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            open_now = [each.handle for each in self._ledger.open_saves]
        for save in open_now:
            save.await_end(None if until_s is None else max(0.0, until_s - time.monotonic()))

    def _told(self, save_ids: Collection[str]) -> str:
        """Return in words the phase of each of these saves that has not ended."""
        with self.changed:
            return ", ".join(
                f"step {each.ref.step} is {each.phase}"
                for each in self._ledger.open_saves
                if each.ref.save_id in save_ids
            )

    def take_failures(self) -> list[Save]:
        """Return the failures that the caller has to raise, each only once."""
        with self.changed:
            return self._ledger.take_failures()

    # --- what is heard

    def heard(self, message: DaemonMessage) -> None:
        """Take a message; on the connection's thread."""
        self._decide(lambda ledger: ledger.heard(message))

    def gone(self, cause: Cause) -> None:
        """End all saves that wait for a daemon that does not come back; on the session's thread."""
        placed = Cause(cause.code, cause.message, cause.hint, self._session.node_id, self._rank)
        self._decide(lambda ledger: ledger.gone(placed))

    # --- decisions

    def _decide(self, ask: Callable[[Ledger[Save]], Sequence[Decision[Save]]]) -> None:
        with self.changed:
            decisions = ask(self._ledger)
            self.changed.notify_all()
        self._carry_out(decisions)

    def _carry_out(self, decisions: Sequence[Decision[Save]]) -> None:
        for decision in decisions:
            match decision:
                case EndCommitted(save, ref, message):
                    for warning in message.warnings if self._rank == 0 else ():
                        log.warning("%s", error_of(warning, MilepostError))
                    path, size = Path(message.path), message.checkpoint_bytes
                    save.commit(Checkpoint(ref.step, path, size, message.elapsed_s))
                case EndUncommitted(save, ref, outcome, cause, is_logged):
                    save.fail(outcome, cause)
                    if is_logged:
                        names = (ref.save_id, ref.step, outcome)
                        log.warning("save %s of step %s %s: %s", *names, save.failure())
                case Advance(save, phase):
                    save.advance(phase)
                case FreeSlot(save_id):
                    self.slots.free(save_id)
                case LoseArena():
                    self.slots.lose()
                case ForgetWords(save_id):
                    self._session.settle(save_id)

    @property
    def slots(self) -> Slots:
        """The slots of the present attempt."""
        with self.changed:
            assert self._slots is not None
            return self._slots
