"""Which checkpoints may be removed: the user's policies, and the pure decision that client and
daemon share.

Takes names, steps and their order, and returns names; touches no file and knows no root. The caller
deletes: the coordinator after a commit, `milepost prune` on request.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from milepost.errors import UsageError
from milepost.wire.messages import Keep

Candidate: TypeAlias = tuple[str, int, tuple[int, ...]]
"""A checkpoint's name, step and order; the greatest order is the newest
(`catalog.CheckpointEntry.order`).
"""


class Policy:
    """A retention policy; `a | b` keeps what either of them keeps."""

    def rules(self) -> Keep:
        """Return the policy as data."""
        raise NotImplementedError

    def __or__(self, other: Policy) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return _Either(self, other)


@dataclass(frozen=True)
class KeepLast(Policy):
    """Keep the newest `n` checkpoints, at least 1. Raises UsageError."""

    n: int

    def __post_init__(self) -> None:
        _integer("KeepLast(n)", self.n, least=1)

    def rules(self) -> Keep:
        return Keep(last=operator.index(self.n))


@dataclass(frozen=True)
class KeepEvery(Policy):
    """Keep each checkpoint whose step is a multiple of `steps`, at least 1. Raises UsageError."""

    steps: int

    def __post_init__(self) -> None:
        _integer("KeepEvery(steps)", self.steps, least=1)

    def rules(self) -> Keep:
        return Keep(every=(operator.index(self.steps),))


@dataclass(frozen=True)
class Protect(Policy):
    """Never delete these steps (one, or several). Alone it deletes nothing else either. Raises
    UsageError.
    """

    steps: int | Iterable[int]

    def __post_init__(self) -> None:
        given = self.steps
        several = tuple(given) if isinstance(given, Iterable) else (given,)
        checked = {_integer("Protect(steps)", step, least=0) for step in several}
        # An iterator can be read only once, so what was read replaces it.
        object.__setattr__(self, "steps", tuple(sorted(checked)))

    def rules(self) -> Keep:
        return Keep(protect=self.steps if isinstance(self.steps, tuple) else ())


@dataclass(frozen=True)
class _Either(Policy):
    one: Policy
    other: Policy

    def rules(self) -> Keep:
        a, b = self.one.rules(), self.other.rules()
        return Keep(
            last=max(a.last, b.last),
            every=tuple(sorted({*a.every, *b.every})),
            protect=tuple(sorted({*a.protect, *b.protect})),
        )


def _integer(what: str, value: object, *, least: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise UsageError("usage", f"{what} takes an integer of at least {least}, not {value!r}")
    return number


def doomed(
    checkpoints: Sequence[Candidate], keep: Keep, *, foreign: Collection[str] = ()
) -> list[str]:
    """Return the names of the checkpoints that no rule keeps, oldest first.

    The newest one is never among them. Without `last` or `every` there are none: a rule that only
    protects a step does not ask to remove the others.

    Args:
        checkpoints: all committed ones, in any order.
        foreign: names of those without a milepost manifest: not ours to delete, and not counted.
    """
    if not keep.last and not keep.every:
        return []
    newest_first = sorted(
        (each for each in checkpoints if each[0] not in foreign),
        key=lambda each: (each[2], each[0]),
        reverse=True,
    )
    protected = set(keep.protect)
    gone = [
        name
        for name, step, _ in newest_first[max(keep.last, 1) :]
        if step not in protected and not any(step % steps == 0 for steps in keep.every)
    ]
    return gone[::-1]
