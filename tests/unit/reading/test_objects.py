"""What a checkpoint's objects may be, and that a poisoned one runs nothing."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import os
import pathlib
import random
import sys
import types
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.reading.checkpoints import load, stock_save

from milepost.errors import LoadFailed
from milepost.reading.objects import ObjectRefused, load_object

# Stock torch warns that it saves for one process, which is what is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Mode(enum.Enum):
    TRAIN = "train"


class Flags(enum.Flag):
    A = 1
    B = 2


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Setting:
    """A class of the user's."""

    rate: float


class Poison:
    """Calls something when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


PLAIN = [
    None, True, 2**100, 0.5, 1 + 2j, "ünïcode", b"\x00\xff", bytearray(b"x"), (1, (2, [3])),
    {1, 2}, frozenset({3}), range(3), slice(1, 2),
    collections.OrderedDict(a=1), collections.Counter("aab"), collections.deque([1, 2], maxlen=3),
    collections.defaultdict(int, {"a": 1}), collections.defaultdict(list, {"a": [1]}),
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC), datetime.date(2024, 2, 29),
    datetime.timedelta(1), decimal.Decimal("1.10"), fractions.Fraction(1, 3), uuid.UUID(int=7),
    pathlib.Path("a/b"), pathlib.PurePosixPath("x"), argparse.Namespace(a=1, b=[2]),
    types.SimpleNamespace(a=1), Mode.TRAIN, Flags.A | Flags.B, Level.LOW,
    torch.bfloat16, torch.Size([1]), torch.device("cpu"), random.getstate(),
    np.float64(1.25), np.bool_(True), np.datetime64("2020-01-01"), np.dtype("float32"),
    np.dtype(">f8"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: repr(value)[:40])
def test_plain_data_comes_back_unasked(value: Any) -> None:
    back = load_object(dumped({"in": [value, value]}))["in"]
    assert [value, value] == back
    assert type(value) is type(back[0])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(["a", "bcd"]),
        np.array([1, 2], dtype=">i4"),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.array([1, "a", None], dtype=object),
        np.zeros((0, 3)),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_come_back_unasked(array: np.ndarray[Any, Any]) -> None:
    back = load_object(dumped([array, torch.ones(1)]))[0]
    assert np.array_equal(array, back)
    assert array.shape == back.shape


@pytest.mark.parametrize("made", [io.BytesIO(b"loss"), io.StringIO("loss")], ids=["bytes", "text"])
def test_streams_in_memory_come_back_unasked(made: Any) -> None:
    made.seek(2)
    back = load_object(dumped(made))
    assert type(made) is type(back)
    assert (made.getvalue(), 2) == (back.getvalue(), back.tell())


def test_random_generators_go_on_where_they_were() -> None:
    for made in (random.Random(3), np.random.default_rng(3), np.random.RandomState(3)):
        made.random()
        back = load_object(dumped(made))
        assert [made.random() for _ in range(5)] == [back.random() for _ in range(5)]
    state = np.random.RandomState(3).get_state()
    np.testing.assert_equal(state, load_object(dumped(state)))


def test_tensors_inside_objects_come_back(tmp_path: Path) -> None:
    value = collections.deque([torch.arange(3), {"p": torch.nn.Parameter(torch.ones(2))}])
    back = load_object(dumped(value))
    assert torch.equal(value[0], back[0])  # type: ignore[arg-type]
    assert isinstance(back[1]["p"], torch.nn.Parameter)


MARK = "marker"

POISONS: dict[str, Callable[[str], Any]] = {
    "system": lambda mark: Poison(os.system, f"touch {mark}"),
    "open": lambda mark: Poison(open, mark, "w"),
    "exec": lambda mark: Poison(exec, f"open({mark!r}, 'w')"),
    "eval": lambda mark: Poison(eval, f"open({mark!r}, 'w')"),
    "path": lambda mark: Poison(pathlib.Path.touch, pathlib.Path(mark)),
    "getattr": lambda mark: Poison(getattr, Mode.TRAIN, "name"),
    "factory": lambda mark: collections.defaultdict(Setting),  # type: ignore[arg-type]
    "function of torch": lambda mark: Poison(torch.load, mark),
    "function of numpy": lambda mark: Poison(np.save, mark, [1]),
    "module": lambda mark: Poison(__import__, "antigravity"),
    "deep": lambda mark: {"a": [collections.deque([Poison(open, mark, "w")])]},
    "new enum": lambda mark: Poison(Mode, "New", ["A"]),
    "array of a subclass": lambda mark: np.ma.array([1]),
    "array with fields": lambda mark: np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "class": lambda mark: Setting,
    "object": lambda mark: Setting(0.5),
}


@pytest.mark.parametrize("kind", POISONS)
def test_what_names_anything_else_is_refused_and_runs_nothing(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / MARK
    data = dumped(POISONS[kind](str(mark)))
    with pytest.raises(ObjectRefused):
        load_object(data)
    assert not mark.exists()


def test_an_enum_whose_module_is_not_imported_is_refused() -> None:
    module = types.ModuleType("a_module_of_theirs")
    Theirs = enum.Enum("Theirs", {"A": 1}, module=module.__name__)
    module.Theirs = Theirs  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    try:
        data = dumped(Theirs.A)
    finally:
        del sys.modules[module.__name__]
    with pytest.raises(ObjectRefused, match=r"a_module_of_theirs\.Theirs"):
        load_object(data)


def test_classes_that_torch_was_told_are_safe_pass_also_among_ours() -> None:
    value = [Setting(0.5), collections.deque([np.float32(1)])]
    with torch.serialization.safe_globals([Setting]):
        assert value == load_object(dumped(value))
    with pytest.raises(ObjectRefused, match=r"test_objects\.Setting"):
        load_object(dumped(value))


def test_a_poisoned_object_of_stock_torch_runs_nothing_wherever_it_is(tmp_path: Path) -> None:
    mark = tmp_path / MARK
    path = stock_save(
        tmp_path / "stock",
        {
            "w": torch.ones(1),
            "bad": Poison(os.mkdir, str(mark)),
            "good": [1],
            "per_rank/0/bad": Poison(os.system, f"touch {mark}"),
            "setting": Setting(0.5),
        },
    )
    states: list[Any] = [{"w": torch.zeros(1)}, {"w": torch.zeros(1), "bad": None}, None]
    for state in states:
        with pytest.raises(LoadFailed, match=r"'per_rank/0/bad' of posix\.system") as caught:
            load(path, state)
        assert "unsafe-object" == caught.value.code
        assert state is None or 0 == state["w"].item()
        for text in ("allow_pickle=True", "add_safe_globals([", "system"):
            assert text in caught.value.hint
    with pytest.raises(LoadFailed, match=r"'bad' of posix\.mkdir") as caught:
        load(path, None)
    assert f"'setting' of {__name__}.Setting" in caught.value.message
    assert not mark.exists()
    report = load(path, None, allow_pickle=True)
    assert Setting(0.5) == report.state["setting"]
    assert mark.exists()


def test_an_object_that_was_not_asked_for_is_not_read(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"w": torch.ones(1), "setting": Setting(0.5)})
    assert ("setting",) == load(path, {"w": torch.zeros(1)}).unexpected
