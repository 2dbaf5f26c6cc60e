"""The demonstration empties only its own folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.demo.folder import MARKER, make_afresh
from milepost.errors import UsageError


def test_a_folder_that_no_demo_made_is_refused_and_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    with pytest.raises(UsageError, match="no demonstration made it"), make_afresh(tmp_path):
        pass
    assert kept.read_text() == "years of work"


def test_a_demos_own_folder_is_emptied_unless_it_is_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "demo-run"
    with make_afresh(folder):
        (folder / "node0").mkdir()
        (folder / "node0" / "old").touch()
        with pytest.raises(UsageError, match="is running"), make_afresh(folder):
            pass
        assert (folder / "node0" / "old").exists()
    with make_afresh(folder):
        assert [path.name for path in folder.iterdir()] == [MARKER]
