"""`preempted`: whether any rank was told to go, with the same answer on all ranks at each read.

Owns the count of reads and the SIGTERM handler. The handler is installed at the first read: a loop
that never asks keeps the signal's default. It only writes to a descriptor; a thread then tells the
daemon. Source: signal(7), "Execution of Python signal handlers".
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from milepost.errors import MilepostError
from milepost.wire.messages import PreemptionNoticed, ReadsTold

log = logging.getLogger("milepost")

HOLD_S: Final = 15.0
"""How long a read waits for the decision of the coordinator, which takes 5 s at most. A read that
has waited this long answers true, since some rank was told to go."""

REPEAT_S: Final = 1.0
"""How often the daemon is told again until it answers."""


class PreemptionFlag:
    """The flag of one rank.

    Args:
        ensure: returns once the rank has joined its job at the daemon; may raise MilepostError.
        send: sends a message to the daemon, once.
    """

    def __init__(
        self,
        ensure: Callable[[], None],
        send: Callable[[PreemptionNoticed | ReadsTold], None],
    ) -> None:
        self._ensure = ensure
        self._send = send
        self._changed = threading.Condition()
        """Guards the four fields below."""
        self._reads = 0
        """How many reads have been answered."""
        self._is_held = False
        self._at_read: int | None = None
        self._is_closed = False
        self._wake = -1
        self._previous: Any = None

    def read(self) -> bool:
        """Return whether this rank has to go now; counts as one read.

        The first call installs the handler of SIGTERM, which only works on the main thread. On
        another thread this rank's own SIGTERM goes unnoticed; those of other ranks are noticed.
        """
        if self._wake < 0:
            self._install()
        with self._changed:
            if self._is_held and self._at_read is None:
                self._changed.wait_for(lambda: self._at_read is not None, HOLD_S)
                if self._at_read is None:
                    self._at_read = self._reads + 1
            self._reads += 1
            return self._at_read is not None and self._reads >= self._at_read

    def hold(self) -> None:
        """Tell the daemon how often the flag was read, and hold the next read.

        A restarted daemon asks again and gets the same answer. So a coordinator that has forgotten
        what it told some ranks makes the same decision for the others.
        """
        with self._changed:
            self._is_held = True
            reads = self._reads if self._at_read is None else min(self._reads, self._at_read - 1)
        self._send(ReadsTold(reads=reads))

    def decide(self, at_read: int) -> None:
        """Take the daemon's decision: the read of this number and later ones answer true."""
        with self._changed:
            if self._at_read is None:
                self._at_read = at_read
                self._changed.notify_all()

    def close(self) -> None:
        """Restore the signal's earlier handler. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._wake < 0:
            return
        if threading.current_thread() is threading.main_thread() and self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
        os.eventfd_write(self._wake, 1)

    # --- the signal

    def _install(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        threading.Thread(target=self._tell, name="milepost-preemption", daemon=True).start()
        try:
            self._ensure()
        except MilepostError as error:
            log.warning("a preemption may go unnoticed: %s", error)
        try:
            self._previous = signal.signal(signal.SIGTERM, self._noticed)
        except ValueError:
            log.warning(
                "preempted was first read outside the main thread: a SIGTERM to this rank is not "
                "noticed"
            )

    def _noticed(self, number: int, frame: FrameType | None) -> None:
        os.eventfd_write(self._wake, 1)
        if callable(self._previous):
            self._previous(number, frame)

    def _tell(self) -> None:
        os.eventfd_read(self._wake)
        with self._changed:
            if self._is_closed:
                return
            # This rank has to go even if no daemon answers.
            self._is_held = True
        log.warning("this rank was told to go (SIGTERM); asking all ranks")
        while True:
            try:
                self._ensure()
                self._send(PreemptionNoticed())
            except MilepostError as error:
                log.warning("the other ranks cannot be told: %s", error)
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._at_read is not None or self._is_closed, REPEAT_S
                ):
                    return
