"""Calls of one object: one thread after another, none within another, and free after each end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import pytest

from milepost.concurrency.turns import Turn, in_turn
from milepost.errors import UsageError

END_S = 20.0


class Counter:
    """Something that threads share."""

    def __init__(self) -> None:
        self._turn = Turn()
        self.running = 0
        self.most = 0

    @in_turn
    def call(self, work: Callable[[], object]) -> None:
        """Do the work, and count who is here."""
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            work()
        finally:
            self.running -= 1

    @property
    def is_free(self) -> bool:
        return self._turn.is_free


def test_threads_wait_for_each_other() -> None:
    counter, may_end = Counter(), threading.Event()
    threads = [
        threading.Thread(target=counter.call, args=(lambda: may_end.wait(END_S),)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert not counter.is_free
    may_end.set()
    for thread in threads:
        thread.join(END_S)
    assert 1 == counter.most
    assert counter.is_free


def test_a_call_within_a_call_of_the_same_thread_is_refused_by_name() -> None:
    counter = Counter()

    def nested() -> None:
        with pytest.raises(UsageError, match=r"call\(\) was called within call\(\)"):
            counter.call(nested)

    counter.call(nested)
    assert counter.is_free


def test_after_an_interrupt_the_turn_is_free_although_its_traceback_is_kept() -> None:
    counter = Counter()
    kept: list[TracebackType | None] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        counter.call(interrupt)
    except KeyboardInterrupt as error:
        kept.append(error.__traceback__)
    assert counter.is_free
    other = threading.Thread(target=counter.call, args=(lambda: None,))
    other.start()
    other.join(END_S)
    assert not other.is_alive()
