"""What one rank knows of its saves: messages in, decisions out.

Owns the open saves, the layouts that arrived for them, the plans by structure, the names that are
taken, the failures that nobody has raised yet, and the numbers of saves. It is pure: no thread,
lock, socket, clock, file, log or torch. `milepost.saving.saves` guards it with a lock and carries
out its decisions. The simulation drives the same object.

A save is open from `open` until the ledger decides how it ends. The caller gives each save a
handle, which the ledger returns in its decisions and never looks at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeAlias, TypeVar

from milepost.wire.messages import (
    Cause,
    Concluded,
    Ending,
    LayoutReady,
    Progress,
    SaveRef,
    SlotFreed,
)
from milepost.wire.replicas import Rota

if TYPE_CHECKING:
    from collections.abc import Sequence

ENDED: Final = frozenset(ending.value for ending in Ending)
"""Phases in which a save ends."""

STAGED: Final = frozenset({"staged", "writing", "prepared", "committed"})
"""Phases in which the image is complete."""

LAYOUTS_MAX: Final = 8
"""How many structures the ledger remembers, with their layouts. A loop may alternate between a few,
such as with and without optimizer state."""

EARLY_ENDS_MAX: Final = 64
"""How many ends of saves are kept for which this rank has not called `save()` yet. Other ranks may
be a few saves ahead."""

H = TypeVar("H")


class KnownPlan(NamedTuple):
    """The layout that this rank was given for one structure."""

    layout_id: str
    assigned: tuple[int, ...]
    rota: Rota = Rota()
    """When its replicas are compared."""


# --- decisions ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EndCommitted(Generic[H]):
    """End the handle as committed."""

    handle: H
    ref: SaveRef
    message: Concluded


@dataclass(frozen=True)
class EndUncommitted(Generic[H]):
    """End the handle as `outcome`: failed, skipped or outcome-unknown."""

    handle: H
    ref: SaveRef
    outcome: Ending
    cause: Cause
    is_logged: bool
    """Whether to log it; a failure that a call raises is not logged as well."""


@dataclass(frozen=True)
class Advance(Generic[H]):
    """Move the handle to a later phase that is no end."""

    handle: H
    phase: str


@dataclass(frozen=True)
class FreeSlot:
    """Give back the save's slot, if it holds one: the daemon no longer reads it."""

    save_id: str


@dataclass(frozen=True)
class LoseArena:
    """Make a new arena for the next save: somebody removed the file of the present one."""


@dataclass(frozen=True)
class ForgetWords:
    """Stop repeating this save's messages to a restarted daemon: the save has ended, and its slot
    is free.
    """

    save_id: str


Decision: TypeAlias = (
    EndCommitted[H] | EndUncommitted[H] | Advance[H] | FreeSlot | LoseArena | ForgetWords
)


# --- the ledger ---------------------------------------------------------------------------------


@dataclass(eq=False)
class OpenSave(Generic[H]):
    """A save that has not ended.

    Attributes:
        ref: its names.
        handle: the caller's.
        phase: "staging" until `staged`, then the phase that the daemon reports.
        layout: what this rank has to write, once it is known.
        is_in_hand: a call of this rank has neither staged it yet nor said that it will not.
    """

    ref: SaveRef
    handle: H
    phase: str = "staging"
    layout: LayoutReady | None = None
    is_in_hand: bool = True

    @property
    def is_staged(self) -> bool:
        """Whether the image is complete."""
        return self.phase != "staging"


class _Taken(NamedTuple):
    """Which save has a directory's name."""

    step: int
    by: str


class Ledger(Generic[H]):
    """See the module's docstring. One thread at a time.

    Args:
        is_raising: whether to keep failures until `take_failures`, for a caller that raises them.
    """

    def __init__(self, *, is_raising: bool = False) -> None:
        self._is_raising = is_raising
        self._job = ""
        self._attempt = 0
        self._count = 0
        self._open: dict[str, OpenSave[H]] = {}
        self._plans: dict[str, KnownPlan] = {}
        """By fingerprint."""
        self._failures: list[H] = []
        self._taken: dict[str, _Taken] = {}
        """By directory name: the checkpoints that this attempt saved or resumed from. It must not
        replace them."""
        self._early_ends: dict[str, tuple[Ending, Cause]] = {}
        self._last_step = -1
        self._owed: dict[str, None] = {}
        """Saves that have ended while the daemon still reads their slots."""

    def begin(self, job: str, attempt: int) -> Sequence[Decision[H]]:
        """Number the following saves as saves of this attempt. No save is under way.

        Steps that an earlier attempt saved may be saved again. The count goes on, so that no id is
        given twice.
        """
        self._job, self._attempt = job, attempt
        self._taken.clear()
        self._last_step = -1
        owed, self._owed = self._owed, {}
        # A daemon refuses messages of an earlier attempt.
        return [ForgetWords(save_id) for save_id in owed]

    # --- what is asked

    @property
    def open_saves(self) -> tuple[OpenSave[H], ...]:
        """The saves that have not ended, oldest first."""
        return tuple(self._open.values())

    def is_open(self, save_id: str) -> bool:
        """Whether the save has been opened and has not ended."""
        return save_id in self._open

    def layout_of(self, save_id: str) -> LayoutReady | None:
        """Return the layout that arrived for an open save, or None."""
        save = self._open.get(save_id)
        return None if save is None else save.layout

    def plan_of(self, structure: str) -> KnownPlan | None:
        """Return the known layout of a structure if it is still valid, or None."""
        return self._plans.get(structure)

    def taken_by(self, name: str) -> str | None:
        """Return in words which checkpoint of this attempt has a directory's name; None: it is
        free.
        """
        taken = self._taken.get(name)
        return None if taken is None else taken.by

    @property
    def last_step(self) -> int:
        """The greatest step that this attempt has committed or may still commit; -1: none."""
        return self._last_step

    def take_failures(self) -> list[H]:
        """Return the failures that the caller has to raise, oldest first, each only once."""
        failures, self._failures = self._failures, []
        return failures

    # --- what this rank does

    def name_save(
        self,
        step: int,
        name: str,
        *,
        is_plan_only: bool = False,
        place: str = "",
        overwrite: bool = True,
    ) -> SaveRef:
        """Give the next save its names. They are the same on all ranks, without a message, since
        each rank counts its calls.

        overwrite: below a root the caller has refused names that must not be replaced. A name that
        is still taken belongs to an abandoned step, or may be overwritten.
        """
        self._count += 1
        return SaveRef(
            job=self._job,
            save_id=f"{self._attempt}-{self._count}",
            step=step,
            name=name,
            overwrite=overwrite,
            is_plan_only=is_plan_only,
            place=place,
        )

    def open(self, ref: SaveRef, handle: H) -> Sequence[Decision[H]]:
        """Open a save; it ends at once if the other ranks have ended it already."""
        save = self._open[ref.save_id] = OpenSave(ref, handle)
        if not ref.is_plan_only:
            self._taken[ref.name] = _Taken(ref.step, f"save {ref.save_id} of this attempt")
        early = self._early_ends.pop(ref.save_id, None)
        return [] if early is None else self._end(save, *early)

    def keep_plan(self, structure: str, plan: KnownPlan) -> None:
        """Remember the layout of a structure; forget the oldest one if there are too many."""
        self._plans[structure] = plan
        while len(self._plans) > LAYOUTS_MAX:
            del self._plans[next(iter(self._plans))]

    def stage(self, save_id: str) -> Sequence[Decision[H]]:
        """Note that the image is complete. Returns None if the save has ended: then nobody will
        read the image.
        """
        save = self._open.get(save_id)
        if save is None:
            return []
        save.phase, save.is_in_hand = "staged", False
        return [Advance(save.handle, save.phase)]

    def skip(self, save_id: str) -> None:
        """Note that this rank told the daemon that it skips the save. The daemon's answer ends
        it.
        """
        if save := self._open.get(save_id):
            save.is_in_hand = False

    @property
    def in_hand(self) -> list[SaveRef]:
        """The open saves that a call has not staged or given up yet, oldest first."""
        return [save.ref for save in self._open.values() if save.is_in_hand]

    def give_up(
        self, save_id: str, cause: Cause, *, is_raised: bool = False
    ) -> Sequence[Decision[H]]:
        """End a save that this rank cannot complete, unless it has ended.

        is_raised: the caller raises the cause, so it is not logged.
        """
        save = self._open.get(save_id)
        return [] if save is None else self._end(save, Ending.FAILED, cause, is_raised=is_raised)

    def close_plan(self, save_id: str) -> Sequence[Decision[H]]:
        """End a save that was opened only to get a layout."""
        save = self._open.pop(save_id, None)
        if save is None:
            return []
        cause = Cause("aborted", "prepare() only makes a plan and saves nothing")
        return [EndUncommitted(save.handle, save.ref, Ending.SKIPPED, cause, is_logged=False)]

    def resume(self, step: int, name: str) -> None:
        """Note that this attempt goes on from a checkpoint, which it must not replace. Later steps
        are abandoned, even one that the attempt resumed from before.
        """
        self._taken = {each: taken for each, taken in self._taken.items() if taken.step <= step}
        self._taken[name] = _Taken(step, "the checkpoint this attempt resumed from")

    # --- what it hears

    def heard(self, message: object) -> Sequence[Decision[H]]:
        """Take a message of the daemon. A message that is not about saves changes nothing."""
        match message:
            case LayoutReady():
                # Nobody would fetch a layout that arrives after its save has ended.
                if save := self._open.get(message.save_id):
                    save.layout = message
            case Progress():
                save = self._open.get(message.save_id)
                if save is not None and save.is_staged:
                    save.phase = message.phase
                    return [Advance(save.handle, save.phase)]
            case Concluded():
                return self._concluded(message)
            case SlotFreed():
                return self._slot_freed(message.save_id)
            case _:
                pass
        return []

    def gone(self, cause: Cause) -> Sequence[Decision[H]]:
        """End all open saves: the daemon does not come back.

        A daemon that was only stopped goes on with what is staged, and so do daemons of other
        nodes. So the outcome of a save that this rank staged is not known.
        """
        unknown = Cause(
            "outcome-unknown",
            f"this rank had staged the save, but {cause.message}",
            "it may still be committed: look with steps() or `milepost list`",
            cause.node,
            cause.rank,
        )
        decisions: list[Decision[H]] = []
        for save in self.open_saves:
            if save.is_staged:
                decisions += self._end(save, Ending.UNKNOWN, unknown)
            else:
                decisions += self._end(save, Ending.FAILED, cause)
            decisions.append(FreeSlot(save.ref.save_id))
        owed, self._owed = self._owed, {}
        return [*decisions, *(FreeSlot(save_id) for save_id in owed)]

    def _slot_freed(self, save_id: str) -> list[Decision[H]]:
        self._owed.pop(save_id, None)
        return [ForgetWords(save_id), FreeSlot(save_id)]

    def _concluded(self, message: Concluded) -> Sequence[Decision[H]]:
        save_id = message.save_id
        decisions: list[Decision[H]] = []
        if not message.layout_valid:
            self._plans.clear()
        if message.slot_free:
            decisions += self._slot_freed(save_id)
        else:
            # The daemon that runs when the slot becomes free must know that this rank waits for it.
            # So a restarted daemon is told again what was said of the save.
            self._owed[save_id] = None
        save = self._open.get(save_id)
        cause = message.cause or Cause("internal", "the daemon gave no reason")
        if save is None:
            if message.outcome is not Ending.COMMITTED:
                self._keep_early(save_id, message.outcome, cause)
        elif message.outcome is Ending.COMMITTED:
            self._last_step = max(self._last_step, save.ref.step)
            del self._open[save_id]
            decisions.append(EndCommitted(save.handle, save.ref, message))
        else:
            decisions += self._end(save, message.outcome, cause)
        return decisions

    def _end(
        self, save: OpenSave[H], outcome: Ending, cause: Cause, *, is_raised: bool = False
    ) -> Sequence[Decision[H]]:
        """End a save that did not become a checkpoint as far as this rank knows."""
        ref, decisions = save.ref, list[Decision[H]]()
        if not ref.is_plan_only:
            if outcome is Ending.UNKNOWN:
                self._last_step = max(self._last_step, ref.step)
            else:
                self._taken.pop(ref.name, None)
        if cause.code == "arena-invalid":
            decisions.append(LoseArena())
        is_told = is_raised or ref.is_plan_only or outcome is Ending.SKIPPED
        if self._is_raising and not is_told:
            self._failures.append(save.handle)
        # This comes last: docs/design/0010-interrupts.md.
        del self._open[ref.save_id]
        decisions.append(EndUncommitted(save.handle, ref, outcome, cause, is_logged=not is_told))
        return decisions

    def _keep_early(self, save_id: str, outcome: Ending, cause: Cause) -> None:
        """Note how a save ended for which this rank has not called `save()` yet."""
        if count_of(save_id) <= self._count:
            return
        self._early_ends[save_id] = (outcome, cause)
        while len(self._early_ends) > EARLY_ENDS_MAX:
            del self._early_ends[next(iter(self._early_ends))]


def count_of(save_id: str) -> int:
    """Return a save's number, the same on all ranks: the second part of `<attempt>-<count>`. It
    goes on from attempt to attempt.
    """
    count = save_id.rpartition("-")[2]
    return int(count) if count.isdecimal() else 0
