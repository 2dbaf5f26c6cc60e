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
    """A lock that refuses the thread that holds it already.

    An exception of a signal handler leaves the turn free, wherever it comes
    (docs/design/0010-interrupts.md): no Python code takes the lock, and no generator holds it,
    which could go on for as long as somebody keeps the traceback.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.holder = ""
        """The method whose turn it is; guarded by `lock`."""

    @property
    def is_free(self) -> bool:
        """Whether no thread holds the turn at this moment."""
        return not self.holder

    def refuse_nested(self, method: str) -> None:
        """Refuse a call within another call. This thread holds the lock, so it makes both calls.

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
    """Make threads that call decorated methods of one object wait for each other."""
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
