"""The link `latest`: it only moves to newer checkpoints, whoever is held up."""

from __future__ import annotations

import os

import pytest
from tests.unit.storage.published import publish

from milepost.storage import latest
from milepost.storage.latest import move_latest
from milepost.storage.names import RootPaths
from milepost.storage.root import Root


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

    def held_up(paths: RootPaths, name: str) -> None:
        monkeypatch.setattr(latest, "move_latest", move_latest)
        assert root.advance_latest(publish(root, "1-6", 60))
        move_latest(paths, name)

    monkeypatch.setattr(latest, "move_latest", held_up)
    assert not root.advance_latest(earlier)
    assert "step_60" == root.latest_target()


def test_latest_is_not_moved_to_what_retention_has_removed(root: Root) -> None:
    gone = publish(root, "1-5", 50)
    root.advance_latest(publish(root, "1-6", 60))
    root.remove_checkpoint(gone.name)
    root.remove_checkpoint("step_60")
    assert not root.advance_latest(gone)
    assert root.latest_target() is None


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_people_call_latest_stays_as_it_is_unless_it_is_a_link(root: Root, kind: str) -> None:
    own = root.path / "latest"
    if kind == "file":
        own.write_text("step_7")
    else:
        own.mkdir()
        (own / "notes").touch()
    save = publish(root, "1-1", 3)
    assert root.is_latest_foreign()
    assert not root.advance_latest(save)
    root.move_latest("step_3")
    assert not own.is_symlink()
    assert ("step_7" if kind == "file" else ["notes"]) == (
        own.read_text() if kind == "file" else os.listdir(own)
    )
    assert [] == os.listdir(root.path / ".partial")
    assert "step_3" == root.latest()
    own.rename(root.path / "mine")
    assert root.advance_latest(save)
    assert not root.is_latest_foreign()
    assert "step_3" == root.latest_target()
