"""How long is waited, and what is said of it."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import Any

import pytest

from milepost.concurrency import waiting
from milepost.concurrency.waiting import make_condition, wait_telling
from milepost.errors import UsageError
from milepost.handle import Save
from milepost.wire.messages import Cause, Ending


def test_who_waits_long_says_for_what_until_it_has_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "WAIT_TOLD_S", 0.01)
    changed = threading.Condition()

    def is_told() -> bool:
        return bool(caplog.records)

    with changed:
        assert wait_telling(changed, is_told, 60, "rank 3 waits for a slot")
    (record,) = caplog.records
    assert record.getMessage().startswith("rank 3 waits for a slot (0 s so far)")


def test_what_has_come_is_not_waited_for_and_what_never_comes_not_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changed = threading.Condition()
    with changed:
        assert wait_telling(changed, lambda: True, 0.0, "nobody waits")
        assert not wait_telling(changed, lambda: False, 0.01, "somebody waits")
    assert caplog.records == []


@pytest.mark.parametrize("timeout_s", ["soon", True, float("nan"), [1]])
def test_what_is_no_time_to_wait_is_refused_by_name(timeout_s: Any) -> None:
    save = Save(1, "step_1", "1-1", lambda: None)
    for wait in (save.wait, save.wait_staged):
        with pytest.raises(UsageError, match="timeout_s must be seconds"):
            wait(timeout_s)
    with pytest.raises(UsageError, match="must be callable, got 3"):
        save.add_done_callback(3)  # type: ignore[arg-type]
    save.fail(Ending.FAILED, Cause("aborted", "the test is over"))


def test_a_signal_handler_that_raises_leaves_no_condition_taken() -> None:
    class Interrupted(Exception):
        pass

    def handle(number: int, frame: object) -> None:
        raise Interrupted

    def try_it() -> None:
        free.append(condition.acquire(timeout=60))
        if free[-1]:
            condition.release()

    condition, free = make_condition(), list[bool]()
    before = signal.signal(signal.SIGALRM, handle)
    try:
        # Of plain ones, one of the first few is taken for ever.
        for _ in range(1000):
            with contextlib.suppress(Interrupted):
                signal.setitimer(signal.ITIMER_REAL, 2e-5)
                while True:
                    with condition:
                        pass
            other = threading.Thread(target=try_it)
            other.start()
            other.join()
            assert free[-1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
