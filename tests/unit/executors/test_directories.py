"""What decides a save is tried again while it may pass, and is never taken back."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.unit.executors.tables import table_of
from tests.unit.storage.published import filled

from milepost.storage.refusals import storage_error
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef
from milepostd.core.commands import GiveUp, Publish, SlowCommand
from milepostd.core.events import AnyEvent, OutcomeFound, Published, PublishFailed
from milepostd.executors import failures
from milepostd.executors.directories import SaveDirectories
from milepostd.executors.latest import Latest
from milepostd.executors.table import carry_out
from milepostd.ops.faults import FaultPoints

SAVE = SaveRef(job="j", save_id="1-5", step=50, name="step_50", overwrite=True)


class Bench:
    """Real files below one root, and the executors without threads."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.spawned: list[Coroutine[Any, Any, None]] = []

        async def in_files(work: Callable[[], Any]) -> Any:
            return work()

        latest = Latest(in_files, self.spawned.append)
        self.table = table_of(SaveDirectories("node", FaultPoints(()), in_files, latest))

    def end(self, command: SlowCommand) -> AnyEvent:
        """Carry out a command, as the runtime does; return its completion."""
        return asyncio.run(carry_out(self.table, command, "node"))

    def give_up(self, *, for_s: float, is_coordinator: bool = True) -> OutcomeFound:
        command = GiveUp(
            save=SAVE,
            root=str(self.root.path),
            is_coordinator=is_coordinator,
            until_ns=time.monotonic_ns() + int(for_s * 1e9) if for_s else 0,
            was_prepared=True,
        )
        found = self.end(command)
        assert isinstance(found, OutcomeFound)
        return found

    def publish(self, *, for_s: float) -> Published | PublishFailed:
        until_ns = time.monotonic_ns() + int(for_s * 1e9)
        command = Publish(save=SAVE, root=str(self.root.path), until_ns=until_ns)
        ended = self.end(command)
        assert isinstance(ended, Published | PublishFailed)
        return ended


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(failures, "RETRY_S_MIN", 0.001)
    root = Root(tmp_path / "root")
    root.prepare()
    filled(root, SAVE)
    return Bench(root)


def refusing(
    monkeypatch: pytest.MonkeyPatch, method: str, number: int, times: int
) -> list[SaveRef]:
    """Have a method of `Root` fail so often; return a list of its calls."""
    calls: list[SaveRef] = []
    real = getattr(Root, method)

    def refuse(root: Root, save: SaveRef) -> Any:
        calls.append(save)
        if len(calls) <= times:
            raise storage_error("move", root.path, OSError(number, os.strerror(number)))
        return real(root, save)

    monkeypatch.setattr(Root, method, refuse)
    return calls


def test_giving_up_is_tried_again_while_it_may_pass(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.root.publish(SAVE)
    calls = refusing(monkeypatch, "give_up", errno.ESTALE, 3)
    assert "committed" == bench.give_up(for_s=60).fate
    assert 4 == len(calls)


@pytest.mark.parametrize(
    ("number", "for_s"), [(errno.ESTALE, 0), (errno.EIO, 60)], ids=["no-time", "for-good"]
)
def test_an_outcome_that_cannot_be_found_is_unknown_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, for_s: float
) -> None:
    bench.root.publish(SAVE)
    calls = refusing(monkeypatch, "give_up", number, 3)
    assert "unknown" == bench.give_up(for_s=for_s).fate
    assert 1 == len(calls)


def test_what_was_published_is_found_committed_although_latest_cannot_follow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.root.publish(SAVE)
    refusing(monkeypatch, "advance_latest", errno.EIO, 1)
    found = bench.give_up(for_s=0)
    assert ("committed", str(bench.root.path / "step_50")) == (found.fate, found.path)
    assert bench.root.latest_target() is None
    (follow,) = bench.spawned
    asyncio.run(follow)
    assert "step_50" == bench.root.latest_target()


def test_publishing_is_tried_again_while_it_may_pass_and_latest_follows_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = refusing(monkeypatch, "publish", errno.EBUSY, 2)
    refusing(monkeypatch, "advance_latest", errno.EIO, 1)
    assert isinstance(bench.publish(for_s=60), Published)
    assert 3 == len(calls)
    (follow,) = bench.spawned
    asyncio.run(follow)
    assert "step_50" == bench.root.latest_target()


def test_a_publication_that_fails_for_good_says_why(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = refusing(monkeypatch, "publish", errno.ENOSPC, 1)
    ended = bench.publish(for_s=60)
    assert isinstance(ended, PublishFailed)
    assert ("no-space", "node") == (ended.cause.code, ended.cause.node)
    assert str(bench.root.path) in ended.cause.message
    assert 1 == len(calls)
    assert [] == bench.spawned
