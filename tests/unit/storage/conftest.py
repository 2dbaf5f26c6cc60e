"""A root to write in, and a process that ends where a test wants it to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.storage.saves import Crash

from milepost.storage.root import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path / "deep" / "root")
    root.prepare()
    return root


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Have the process end at the n-th call from now on that changes a directory."""
    left = [-1]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for owner, name in [
        (os, "rename"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"), (shutil, "rmtree"),
    ]:  # fmt: skip
        monkeypatch.setattr(owner, name, counting(getattr(owner, name)))

    def set_at(number: int) -> None:
        left[0] = number

    yield set_at
    left[0] = -1
