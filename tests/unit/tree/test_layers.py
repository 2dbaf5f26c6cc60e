"""The laws of the source tree's structure: who may import whom, and what stays pure.

The rooms are listed from the lowest to the highest; docs/architecture.md draws the same list.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.tree.source_tree import CLIENT, CORE, DAEMON, SOURCES, TREE, imports, named, parsed

CLIENT_ROOMS = (
    "errors", "concurrency", "wire", "ledger", "format", "storage", "memory", "link", "dcp_format",
    "state", "staging", "fetching", "reading", "exchange", "handle", "options", "loading", "advice",
    "saving", "checkpointer", "dcp", "__init__", "tools", "demo", "cli", "__main__",
)  # fmt: skip
"""Folders and single files of `milepost`; each imports only from those before it."""

DAEMON_ROOMS = (
    "__init__", "core", "ops", "journal", "identity", "transport", "sessions", "planner",
    "executors", "runtime", "cli",
    "__main__",
)  # fmt: skip
"""The same for `milepostd`."""

TORCH_FREE = {
    "errors", "concurrency", "wire", "ledger", "format", "storage", "memory", "link", "tools",
    "cli", "core", "ops", "journal", "identity", "transport", "sessions", "executors", "runtime",
    "__init__",
}  # fmt: skip
"""Rooms of both packages that can be imported where torch is not wanted."""

CORE_MAY_IMPORT = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "itertools",
    "milepost.format.tiling",
    "milepost.storage.fate",
    "milepost.wire.offers",
    "milepost.wire.messages",
    "milepost.wire.replicas",
    "msgspec",
    "types",
    "typing",
}
"""Beside `milepostd.core` itself: nothing that has a clock, a file, a socket, a thread, chance, an
environment or a log."""

PURE_IN_PART = {"pathlib": {"PurePosixPath"}}


def room(path: Path) -> str:
    """Return the folder or the single file at the top of its package that this file is in."""
    package = CLIENT if path.is_relative_to(CLIENT) else DAEMON
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


def module_of(path: Path) -> str:
    """Return the name under which this file is imported."""
    inside = path.relative_to(TREE).with_suffix("").parts[1:]
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def imported_rooms(path: Path, package: str) -> set[str]:
    """Return the rooms of a package that a file imports from."""
    found = set()
    for module, names in imports(path):
        parts = module.split(".")
        if parts[0] == package:
            found |= {parts[1]} if len(parts) > 1 else {_home(package, name) for name in names}
    return found


def _home(package: str, name: str) -> str:
    """Return the room of what `from package import name` takes."""
    rooms = CLIENT_ROOMS if package == "milepost" else DAEMON_ROOMS
    return name if name in rooms else "__init__"


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_no_arrow_points_from_a_lower_room_to_a_higher_one(path: Path) -> None:
    is_client = path.is_relative_to(CLIENT)
    rooms = CLIENT_ROOMS if is_client else DAEMON_ROOMS
    own = rooms.index(room(path))
    # `__init__` names what is public and loads it on first use.
    lazy = {*rooms} if path == CLIENT / "__init__.py" else set()
    there = imported_rooms(path, "milepost" if is_client else "milepostd")
    assert set() == {each for each in there if rooms.index(each) > own} - lazy


def test_within_a_room_there_is_no_circle() -> None:
    arrows = {
        module_of(path): {
            target
            for module, names in imports(path)
            for target in (module, *(f"{module}.{name}" for name in names))
            if target.split(".")[0] in ("milepost", "milepostd")
        }
        for path in SOURCES
        if path.name != "__init__.py"
    }
    done: set[str] = set()
    while free := {name for name, to in arrows.items() if not (to & arrows.keys()) - done} - done:
        done |= free
    assert set() == arrows.keys() - done


def test_the_client_never_imports_the_daemon() -> None:
    found = [
        (named(path), module)
        for path in CLIENT.rglob("*.py")
        for module, _ in imports(path)
        if module.split(".")[0] == "milepostd"
    ]
    assert [] == found


def test_the_core_is_pure() -> None:
    found = [
        (named(path), module, names)
        for path in CORE.glob("*.py")
        for module, names in imports(path)
        if not module.startswith("milepostd.core.")
        and module not in CORE_MAY_IMPORT
        and not (names and set(names) <= PURE_IN_PART.get(module, set()))
    ]
    assert [] == found


def test_the_ledger_of_saves_is_pure() -> None:
    """The simulation drives it as it is, beside a clock and threads of its own."""
    may_import = CORE_MAY_IMPORT - {"msgspec"}
    assert [] == [module for module, _ in imports(CLIENT / "ledger.py") if module not in may_import]


def test_what_the_core_imports_is_pure_too() -> None:
    shared = [
        *(CLIENT / "wire").glob("*.py"),
        CLIENT / "format" / "tiling.py",
        CLIENT / "storage" / "fate.py",
    ]
    impure = {"os", "io", "time", "random", "socket", "threading", "logging", "torch", "secrets"}
    assert [] == [
        (named(path), module)
        for path in shared
        for module, _ in imports(path)
        if module.split(".")[0] in impure
    ]


def test_the_core_calls_nothing_that_reads_the_world() -> None:
    calls = {"open", "print", "input", "id", "hash", "exec", "eval"}
    found = [
        (named(path), node.lineno, node.func.id)
        for path in CORE.glob("*.py")
        if path.name != "invariants.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls
    ]
    assert [] == found


def test_folders_that_are_torch_free_import_no_torch() -> None:
    names = [
        module_of(path)
        for path in SOURCES
        if room(path) in TORCH_FREE and path.name != "__main__.py"
    ]
    assert len(names) > len(TORCH_FREE)
    program = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert "" == ran.stderr
    assert 0 == ran.returncode


def test_of_the_daemon_only_the_planner_imports_torch() -> None:
    assert {"planner"} == {
        room(path)
        for path in DAEMON.rglob("*.py")
        for module, _ in imports(path)
        if module.split(".")[0] == "torch"
    }
