"""Keys that are no text keep their types."""

from __future__ import annotations

import enum
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from milepost.state.keys import NO_FORM, key_of, plain_form


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Word(str, enum.Enum):  # noqa: UP042 - text as old programs write it
    ONE = "one"


class Whatever:
    """A class that can be a key."""


KEYS: list[Any] = [
    7, -1, 0, 2**63 - 1, 2**63, -(2**70), True, False, None, 2.5, float("inf"), b"\xff", "text",
    (), (1, 2), ("a", (3, None, b"x")), (True, Color.RED), torch.float16, torch.device("cpu"),
    torch.Size([1, 2]), Color.RED, Level.LOW, Word.ONE,
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=repr)
def test_a_key_comes_back_as_what_it_was(key: Any) -> None:
    form = msgpack.unpackb(msgpack.packb(plain_form(key)), use_list=False)
    back = key_of(form)
    assert key == back
    assert type(key) is type(back)
    assert str(key) == str(back)


@pytest.mark.parametrize(
    ("key", "plain"), [(np.int64(3), 3), (np.float64(2.5), 2.5), (np.str_("a"), "a")]
)
def test_numbers_of_numpy_come_back_as_equal_ones_of_python(key: Any, plain: Any) -> None:
    assert plain == key_of(plain_form(key))
    assert str(key) == str(plain)


@pytest.mark.parametrize("key", [Whatever(), (1, Whatever()), frozenset({1}), 1j])
def test_a_key_of_another_class_has_no_plain_form(key: Any) -> None:
    assert NO_FORM is plain_form(key)


@pytest.mark.parametrize(
    "form",
    [
        ["enum", "a_module_that_is_not_imported", "Color", "RED"],
        ["enum", "os", "system", "x"],
        ["enum", __name__, "Color", "BLUE"],
        ["dtype", "nn"],
        ["dtype", "float17"],
        ["colour", "red"],
        [],
        ["int", 7],
    ],
)
def test_what_is_no_plain_form_is_refused_and_imports_nothing(form: Any) -> None:
    with pytest.raises(ValueError, match=r"form of a key|unpack"):
        key_of(form)
