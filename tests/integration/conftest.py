"""What the integration tests share: folders whose paths leave room for a socket's name."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def _short_folder() -> Iterator[Path]:
    """Make a folder with a short path, for a socket's must fit into 107 bytes; remove it after."""
    made = Path(tempfile.mkdtemp(prefix="mp-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for one test."""
    with _short_folder() as made:
        yield made


@pytest.fixture(scope="module")
def module_folder() -> Iterator[Path]:
    """A folder that the tests of a module share, for one run of ranks that many of them look at."""
    with _short_folder() as made:
        yield made
