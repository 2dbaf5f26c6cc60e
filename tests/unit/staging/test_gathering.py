"""Small tensors gathered on their device: host memory stands for the device's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.staging import gathering as under_test
from milepost.staging.gathering import Gathering
from milepost.staging.layouts import TensorColumns, tensor_views
from milepost.state.collecting import _device_first, collect
from milepost.state.flattening import flatten

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
GAP = 64
"""Between two payloads: stands for the bytes of their containers."""


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[TensorColumns, torch.Tensor]:
    """Return where the tensors go, and an image with something in every byte."""
    ats, end = [], GAP
    for tensor in tensors:
        ats.append(end)
        end += -(-tensor.nbytes // 64) * 64 + GAP
    columns = TensorColumns(
        tuple(range(len(tensors))),
        tuple(tensor.dtype for tensor in tensors),
        tuple(tuple(tensor.shape) for tensor in tensors),
        tuple(ats),
    )
    return columns, torch.randint(0, 256, (end,), dtype=torch.uint8)


def copy(
    made: Gathering, image: torch.Tensor, columns: TensorColumns, positions: Sequence[int],
    tensors: Sequence[torch.Tensor],
) -> int:  # fmt: skip
    """Copy as the callers do; return with how many calls."""
    sources = [tensors[position] for position in positions]
    into = tensor_views(image, columns.dtypes, columns.sizes, columns.payloads_at)
    calls = 0
    for targets, out_of in made.gathered(image, sources):
        torch._foreach_copy_(targets, out_of)
        calls += 1
    for index in made.alone:
        target = into[positions[index]]
        assert target is not None
        target.copy_(sources[index])
        calls += 1
    return calls


@given(st.data())
def test_the_image_is_what_single_copies_make_of_it(data: st.DataObject) -> None:
    shapes = st.lists(st.integers(0, 5), max_size=3)
    tensors = [
        torch.randint(0, 2, data.draw(shapes)).to(data.draw(st.sampled_from(DTYPES)))
        for _ in range(data.draw(st.integers(0, 20)))
    ]
    columns, image = lay_out(tensors)
    full = [at for at, tensor in enumerate(tensors) if tensor.numel()]
    positions = [at for at in full if data.draw(st.integers(0, 4))]
    expected = image.clone()
    into = tensor_views(expected, columns.dtypes, columns.sizes, columns.payloads_at)
    for position in positions:
        target = into[position]
        assert target is not None
        target.copy_(tensors[position])
    made = Gathering(columns, positions, image, CPU)
    for _ in range(2):
        copy(made, image, columns, positions, tensors)
        assert torch.equal(expected, image)


def test_thousands_of_small_tensors_go_in_a_few_transfers_and_a_large_one_alone() -> None:
    tensors = [torch.full((7,), float(number)) for number in range(3000)]
    tensors[1500] = torch.rand(under_test.GATHERED_BYTES_MAX)
    columns, image = lay_out(tensors)
    positions = range(3000)
    made = Gathering(columns, positions, image, CPU)
    assert [1500] == made.alone
    assert 2 * 4 + 1 == copy(made, image, columns, positions, tensors)


def test_a_tensor_of_another_owner_between_two_stretches_is_left_as_it_is() -> None:
    tensors = [torch.rand(5) for _ in range(21)]
    columns, image = lay_out(tensors)
    positions = [number for number in range(21) if number != 10]
    made = Gathering(columns, positions, image, CPU)
    assert [] == made.alone
    at = columns.payloads_at[10]
    others = image[at - GAP : at + 20].clone()
    # Written by its owner after the twins were made, and before they are copied.
    others[GAP:] = 7
    image[at - GAP : at + 20] = others
    assert 4 == copy(made, image, columns, positions, tensors)
    assert torch.equal(others, image[at - GAP : at + 20])


def test_few_neighbours_are_copied_alone() -> None:
    tensors = [torch.rand(5) for _ in range(3)]
    columns, image = lay_out(tensors)
    assert [0, 1, 2] == Gathering(columns, range(3), image, CPU).alone


@pytest.mark.parametrize("limit", ["ours", "the device's"])
def test_tensors_without_room_on_the_device_are_copied_alone(
    limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = [torch.rand(5) for _ in range(8)]
    columns, image = lay_out(tensors)
    if limit == "ours":
        monkeypatch.setattr(under_test, "TWINS_BYTES_MAX", 100)
    else:

        def fail(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(torch, "empty", fail)
    assert list(range(8)) == Gathering(columns, range(8), image, CPU).alone
    assert (limit != "ours") == ("the device has no memory left" in caplog.text)


def test_items_on_a_device_come_first_to_lie_side_by_side() -> None:
    moments = {"exp_avg": torch.ones(2), "step": torch.zeros(()), "exp_avg_sq": torch.ones(2)}
    flat, paths = flatten({f"p{number}": dict(moments) for number in range(2)} | {"note": "x"})
    items = collect(flat, paths)
    assert list(flat) == items.keys
    for item, key in enumerate(items.keys):
        if "exp_avg" in key:
            items.devices[item] = "cuda"
    sources = dict(zip(items.keys, items.sources, strict=True))
    first = _device_first(items)
    assert [
        "p0.exp_avg", "p0.exp_avg_sq", "p1.exp_avg", "p1.exp_avg_sq",
        "p0.step", "p1.step", "note",
    ] == first.keys  # fmt: skip
    assert ["cuda"] * 4 + ["cpu"] * 2 + [""] == first.devices
    assert all(
        sources[key] is source for key, source in zip(first.keys, first.sources, strict=True)
    )
    assert first.kinds == bytearray([0] * 6 + [items.kinds[-1]])
    assert first.paths is items.paths
    columns = [getattr(first, name) for name in ("dtypes", "sizes", "offsets", "addresses")]
    assert {7} == set(map(len, columns))
    assert (torch.Size([]), torch.Size([2])) == (first.sizes[4], first.sizes[0])
