"""A run directory is one node, of one daemon at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milepost.errors import UsageError
from milepostd.identity import IDENTITY_NAME, load_identity, only_daemon


def test_a_damaged_identity_is_drawn_anew_and_kept(tmp_path: Path) -> None:
    (tmp_path / IDENTITY_NAME).write_bytes(b"\x00torn")
    drawn = load_identity(tmp_path)
    assert drawn == load_identity(tmp_path)


def test_a_second_daemon_is_refused_until_the_first_has_let_go(tmp_path: Path) -> None:
    with only_daemon(tmp_path) as release:
        with (
            pytest.raises(UsageError, match=f"in use by the daemon with pid {os.getpid()}"),
            only_daemon(tmp_path),
        ):
            pass
        release()
        with only_daemon(tmp_path):
            pass
