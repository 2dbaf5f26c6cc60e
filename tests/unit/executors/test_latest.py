"""Retention beside those who read a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.storage.published import publish

from milepost.storage.claims import reading
from milepost.storage.root import Root
from milepost.wire.messages import Keep
from milepostd.executors.latest import _retain


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
