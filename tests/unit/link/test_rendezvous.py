"""How ranks meet: over a store in memory, one thread a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from milepost.errors import MilepostError, Rejected, Unavailable, UsageError
from milepost.link.rendezvous import (
    Group,
    Introduction,
    Meeting,
    gather,
    join_group,
    meet,
    tell_all,
)
from milepost.wire.messages import NodeRef

WAIT_S = 10.0
NODES = [NodeRef(f"node-{index}", f"tcp://10.0.0.{index}:1", "k") for index in range(3)]


def together(world: int, act: Callable[[Group], Any], absent: tuple[int, ...] = ()) -> list[Any]:
    """Run `act` as every rank that is not absent; return what each returned or raised."""
    store = dist.HashStore()
    results: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            results[rank] = act(Group(rank, world, store))
        except BaseException as error:
            results[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,)) for rank in range(world) if rank not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return results


def introduction(rank: int, **changes: str) -> Introduction:
    fields = {"root": "/data/run", "job": "run", "torch_version": "2.13.0"} | changes
    return Introduction(NODES[rank // 2], **fields, umask=0o20 + rank)


def test_ranks_learn_where_the_others_are() -> None:
    claims: list[int] = []

    def claim() -> tuple[str, int]:
        claims.append(1)
        return "run@1f", 7

    results = together(5, lambda group: meet(group, introduction(group.rank), claim, WAIT_S))
    expected = Meeting(tuple(NODES), (0, 0, 1, 1, 2), "run@1f", 7, umask=0o20)
    assert [expected] * 5 == results
    assert 1 == len(claims)


def test_a_lone_process_meets_itself_without_a_store() -> None:
    me = introduction(0)
    assert Meeting((NODES[0],), (0,), "run@1f", 1, umask=0o20) == meet(
        Group(0, 1, None), me, lambda: ("run@1f", 1)
    )


@pytest.mark.parametrize("field", ["root", "job", "torch_version"])
def test_ranks_that_disagree_are_named_on_every_rank(field: str) -> None:
    def act(group: Group) -> Meeting:
        changes = {field: "another"} if group.rank == 2 else {}
        return meet(group, introduction(group.rank, **changes), lambda: ("run", 1), WAIT_S)

    for error in together(3, act):
        assert isinstance(error, UsageError)
        assert f"rank 2 has {field} 'another', rank 0 has" in str(error)


def test_a_rank_that_does_not_come_is_named_on_every_rank() -> None:
    def act(group: Group) -> Meeting:
        assert isinstance(group.store, dist.Store)
        if group.rank == 0:
            group.store.wait(["meet/2"], timedelta(seconds=WAIT_S))
        timeout_s = WAIT_S if group.rank else 0.05
        return meet(group, introduction(group.rank), lambda: ("run", 1), timeout_s)

    results = together(4, act, absent=(1, 3))
    for error in (results[0], results[2]):
        assert isinstance(error, Unavailable)
        assert "rank-missing" == error.code
        assert "2 of 4 ranks did not come within 0.05 s: 1, 3" in str(error)


def test_many_missing_ranks_are_counted_and_some_named() -> None:
    store = dist.HashStore()
    with pytest.raises(
        Unavailable, match=r"19 of 20 ranks .*: 1, 2, 3, 4, 5, 6, 7, 8 and 11 more \["
    ):
        gather(Group(0, 20, store), "topic", b"", 0.02)


def test_waiting_for_several_missing_ranks_takes_no_longer_than_for_one() -> None:
    started_s = time.monotonic()
    with pytest.raises(Unavailable):
        gather(Group(0, 20, dist.HashStore()), "topic", b"", 0.5)
    assert time.monotonic() - started_s < 19 * 0.5


def test_without_rank_0_the_others_say_so() -> None:
    results = together(3, lambda group: tell_all(group, "load/1", bytes, 0.05), absent=(0,))
    for error in results[1:]:
        assert isinstance(error, Unavailable)
        assert "rank 0 did not answer within 0.05 s" in str(error)


@pytest.mark.parametrize("ended", [0, 2])
def test_a_rank_that_has_ended_is_not_waited_for(ended: int) -> None:
    def act(group: Group) -> Any:
        def make() -> bytes:
            gather(group, "t", b"", 3600, lambda rank: rank == ended)
            return b""

        if group.rank:
            gather(group, "t", b"", 3600)
        return tell_all(group, "t", make, 3600, lambda rank: rank == ended)

    for error in together(3, act, absent=(ended,)):
        if error is not None:
            assert isinstance(error, Unavailable)
            assert "rank-missing" == error.code
            assert f"rank {ended} ended while others waited for it" in str(error)


def test_what_a_rank_has_said_before_it_ended_counts() -> None:
    store = dist.HashStore()
    gather(Group(1, 2, store), "t", b"1", WAIT_S)
    assert [b"0", b"1"] == gather(Group(0, 2, store), "t", b"0", WAIT_S, lambda _: True)
    tell_all(Group(0, 2, store), "t", lambda: b"all", WAIT_S)
    assert b"all" == tell_all(Group(1, 2, store), "t", bytes, WAIT_S, lambda _: True)


def test_all_values_come_to_rank_0_in_rank_order() -> None:
    results = together(4, lambda group: gather(group, "t", b"%d" % group.rank, WAIT_S))
    assert [b"0", b"1", b"2", b"3"] == results[0]
    assert [[], [], []] == results[1:]


def test_what_rank_0_made_reaches_all_byte_for_byte() -> None:
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        return b"\x00=!\xff"

    assert [b"\x00=!\xff"] * 3 == together(3, lambda group: tell_all(group, "t", make, WAIT_S))
    assert 1 == len(made)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("usage", "slots is 1", "at least 2"),
        Rejected("already-committed", "step_1 is taken", ""),
        Unavailable("daemon-unreachable", "no daemon answers", "start one"),
    ],
)
def test_an_error_of_rank_0_is_the_same_error_on_all(error: MilepostError) -> None:
    def make() -> bytes:
        raise error

    for raised in together(3, lambda group: tell_all(group, "t", make, WAIT_S)):
        assert type(error) is type(raised)
        assert (error.code, error.message, error.hint) == (raised.code, raised.message, raised.hint)


def test_an_error_of_rank_0_that_is_not_ours_reaches_the_others_in_words() -> None:
    def make() -> bytes:
        raise ZeroDivisionError("by zero")

    first, second = together(2, lambda group: tell_all(group, "t", make, WAIT_S))
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, MilepostError)
    assert ("internal", "rank 0: ZeroDivisionError('by zero')") == (second.code, second.message)


def test_topics_do_not_meet() -> None:
    def act(group: Group) -> list[bytes]:
        return [tell_all(group, f"load/{count}", partial(bytes, count), WAIT_S) for count in (1, 2)]

    assert [[b"\0", b"\0\0"]] * 2 == together(2, act)


def test_a_process_without_torch_distributed_is_alone() -> None:
    assert Group(0, 1, None) == join_group(None)
    with pytest.raises(UsageError, match=r"torch\.distributed is not set up"):
        join_group(object())  # type: ignore[arg-type]
