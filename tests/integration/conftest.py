"""Fixtures of the integration tests: folders whose paths leave room for a socket's name."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.alone import make_environment
from tests.integration.cluster import Node, nodes


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


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds milepost and what it requires, and nothing else."""
    return make_environment(tmp_path_factory.mktemp("alone") / "env")


@pytest.fixture(scope="module")
def pair(module_folder: Path) -> Iterator[list[Node]]:
    """Two daemons for those tests of a module that need daemons only for saving."""
    with nodes(module_folder, 2, module_folder) as started:
        yield started


@pytest.fixture
def root(module_folder: Path) -> Path:
    """A root for one of the tests that share the `pair`."""
    return Path(tempfile.mkdtemp(prefix="test-", dir=module_folder)) / "root"
