"""A path means what the system would open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milepost.storage.paths import absolute


def test_the_parent_of_a_link_is_that_of_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    monkeypatch.chdir(tmp_path)
    os.mkdir("link/../here")
    assert os.path.samefile(absolute("link/../here"), "real/here")


@pytest.mark.parametrize("path", ["link", "./link", "link/", "link//x"])
def test_other_links_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (tmp_path / "link").symlink_to("/")
    monkeypatch.chdir(tmp_path)
    assert os.path.join(tmp_path, os.path.normpath(path)) == absolute(path)


def test_a_path_that_is_not_there_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path / "b") == absolute(Path("a/../b"))
