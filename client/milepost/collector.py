"""Pausing Python's cycle collector where very many objects are made that all stay, or all go.

A save of 11,000 tensors makes enough of them to set off a full collection, which walks every object
of the trainer for 0.2 s. Owns the collector's switch for this process: the threads that pause it
are counted, and the last one to end switches on only what the first one had switched off.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Switch:
    """How many want the collector off, and whether it was on before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses = 0
        self._was_enabled = False

    def pause(self) -> None:
        with self._lock:
            if not self._pauses:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._pauses += 1

    def resume(self) -> None:
        with self._lock:
            self._pauses -= 1
            if not self._pauses and self._was_enabled:
                gc.enable()


_switch = _Switch()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles in this process meanwhile.

    Nests, in a thread and across threads. Drop large structures before the end: the next
    collection walks those that are left.
    """
    _switch.pause()
    try:
        yield
    finally:
        _switch.resume()


@contextmanager
def collector_running() -> Iterator[None]:
    """Within one `collector_paused()`, take it back for a wait whose length is not known."""
    _switch.resume()
    try:
        yield
    finally:
        _switch.pause()


def collect_now() -> None:
    """Walk what was made to stay now, not within the next save, which would set that off by its own
    objects. Does nothing where the collector is switched off.
    """
    if gc.isenabled():
        gc.collect()
