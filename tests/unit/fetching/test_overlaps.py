"""Reads into memory that overlaps come one after another, the later key last."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock

import milepost
from milepost import dcp
from milepost.fetching.overlaps import apart
from milepost.fetching.requests import Blob, TensorRead

LONG = 1_500_000
"""Elements of a tensor that several threads read."""


def read_of(key: str, memory: torch.Tensor) -> TensorRead:
    sizes = tuple(memory.shape)
    return TensorRead(key, Blob("f", 0, 0), memory.dtype, sizes, (0,) * memory.dim(), sizes, memory)


def groups(**memory: torch.Tensor) -> list[list[str]]:
    """Return the keys of each group."""
    found = apart([read_of(key, value) for key, value in memory.items()])
    return [[read.key for read in group] for group in found]


def test_reads_into_memory_of_their_own_are_one_group_in_their_order() -> None:
    base = torch.zeros(10)
    assert [["b", "a", "c"]] == groups(b=base[5:], a=base[:5], c=torch.zeros(3))


def test_a_later_key_of_the_same_memory_comes_in_a_later_group() -> None:
    w, x = torch.zeros(4, 4), torch.zeros(3)
    assert [["b", "x"], ["a"], ["c"]] == groups(b=w, x=x, a=w, c=w)
    assert [["w", "x"], ["part"]] == groups(w=w, x=x, part=w[2:])
    assert [["part", "x"], ["w"]] == groups(part=w[:, 1], x=x, w=w)


def test_the_boxes_of_one_key_are_one_group() -> None:
    w = torch.zeros(4, 4)
    boxes = [read_of("w", w[:, :2]), read_of("w", w[:, 2:])]
    assert [boxes] == apart(boxes)


def test_empty_tensors_and_no_reads_at_all_overlap_nothing() -> None:
    w = torch.zeros(4)
    assert [["a", "w"]] == groups(a=w[:0], w=w)
    assert [[]] == apart([])


def test_a_class_that_does_not_tell_its_memory_is_read_with_the_others() -> None:
    class Secret(torch.Tensor):
        def data_ptr(self) -> int:
            raise RuntimeError("no")

    w = torch.zeros(4)
    assert [["a", "b", "w"]] == groups(a=w.as_subclass(Secret), b=w.as_subclass(Secret), w=w)


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("length", [3, LONG])
def test_tied_tensors_take_the_later_of_the_values_that_a_checkpoint_holds(
    tmp_path: Path, order: str, length: int
) -> None:
    path, values = tmp_path / "untied", {"a": 1.0, "b": 2.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what `no_dist` asks for.
        state = {key: torch.full((length,), value) for key, value in values.items()}
        stock.save(state, checkpoint_id=path, no_dist=True)
        tied = torch.zeros(length)
        milepost.load(path, dict.fromkeys(order, tied))
        assert torch.equal(torch.full((length,), values[order[-1]]), tied)
        tied = torch.zeros(length)
        dcp.load(dict.fromkeys(order, tied), checkpoint_id=path, no_dist=True)
        assert any(torch.equal(each, tied) for each in state.values())
