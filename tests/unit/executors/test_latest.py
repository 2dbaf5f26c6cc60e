"""`latest` follows the newest branch, and never goes back to a slower save."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import pytest
from tests.unit.storage.published import publish

from milepost.storage.claims import reading
from milepost.storage.root import Root
from milepost.wire.messages import Keep, SaveRef
from milepostd.executors.latest import _retain


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.prepare()
    return made


def test_a_slower_earlier_save_does_not_move_latest_back(root: Root) -> None:
    later, earlier = publish(root, "1-6", 60), publish(root, "1-5", 50)
    assert root.advance_latest(later)
    assert not root.advance_latest(earlier)
    assert "step_60" == root.latest_target()


def test_a_lower_step_of_a_newer_attempt_becomes_latest(root: Root) -> None:
    assert root.advance_latest(publish(root, "1-6", 60))
    assert root.advance_latest(publish(root, "2-1", 50))
    assert "step_50" == root.latest_target()


def test_latest_heals_if_what_it_named_is_gone(root: Root) -> None:
    root.move_latest("step_7")
    assert root.latest_target() is None
    assert root.advance_latest(publish(root, "1-1", 3))
    assert "step_3" == root.latest()


def test_a_mover_that_was_held_up_does_not_move_latest_back(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = publish(root, "1-5", 50)
    move = Root.move_latest

    def held_up(self: Root, name: str) -> None:
        monkeypatch.setattr(Root, "move_latest", move)
        assert self.advance_latest(publish(root, "1-6", 60))
        move(self, name)

    monkeypatch.setattr(Root, "move_latest", held_up)
    assert not root.advance_latest(earlier)
    assert "step_60" == root.latest_target()


def test_latest_is_not_moved_to_what_retention_has_removed(root: Root) -> None:
    gone = publish(root, "1-5", 50)
    root.advance_latest(publish(root, "1-6", 60))
    root.remove_checkpoint(gone.name)
    root.remove_checkpoint("step_60")
    assert not root.advance_latest(gone)
    assert root.latest_target() is None


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


def test_what_could_not_be_moved_is_unpublished_only_where_it_was_and_without_an_intent(
    root: Root,
) -> None:
    save = SaveRef(job="j", save_id="1-7", step=70, name="step_70", overwrite=True)
    assert not root.is_unpublished(save, was_begun=True)
    assert root.is_unpublished(save, was_begun=False)
    folder = root.open_save(save)
    assert root.is_unpublished(save, was_begun=True)
    intent = root.run_path / "replace-step_70"
    intent.write_bytes(msgpack.packb({"name": "step_70", "save_id": "1-7", "aside": "x"}))
    assert not root.is_unpublished(save, was_begun=False)
    intent.unlink()
    folder.rename(root.path / "step_70")
    assert not root.is_unpublished(save, was_begun=True)


def test_an_old_draft_is_swept_and_a_fresh_one_stays(root: Root) -> None:
    old, fresh = (root.run_path / f".tmp-{name}" for name in ("old", "fresh"))
    link = root.path / ".partial" / "latest.0123"
    for draft in (old, fresh):
        draft.write_bytes(b"")
    link.symlink_to("step_1")
    os.utime(old, (1.0, 1.0))
    root.prepare()
    assert not old.exists()
    assert fresh.exists()
    assert not link.is_symlink()
