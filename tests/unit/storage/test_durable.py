"""Small files and directories: whole or as before, whoever is at work on them too."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from tests.unit.storage.saves import SAVE, names

from milepost.errors import StorageError
from milepost.storage.durable import delete_tree
from milepost.storage.root import Root


def test_writing_a_file_replaces_it_whole_and_leaves_nothing_else(root: Root) -> None:
    directory = root.open_save(SAVE)
    root.write_file(directory / "f", b"old")
    root.write_file(directory / "f", b"new" * 100_000)
    assert b"new" * 100_000 == (directory / "f").read_bytes()
    assert ["f"] == names(directory)


def test_a_file_that_cannot_be_replaced_stays_and_the_temporary_one_goes(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root.open_save(SAVE)
    root.write_file(directory / "f", b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    for call in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(StorageError):
                root.write_file(directory / "f", b"new")
        assert ["f"] == names(directory)
        assert b"old" == (directory / "f").read_bytes()


def test_two_may_delete_the_same_directory_at_once(tmp_path: Path) -> None:
    for _ in range(5):
        victim = tmp_path / "victim"
        for number in range(50):
            (victim / str(number % 5)).mkdir(parents=True, exist_ok=True)
            (victim / str(number % 5) / str(number)).touch()
        threads = [threading.Thread(target=delete_tree, args=(victim,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not victim.exists()
