"""What the log tells a user whose program works, but costs or loses more than it need.

Owns the words and when they are due; decides nothing, refuses nothing.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from milepost.storage.root import Root

log = logging.getLogger("milepost")

UNPREPARED_S: Final = 0.2
"""How long a first save may take that was not prepared before the log warns of it; below, it is
told at the level of information.
"""


class Saver(Protocol):
    """The part of a Checkpointer that is looked at."""

    root: Path
    rank: int
    attempt: int

    @property
    def is_closed(self) -> bool: ...


_made: weakref.WeakSet[Saver] = weakref.WeakSet()
"""Those that this process has made and not forgotten."""


def note_made(saver: Saver) -> None:
    """Warn if this process has another open one of the same root and rank: its saves fail from now
    on.
    """
    for other in list(_made):
        if other is saver or other.is_closed:
            continue
        if (other.root, other.rank) == (saver.root, saver.rank):
            log.warning(
                "%r supersedes the one of attempt %d, which is still open in this process, and "
                "whose saves fail from now on: close() it first, or use one for all",
                saver, other.attempt,
            )  # fmt: skip
    _made.add(saver)


def tell_branch(root: Root, step: int, attempt: int) -> None:
    """Warn before the first save of an attempt that has loaded nothing, if an earlier attempt has
    been as far: a forgotten `load()` costs the checkpoints that `keep` no longer keeps.
    """
    entries = root.checkpoints()
    if entries and entries[0].order[0] < attempt and entries[0].step >= step:
        log.warning(
            "%s holds step %d of an earlier attempt, nothing was loaded, and step %d is saved: "
            "training has begun anew there, the new checkpoints count as the newest, and with "
            "keep= the old ones go in turn; ck.load(state) before the loop resumes",
            root.path, entries[0].step, step,
        )  # fmt: skip


class FirstSave:
    """Tells once what the first save paid that `prepare` would have paid ahead.

    Args:
        is_telling: False on ranks that leave it to another one.
    """

    def __init__(self, *, is_telling: bool) -> None:
        self._is_telling = is_telling
        self.was_prepared = False
        """Whether a preparation was completed, for whatever structure."""

    def paid(self, planned_s: float, copied_s: float | None) -> None:
        """Tell what a save has paid that had to plan. Only the first one is told."""
        if self._is_telling:
            tell_unprepared(planned_s, copied_s, was_prepared=self.was_prepared)
        self.pass_by()

    def pass_by(self) -> None:
        """Note that the first save is past."""
        self._is_telling = False


def tell_unprepared(planned_s: float, copied_s: float | None, *, was_prepared: bool) -> None:
    """Say what a first save paid that `prepare` would have paid ahead, and how to avoid it.

    Args:
        planned_s: what it took to plan and to reserve memory.
        copied_s: the copy; None: it goes on behind training, and takes longer than later ones.
        was_prepared: `prepare` was called, and for another structure.
    """
    copied = "the copy behind training also touches its pages for the first time"
    if copied_s is not None:
        copied = f"copying into pages never touched {copied_s:.1f} s"
    log.log(
        logging.WARNING if planned_s + (copied_s or 0.0) > UNPREPARED_S else logging.INFO,
        "the first save was %s: planning and reserving memory took %.1f s, %s; "
        "ck.prepare(state) after the optimizer's first step, when it has its state, pays for that "
        "ahead",
        "prepared with a state of another structure" if was_prepared else "not prepared",
        planned_s, copied,
    )  # fmt: skip
