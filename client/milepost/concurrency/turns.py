"""Lets the threads that call one object's methods take turns."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from milepost.errors import UsageError


class Shared(Protocol):
    """An object that several threads use."""

    @property
    def _turn(self) -> Turn:
        """Whose turn it is."""


class Turn:
    """Whose turn it is: a lock that refuses the thread that has it.

    What a signal handler raises in a call leaves the turn free, wherever it comes
    (docs/design/0010-interrupts.md): no lock is taken in Python code, and no generator is left
    that would hold one for as long as somebody keeps the traceback.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holder = ""
        """The method whose turn it is; guarded by `lock`."""

    @property
    def is_free(self) -> bool:
        """Whether nobody has it at this moment."""
        return not self.holder

    def refuse_nested(self, method: str) -> None:
        """Refuse a call within another one; the lock is held, so both are of this thread.

        Raises UsageError("nested-call"): a signal handler that runs in the middle of one call must
        not make another.
        """
        if self.holder:
            raise UsageError(
                "nested-call",
                f"{method}() was called within {self.holder}() by the same thread",
                "let a signal handler note the signal, or use ck.preempted, and save in the loop",
            )


S = TypeVar("S", bound=Shared)
P = ParamSpec("P")
R = TypeVar("R")


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let threads that call such methods of one object wait for each other."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        turn = self._turn
        with turn.lock:
            turn.refuse_nested(name)
            try:
                turn.holder = name
                return method(self, *args, **kwargs)
            finally:
                turn.holder = ""

    return call
