"""Tiling: against counting every element, on the shapes that shardings make, and in its limits."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.format.tiling import BOUNDS, GAP, OVERLAP, check_tiling
from milepost.wire.offers import Box

Boxes = list[tuple[Box, Box]]


def covered(boxes: Boxes) -> Counter[Box]:
    """Count how often each element is covered."""
    return Counter(
        element
        for offsets, sizes in boxes
        for element in itertools.product(
            *(range(at, at + length) for at, length in zip(offsets, sizes, strict=True))
        )
    )


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Box, Boxes]:
    """Draw a small tensor and boxes within it, often such that they tile."""
    size = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    boxes: Boxes = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 4))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, length in enumerate(sizes) if length > 1]
        if not dims:
            boxes.append((offsets, sizes))
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, sizes[dim] - 1))
        boxes.append((offsets, (*sizes[:dim], cut, *sizes[dim + 1 :])))
        boxes.append(
            (
                (*offsets[:dim], offsets[dim] + cut, *offsets[dim + 1 :]),
                (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :]),
            )
        )
    damage = draw(st.sampled_from(["none", "drop", "twice"]))
    if damage == "drop":
        boxes.pop()
    elif damage == "twice":
        boxes.append(draw(st.sampled_from(boxes)))
    return size, draw(st.permutations(boxes))


@given(tensors())
@settings(deadline=None)
def test_the_verdict_is_that_of_counting_every_element(drawn: tuple[Box, Boxes]) -> None:
    size, boxes = drawn
    counts = covered(boxes)
    elements = list(itertools.product(*map(range, size)))
    problem = check_tiling(size, boxes)
    assert all(counts[element] == 1 for element in elements) == (problem is None)
    if problem is not None and problem.code == OVERLAP:
        assert set(covered([boxes[problem.boxes[0]]])) & set(covered([boxes[problem.boxes[1]]]))
    if problem is not None and problem.code == GAP:
        assert any(counts[element] == 0 for element in elements)


PINWHEEL: Boxes = [
    ((0, 0), (1, 2)),
    ((0, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 0), (2, 1)),
    ((1, 1), (1, 1)),
]
"""Tiles a 3 x 3 tensor, and no straight cut separates anything."""


def test_a_pinwheel_tiles_although_it_cannot_be_cut() -> None:
    assert check_tiling((3, 3), PINWHEEL) is None


def test_a_pinwheel_without_its_hub_has_a_gap_of_one_element() -> None:
    problem = check_tiling((3, 3), PINWHEEL[:-1])
    assert problem is not None
    assert (GAP, True) == (problem.code, "1 of the 9 elements" in problem.text)


def test_a_gap_and_an_overlap_of_equal_volume_do_not_cancel_out() -> None:
    problem = check_tiling((4,), [((0,), (2,)), ((0,), (2,))])
    assert problem is not None
    assert problem.code in (GAP, OVERLAP)


def test_the_boxes_that_overlap_are_named() -> None:
    problem = check_tiling((4,), [((0,), (1,)), ((2,), (2,)), ((1,), (2,))])
    assert problem == (OVERLAP, "shard 1, [2:4], and shard 2, [1:3], overlap", (1, 2))


def test_the_gap_is_named() -> None:
    problem = check_tiling((8, 2), [((0, 0), (4, 2)), ((6, 0), (2, 2))])
    assert problem is not None
    assert problem.text == "no shard holds [4:6, 0:2]"


@pytest.mark.parametrize(
    ("offsets", "sizes"), [((3,), (2,)), ((-1,), (2,)), ((0,), (-1,)), ((0, 0), (1, 1))]
)
def test_a_box_outside_its_tensor_is_named(offsets: Box, sizes: Box) -> None:
    problem = check_tiling((4,), [((0,), (4,)), (offsets, sizes)])
    assert problem is not None
    assert (BOUNDS, (1,)) == (problem.code, problem.boxes)


def test_boxes_without_elements_are_no_overlap_and_no_gap() -> None:
    assert check_tiling((3,), [((0,), (3,)), ((3,), (0,)), ((3,), (0,))]) is None
    assert check_tiling((0, 5), []) is None


def test_a_scalar_is_one_element() -> None:
    assert check_tiling((), [((), ())]) is None
    assert check_tiling((), []) is not None
    assert check_tiling((), [((), ()), ((), ())]) is not None


@pytest.mark.parametrize("shape", [(4096, 1), (64, 64), (16, 256)])
def test_4096_shards_are_not_compared_pair_by_pair(shape: Box) -> None:
    rows, columns = shape
    boxes: Boxes = [((i * 3, j * 2), (3, 2)) for i in range(rows) for j in range(columns)]
    random.Random(7).shuffle(boxes)
    started_s = time.process_time()
    assert check_tiling((rows * 3, columns * 2), boxes) is None
    assert check_tiling((rows * 3, columns * 2), boxes[1:]) is not None
    # A tenth of a second is usual; 16 million pairs would take ten.
    assert time.process_time() - started_s < 3
