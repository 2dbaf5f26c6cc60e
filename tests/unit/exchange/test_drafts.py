"""What is written appears whole or not at all, and what stood there before stays until then."""

from __future__ import annotations

import errno
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from milepost.errors import StorageError, UsageError
from milepost.exchange.drafts import (
    Draft,
    checkpoint_draft,
    file_draft,
    folder_draft,
    resolved,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Open = AbstractContextManager[Path]


def folder(target: Path, *, overwrite: bool = False) -> Open:
    return folder_draft(
        target, overwrite=overwrite, is_replaced=lambda name: name.startswith("model")
    )


def tree(path: Path) -> dict[str, str]:
    """Return every file below a directory with its content."""
    return {
        str(each.relative_to(path)): each.read_text() for each in path.rglob("*") if each.is_file()
    }


# --- one file


def test_a_draft_is_written_front_to_back_and_patched(tmp_path: Path) -> None:
    with Draft(tmp_path / "f", 12) as draft:
        draft.write(b"abcd")
        draft.skip_to(8)
        draft.write(memoryview(b"ij"))
        draft.patch(b"B", 1)
    assert b"aBcd\0\0\0\0ij\0\0" == (tmp_path / "f").read_bytes()


def test_holes_of_a_file_that_is_there_are_filled(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"head....tail")
    with Draft(tmp_path / "f") as draft:
        draft.skip_to(4)
        draft.write(b"body")
    assert b"headbodytail" == (tmp_path / "f").read_bytes()


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "f"
    with file_draft(target, overwrite=False) as path:
        path.write_text("new")
        assert not target.exists()
    assert {"f": "new"} == tree(tmp_path)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_of_a_file_if_the_block_fails(
    tmp_path: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), file_draft(tmp_path / "f", overwrite=False) as path:
        path.write_text("new")
        raise error
    assert [] == os.listdir(tmp_path)


def test_a_file_is_replaced_only_if_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(UsageError, match="exists already") as caught:
        file_draft(tmp_path / "f", overwrite=False).__enter__()
    assert "--overwrite" in caught.value.hint
    with file_draft(tmp_path / "f", overwrite=True) as path:
        path.write_text("new")
    assert {"f": "new"} == tree(tmp_path)


def test_a_file_that_came_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="exists already"),
        file_draft(tmp_path / "f", overwrite=False) as path,
    ):
        path.write_text("new")
        (tmp_path / "f").write_text("another's")
    assert {"f": "another's"} == tree(tmp_path)


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_directory_or_a_device_is_not_replaced_by_a_file(tmp_path: Path, overwrite: bool) -> None:
    for target in (tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError, match="is not a file"):
            file_draft(target, overwrite=overwrite).__enter__()


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no directory"):
        resolved(tmp_path / "absent" / "f")


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    assert tmp_path / "real" == resolved(tmp_path / "link")


# --- a directory of files


def test_a_new_directory_appears_at_once(tmp_path: Path) -> None:
    with folder(tmp_path / "d") as path:
        (path / "model.a").write_text("a")
        assert not (tmp_path / "d").exists()
    assert {"d/model.a": "a"} == tree(tmp_path)
    assert ["d"] == os.listdir(tmp_path)


def test_a_directory_that_is_there_stays_the_one_it_is(tmp_path: Path) -> None:
    # It may be a mount point, or the directory that a shell is in.
    (tmp_path / "d").mkdir()
    before = (tmp_path / "d").stat().st_ino
    with folder(tmp_path / "d") as path:
        (path / "model.a").write_text("a")
    assert {"d/model.a": "a"} == tree(tmp_path)
    assert (before, ["model.a"]) == ((tmp_path / "d").stat().st_ino, os.listdir(tmp_path / "d"))


def test_files_join_those_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with folder(tmp_path) as path:
        (path / "model.a").write_text("a")
    assert {"config.json": "{}", "model.a": "a"} == tree(tmp_path)
    assert 2 == len(os.listdir(tmp_path))


def test_files_of_another_export_make_room_only_if_that_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("model.1", "model.2", "model.index.json"):
        (tmp_path / name).write_text("old")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match=r"holds model\.1, model\.2"):
        folder(tmp_path).__enter__()
    assert before == tree(tmp_path)
    with folder(tmp_path, overwrite=True) as path:
        (path / "model.1").write_text("new")
    assert {"config.json": "{}", "model.1": "new"} == tree(tmp_path)
    assert 2 == len(os.listdir(tmp_path))


def test_the_index_is_moved_in_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    moved: list[str] = []
    real = os.rename

    def rename(source: Any, goal: Any) -> None:
        moved.append(Path(goal).name)
        real(source, goal)

    monkeypatch.setattr(os, "rename", rename)
    with folder(tmp_path) as path:
        for name in ("model.index.json", "model.z", "model.a"):
            (path / name).write_text(name)
    assert ["model.a", "model.z", "model.index.json"] == moved


@pytest.mark.parametrize("fails_at", range(5))
def test_a_move_that_fails_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    for name in ("config.json", "model.1", "model.2", "model.index.json"):
        (tmp_path / name).write_text(f"old {name}")
    before = tree(tmp_path)
    real, calls = os.rename, iter(range(100))

    def rename(source: Any, goal: Any) -> None:
        if next(calls) == fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, goal)

    monkeypatch.setattr(os, "rename", rename)
    with (
        pytest.raises(StorageError, match="move into place"),
        folder(tmp_path, overwrite=True) as path,
    ):
        for name in ("model.1", "model.index.json"):
            (path / name).write_text("new")
    assert before == tree(tmp_path)
    assert 4 == len(os.listdir(tmp_path))


# --- a checkpoint


def old_checkpoint(path: Path) -> None:
    path.mkdir()
    for name in (".metadata", ".milepost", "__0_0.distcp"):
        (path / name).write_text("old")


def test_a_checkpoint_appears_at_once_and_nothing_else(tmp_path: Path) -> None:
    with checkpoint_draft(tmp_path / "c", overwrite=False) as path:
        (path / ".metadata").write_text("new")
        assert path.name.startswith(".")
    assert {"c/.metadata": "new"} == tree(tmp_path)
    assert ["c"] == os.listdir(tmp_path)


def test_a_checkpoint_is_replaced_only_if_that_is_wanted(tmp_path: Path) -> None:
    old_checkpoint(tmp_path / "c")
    with pytest.raises(UsageError, match="exists already"):
        checkpoint_draft(tmp_path / "c", overwrite=False).__enter__()
    with checkpoint_draft(tmp_path / "c", overwrite=True) as path:
        (path / ".metadata").write_text("new")
    assert {"c/.metadata": "new"} == tree(tmp_path)
    assert ["c"] == os.listdir(tmp_path)


def with_notes(path: Path) -> None:
    old_checkpoint(path)
    (path / "notes.txt").write_text("mine")


def no_checkpoint(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


@pytest.mark.parametrize("make", [with_notes, no_checkpoint, lambda path: path.write_text("x")])
def test_what_is_not_only_a_checkpoint_is_never_replaced(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "c")
    before = tree(tmp_path)
    with pytest.raises(UsageError, match="exists"):
        checkpoint_draft(tmp_path / "c", overwrite=True).__enter__()
    assert before == tree(tmp_path)


def test_nothing_is_left_of_a_checkpoint_if_the_block_fails(tmp_path: Path) -> None:
    old_checkpoint(tmp_path / "c")
    before = tree(tmp_path)
    with (
        pytest.raises(ValueError, match="no"),
        checkpoint_draft(tmp_path / "c", overwrite=True) as path,
    ):
        (path / ".metadata").write_text("new")
        raise ValueError("no")
    assert before == tree(tmp_path)
    assert ["c"] == os.listdir(tmp_path)


def test_a_checkpoint_is_put_back_if_the_new_one_cannot_take_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_checkpoint(tmp_path / "c")
    before = tree(tmp_path)
    real, calls = os.rename, iter(range(100))

    def rename(source: Any, goal: Any) -> None:
        if next(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, goal)

    monkeypatch.setattr(os, "rename", rename)
    with (
        pytest.raises(StorageError, match="rename"),
        checkpoint_draft(tmp_path / "c", overwrite=True) as path,
    ):
        (path / ".metadata").write_text("new")
    assert before == tree(tmp_path)
    assert ["c"] == os.listdir(tmp_path)
