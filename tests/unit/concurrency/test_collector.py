"""The collector's switch: nested, from several threads, and taken back for a wait."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

import pytest

from milepost.concurrency.collector import collect_now, collector_paused, collector_running


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


def test_the_collector_is_off_until_the_outermost_pause_ends() -> None:
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_fails_within_a_pause_ends_it() -> None:
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_a_wait_within_a_pause_has_the_collector_on() -> None:
    with collector_paused():
        with collector_running():
            assert gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@contextlib.contextmanager
def paused_elsewhere() -> Iterator[None]:
    """Another thread pauses meanwhile."""
    is_in, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with collector_paused():
            is_in.set()
            may_end.wait()

    other = threading.Thread(target=pause)
    other.start()
    is_in.wait()
    try:
        yield
    finally:
        may_end.set()
        other.join()


def test_the_last_of_several_threads_switches_on_again() -> None:
    with contextlib.ExitStack() as elsewhere:
        with collector_paused():
            elsewhere.enter_context(paused_elsewhere())
            with collector_running():
                assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_nobody_waits_for_a_thread_that_is_switching(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a signal handler runs in the middle of it, and waits for a thread that pauses."""
    is_enabled, asked = gc.isenabled, []

    def handled() -> bool:
        asked.append(1)
        if len(asked) == 1:
            other = threading.Thread(target=pause, daemon=True)
            other.start()
            other.join(20)
            assert not other.is_alive()
        return is_enabled()

    def pause() -> None:
        with collector_paused():
            pass

    monkeypatch.setattr(gc, "isenabled", handled)
    with collector_paused():
        assert not is_enabled()
    assert is_enabled()


def test_a_wait_that_is_taken_back_late_pauses_nobody_any_more() -> None:
    """As after an interrupt, when a traceback keeps the generator."""
    with collector_paused():
        late = collector_running()
        late.__enter__()
    late.__exit__(None, None, None)
    assert gc.isenabled()
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_child_that_is_forked_meanwhile_collects() -> None:
    with paused_elsewhere():
        child = os.fork()
        if not child:
            os._exit(gc.isenabled())
    assert 1 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("is_on", [True, False])
def test_what_stays_is_walked_at_once_unless_the_user_has_switched_that_off(is_on: bool) -> None:
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        seen.append(info["generation"])

    if not is_on:
        gc.disable()
    gc.callbacks.append(note)
    collect_now()
    gc.callbacks.remove(note)
    assert is_on == (2 in seen)
