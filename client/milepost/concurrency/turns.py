"""Lets the threads that call one object's methods take turns."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from milepost.errors import UsageError


class Shared(Protocol):
    """What is used by several threads."""

    @property
    def _turn(self) -> Turn:
        """Whose turn it is."""


class Turn:
    """A lock that tells its holder that it has it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._in = ""

    @property
    def is_free(self) -> bool:
        """Whether nobody has it at this moment."""
        return not self._in

    @contextlib.contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """Wait for the turn, and keep it meanwhile.

        Raises UsageError if this thread has it: a signal handler that runs in the middle of one
        call must not make another.
        """
        with self._lock:
            if self._in:
                raise UsageError(
                    "nested-call",
                    f"{what}() was called within {self._in}() by the same thread",
                    "let a signal handler note the signal, or use ck.preempted, and save in the "
                    "loop",
                )
            try:
                self._in = what
                yield
            finally:
                self._in = ""


S = TypeVar("S", bound=Shared)
P = ParamSpec("P")
R = TypeVar("R")


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let threads that call such methods of one object wait for each other."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turn.taken(method.__name__):
            return method(self, *args, **kwargs)

    return call
