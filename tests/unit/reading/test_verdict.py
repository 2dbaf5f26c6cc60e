"""A step of a load is taken by all ranks or by none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.reading.checkpoints import ALONE, on_ranks

from milepost.errors import CorruptCheckpoint, LoadFailed, Unavailable, UsageError
from milepost.link.rendezvous import Group
from milepost.reading.verdict import Verdicts


def shared(group: Group, acts: dict[int, Callable[[], Any]], timeout_s: float = 20.0) -> Any:
    """Share one step; ranks without an act of their own do nothing."""
    try:
        return Verdicts(group, "load/1", timeout_s).share("step", acts.get(group.rank, str))
    except BaseException as error:
        # Threads of a pool must not let an interrupt out.
        return error


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


def test_every_rank_gets_its_own_result_and_the_next_step_follows() -> None:
    def act(group: Group) -> list[int]:
        verdicts = Verdicts(group, "load/1", 20.0)
        return [verdicts.share(str(step), lambda: 10 * group.rank) for step in range(3)]

    assert [[0] * 3, [10] * 3, [20] * 3] == on_ranks(3, act)


@pytest.mark.parametrize("kind", [LoadFailed, CorruptCheckpoint, UsageError])
@pytest.mark.parametrize("at", [0, 2])
def test_what_one_rank_raises_all_raise_with_its_name(kind: type[LoadFailed], at: int) -> None:
    fault = kind("load-failed", "no such thing", "look again")
    for error in on_ranks(3, lambda group: shared(group, {at: raising(fault)})):
        assert isinstance(error, kind)
        told = (error.code, error.message, error.hint)
        assert ("load-failed", f"rank {at}: no such thing", "look again") == told


def test_of_several_faults_the_lowest_ranks_is_told_and_the_others_are_counted() -> None:
    faults = {rank: raising(ValueError(f"wrong {rank}\nin detail")) for rank in (1, 3)}
    for error in on_ranks(4, lambda group: shared(group, faults)):
        assert isinstance(error, LoadFailed)
        assert "rank 1: ValueError: wrong 1 (and 1 more of 4 ranks" in error.message


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_on_one_rank_ends_the_step_on_the_others_at_once(at: int) -> None:
    started_s = time.monotonic()
    told = on_ranks(3, lambda group: shared(group, {at: raising(KeyboardInterrupt())}))
    assert time.monotonic() - started_s < 10
    assert isinstance(told.pop(at), KeyboardInterrupt)
    for error in told:
        assert isinstance(error, LoadFailed)
        assert f"rank {at}: KeyboardInterrupt" in error.message


def test_a_rank_that_does_not_come_is_named() -> None:
    def act(group: Group) -> Any:
        return None if group.rank == 1 else shared(group, {}, timeout_s=0.2)

    first, _, third = on_ranks(3, act)
    for error in (first, third):
        assert isinstance(error, Unavailable)
        assert "1 of 3 ranks did not come within 0.2 s: 1" in error.message


def test_a_rank_alone_raises_what_it_raised() -> None:
    fault = LoadFailed("load-failed", "no such thing")
    assert fault is shared(ALONE, {0: raising(fault)})
    assert isinstance(shared(ALONE, {0: raising(KeyboardInterrupt())}), KeyboardInterrupt)
    assert isinstance(shared(ALONE, {0: raising(ValueError("x"))}), LoadFailed)
