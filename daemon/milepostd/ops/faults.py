"""Fault points: places where a test can make the daemon misbehave.

Owns the names of points and actions, how they are parsed and what they do. A point fires once per
save and node. `sleep` and `hold` delay only the work that met the point, never the loop. The
executors say where each point is. docs/operations.md lists points and actions.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from milepost.errors import MilepostError, UsageError
from milepost.wire.messages import SaveRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

POINTS: Final = (
    "after-staged",
    "before-plan",
    "mid-write",
    "after-write",
    "before-durable",
    "before-metadata",
    "after-metadata",
    "before-publish",
    "after-publish",
    "before-committed",
)
"""In the order in which a save passes them."""

_ERRNOS: Final = {
    "enospc": errno.ENOSPC,
    "edquot": errno.EDQUOT,
    "eio": errno.EIO,
    "estale": errno.ESTALE,
}
"""Actions that raise what a file system may answer: full, over quota, broken, away for a moment.
The last one may pass, so the work that met it is tried again, with a new file."""

ACTIONS: Final = ("kill", "stop", "raise", "sleep", "hold", *_ERRNOS)

SLEEP_S_MAX: Final = 3600.0

HOLD_LOOK_S: Final = 0.01
"""How often `hold` looks for its file."""

_log = logging.getLogger(__name__)


class Fault(NamedTuple):
    """What happens at a point."""

    point: str
    action: str
    sleep_s: float = 0.0
    """Seconds that `sleep` takes."""
    step: int | None = None
    """Happens only to saves of this training step; None: to every save."""
    file: str = ""
    """`hold` waits until this file exists."""

    def pauses_s(self) -> Iterator[float]:
        """Yield one pause after the other, in seconds, until the save may go on."""
        while self.action == "hold" and not os.path.exists(self.file):
            yield HOLD_LOOK_S
        yield self.sleep_s


class InjectedFault(MilepostError):
    """What the action `raise` raises: an error that the daemon does not expect."""


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read a list of `point:action[:argument][@step]`, separated by commas; it may be empty. Raises
    UsageError.
    """
    faults: list[Fault] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        what, at, when = part.partition("@")
        point, _, rest = what.partition(":")
        action, _, argument = rest.partition(":")
        if point not in POINTS:
            raise UsageError(
                "usage", f"unknown fault point {point!r} in {part!r}; points: {', '.join(POINTS)}"
            )
        if action not in ACTIONS:
            raise UsageError(
                "usage", f"unknown action {action!r} in {part!r}; actions: {', '.join(ACTIONS)}"
            )
        if at and not when.isdecimal():
            raise UsageError("usage", f"after @ stands the step of a save, got {part!r}")
        step = int(when) if at else None
        if action == "hold":
            if not argument:
                raise UsageError("usage", f"hold takes the path of a file, got {part!r}")
            faults.append(Fault(point, action, step=step, file=argument))
            continue
        if action != "sleep":
            if argument:
                raise UsageError("usage", f"{action} takes no argument, got {part!r}")
            faults.append(Fault(point, action, step=step))
            continue
        try:
            sleep_s = float(argument)
        except ValueError:
            sleep_s = -1.0
        if not 0 <= sleep_s <= SLEEP_S_MAX:
            raise UsageError(
                "usage", f"sleep takes seconds from 0 to {SLEEP_S_MAX:g}, got {part!r}"
            )
        faults.append(Fault(point, action, sleep_s, step))
    return tuple(faults)


class FaultPoints:
    """The faults of one daemon, and which of them have fired. Thread-safe.

    Args:
        faults: what to do; several at one point happen in this order.
        send_signal: `os.kill`; a test may put a fake in its place.
    """

    def __init__(
        self, faults: Sequence[Fault], send_signal: Callable[[int, int], None] = os.kill
    ) -> None:
        self._faults = tuple(faults)
        self._send_signal = send_signal
        self._fired: set[tuple[int, str, str]] = set()
        self._holding: dict[tuple[str, str], list[str]] = {}
        self._lock = threading.Lock()

    async def at(self, point: str, save: SaveRef) -> None:
        """Do to this save what is planned for this point. Call it on the loop.

        Raises:
            InjectedFault: for `raise`.
            OSError: ENOSPC, EDQUOT, EIO or ESTALE, for the actions with these names.
        """
        for fault in self._due(point, save):
            with self._held(fault, save):
                for pause_s in fault.pauses_s():
                    await asyncio.sleep(pause_s)
            self._strike(fault)

    def at_blocking(self, point: str, save: SaveRef) -> None:
        """Do the same on a writer thread, and block it if need be. Raises what `at` raises."""
        for fault in self._due(point, save):
            with self._held(fault, save):
                for pause_s in fault.pauses_s():
                    time.sleep(pause_s)
            self._strike(fault)

    def holding(self, job: str, save_id: str) -> str | None:
        """Return the point that this save waits at now, for its status sentence."""
        with self._lock:
            points = self._holding.get((job, save_id))
            return points[-1] if points else None

    def _due(self, point: str, save: SaveRef) -> Iterator[Fault]:
        """Yield each fault that is to happen now. It is logged and marked as fired before that."""
        for index, fault in enumerate(self._faults):
            if fault.point != point or fault.step not in (None, save.step):
                continue
            firing = (index, save.job, save.save_id)
            with self._lock:
                if firing in self._fired:
                    continue
                self._fired.add(firing)
            fields = {"point": point, "action": fault.action, "job": save.job,
                      "save": save.save_id, "step": save.step}  # fmt: skip
            _log.warning("fault.fired", extra={"fields": fields})
            yield fault

    @contextmanager
    def _held(self, fault: Fault, save: SaveRef) -> Iterator[None]:
        if fault.action not in ("sleep", "hold"):
            yield
            return
        key = (save.job, save.save_id)
        with self._lock:
            self._holding.setdefault(key, []).append(fault.point)
        try:
            yield
        finally:
            with self._lock:
                points = self._holding[key]
                points.remove(fault.point)
                if not points:
                    del self._holding[key]

    def _strike(self, fault: Fault) -> None:
        match fault.action:
            case "kill":
                self._send_signal(os.getpid(), signal.SIGKILL)
            case "stop":
                self._send_signal(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise InjectedFault("internal", f"injected at fault point {fault.point}")
            case action if action in _ERRNOS:
                number = _ERRNOS[action]
                raise OSError(number, os.strerror(number), fault.point)
