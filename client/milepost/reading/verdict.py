"""One answer for all ranks: if one rank cannot take a step of a load, no rank takes it.

Knows nothing of checkpoints. Uses the process group's store, never a collective, so a rank that
fails leaves no other rank half way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgpack

from milepost.errors import CorruptCheckpoint, LoadFailed, MilepostError, UsageError
from milepost.link.presence import Presence
from milepost.link.rendezvous import Group, gather, tell_all

_Result = TypeVar("_Result")

_KINDS: dict[str, type[MilepostError]] = {
    kind.__name__: kind for kind in (CorruptCheckpoint, LoadFailed, UsageError)
}


class Verdicts:
    """Takes the ranks of a group through the steps of one load. All ranks take the same steps.

    Args:
        group: this process's place among them.
        topic: identifies the load in the group's store; never used before.
        timeout_s: how long to wait for a rank at each step.
    """

    def __init__(self, group: Group, topic: str, timeout_s: float) -> None:
        self._group = group
        self._topic = topic
        self._timeout_s = timeout_s
        self._has_ended = Presence(group, topic).has_ended

    def share(self, step: str, act: Callable[[], _Result]) -> _Result:
        """Take a step; return its result once every rank has taken it.

        If the step raised on one rank, raises on every rank a MilepostError that names this rank. A
        single process raises the exception itself.
        """
        topic = f"{self._topic}/{step}"
        try:
            result = act()
        except Exception as error:
            fault = error if isinstance(error, MilepostError) else failed(error)
            if self._group.store is None:
                raise fault from (None if fault is error else error)
            try:
                self._agree(topic, fault)
            except MilepostError as agreed:
                raise agreed from error
            raise AssertionError("a fault was told and nobody raised") from error
        except BaseException as error:
            # An interrupt: this rank leaves at once. The others must not wait for it.
            self._leave(topic, failed(error))
            raise
        self._agree(topic, None)
        return result

    def _agree(self, topic: str, fault: MilepostError | None) -> None:
        """Return if no rank has failed, else raise the error that all ranks raise."""
        group = self._group
        if group.rank:
            gather(group, topic, _packed(fault), self._timeout_s)
            tell_all(group, topic, bytes, self._timeout_s + 30, self._has_ended)
            return

        def judge() -> bytes:
            said = gather(group, topic, _packed(fault), self._timeout_s, self._has_ended)
            return _judge(said)

        tell_all(group, topic, judge, 0)

    def _leave(self, topic: str, fault: MilepostError) -> None:
        group = self._group
        if group.store is None:
            return
        if group.rank:
            gather(group, topic, _packed(fault), self._timeout_s)
            return

        def judge() -> bytes:
            raise _placed(fault, 0)

        try:
            tell_all(group, topic, judge, 0)
        except MilepostError:
            return


def failed(error: BaseException) -> LoadFailed:
    """Return the error of a load that another exception ended."""
    text = "".join(str(error).splitlines()[:1])
    return LoadFailed("load-failed", f"{type(error).__name__}: {text}")


def _packed(fault: MilepostError | None) -> bytes:
    told: tuple[str, ...] = ()
    if fault is not None:
        told = (type(fault).__name__, fault.code, fault.message, fault.hint)
    packed: bytes = msgpack.packb(told)
    return packed


def _placed(fault: MilepostError, rank: int) -> MilepostError:
    kind = _KINDS.get(type(fault).__name__, LoadFailed)
    return kind(fault.code, f"rank {rank}: {fault.message}", fault.hint)


def _judge(said: list[bytes]) -> bytes:
    """Return None if no rank has failed. Rank 0 only."""
    faults = {}
    for rank, each in enumerate(said):
        told = msgpack.unpackb(each)
        if told:
            kind, *rest = told
            faults[rank] = _KINDS.get(kind, LoadFailed)(*rest)
    if not faults:
        return b""
    rank, first = next(iter(faults.items()))
    if len(faults) == len(said) and all(each.args == first.args for each in faults.values()):
        raise first
    same = [other for other in faults if other != rank]
    placed = _placed(first, rank)
    if same:
        placed = type(placed)(
            placed.code,
            f"{placed.message} (and {len(same)} more of {len(said)} ranks could not go on)",
            placed.hint,
        )
    raise placed
