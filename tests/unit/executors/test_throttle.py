"""The bandwidth limit: never more than it says, and nobody is held longer than needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import SaveFailed
from milepost.format.layout import PAGE_BYTES
from milepost.storage.blocks import BLOCK_BYTES
from milepostd.executors.throttle import BLOCK_BYTES_MIN, BURST_S, MB, BandwidthLimit, Pace


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waits_s: list[float] = []
        self.on_wait: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def wait(self, stopped: threading.Event, timeout_s: float) -> bool:
        self.on_wait()
        if not stopped.is_set():
            self.now_s += timeout_s
            self.waits_s.append(timeout_s)
        return stopped.is_set()


def pace_of(limit: BandwidthLimit | None, clock: Clock, until_s: float = float("inf")) -> Pace:
    return Pace(limit, until_s=until_s, clock=clock, wait=clock.wait)


@given(
    rate=st.floats(0.01, 1e4).map(lambda mbps: mbps * MB),
    blocks=st.lists(
        st.tuples(st.integers(1, BLOCK_BYTES), st.floats(0, 5)), min_size=1, max_size=30
    ),
)
def test_no_span_of_time_is_granted_more_than_the_limit_and_one_burst(
    rate: float, blocks: list[tuple[int, float]]
) -> None:
    limit, now_s = BandwidthLimit(rate), 0.0
    granted: list[tuple[float, int]] = []
    for count, idle_s in blocks:
        now_s += idle_s
        now_s = max(now_s, limit.reserve(count, now_s))
        granted.append((now_s, count))
    for first in range(len(granted)):
        total = 0
        for at_s, count in granted[first:]:
            total += count
            span_s = at_s - granted[first][0]
            # The first block of a span may have been saved up for before it, at the limit.
            free = granted[first][1]
            assert total <= free + rate * (span_s + BURST_S) * (1 + 1e-9) + 1


@given(st.integers(1, 64), st.floats(1, 1000))
def test_a_busy_limit_grants_all_that_it_allows(blocks: int, mbps: float) -> None:
    limit = BandwidthLimit(mbps * MB)
    total = blocks * limit.block_bytes
    last_s = [limit.reserve(limit.block_bytes, 0.0) for _ in range(blocks)][-1]
    assert last_s == pytest.approx(total / (mbps * MB) - BURST_S)


def test_two_who_write_at_once_share_one_limit_in_turn() -> None:
    limit = BandwidthLimit(16 * MB)
    assert 4 * MB // PAGE_BYTES * PAGE_BYTES == limit.block_bytes
    at_s = [limit.reserve(4 * MB, 0.0) for _ in range(4)]
    assert [0.0, 0.25, 0.5, 0.75] == at_s


def test_what_is_asked_for_by_many_threads_is_granted_once() -> None:
    limit = BandwidthLimit(1 * MB)
    with ThreadPoolExecutor(8) as threads:
        at_s = list(threads.map(lambda _: limit.reserve(1000, 0.0), range(2000)))
    assert 2000 == len({round(each, 6) for each in at_s})
    assert 2.0 - BURST_S == pytest.approx(max(at_s))


def test_what_is_given_back_is_there_for_the_next() -> None:
    limit = BandwidthLimit(1 * MB)
    limit.reserve(5 * MB, 0.0)
    before_s = limit.earliest_s(1, 0.0)
    limit.reserve(7 * MB, 0.0)
    limit.give_back(7 * MB)
    assert before_s == pytest.approx(limit.earliest_s(1, 0.0))


@pytest.mark.parametrize("mbps", [0.001, 1, 1.7, 16, 500, 1e6])
def test_blocks_are_whole_pages_neither_tiny_nor_larger_than_without_a_limit(mbps: float) -> None:
    block = BandwidthLimit(mbps * MB).block_bytes
    assert 0 == block % PAGE_BYTES
    assert BLOCK_BYTES_MIN <= block <= BLOCK_BYTES
    assert BLOCK_BYTES == Pace().block_bytes


def test_a_write_takes_its_bytes_divided_by_the_limit_less_one_burst() -> None:
    clock, told = Clock(), list[float]()
    limit = BandwidthLimit(16 * MB)
    pace = Pace(limit, on_wait=told.append, clock=clock, wait=clock.wait)
    started_s, left = clock.now_s, 32 * MB
    while left:
        count = min(4 * MB, left)
        pace.await_turn(count, left)
        left -= count
    assert 2.0 - BURST_S == pytest.approx(clock.now_s - started_s)
    assert sum(told) == pytest.approx(clock.now_s - started_s)


def test_without_a_limit_nobody_waits() -> None:
    clock = Clock()
    pace_of(None, clock).await_turn(BLOCK_BYTES, 1 << 50)
    assert [] == clock.waits_s


def test_a_write_that_is_stopped_while_it_waits_ends_and_leaves_the_limit_to_others() -> None:
    clock, limit = Clock(), BandwidthLimit(1 * MB)
    limit.reserve(100 * MB, clock.now_s)
    before_s = limit.earliest_s(MB, clock.now_s)
    pace = pace_of(limit, clock)
    clock.on_wait = pace.stop
    with pytest.raises(SaveFailed) as caught:
        pace.await_turn(MB, 10 * MB)
    assert "aborted" == caught.value.code
    assert [] == clock.waits_s
    assert before_s == pytest.approx(limit.earliest_s(MB, clock.now_s))


def test_a_wait_in_real_time_is_ended_by_another_thread() -> None:
    limit = BandwidthLimit(1)
    pace = Pace(limit)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pace.await_turn, 10**9, 10**9)
        pace.stop()
        with pytest.raises(SaveFailed, match="ended"):
            waiting.result(20)


@pytest.mark.parametrize("limit", [None, BandwidthLimit(MB)])
def test_a_stopped_write_gets_no_further_turn(limit: BandwidthLimit | None) -> None:
    pace = Pace(limit)
    pace.check()
    pace.stop()
    for act in (pace.check, lambda: pace.await_turn(1, 1)):
        with pytest.raises(SaveFailed) as caught:
            act()
        assert "aborted" == caught.value.code


def test_a_write_that_cannot_be_done_by_its_deadline_fails_at_once_with_the_numbers() -> None:
    clock, limit = Clock(), BandwidthLimit(16 * MB)
    pace = pace_of(limit, clock, clock.now_s + 60)
    with pytest.raises(SaveFailed) as caught:
        pace.await_turn(4 * MB, 1600 * MB)
    assert "timeout" == caught.value.code
    assert caught.value.message == (
        "1600000000 bytes of the image are left to write, which takes 99.8 s or more at the "
        "daemon's limit of 16 MB/s, and the save has 60.0 s left"
    )
    assert "write_mbps" in caught.value.hint
    assert "deadline_s" in caught.value.hint
    assert [] == clock.waits_s
    assert clock.now_s - BURST_S == limit.earliest_s(0, clock.now_s), "nothing was taken"


def test_a_write_that_others_delay_too_long_fails_as_soon_as_that_is_certain() -> None:
    clock, limit = Clock(), BandwidthLimit(1 * MB)
    pace = pace_of(limit, clock, clock.now_s + 20)
    left, failed_s = 15 * MB, 0.0
    try:
        while left:
            pace.await_turn(MB, left)
            limit.reserve(MB, clock.now_s)  # another writer's turn
            left -= MB
    except SaveFailed:
        failed_s = clock.now_s
    assert 1000 < failed_s < 1020
