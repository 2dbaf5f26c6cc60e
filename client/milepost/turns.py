"""Lets the threads that call one object's methods take turns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Shared(Protocol):
    """What is used by several threads."""

    @property
    def _one_call(self) -> AbstractContextManager[Any]:
        """A lock that its holder may take again."""


S = TypeVar("S", bound=Shared)
P = ParamSpec("P")
R = TypeVar("R")


def in_turn(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let threads that call such methods of one object wait for each other."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._one_call:
            return method(self, *args, **kwargs)

    return call
