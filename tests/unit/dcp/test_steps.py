"""The steps of a load, on ranks that are threads: one answer for all of them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.checkpoint.api import CheckpointException

from milepost.dcp.steps import Steps
from milepost.errors import Unavailable
from milepost.link.rendezvous import Group

WAIT_S = 20.0


def on_ranks(world: int, act: Callable[[Steps, int], Any], wait_s: float = WAIT_S) -> list[Any]:
    """Return what `act` returned or raised on each rank."""
    store = HashStore()

    def run(rank: int) -> Any:
        try:
            return act(Steps(Group(rank, world, store), wait_s), rank)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(world) as ranks:
        found = list(ranks.map(run, range(world)))
    # What all have read is not kept for as long as the run lasts, but for the last answer.
    assert store.num_keys() <= 2
    return found


def failures(error: Any) -> dict[int, str]:
    assert isinstance(error, CheckpointException)
    return {rank: repr(each) for rank, (each, _) in error.failures.items()}


def fail(error: BaseException) -> Any:
    raise error


def test_each_rank_gets_its_own_result_once_all_have_one() -> None:
    assert [10, 11, 12] == on_ranks(3, lambda steps, rank: steps.agree("a", lambda: 10 + rank))


def test_rank_0_makes_of_all_results_a_part_for_each() -> None:
    def act(steps: Steps, rank: int) -> Any:
        first = steps.exchange("a", lambda: [rank], lambda every: every[::-1])
        return steps.exchange("b", lambda: first, lambda every: [[*each, "x"] for each in every])

    assert [[2, "x"], [1, "x"], [0, "x"]] == on_ranks(3, act)


def test_what_fails_on_some_ranks_is_raised_on_all_by_rank() -> None:
    def act(steps: Steps, rank: int) -> Any:
        return steps.agree("a", lambda: fail(ValueError(rank)) if rank else rank)

    found = on_ranks(3, act)
    assert [{1: "ValueError(1)", 2: "ValueError(2)"}] * 3 == [failures(each) for each in found]
    assert isinstance(found[1].__cause__, ValueError)


def test_what_rank_0_fails_in_for_all_is_raised_on_all() -> None:
    def act(steps: Steps, rank: int) -> Any:
        return steps.exchange("a", lambda: rank, lambda _: fail(KeyError("plan")))

    assert [{0: "KeyError('plan')"}] * 2 == [failures(each) for each in on_ranks(2, act)]


class Unpicklable(Exception):
    """Cannot be made again by what it holds."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize("rank_that_fails", [0, 1])
def test_an_error_that_cannot_travel_arrives_as_its_text(rank_that_fails: int) -> None:
    def act(steps: Steps, rank: int) -> Any:
        return steps.agree("a", lambda: fail(Unpicklable(1, 2)) if rank == rank_that_fails else 0)

    for each in on_ranks(2, act):
        assert {rank_that_fails: "RuntimeError('Unpicklable: 1 and 2')"} == failures(each)


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank() -> None:
    unpicklable: Any = lambda: 1  # noqa: E731

    def act(steps: Steps, rank: int) -> Any:
        return steps.exchange("a", lambda: unpicklable if rank else 0, lambda every: every)

    for each in on_ranks(2, act):
        assert [1] == list(failures(each))


def test_planners_of_which_only_that_of_rank_0_makes_a_global_plan_are_refused() -> None:
    def exchange(steps: Steps, rank: int) -> int:
        return steps.exchange("a", lambda: rank, lambda every: every[::-1])

    def agree(steps: Steps, rank: int) -> int:
        return steps.agree("a", lambda: rank)

    for each in on_ranks(2, lambda steps, rank: (agree if rank else exchange)(steps, rank)):
        assert "those of ranks [1] do not" in failures(each)[0]
    # And the other way round, each one keeps what it has.
    assert [0, 1] == on_ranks(2, lambda steps, rank: (exchange if rank else agree)(steps, rank))


@pytest.mark.parametrize("rank_that_goes", [0, 1])
def test_a_rank_that_is_interrupted_goes_at_once_and_the_others_are_told(
    rank_that_goes: int,
) -> None:
    def act(steps: Steps, rank: int) -> Any:
        return steps.agree("a", lambda: fail(KeyboardInterrupt()) if rank == rank_that_goes else 0)

    found = on_ranks(2, act)
    assert isinstance(found[rank_that_goes], KeyboardInterrupt)
    assert {rank_that_goes: "KeyboardInterrupt()"} == failures(found[1 - rank_that_goes])


def test_a_rank_that_does_not_come_is_named() -> None:
    def act(steps: Steps, rank: int) -> Any:
        return rank or steps.agree("a", lambda: rank)

    found = on_ranks(2, act, wait_s=0.05)
    assert isinstance(found[0], Unavailable)
    assert "rank-missing" == found[0].code


def test_one_process_alone_raises_as_a_group_does() -> None:
    steps = Steps(Group(0, 1, None), WAIT_S)
    assert 3 == steps.agree("a", lambda: 3)
    assert 5 == steps.exchange("b", lambda: 4, lambda every: [every[0] + 1])
    with pytest.raises(CheckpointException) as caught:
        steps.agree("c", lambda: fail(ValueError(1)))
    assert {0: "ValueError(1)"} == failures(caught.value)
    with pytest.raises(CheckpointException) as caught:
        steps.exchange("d", lambda: 1, lambda _: fail(ValueError(2)))
    assert {0: "ValueError(2)"} == failures(caught.value)
    with pytest.raises(KeyboardInterrupt):
        steps.agree("e", lambda: fail(KeyboardInterrupt()))
