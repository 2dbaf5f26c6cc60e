"""The laws of the source's style: how long things get, and that every word has one meaning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.tree.source_tree import CLIENT, SOURCES, named, parsed

import milepost
from milepost.errors import CODES

FILE_LINES_MAX = 950
"""Longer files have more than one subject."""

FUNCTION_LINES_MAX = 110
"""Longer functions cannot be seen at once. The signature and the docstring count."""

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
    "Unavailable", "UsageError", "load",
]  # fmt: skip


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


def test_no_class_name_is_given_twice() -> None:
    modules: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(named(path))
    twice = {name: where for name, where in modules.items() if len(where) > 1}
    assert {} == twice


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
