"""The laws of the source tree: who may import whom, what stays pure, how long things get, and that
every word has one meaning.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import milepost
from milepost.errors import CODES

TREE = Path(__file__).parent.parent.parent
CLIENT = TREE / "client" / "milepost"
DAEMON = TREE / "daemon" / "milepostd"
CORE = DAEMON / "core"
SOURCES = sorted([*CLIENT.rglob("*.py"), *DAEMON.rglob("*.py")])

FILE_LINES_MAX = 950
"""Longer files have more than one subject."""

FUNCTION_LINES_MAX = 110
"""Longer functions cannot be seen at once. The signature and the docstring count."""

CORE_MAY_IMPORT = {
    "__future__",
    "collections",
    "collections.abc",
    "dataclasses",
    "enum",
    "itertools",
    "milepost.format.tiling",
    "milepost.offer",
    "milepost.protocol",
    "msgspec",
    "types",
    "typing",
}
"""Beside `milepostd.core` itself: nothing that has a clock, a file, a socket, a thread, chance, an
environment or a log."""

PURE_IN_PART = {"pathlib": {"PurePosixPath"}}

WITHOUT_TORCH = (
    "milepost",
    "milepost.arena",
    "milepost.cli",
    "milepost.connection",
    "milepost.protocol",
    "milepost.storage",
    "milepostd.cli",
    "milepostd.http",
    "milepostd.runtime",
)

RESERVED_CODES: set[str] = set()
"""Part of the contract, and not raised yet."""

ERRORS = {
    "Cause", "CorruptCheckpoint", "LoadFailed", "MilepostError", "ProtocolError", "Rejected",
    "SaveFailed", "StorageError", "Unavailable", "UsageError",
}  # fmt: skip

BANNED_WORDS = re.compile(
    r"(?:^|_)(worker|workers|master|leader|snapshot|snapshots|transaction|finalize|promote|"
    r"persisted|persist|flushed|iteration|epoch|util|utils|helper|helpers|manager|common)(?:_|$)",
    re.IGNORECASE,
)
"""What `docs/glossary.md` has another word for."""

BANNED_FILES = {"utils", "util", "common", "helpers", "manager", "base", "misc"}

PUBLIC = [
    "Checkpoint", "Checkpointer", "CorruptCheckpoint", "KeepEvery", "KeepLast", "LoadFailed",
    "LoadReport", "MilepostError", "Protect", "Rejected", "Save", "SaveFailed", "StorageError",
    "Unavailable", "UsageError",
]  # fmt: skip


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def named(path: Path) -> str:
    return str(path.relative_to(TREE))


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every imported module with the names taken from it, wherever in the file."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno} imports relatively"
            yield node.module or "", tuple(alias.name for alias in node.names)


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


def test_what_the_core_imports_is_pure_too() -> None:
    shared = [CLIENT / "protocol.py", CLIENT / "offer.py", CLIENT / "format" / "tiling.py"]
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


def test_the_daemon_s_own_side_starts_without_torch() -> None:
    program = (
        "import importlib, sys\n"
        f"for name in {WITHOUT_TORCH!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert "" == ran.stderr
    assert 0 == ran.returncode


def test_only_the_planner_s_child_of_the_daemon_imports_torch() -> None:
    assert ["daemon/milepostd/planner_child.py"] == sorted(
        {
            named(path)
            for path in DAEMON.rglob("*.py")
            for module, _ in imports(path)
            if module.split(".")[0] == "torch"
        }
    )


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_files_and_functions_stay_short(path: Path) -> None:
    assert path.read_text().count("\n") <= FILE_LINES_MAX
    assert [] == [
        (node.name, (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX
    ]


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_every_file_says_what_it_is_for(path: Path) -> None:
    if path.read_text():
        assert ast.get_docstring(parsed(path))


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_nothing_is_left_to_do_in_the_source(path: Path) -> None:
    assert None is re.search(r"\b(TODO|FIXME|XXX|HACK)\b", path.read_text())


def test_no_file_is_named_for_nothing() -> None:
    assert [] == [named(path) for path in SOURCES if path.stem in BANNED_FILES]


def own_names(path: Path) -> Iterator[tuple[int, str]]:
    """Names that this file gives: functions, classes, arguments, variables, fields."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


@pytest.mark.parametrize("path", SOURCES, ids=named)
def test_one_word_for_each_concept(path: Path) -> None:
    assert [] == [(line, name) for line, name in own_names(path) if BANNED_WORDS.search(name)]


def used_codes() -> Iterator[tuple[str, str]]:
    """Every string that is the code of an error or a cause, and where."""
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            name = name.id if isinstance(name, ast.Name) else name
            first = node.args[0]
            if name in ERRORS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield f"{named(path)}:{node.lineno}", first.value


def test_every_code_that_is_used_exists() -> None:
    assert [] == [(where, code) for where, code in used_codes() if code not in CODES]


def test_every_code_that_exists_is_used() -> None:
    strings = {
        node.value
        for path in SOURCES
        if path != CLIENT / "errors.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert RESERVED_CODES == CODES.keys() - strings


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_one_kebab_case_word_with_a_meaning(code: str) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
    assert CODES[code]
    assert not CODES[code].endswith(".")


def test_the_public_names_are_these_and_load() -> None:
    assert PUBLIC == milepost.__all__
    for name in PUBLIC:
        assert name == getattr(milepost, name).__name__


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Snapshot'"):
        milepost.Snapshot  # noqa: B018
