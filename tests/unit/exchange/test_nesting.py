"""States are nested again as they were: lists, keys that are no text, empty dicts, without a part
of their keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from milepost.errors import CorruptCheckpoint
from milepost.exchange.nesting import (
    DEPTH_MAX,
    GAPS_MAX,
    Step,
    Steps,
    nested,
    steps_of,
    without_prefix,
)
from milepost.reading.nesting import SavedNesting

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def nothing(tmp_path: Path) -> SavedNesting:
    """What a checkpoint of stock torch tells."""
    return SavedNesting(tmp_path)


def plain(*path: Any) -> Steps:
    return tuple(Step(part, isinstance(part, int)) for part in path)


def test_paths_are_nested_as_torch_nests_them(nothing: SavedNesting) -> None:
    paths = {"a.b": ("a", "b"), "l.0": ("l", 0), "l.2.x": ("l", 2, "x"), "m.0.1": ("m", 0, 1)}
    values = {key: key for key in paths}
    assert {
        "a": {"b": "a.b"},
        "l": ["l.0", None, {"x": "l.2.x"}],
        "m": [[None, "m.0.1"]],
    } == nested(values, {key: steps_of(path, nothing) for key, path in paths.items()})


def test_keys_of_dicts_may_be_numbers_and_empty_dicts_are_put_where_nothing_is() -> None:
    steps = {"a.0": (Step("a", False), Step(0, False)), "l.0": plain("l", 0)}
    empty = [plain("a"), plain("l"), plain("e"), (*plain("l", 1), Step("x", False))]
    assert {"a": {0: "v"}, "l": ["w", {"x": {}}], "e": {}} == nested(
        {"a.0": "v", "l.0": "w"}, steps, empty
    )


def test_parameters_of_an_optimizer_get_their_numbers_back() -> None:
    values = {"state.0.m": 1, "param_groups.0.params": [0, 1]}
    steps = {
        "state.0.m": plain("state", "0", "m"),
        "param_groups.0.params": plain("param_groups", 0, "params"),
    }
    assert {"state": {0: {"m": 1}}, "param_groups": [{"params": [0, 1]}]} == nested(values, steps)


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("a",), "a.b": ("a", "b")},
        {"a.b": ("a", "b"), "a": ("a",)},
        {"a.0": ("a", 0), "a.b": ("a", "b")},
        {"a.b": ("a", "b"), "a.0": ("a", 0)},
        {"a": ("x",), "b": ("x",)},
        {"a": ("a", -1)},
        {"a": ("a", GAPS_MAX + 2)},
        {"a": ("a",) * (DEPTH_MAX + 1)},
        {"a": ()},
    ],
)
def test_paths_that_contradict_one_another_are_refused(paths: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpoint, match="the path of"):
        nested(dict.fromkeys(paths, 1), {key: plain(*path) for key, path in paths.items()})


@pytest.mark.parametrize(
    ("path", "prefix", "left"),
    [
        (("a", "b"), "", ("a", "b")),
        (("a", "b"), "a.", ("b",)),
        (("a", "b.c", "d"), "a.b.", ("c", "d")),
        (("a.b", "c"), "a.", ("b", "c")),
        (("a.b", "c"), "a.b.", ("c",)),
        (("a", 0, "c"), "a.0.", ("c",)),
        (("a", "b"), "b.", None),
        (("a",), "a.", None),
        (("ab", "c"), "a.", None),
    ],
)
def test_a_prefix_is_taken_off_the_text_of_a_path(
    path: tuple[Any, ...], prefix: str, left: tuple[Any, ...] | None
) -> None:
    assert (None if left is None else plain(*left)) == without_prefix(plain(*path), prefix)
