"""How the ranks of a process group find one another's daemons, without a collective.

The ranks meet once, when a Checkpointer is made, through the process group's own key-value store:
each says which node it is on; rank 0 gathers, checks and answers. If a rank does not come, an error
names it instead of a hang. Later exchanges (which step to load) use the same store.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import msgpack
import msgspec

from milepost.errors import (
    CorruptCheckpoint,
    LoadFailed,
    MilepostError,
    Rejected,
    Unavailable,
    UsageError,
    listed,
)
from milepost.wire.messages import NodeRef

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("milepost")

MEET_S: Final = 300.0
"""How long ranks wait for one another: on a busy cluster they start minutes apart."""

LATE_S: Final = 5.0
"""How long a rank waits before the log names the ranks that have not come."""

LOOK_S: Final = 1.0
"""How often a rank that waits looks whether the others are still there."""

ACTS: Final = {
    "meet": "Checkpointer()", "load": "load()", "claim": "save()", "dcp": "milepost.dcp.save()",
}  # fmt: skip
"""The call that the ranks have made, by the first part of a topic."""


class Store(Protocol):
    """The part of torch.distributed.Store that is used here."""

    def set(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def add(self, key: str, amount: int) -> int: ...
    def delete_key(self, key: str) -> bool: ...


class Introduction(msgspec.Struct, frozen=True):
    """What each rank says about itself."""

    node: NodeRef
    root: str
    job: str
    torch_version: str
    umask: int = -1
    """As in `Join`."""


class Meeting(msgspec.Struct, frozen=True):
    """What rank 0 answers: the nodes once, each rank's index among them, the job, the attempt."""

    cohort: tuple[NodeRef, ...]
    node_of_rank: tuple[int, ...]
    job: str
    attempt: int
    umask: int = -1
    """That of rank 0."""


class Group(NamedTuple):
    """This process's place among the ranks that save together; `store` is None if it is alone."""

    rank: int
    world: int
    store: Store | None


_meetings: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many Checkpointers a process group has had. All its ranks count the same number, which keeps
the keys of different Checkpointers apart."""


def join_group(process_group: dist.ProcessGroup | None) -> Group:
    """Return this process's place in the given group, the default group, or alone.

    Raises UsageError if this process is not in the group.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise UsageError(
                "usage", "a process_group was given, but torch.distributed is not set up"
            )
        return Group(0, 1, None)
    group = dist.group.WORLD if process_group is None else process_group
    rank = dist.get_rank(group)
    if group is None or rank < 0:
        raise UsageError(
            "usage",
            f"global rank {dist.get_rank()} is not in the given process_group",
            "make the Checkpointer on the group's own ranks only",
        )
    world = dist.get_world_size(group)
    if world == 1:
        return Group(0, 1, None)
    count = _meetings.get(group, 0)
    _meetings[group] = count + 1
    store = dist.distributed_c10d.PrefixStore(f"milepost/{count}", group.get_group_store())
    return Group(rank, world, store)


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(msgspec.to_builtins(value))
    return packed


def gather(
    group: Group,
    topic: str,
    value: bytes,
    timeout_s: float,
    has_ended: Callable[[int], bool] | None = None,
) -> list[bytes]:
    """Send a value from every rank to rank 0. Returns all values in rank order there, [] elsewhere.

    has_ended: tells whether a rank will not come any more; None: nobody knows.

    Raises Unavailable("rank-missing") on rank 0, naming the ranks that said nothing in time, or
    have ended.
    """
    if group.store is None:
        return [value]
    group.store.set(f"{topic}/{group.rank}", value)
    if group.rank != 0:
        return []
    store = group.store
    until_s = time.monotonic() + timeout_s
    warn_s = time.monotonic() + min(LATE_S, timeout_s)
    missing = list(range(group.world))
    while True:
        # Give all missing ranks one pause, so that a warning names only ranks that are late.
        pause_until_s = min(warn_s, time.monotonic() + LOOK_S) if has_ended else warn_s
        missing = [
            rank
            for rank in missing
            if not _has_come(store, f"{topic}/{rank}", max(0.001, pause_until_s - time.monotonic()))
        ]
        now_s = time.monotonic()
        if not missing or now_s >= until_s:
            break
        if has_ended is not None:
            _check_presence(store, {rank: f"{topic}/{rank}" for rank in missing}, has_ended)
        if now_s >= warn_s:
            _warn_of_missing(topic, missing, group.world, timeout_s)
            warn_s = now_s + min(4 * LATE_S, until_s - now_s)
    if missing:
        raise Unavailable(
            "rank-missing",
            f"{len(missing)} of {group.world} ranks did not come within {timeout_s:g} s: "
            + listed(missing),
            "every rank of the group has to make its Checkpointer and to call load()",
        )
    return [store.get(f"{topic}/{rank}") for rank in range(group.world)]


def _check_presence(
    store: Store, missing: Mapping[int, str], has_ended: Callable[[int], bool]
) -> None:
    """Raise Unavailable if ranks have ended without saying what they were to say, each under its
    key.
    """
    ended = [rank for rank in missing if has_ended(rank)]
    # What one has said just before it ended counts.
    ended = [rank for rank in ended if not store.check([missing[rank]])]
    if ended:
        raise Unavailable(
            "rank-missing",
            f"rank {listed(ended)} ended while others waited for it",
            "look at their output: they were killed, or have crashed",
        )


def _warn_of_missing(topic: str, missing: Sequence[int], world: int, timeout_s: float) -> None:
    act = ACTS.get(topic.partition("/")[0], topic)
    log.warning(
        "waiting in %s for %d of %d ranks, up to %g s: %s; every rank of the group has to call it",
        act, len(missing), world, timeout_s, listed(missing),
    )  # fmt: skip


def tell_all(
    group: Group,
    topic: str,
    make: Callable[[], bytes],
    timeout_s: float,
    has_ended: Callable[[int], bool] | None = None,
) -> bytes:
    """Let rank 0 make a value, and return it on every rank. An error of `make` is raised on all.

    has_ended: tells whether a rank will not answer any more; None: nobody knows.

    Raises Unavailable("rank-missing") on the other ranks if rank 0 does not answer in time, or has
    ended.
    """
    if group.store is None:
        return make()
    key = f"{topic}/answer"
    if group.rank == 0:
        try:
            answer = make()
        except MilepostError as error:
            told = {"kind": type(error).__name__, "code": error.code, "message": error.message,
                    "hint": error.hint}  # fmt: skip
            group.store.set(key, b"!" + _pack(told))
            raise
        except BaseException as error:
            told = {"kind": "", "code": "internal", "message": f"rank 0: {error!r}", "hint": ""}
            group.store.set(key, b"!" + _pack(told))
            raise
        group.store.set(key, b"=" + answer)
        return answer
    until_s = time.monotonic() + timeout_s
    warn_s = time.monotonic() + min(LATE_S, timeout_s)
    while not _has_come(
        group.store, key, max(0.001, min(LOOK_S, min(warn_s, until_s) - time.monotonic()))
    ):
        if time.monotonic() >= until_s:
            raise Unavailable("rank-missing", f"rank 0 did not answer within {timeout_s:g} s")
        if has_ended is not None:
            _check_presence(group.store, {0: key}, has_ended)
        if time.monotonic() >= warn_s:
            _warn_of_missing(topic, [0], group.world, timeout_s)
            warn_s = until_s
    answer = group.store.get(key)
    if answer[:1] == b"=":
        return answer[1:]
    told = msgpack.unpackb(answer[1:])
    kinds: dict[str, type[MilepostError]] = {
        "CorruptCheckpoint": CorruptCheckpoint,
        "LoadFailed": LoadFailed,
        "UsageError": UsageError, "Rejected": Rejected, "Unavailable": Unavailable,
    }  # fmt: skip
    raise kinds.get(told["kind"], MilepostError)(told["code"], told["message"], told["hint"])


def _has_come(store: Store, key: str, timeout_s: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=timeout_s))
    except (
        RuntimeError,
        ValueError,
    ):  # torch raises DistStoreError, a RuntimeError, at the timeout
        return store.check([key])
    return True


def meet(
    group: Group,
    me: Introduction,
    claim: Callable[[], tuple[str, int]],
    timeout_s: float = MEET_S,
    topic: str = "meet",
) -> Meeting:
    """Introduce this rank, and return where the others are.

    Args:
        group: from `join_group`.
        me: this rank's node, root, job and torch version.
        claim: claims the next attempt number of the root, and returns the job's name on the wire
            and this number; called on rank 0 only.
        timeout_s: how long to wait for the others.
        topic: names the meeting among all of the group's store.

    Raises:
        UsageError: ranks disagree about root, job or torch version; names both.
        Unavailable: "rank-missing", naming the ranks.
    """

    def answer() -> bytes:
        said = [
            msgspec.convert(msgpack.unpackb(data), Introduction)
            for data in gather(group, topic, _pack(me), timeout_s)
        ]
        _check_agreement(said)
        cohort: dict[NodeRef, int] = {}
        node_of_rank = tuple(cohort.setdefault(entry.node, len(cohort)) for entry in said)
        return _pack(Meeting(tuple(cohort), node_of_rank, *claim(), said[0].umask))

    if group.rank != 0:
        gather(group, topic, _pack(me), timeout_s)
    # Rank 0 may wait all of `timeout_s` for a late rank before it answers.
    told = tell_all(group, topic, answer, timeout_s + 30)
    return msgspec.convert(msgpack.unpackb(told), Meeting)


def _check_agreement(said: Sequence[Introduction]) -> None:
    first = said[0]
    for rank, other in enumerate(said):
        for field in ("root", "job", "torch_version"):
            if getattr(other, field) != getattr(first, field):
                raise UsageError(
                    "usage",
                    f"rank {rank} has {field} {getattr(other, field)!r}, rank 0 has "
                    f"{getattr(first, field)!r}",
                    "every rank must pass the same root and job, and run the same torch",
                )
