"""What the fault tests share: short folders, from the integration tests, and a place for arenas."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import folder as folder
from tests.integration.conftest import module_folder as module_folder

TEST_S = 300
"""How long one test may take on a busy machine, including fixtures that it is the first to use.
Only a test that hangs takes this long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            item.add_marker(pytest.mark.timeout(TEST_S))


@contextlib.contextmanager
def _memory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="mp-faults-", dir="/dev/shm"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A place for the arenas of one test only, on a memory file system."""
    with _memory() as made:
        yield made


@pytest.fixture(scope="module")
def module_shm() -> Iterator[Path]:
    """A place for the arenas that the tests of a module share."""
    with _memory() as made:
        yield made
