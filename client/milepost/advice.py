"""Log lines for a user whose program works, but costs or loses more than necessary.

Owns their texts and decides when to log them. Refuses nothing.
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
"""If an unprepared first save takes longer than this, the log warns of it; otherwise the line has
the level of information.
"""


class Saver(Protocol):
    """The part of a Checkpointer that this module reads."""

    root: Path
    rank: int
    attempt: int

    @property
    def is_closed(self) -> bool: ...


_made: weakref.WeakSet[Saver] = weakref.WeakSet()
"""The Checkpointers of this process that still exist."""


def note_made(saver: Saver) -> None:
    """Warn if this process has another open Checkpointer of the same root and rank: saves of the
    older one fail from now on.
    """
    for other in list(_made):
        if other is saver or other.is_closed:
            continue
        if (other.root, other.rank) == (saver.root, saver.rank):
            log.warning(
                "%r supersedes the Checkpointer of attempt %d, which is still open in this "
                "process. Saves of the older one fail from now on: close() it first, or use one "
                "Checkpointer for all saves",
                saver, other.attempt,
            )  # fmt: skip
    _made.add(saver)


def tell_branch(root: Root, step: int, attempt: int) -> None:
    """Warn before the first save of an attempt that has loaded nothing, if an earlier attempt has
    saved this step or a later one. After a forgotten `load()`, `keep` removes the old checkpoints.
    """
    entries = root.checkpoints()
    if entries and entries[0].order[0] < attempt and entries[0].step >= step:
        log.warning(
            "%s holds step %d of an earlier attempt, but this run loaded nothing and now saves "
            "step %d. The new checkpoints count as the newest, and keep= removes the old ones "
            "first. To resume instead, call ck.load(state) before the loop",
            root.path, entries[0].step, step,
        )  # fmt: skip


class FirstSave:
    """Logs once how long the first save took for work that `prepare` could have done before.

    Args:
        is_telling: False on ranks that leave the log line to another rank.
    """

    def __init__(self, *, is_telling: bool) -> None:
        self._is_telling = is_telling
        self.was_prepared = False
        """Whether a preparation was completed, for any structure."""

    def paid(self, planned_s: float, copied_s: float | None) -> None:
        """Log what a save that had to plan has cost. Only the first save is logged."""
        if self._is_telling:
            tell_unprepared(planned_s, copied_s, was_prepared=self.was_prepared)
        self.pass_by()

    def pass_by(self) -> None:
        """Note that the first save is over."""
        self._is_telling = False


def tell_unprepared(planned_s: float, copied_s: float | None, *, was_prepared: bool) -> None:
    """Log what the first save did that `prepare` would have done before, and how to avoid it.

    Args:
        planned_s: how long it took to plan and to reserve memory.
        copied_s: how long the copy took; None: it still goes on behind training.
        was_prepared: `prepare` was called, but for another structure.
    """
    copied = "the copy behind training also touches its pages for the first time"
    if copied_s is not None:
        copied = f"copying into untouched pages took {copied_s:.1f} s"
    log.log(
        logging.WARNING if planned_s + (copied_s or 0.0) > UNPREPARED_S else logging.INFO,
        "the first save was %s: planning and reserving memory took %.1f s, %s. To do this before "
        "the save, call ck.prepare(state) after the optimizer's first step, when it has its state",
        "prepared with a state of another structure" if was_prepared else "not prepared",
        planned_s, copied,
    )  # fmt: skip
