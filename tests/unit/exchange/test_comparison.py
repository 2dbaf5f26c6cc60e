"""Two sources are compared byte by byte, however their streams are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from isal import isal_zlib
from tests.unit.exchange.checkpoints import whole, write_checkpoint

from milepost.exchange.checkpoint import CheckpointSource
from milepost.exchange.comparison import (
    Values,
    compare_tensors,
    equal,
    equal_objects,
    same_by_manifests,
)
from milepost.exchange.files import StateSource

if TYPE_CHECKING:
    from pathlib import Path


def compare(a: torch.Tensor, b: torch.Tensor) -> Values | None:
    return compare_tensors(StateSource({"w": a}), StateSource({"w": b}), "w", lambda _: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex128,
                                   torch.float8_e4m3fn, torch.bool])  # fmt: skip
def test_equal_tensors_are_equal(dtype: torch.dtype) -> None:
    tensor = torch.arange(50).to(dtype)
    assert None is compare(tensor, tensor.clone())


def test_what_differs_is_counted_and_measured() -> None:
    a = torch.zeros(100)
    b = a.clone()
    b[3], b[70] = 0.5, -2.0
    crc_a, crc_b = (isal_zlib.crc32(x.numpy().tobytes()) for x in (a, b))
    assert Values(crc_a, crc_b, 2, 2.0) == compare(a, b)


def test_complex_numbers_are_counted_as_one_element_each() -> None:
    a = torch.zeros(4, dtype=torch.complex128)
    b = a + torch.tensor([0, 3 + 4j, 0, 0])
    found = compare(a, b)
    assert found is not None
    assert (1, 5.0) == (found.differing, found.largest)


def test_bits_count_not_values() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert None is compare(nan, nan.clone())
    found = compare(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert found is not None
    assert (1, 0.0) == (found.differing, found.largest)
    found = compare(nan, torch.tensor([1.0, 0.0]))
    assert found is not None
    assert (1, None) == (found.differing, found.largest)


def test_streams_that_are_cut_differently_are_compared_all_the_same(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    boxes = [((0, 0), (4, 1)), ((0, 1), (4, 5))]
    folder = write_checkpoint(tmp_path / "c", {"w": (tensor, boxes)})
    a, b = CheckpointSource(folder), StateSource({"w": tensor.t().contiguous().t()})
    assert None is compare_tensors(a, b, "w", lambda _: None)
    a.close()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"x": [1, (2.0, "y")]}, {"x": [1, (2.0, "y")]}, True),
        ({"x": 1}, {"x": 1.0}, False),
        ({"x": 1}, {"y": 1}, False),
        ([1, 2], [1], False),
        (float("nan"), float("nan"), True),
        ((torch.ones(2),), (torch.ones(2),), True),
        ((torch.ones(2),), (torch.zeros(2),), False),
        ((torch.ones(2),), (torch.ones(2).double(),), False),
        (torch.tensor(float("nan")), torch.tensor(float("nan")), True),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse(), False),
    ],
)
def test_objects_are_compared_by_type_and_value(a: Any, b: Any, expected: bool) -> None:
    assert expected == equal(a, b)


class Opaque:
    """A class that is no plain data."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize(("value", "expected"), [(3, True), (4, False)])
def test_what_is_no_plain_data_is_compared_as_it_was_pickled(
    tmp_path: Path, value: int, expected: bool
) -> None:
    a = CheckpointSource(write_checkpoint(tmp_path / "a", {}, {"o": Opaque(3)}))
    b = CheckpointSource(write_checkpoint(tmp_path / "b", {}, {"o": Opaque(value)}, files=1))
    assert expected == equal_objects(a, b, "o")
    a.close()
    b.close()


def test_manifests_tell_equality_only_of_the_same_shards(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    halves = (tensor, [((0,), (3,)), ((3,), (3,))])
    sources = [
        CheckpointSource(write_checkpoint(tmp_path / name, {"w": cut}, with_manifest=has))
        for name, cut, has in (
            ("whole", whole(tensor), True),
            ("again", whole(tensor), True),
            ("other", whole(tensor + 1), True),
            ("halves", halves, True),
            ("none", whole(tensor), False),
        )
    ]
    found = [same_by_manifests(sources[0], source, "w") for source in sources]
    assert [True, True, False, False, False] == found
    for source in sources:
        source.close()
