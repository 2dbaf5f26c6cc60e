"""Removing checkpoints: the name goes first, and only what was meant is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.storage.saves import SAVE, Power, commit, content_of, names, save_of

from milepost.storage import aside, removals
from milepost.storage.root import Root


def test_an_interrupted_deletion_is_finished_by_the_next_discard(root: Root) -> None:
    commit(root, save_of(1, "1-1"))
    half_deleted = root.path / ".partial" / "step_0.pruned-0123abcd"
    half_deleted.mkdir()
    (half_deleted / "__0_0.distcp").write_bytes(b"data")
    root.discard(save_of(1, "1-1"))
    assert [] == names(root.path / ".partial")


def test_a_checkpoint_loses_its_name_before_its_files(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, SAVE)

    def refuse(path: Path) -> None:
        raise Power

    with monkeypatch.context() as patch:
        patch.setattr(aside, "delete_tree", refuse)
        with pytest.raises(Power):
            root.remove_checkpoint("step_30")
    assert [] == root.checkpoints()
    (left,) = root.partials()
    assert [".metadata", ".milepost", "__0_0.distcp"] == names(left)
    root.prepare()
    assert [] == root.partials()
    root.remove_checkpoint("step_30")


def test_a_newer_checkpoint_of_the_same_name_is_not_removed_instead_of_the_old_one(
    root: Root,
) -> None:
    commit(root, save_of(30, "1-1"))
    commit(root, save_of(30, "2-1", overwrite=True), b"new")
    root.discard(save_of(30, "2-1"))
    assert not root.remove_checkpoint("step_30", "1-1")
    assert b"new" == content_of(root, "step_30")
    assert [] == root.partials()
    assert root.remove_checkpoint("step_30", "2-1")
    assert not root.remove_checkpoint("step_30", "2-1")
    assert [] == root.checkpoints()
    assert [] == root.partials()


def test_a_removal_interrupted_before_it_checks_the_save_is_undone_at_the_next_start(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "2-1"), b"new")

    def power_off(path: Path) -> str:
        raise Power

    with monkeypatch.context() as patch:
        patch.setattr(removals, "save_id_in", power_off)
        with pytest.raises(Power):
            root.remove_checkpoint("step_30", "1-1")
    assert [] == root.checkpoints()
    root.prepare()
    assert b"new" == content_of(root, "step_30")
    assert [] == root.partials()
