"""A nested state as leaves by key: torch's own flattening is the judge."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict

from milepost.errors import UsageError
from milepost.state.flattening import call_stateful, flatten, with_per_rank

LEAVES = st.sampled_from(
    [torch.zeros(2), None, 1, "text", b"bytes", (torch.zeros(1), {"in": "tuple"}), {1, 2}, 2.5]
)


NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "a.b", 0, 1]), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["m", "o", "m.a", 0, "0"]), NESTED, max_size=4))
def test_flattening_gives_the_keys_paths_and_values_that_torch_gives(state: dict[Any, Any]) -> None:
    try:
        expected, expected_paths = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(UsageError, match="key-collision"):
            flatten(state)
        return
    flat, paths = flatten(state)
    assert list(expected_paths.items()) == list(paths.items())
    assert [(key, id(value)) for key, value in expected.items()] == [
        (key, id(value)) for key, value in flat.items()
    ]


@pytest.mark.parametrize(
    ("state", "first", "second"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "'a.b'", "'a' / 'b'"),
        ({"x": [torch.zeros(1)], "x.0": 1}, "'x' / 0", "'x.0'"),
        ({0: 1, "0": 2}, "0", "'0'"),
    ],
)
def test_two_entries_under_one_key_are_refused_with_both_paths(
    state: dict[Any, Any], first: str, second: str
) -> None:
    with pytest.raises(UsageError) as caught:
        flatten(state)
    assert caught.value.code == "key-collision"
    assert f"the entries {first} and {second} of the state" in caught.value.message


def test_odd_keys_are_kept_as_they_are() -> None:
    keys = ["", " ", "a/b", "new\nline", "größe", "雪", "k" * 4000]
    assert keys == list(flatten(dict.fromkeys(keys, 1))[0])


def test_mappings_that_are_no_dicts_are_taken_apart() -> None:
    assert list(flatten({"m": MappingProxyType({"a": 1})})[0]) == ["m.a"]


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UsageError, match="contains itself"):
        flatten(state)


def test_a_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(UsageError, match="the state is a Linear"):
        flatten(nn.Linear(1, 1))  # type: ignore[arg-type]


class Inner:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_only_stateful_entries_of_the_top_level_are_called_as_in_torch() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nested = Inner({"deep": 1})
    state: dict[Any, Any] = {
        "m": model,
        "o": optimizer,
        "own": Inner({"i": nested}),
        "dict": {"n": nested},
        3: 4,
    }
    expected = flatten_state_dict(_stateful_to_state_dict(state))[0]
    flat = flatten(state)[0]
    assert list(expected) == list(flat)
    assert nested is flat["own.i"]
    assert nested is flat["dict.n"]
    assert 3 in call_stateful(state)


def test_state_of_one_rank_goes_under_one_top_level_name() -> None:
    state = with_per_rank({"a": 1}, {"rng": {"cpu": [torch.zeros(1)]}, "n": 2}, 3)
    _, paths = flatten(state)
    assert paths == {
        "a": ("a",),
        "per_rank/3/rng.cpu.0": ("per_rank/3/rng", "cpu", 0),
        "per_rank/3/n": ("per_rank/3/n",),
    }


@pytest.mark.parametrize(("state", "own"), [({"per_rank/0/n": 1}, {"n": 2}), ({}, {0: 1, "0": 2})])
def test_state_of_one_rank_never_replaces_another_entry(
    state: dict[Any, Any], own: dict[Any, Any]
) -> None:
    with pytest.raises(UsageError, match="key-collision"):
        with_per_rank(state, own, 0)


def test_keys_that_are_no_text_and_empty_dicts_are_remembered_beside() -> None:
    state = {"a": {7: {None: 1, "x": {}}, (1, 2): [torch.ones(1), {}]}, 3: 4}
    own = {5: {6: 1}, "b": {}}
    nesting = flatten(with_per_rank(state, own, 2))[1].nesting()
    assert {
        (): (("3", "per_rank/2/5"), (3, 5)),
        ("a",): (("7", "(1, 2)"), (7, ["tuple", [1, 2]])),
        ("a", "7"): (("None",), (None,)),
        ("per_rank/2/5",): (("6",), (6,)),
    } == {path: (texts, forms) for path, texts, forms in nesting.names}
    assert (("a", "7", "x"), ("a", "(1, 2)", 1), ("per_rank/2/b",)) == nesting.empty


def test_text_alone_leaves_nothing_to_remember() -> None:
    nesting = flatten({"a": {"b": [torch.ones(1), {"c": 1}]}})[1].nesting()
    assert ((), ()) == (nesting.names, nesting.empty)
