"""A root to write in."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.storage.root import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path / "deep" / "root")
    root.prepare()
    return root
