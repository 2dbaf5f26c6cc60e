"""Fault points: what is understood, what happens, to whom, and how often."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from milepost.errors import UsageError
from milepost.wire.messages import SaveRef
from milepostd.ops.faults import ACTIONS, POINTS, Fault, FaultPoints, InjectedFault, parse_faults


def _save(job: str, step: int) -> SaveRef:
    return SaveRef(job=job, save_id="1-1", step=step, name=f"step_{step}")


def test_points_actions_and_arguments_are_understood() -> None:
    assert parse_faults(" mid-write:sleep:2.5, before-publish:kill,,") == (
        Fault("mid-write", "sleep", 2.5),
        Fault("before-publish", "kill"),
    )
    assert parse_faults("mid-write:eio@12,after-write:sleep:0.5@3") == (
        Fault("mid-write", "eio", step=12),
        Fault("after-write", "sleep", 0.5, 3),
    )
    assert parse_faults("mid-write:hold:/run/go-on@12") == (
        Fault("mid-write", "hold", step=12, file="/run/go-on"),
    )
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("mid-flight:kill", "unknown fault point 'mid-flight'"),
        ("mid-write:explode", "unknown action 'explode'"),
        ("mid-write", "unknown action ''"),
        ("mid-write:sleep", "sleep takes seconds"),
        ("mid-write:sleep:-1", "sleep takes seconds"),
        ("mid-write:sleep:nan", "sleep takes seconds"),
        ("mid-write:hold@3", "hold takes the path of a file"),
        ("mid-write:kill:9", "kill takes no argument"),
        ("mid-write:kill@", "after @ stands the step"),
        ("mid-write:kill@-1", "after @ stands the step"),
        ("mid-write@3:kill", "unknown action ''"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        parse_faults(text)


def test_every_point_takes_every_action() -> None:
    takes = ("sleep", "hold")
    texts = [f"{p}:{a}" + (":1" if a in takes else "") for p in POINTS for a in ACTIONS]
    assert len(parse_faults(",".join(texts))) == len(POINTS) * len(ACTIONS)


def test_a_fault_fires_once_per_save_and_only_at_its_point(
    caplog: pytest.LogCaptureFixture,
) -> None:
    points = FaultPoints(parse_faults("mid-write:raise"))
    points.at_blocking("after-write", _save("a", 1))
    with pytest.raises(InjectedFault, match="mid-write"):
        points.at_blocking("mid-write", _save("a", 1))
    points.at_blocking("mid-write", _save("a", 1))
    with pytest.raises(InjectedFault):
        asyncio.run(points.at("mid-write", _save("b", 1)))
    assert [record.getMessage() for record in caplog.records] == ["fault.fired"] * 2


def test_a_fault_with_a_step_leaves_the_saves_of_other_steps_alone() -> None:
    points = FaultPoints(parse_faults("mid-write:raise@7"))
    points.at_blocking("mid-write", _save("a", 6))
    with pytest.raises(InjectedFault):
        points.at_blocking("mid-write", _save("b", 7))
    points.at_blocking("mid-write", _save("b", 7))
    with pytest.raises(InjectedFault):
        points.at_blocking("mid-write", _save("c", 7))


@pytest.mark.parametrize(
    ("action", "number"),
    [
        ("enospc", errno.ENOSPC),
        ("edquot", errno.EDQUOT),
        ("eio", errno.EIO),
        ("estale", errno.ESTALE),
    ],
)
def test_a_disk_s_faults_look_like_the_disk_s(action: str, number: int) -> None:
    points = FaultPoints(parse_faults(f"mid-write:{action}"))
    with pytest.raises(OSError, match="mid-write") as caught:
        points.at_blocking("mid-write", _save("a", 1))
    assert caught.value.errno == number


def test_kill_and_stop_strike_the_daemon_itself() -> None:
    sent: list[tuple[int, int]] = []
    faults = parse_faults("before-plan:stop,before-plan:kill")
    points = FaultPoints(faults, lambda pid, number: sent.append((pid, number)))
    points.at_blocking("before-plan", _save("a", 1))
    assert sent == [(os.getpid(), signal.SIGSTOP), (os.getpid(), signal.SIGKILL)]


def test_sleep_holds_one_save_is_told_and_leaves_the_loop_turning() -> None:
    async def main() -> None:
        points = FaultPoints(parse_faults("before-publish:sleep:3600"))
        held = asyncio.create_task(points.at("before-publish", _save("a", 1)))
        await asyncio.sleep(0)
        assert points.holding("a", "1-1") == "before-publish"
        assert points.holding("b", "1-1") is None
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        assert points.holding("a", "1-1") is None

    asyncio.run(main())


def test_sleep_in_a_writer_thread_holds_that_thread_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = FaultPoints(parse_faults("mid-write:sleep:5"))
    entered, go_on = threading.Event(), threading.Event()

    def held(seconds: float) -> None:
        assert seconds == 5
        entered.set()
        assert go_on.wait(10)

    monkeypatch.setattr("milepostd.ops.faults.time.sleep", held)
    writer = threading.Thread(target=points.at_blocking, args=("mid-write", _save("a", 1)))
    writer.start()
    assert entered.wait(10)
    assert points.holding("a", "1-1") == "mid-write"
    go_on.set()
    writer.join()
    assert points.holding("a", "1-1") is None


def test_hold_lets_go_of_the_save_once_its_file_is_there(tmp_path: Path) -> None:
    async def main() -> None:
        points = FaultPoints(parse_faults(f"before-publish:hold:{tmp_path / 'go-on'}"))
        held = asyncio.create_task(points.at("before-publish", _save("a", 1)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert points.holding("a", "1-1") == "before-publish"
        assert not held.done()
        (tmp_path / "go-on").touch()
        await held
        assert points.holding("a", "1-1") is None

    asyncio.run(main())
