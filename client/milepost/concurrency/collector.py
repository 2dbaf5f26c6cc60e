"""Pauses Python's cycle collector while very many objects are made that all stay, or all go.

A save of 11,000 tensors makes enough objects to start a full collection, which walks every object
of the trainer for 0.2 s. Owns the collector's switch for this process: it knows all pauses, and the
last one to end switches the collector on only if the first one had switched it off.
"""

from __future__ import annotations

import gc
import os
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(eq=False)
class Holder:
    """One pause."""

    thread: int
    is_over: bool = False


class _Switch:
    """All pauses, and whether the collector has to be on again after the last one.

    Uses no lock: a signal handler may run in the middle of this code on the main thread, and wait
    for a thread that wants to pause the collector (docs/design/0010-interrupts.md). In any order of
    steps, the last pause leaves the collector on if it was on before. At worst it is on too early,
    which costs only time.
    """

    def __init__(self) -> None:
        self._holders: dict[Holder, None] = {}
        self._is_to_be_on = False

    def of_this_thread(self) -> list[Holder]:
        thread = threading.get_ident()
        return [holder for holder in list(self._holders) if holder.thread == thread]

    def pause(self, holder: Holder) -> None:
        self._holders[holder] = None
        if gc.isenabled():
            self._is_to_be_on = True
            gc.disable()

    def resume(self, holder: Holder) -> None:
        self._holders.pop(holder, None)
        self._settle()

    def start_over(self) -> None:
        """Forget all pauses, in a forked child: it has none of the other threads."""
        self._holders.clear()
        self._settle()

    def _settle(self) -> None:
        if not self._holders and self._is_to_be_on:
            try:
                self._is_to_be_on = False
            finally:  # also if an interrupt comes just here
                gc.enable()


_switch = _Switch()
os.register_at_fork(after_in_child=_switch.start_over)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles in this process within this block.

    Blocks may nest, in a thread and across threads. Drop large structures before the end: the next
    collection walks those that are left.
    """
    holder = Holder(threading.get_ident())
    try:
        _switch.pause(holder)
        yield
    finally:
        holder.is_over = True
        _switch.resume(holder)


@contextmanager
def collector_running() -> Iterator[None]:
    """Within a `collector_paused()`, let the collector run during a wait of unknown length."""
    holders = _switch.of_this_thread()
    for holder in holders:
        _switch.resume(holder)
    try:
        yield
    finally:
        for holder in holders:
            # After an interrupt this may run late, when the traceback is dropped.
            if not holder.is_over:
                _switch.pause(holder)


def collect_now() -> None:
    """Collect now, so that the next save does not start a collection of the objects that stay. Does
    nothing if the collector is switched off.
    """
    if gc.isenabled():
        gc.collect()
