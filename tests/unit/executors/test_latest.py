"""`latest` where people have something of that name; retention beside those who read a checkpoint,
and beside what people have put there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.storage.published import publish

from milepost.storage.claims import reading
from milepost.storage.root import Root
from milepost.wire.messages import Keep
from milepostd.executors.latest import Latest, _retain


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.prepare()
    return made


def test_a_checkpoint_that_finds_a_reader_while_another_is_deleted_stays(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 2, 3):
        root.advance_latest(publish(root, f"1-{count}", count))
    remove = Root.remove_checkpoint
    lease = reading(root, "step_2")

    def slow(self: Root, name: str, save_id: str | None = None) -> bool:
        if name == "step_1":
            lease.__enter__()
        return remove(self, name, save_id)

    monkeypatch.setattr(Root, "remove_checkpoint", slow)
    assert ("step_1",) == _retain(root, Keep(last=1))
    lease.__exit__(None, None, None)
    monkeypatch.setattr(Root, "remove_checkpoint", remove)
    assert ("step_2",) == _retain(root, Keep(last=1))


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """What was logged: event and file."""
    return [(each.getMessage(), each.__dict__["fields"]["file"]) for each in caplog.records]


def test_a_file_of_people_s_called_latest_is_said_once_and_left_alone(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    own = root.path / "latest"
    own.write_text("mine")
    latest = Latest(at_once, lambda task: task.close())
    with caplog.at_level(logging.WARNING, logger="milepostd"):
        for count in (1, 2):
            asyncio.run(latest.advance(root, publish(root, f"1-{count}", count)))
    assert [("latest.foreign", str(own))] == events(caplog)
    assert "mine" == own.read_text()


def test_retention_keeps_what_people_put_there_and_says_so(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    latest = Latest(at_once, lambda task: task.close())
    for count in (1, 2, 3):
        asyncio.run(latest.advance(root, publish(root, f"1-{count}", count)))
    (root.path / "step_1" / "config.json").write_text("{}")
    with caplog.at_level(logging.INFO, logger="milepostd"):
        assert ("step_1", "step_2") == asyncio.run(latest.retain(root, Keep(last=1)))
    assert [("retention.kept", "step_1/config.json")] == events(caplog)
    assert "{}" == (root.path / "step_1" / "config.json").read_text()
    assert not (root.path / "step_2").exists()
