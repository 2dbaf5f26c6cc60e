"""What people put into a checkpoint's directory outlives the checkpoint, wherever a call ends."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.storage.saves import Crash, commit, content_of, fill, names, save_of

from milepost.errors import Rejected, UsageError
from milepost.storage.claims import check_ours
from milepost.storage.contents import is_own
from milepost.storage.root import Root

OLD, NEW = save_of(30, "1-1"), save_of(30, "2-3", overwrite=True)

FOREIGN = {"config.json", ".hidden", "logs", "best", "link", "__0_0.distcp.bak"}
"""What `furnish` puts into a directory."""


def furnish(directory: Path) -> None:
    """Put there what people put there: files, directories, a link, a nested checkpoint."""
    (directory / "config.json").write_text("{}")
    (directory / ".hidden").write_text("hidden")
    (directory / "__0_0.distcp.bak").write_text("copy")
    (directory / "logs" / "deep").mkdir(parents=True)
    (directory / "logs" / "deep" / "log.txt").write_text("log")
    (directory / "best").mkdir()
    (directory / "best" / ".metadata").write_text("nested")
    (directory / "best" / "__0_0.distcp").write_text("nested data")
    (directory / "link").symlink_to("config.json")


def assert_furnished(directory: Path) -> None:
    """Everything that people put there is there, and unchanged."""
    assert FOREIGN == {name for name in os.listdir(directory) if not is_own(name)}
    assert "{}" == (directory / "link").read_text()
    assert "hidden" == (directory / ".hidden").read_text()
    assert "log" == (directory / "logs" / "deep" / "log.txt").read_text()
    assert "nested data" == (directory / "best" / "__0_0.distcp").read_text()
    assert [".metadata", "__0_0.distcp"] == names(directory / "best")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- replacing ------------------------------------------------------------------------------------


def test_a_replaced_checkpoint_leaves_what_people_put_there_and_its_mode(root: Root) -> None:
    final = commit(root, OLD, b"old")
    furnish(final)
    final.chmod(0o750)
    commit(root, NEW, b"new")
    assert b"new" == content_of(root, "step_30")
    assert_furnished(final)
    root.discard(NEW)
    assert_furnished(final)
    assert {".metadata", ".milepost", "__0_0.distcp"} == {*os.listdir(final)} - FOREIGN
    assert 0o750 == mode_of(final)
    assert [] == names(root.path / ".partial")


@pytest.mark.parametrize("was_checkpoint", [True, False])
@pytest.mark.parametrize("finish", ["prepare", "publish", "give_up"])
def test_a_crash_at_any_call_of_a_replacement_loses_nothing(
    root: Root, crash_at: Callable[[int], None], finish: str, was_checkpoint: bool
) -> None:
    held = set()
    for number in range(200):
        here = Root(root.path / str(number))
        here.prepare()
        final = here.path / "step_30"
        if was_checkpoint:
            commit(here, OLD, b"old")
        else:
            final.mkdir()
        furnish(final)
        fill(here, NEW, b"new")
        crash_at(number)
        try:
            here.publish(NEW)
            here.discard(NEW)
            is_over = True
        except Crash:
            is_over = False
        crash_at(-1)
        if finish == "publish":
            here.publish(NEW)
            here.discard(NEW)
        elif finish == "give_up":
            here.give_up(NEW)
            here.discard(NEW)
        else:
            here.prepare()
        assert_furnished(final)
        if was_checkpoint:
            held.add(content_of(here, "step_30"))
        else:
            held.add(content_of(here, "step_30") if (final / ".metadata").exists() else b"old")
        if finish != "prepare":
            assert [] == names(here.path / ".partial")
        if is_over:
            break
    else:
        pytest.fail("publishing does not end")
    assert ({b"new"} if finish == "publish" else {b"old", b"new"}) == held


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_directory_of_people_s_own_files_becomes_the_checkpoint_and_keeps_them(
    root: Root, overwrite: bool
) -> None:
    final = root.path / "step_30"
    final.mkdir(0o700)
    furnish(final)
    check_ours(final)
    commit(root, save_of(30, "2-3", overwrite=True), b"new")
    assert b"new" == content_of(root, "step_30")
    assert_furnished(final)
    assert 0o700 == mode_of(final)


@pytest.mark.parametrize("part", ["__3_0.distcp", ".milepost", "__0.metadata"])
def test_parts_of_a_checkpoint_without_its_index_are_not_replaced(root: Root, part: str) -> None:
    final = root.path / "step_30"
    final.mkdir()
    (final / part).write_text("being copied to here")
    fill(root, NEW)
    with pytest.raises(Rejected, match=r"holds parts of a checkpoint but no \.metadata") as caught:
        root.publish(NEW)
    assert "already-committed" == caught.value.code
    assert [part] == names(final)
    if part != ".milepost":
        with pytest.raises(UsageError, match="was not written by milepost"):
            check_ours(final)


def test_what_was_put_into_the_new_checkpoint_meanwhile_keeps_its_name(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = commit(root, OLD)
    (final / "notes").write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr("milepost.storage.outcomes.carry_over", lambda source, target: None)
        commit(root, NEW)
    (final / "notes").write_text("new")
    root.discard(NEW)
    assert ["new", "old"] == [(final / name).read_text() for name in ("notes", "notes.1")]


def test_what_the_system_does_not_move_is_not_deleted_and_hinders_nobody(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = commit(root, OLD)
    (final / "notes").write_text("kept")
    (final / "mount").mkdir()
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).name == "mount":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        commit(root, NEW, b"new")
        root.discard(NEW)
        root.prepare()
    (left,) = root.partials()
    assert ["mount"] == names(left)
    assert "kept" == (final / "notes").read_text()
    root.finish_removals()
    assert (final / "mount").is_dir()
    assert [] == root.partials()


# --- removing -------------------------------------------------------------------------------------


def test_a_removed_checkpoint_leaves_what_people_put_there_and_its_mode(root: Root) -> None:
    final = commit(root, OLD)
    furnish(final)
    final.chmod(0o750)
    assert root.remove_checkpoint("step_30", "1-1")
    assert FOREIGN == {*os.listdir(final)}
    assert_furnished(final)
    assert 0o750 == mode_of(final)
    assert [[], []] == [root.checkpoints(), root.partials()]
    # Training went back, and comes to this step again.
    commit(root, NEW, b"new")
    root.discard(NEW)
    assert_furnished(final)
    assert b"new" == content_of(root, "step_30")


def test_a_removed_checkpoint_that_nobody_added_to_leaves_no_directory(root: Root) -> None:
    final = commit(root, OLD)
    assert root.remove_checkpoint("step_30", "1-1")
    assert not final.exists()


@pytest.mark.parametrize("finish", ["prepare", "finish_removals", "discard"])
def test_a_crash_at_any_call_of_a_removal_loses_nothing_that_people_put_there(
    root: Root, crash_at: Callable[[int], None], finish: str
) -> None:
    held = set()
    for number in range(100):
        here = Root(root.path / str(number))
        here.prepare()
        final = commit(here, OLD, b"old")
        furnish(final)
        crash_at(number)
        try:
            here.remove_checkpoint("step_30", "1-1")
            is_over = True
        except Crash:
            is_over = False
        crash_at(-1)
        finishing: Any = getattr(here, finish)
        finishing(*([OLD] if finish == "discard" else []))
        if finish == "discard":
            here.finish_removals()
        assert_furnished(final)
        is_there = bool(here.checkpoints())
        assert is_there == ("__0_0.distcp" in os.listdir(final))
        held.add(is_there)
        assert [] == here.partials()
        if is_over:
            break
    else:
        pytest.fail("removing does not end")
    assert {True, False} == held


def test_people_s_files_wait_while_a_replacement_needs_the_name(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is free for a moment only, and a directory made there would be in its way."""
    commit(root, OLD, b"old")
    fill(root, NEW, b"new")
    left = root.path / ".partial" / "step_30.0-9.retired.pruned-0123abcd"
    left.mkdir()
    (left / "notes").write_text("kept")
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if target == root.path / "step_30":
            root.finish_removals()
            assert not target.exists()
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        root.publish(NEW)
    assert b"new" == content_of(root, "step_30")
    root.discard(NEW)
    assert "kept" == (root.path / "step_30" / "notes").read_text()
    assert [] == root.partials()
