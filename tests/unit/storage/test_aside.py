"""Replacing a checkpoint: cut off anywhere, either the old one or the new one has the name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.unit.storage.saves import SAVE, Power, commit, content_of, fill, names, save_of

from milepost.errors import Rejected, SaveFailed, StorageError
from milepost.storage import aside, outcomes
from milepost.storage.durable import replace_file, sync_directory
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef


def test_a_taken_name_is_refused_and_both_stay_as_they_were(root: Root) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    fill(root, SAVE, b"new")
    with pytest.raises(Rejected) as caught:
        root.publish(SAVE)
    assert "already-committed" == caught.value.code
    assert b"old" == content_of(root, "step_30")
    assert "aborted" == root.give_up(SAVE)


@pytest.mark.parametrize("in_the_way", ["file", "link", "directory"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_something_that_is_not_a_checkpoint_is_not_replaced_silently(
    root: Root, in_the_way: str, overwrite: bool
) -> None:
    path = root.path / "step_30"
    if in_the_way == "file":
        path.touch()
    elif in_the_way == "link":
        path.symlink_to(root.path / ".milepost-run")
    else:
        path.mkdir()
        (path / "notes").touch()
    save = save_of(30, "2-3", overwrite=overwrite)
    fill(root, save)
    if in_the_way == "directory" and overwrite:
        root.publish(save)
        assert ["step_30.0-0.replaced"] == names(root.path / ".partial")
        return
    with pytest.raises(Rejected) as caught:
        root.publish(save)
    assert ("move it away" in caught.value.hint) == (in_the_way != "directory")
    assert path.is_symlink() or path.exists()


def test_overwriting_replaces_a_checkpoint_and_discarding_deletes_the_old_one(root: Root) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    commit(root, save, b"new")
    assert b"new" == content_of(root, "step_30")
    assert ["step_30.1-1.replaced"] == names(root.path / ".partial")
    root.discard(save)
    assert [] == names(root.path / ".partial")
    assert b"new" == content_of(root, "step_30")
    assert "committed" == root.give_up(save)


@pytest.mark.parametrize("late_id", ["1-7", "2-2"])
def test_a_save_that_was_held_up_does_not_replace_a_newer_one(root: Root, late_id: str) -> None:
    late = save_of(30, late_id, overwrite=True)
    fill(root, late, b"abandoned")
    commit(root, save_of(30, "2-3", overwrite=True), b"kept")
    with pytest.raises(Rejected) as caught:
        root.publish(late)
    assert "already-committed" == caught.value.code
    assert b"kept" == content_of(root, "step_30")
    assert "aborted" == root.give_up(late)
    root.discard(late)
    assert [] == names(root.path / ".partial")
    assert b"kept" == content_of(root, "step_30")


def test_overwriting_a_free_name_is_plain_publishing(root: Root) -> None:
    commit(root, save_of(30, "2-3", overwrite=True))
    assert [] == names(root.path / ".partial")
    assert ["step_30"] == [each.name for each in root.checkpoints()]


def cut_off_after_putting_aside(
    root: Root, save: SaveRef, monkeypatch: pytest.MonkeyPatch, *, before: bool = False
) -> None:
    """Publish up to the second rename of an overwriting, or up to the first one."""
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if target == root.path / save.name or (before and source == root.path / save.name):
            raise Power
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(Power):
            root.publish(save)


@pytest.fixture
def torn(root: Root, monkeypatch: pytest.MonkeyPatch) -> SaveRef:
    """A save whose publication was cut off when the old checkpoint had lost its name."""
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    fill(root, save, b"new")
    cut_off_after_putting_aside(root, save, monkeypatch)
    assert not (root.path / "step_30").exists()
    return save


def test_an_interrupted_replacement_is_completed_at_the_next_start(
    root: Root, torn: SaveRef
) -> None:
    root.prepare()
    assert b"new" == content_of(root, "step_30")
    assert [[], []] == [names(root.path / each) for each in (".partial", ".milepost-run")]
    assert "committed" == root.give_up(torn)


def test_an_interrupted_replacement_can_be_published_again(root: Root, torn: SaveRef) -> None:
    root.publish(torn)
    assert b"new" == content_of(root, "step_30")
    root.discard(torn)
    assert [] == names(root.path / ".partial")


def test_giving_up_an_interrupted_replacement_puts_the_old_checkpoint_back(
    root: Root, torn: SaveRef
) -> None:
    assert "aborted" == root.give_up(torn)
    assert b"old" == content_of(root, "step_30")
    root.discard(torn)
    assert [[], []] == [names(root.path / each) for each in (".partial", ".milepost-run")]


def test_a_start_puts_the_old_checkpoint_back_if_the_new_one_was_given_up(
    root: Root, torn: SaveRef
) -> None:
    source = root.save_dir(torn)
    os.rename(source, source.with_name(source.name + ".aborted"))
    root.prepare()
    assert b"old" == content_of(root, "step_30")
    assert [] == names(root.path / ".milepost-run")


def test_a_start_puts_an_old_checkpoint_back_even_without_the_intent(
    root: Root, torn: SaveRef
) -> None:
    (root.path / ".milepost-run" / "replace-step_30").unlink()
    root.prepare()
    assert b"old" == content_of(root, "step_30")
    assert "aborted" == root.give_up(torn)


def test_a_replacement_interrupted_before_its_first_rename_leaves_the_old_checkpoint(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    fill(root, save, b"new")
    cut_off_after_putting_aside(root, save, monkeypatch, before=True)
    root.prepare()
    assert b"old" == content_of(root, "step_30")
    root.publish(save)
    assert b"new" == content_of(root, "step_30")


@pytest.mark.parametrize("another_start", [False, True])
def test_a_give_up_between_the_two_renames_leaves_the_old_checkpoint(
    root: Root, monkeypatch: pytest.MonkeyPatch, another_start: bool
) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    source = fill(root, save, b"new")
    real = os.rename

    def rename(one: Path, two: Path) -> None:
        if two == root.path / "step_30" and one == source:
            real(source, source.with_name(source.name + ".aborted"))
            if another_start:  # It ran before the old checkpoint was put aside: all was over then.
                (root.path / ".milepost-run" / "replace-step_30").unlink()
        real(one, two)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(SaveFailed) as caught:
        root.publish(save)
    assert "aborted" == caught.value.code
    assert b"old" == content_of(root, "step_30")


def test_a_second_process_that_publishes_the_same_save_does_not_move_the_new_checkpoint(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    fill(root, save, b"new")
    real = sync_directory
    moved: list[Path] = []

    def first_hand_meanwhile(path: Path) -> None:
        monkeypatch.setattr(outcomes, "sync_directory", real)
        Root(root.path).publish(save)
        rename = os.rename

        def noted(one: Path, two: Path) -> None:
            moved.append(one)
            rename(one, two)

        monkeypatch.setattr(os, "rename", noted)

    monkeypatch.setattr(outcomes, "sync_directory", first_hand_meanwhile)
    assert root.path / "step_30" == root.publish(save)
    assert root.path / "step_30" not in moved
    assert b"new" == content_of(root, "step_30")


def test_a_rename_that_fails_after_the_old_checkpoint_was_put_aside_puts_it_back(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    source = fill(root, save, b"new")
    real = os.rename

    def rename(one: Path, two: Path) -> None:
        if one == source:
            raise OSError(errno.ESTALE, "injected")
        real(one, two)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(StorageError) as caught:
            root.publish(save)
    assert caught.value.transient
    assert b"old" == content_of(root, "step_30")
    root.publish(save)
    assert b"new" == content_of(root, "step_30")


def test_a_start_keeps_an_old_checkpoint_whose_name_something_else_has_taken(
    root: Root, torn: SaveRef
) -> None:
    root.give_up(torn)
    os.rename(root.path / "step_30", root.path / ".partial" / "step_30.1-1.replaced")
    (root.path / "step_30").mkdir()
    root.prepare()
    assert (root.path / ".partial" / "step_30.1-1.replaced" / ".metadata").exists()


def test_publishing_goes_on_if_what_it_replaces_is_removed_at_that_moment(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "1-1"))
    save = save_of(30, "2-1", overwrite=True)
    fill(root, save, b"new")
    write = replace_file

    def removed_meanwhile(path: Path, content: bytes) -> None:
        write(path, content)
        assert root.remove_checkpoint("step_30", "1-1")

    with monkeypatch.context() as patch:
        patch.setattr(aside, "replace_file", removed_meanwhile)
        root.publish(save)
    assert b"new" == content_of(root, "step_30")
    root.discard(save)
    assert [] == root.partials()
    assert [] == list(root.run_path.glob("replace-*"))
