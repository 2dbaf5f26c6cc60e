"""`Save`: the handle of one save, and `Checkpoint`, its result.

The Checkpointer writes a handle: on the trainer's or the copying thread until it is staged, on the
connection's thread after that. Any thread may read it and wait for it. It ends exactly once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.concurrency.waiting import check_timeout, make_condition
from milepost.errors import SaveFailed, UsageError
from milepost.ledger import ENDED, STAGED
from milepost.wire.causes import error_of

if TYPE_CHECKING:
    from milepost.wire.messages import Cause, Ending

log = logging.getLogger("milepost")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        step: the trainer's step.
        path: its directory.
        bytes: size of its data files together, of all ranks.
        elapsed_s: from the save's first report at this node to the commit.
    """

    step: int
    path: Path
    bytes: int
    elapsed_s: float


class Save:
    """One attempt to make a checkpoint.

    Attributes:
        step: the trainer's step.
        name: of the checkpoint's directory below the root.
        save_id: `<attempt>-<count>`, the same on all ranks.
        is_told: whether `wait()` has raised the reason of its failure.
        stall_s: how long `save()` took.
        guard_s: with `staging="overlap"`: how long the guard kept the trainer waiting after that.
    """

    # `_changed` guards every field that changes, except `stall_s`, which `save()` sets before it
    # returns the handle. `phase`, `done()` and the result are read without the lock: a read is one
    # step, `_phase` is set last, and it never changes after the end.

    def __init__(self, step: int, name: str, save_id: str, abort: Callable[[], None]) -> None:
        self.step = step
        self.name = name
        self.save_id = save_id
        self.stall_s = 0.0
        self.is_told = False
        self.guard_s = 0.0
        self._abort = abort
        self._changed = make_condition()
        self._phase = "staging"
        self._checkpoint: Checkpoint | None = None
        self._cause: Cause | None = None
        self._callbacks: list[Callable[[Save], None]] = []

    def __repr__(self) -> str:
        return f"<Save {self.save_id} of step {self.step}: {self.phase}>"

    @property
    def phase(self) -> str:
        """One of staging, staged, writing, committed, failed, skipped, outcome-unknown."""
        return self._phase

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._phase in ENDED

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return once the state may change without harm to the checkpoint.

        Raises:
            SaveFailed: it ended before it was staged.
            TimeoutError: not staged in time; the save goes on.
        """
        self._wait_until(lambda: self._phase in STAGED or self.done(), timeout_s, "staged")
        if self._phase not in STAGED and self._phase != "outcome-unknown":
            raise self.failure()

    def wait(self, timeout_s: float | None = None) -> Checkpoint:
        """Return the checkpoint once it is committed: durable and published.

        Raises:
            SaveFailed: it failed, it was skipped (`busy`), or its outcome could not be found out
                (`outcome-unknown`).
            TimeoutError: not ended in time; the save goes on.
        """
        self.await_end(timeout_s)
        if self._checkpoint is None:
            with self._changed:
                self.is_told = True
            raise self.failure()
        return self._checkpoint

    def add_done_callback(self, function: Callable[[Save], None]) -> None:
        """Call `function(save)` once when the save ends, or at once if it has ended.

        The function runs on the connection's thread, or on the thread that found that the save
        cannot be staged. It must not block; an exception from it is logged. Raises UsageError if it
        is not callable.
        """
        if not callable(function):
            raise UsageError("usage", f"a done callback must be callable, got {function!r}")
        with self._changed:
            if not self.done():
                self._callbacks.append(function)
                return
        self._call(function)

    def abort(self) -> None:
        """Ask all ranks to give the save up. It may still be committed if the commit is under
        way.
        """
        if not self.done():
            self._abort()

    def failure(self) -> SaveFailed:
        """Return why it did not become a checkpoint. Only for a save that ended without one."""
        assert self._cause is not None
        error = error_of(self._cause, SaveFailed)
        assert isinstance(error, SaveFailed)
        return error

    @property
    def failed_rank(self) -> int:
        """The rank because of which it is no checkpoint; -1: none, or not known."""
        return -1 if self._cause is None else self._cause.rank

    # --- for the Checkpointer

    def await_end(self, timeout_s: float | None) -> None:
        """Return once it has ended, in whatever way. Raises TimeoutError."""
        self._wait_until(self.done, timeout_s, "committed")

    def add_guard(self, waited_s: float) -> None:
        """Note how long the guard has kept a thread."""
        with self._changed:
            self.guard_s += waited_s

    def advance(self, phase: str) -> None:
        """Move to a later phase that is no end."""
        with self._changed:
            if not self.done():
                self._phase = phase
                self._changed.notify_all()

    def commit(self, checkpoint: Checkpoint) -> None:
        """End as committed."""
        self._end("committed", checkpoint, None)

    def fail(self, outcome: Ending, cause: Cause) -> None:
        """End as failed, skipped or outcome-unknown."""
        self._end(outcome.value, None, cause)

    def _end(self, phase: str, checkpoint: Checkpoint | None, cause: Cause | None) -> None:
        with self._changed:
            if self.done():
                return
            self._checkpoint, self._cause = checkpoint, cause
            self._phase = phase
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for function in callbacks:
            self._call(function)

    def _call(self, function: Callable[[Save], None]) -> None:
        try:
            function(self)
        except Exception:
            log.exception("a done callback of save %s raised", self.save_id)

    def _wait_until(self, has_come: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        check_timeout(timeout_s)
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not has_come():
                left_s = None if until_s is None else until_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise TimeoutError(
                        f"save {self.save_id} of step {self.step} is not {what} after "
                        f"{timeout_s:g} s; it is {self._phase} and goes on"
                    )
                self._changed.wait(left_s)
