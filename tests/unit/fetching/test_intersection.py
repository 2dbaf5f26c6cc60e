"""Boxes in chunks: against counting every element, and in about the time that sorting takes."""

from __future__ import annotations

import itertools
import time
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from milepost.fetching.intersection import (
    Chunks,
    Intersection,
    boxes_within,
    flat_range,
    flat_spans,
    missing,
)
from milepost.wire.offers import Box


def elements(at: Box, sizes: Box) -> set[Box]:
    return set(itertools.product(*map(range, at, map(int.__add__, at, sizes))))


def flat(chunk: Box, element: Box) -> int:
    index = 0
    for length, at in zip(chunk, element, strict=True):
        index = index * length + at
    return index


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Box, list[tuple[Box, Box]]]:
    """Draw a tensor and boxes that tile it, in any order; some may be empty."""
    size = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    boxes = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 5))):
        at, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        if not size:
            boxes.append((at, sizes))
            continue
        dim = draw(st.integers(0, len(size) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        boxes.append((at, (*sizes[:dim], cut, *sizes[dim + 1 :])))
        boxes.append(
            (
                (*at[:dim], at[dim] + cut, *at[dim + 1 :]),
                (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :]),
            )
        )
    return size, draw(st.permutations(boxes))


@st.composite
def boxes_of(draw: st.DrawFn, size: Box) -> tuple[Box, Box]:
    lows = [draw(st.integers(0, length)) for length in size]
    return tuple(lows), tuple(
        draw(st.integers(0, length - low)) for length, low in zip(size, lows, strict=True)
    )


@given(tiling=tilings(), data=st.data())
def test_overlaps_are_every_element_of_the_box_once(
    tiling: tuple[Box, list[tuple[Box, Box]]], data: st.DataObject
) -> None:
    size, boxes = tiling
    at, sizes = data.draw(boxes_of(size))
    found = Chunks.of(boxes).overlaps(at, sizes)
    counted: list[Box] = []
    for chunk, stored_at, wanted_at, common in found:
        chunk_at, chunk_sizes = boxes[chunk]
        assert elements(stored_at, common) <= elements((0,) * len(size), chunk_sizes)
        in_chunk = elements(tuple(map(int.__add__, chunk_at, stored_at)), common)
        assert in_chunk == elements(tuple(map(int.__add__, at, wanted_at)), common)
        counted += in_chunk
    assert sorted(elements(at, sizes)) == sorted(counted)
    assert 0 == missing(sizes, found)


def test_what_no_chunk_holds_is_counted() -> None:
    found = Chunks.of([((0, 0), (2, 4)), ((3, 0), (1, 4))]).overlaps((1, 1), (3, 2))
    assert [
        Intersection(0, (1, 1), (0, 0), (1, 2)),
        Intersection(1, (0, 1), (2, 0), (1, 2)),
    ] == found
    assert 2 == missing((3, 2), found)


def test_a_scalar_is_one_element_of_its_one_chunk() -> None:
    assert [Intersection(0, (), (), ())] == Chunks.of([((), ())]).overlaps((), ())


@given(data=st.data(), chunk=st.lists(st.integers(1, 5), max_size=3).map(tuple))
def test_parts_of_a_box_are_its_elements_in_the_range(data: st.DataObject, chunk: Box) -> None:
    at, sizes = data.draw(boxes_of(chunk))
    total = prod(chunk)
    begin, end = sorted(data.draw(st.integers(-1, total + 1)) for _ in range(2))
    counted: list[Box] = []
    for where, extent in boxes_within(chunk, at, sizes, begin, end):
        counted += elements(where, extent)
    expected = [each for each in elements(at, sizes) if begin <= flat(chunk, each) < end]
    assert sorted(expected) == sorted(counted)


@given(data=st.data(), chunk=st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_a_run_is_a_box_whose_elements_follow_one_another(data: st.DataObject, chunk: Box) -> None:
    at, sizes = data.draw(boxes_of(chunk))
    if 0 in sizes:
        return
    places = sorted(flat(chunk, each) for each in elements(at, sizes))
    is_run = places == list(range(places[0], places[0] + len(places)))
    assert flat_range(chunk, at, sizes) == ((places[0], len(places)) if is_run else None)


@given(
    data=st.data(),
    chunk=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    gap=st.integers(0, 30),
)
def test_spans_hold_the_box_and_no_long_gaps(data: st.DataObject, chunk: Box, gap: int) -> None:
    at, sizes = data.draw(boxes_of(chunk))
    if 0 in sizes:
        return
    wanted = {flat(chunk, each) for each in elements(at, sizes)}
    end = -1
    held: set[int] = set()
    for first, count in flat_spans(chunk, at, sizes, gap):
        assert first > end
        end = first + count - 1
        held |= set(range(first, first + count))
        inside = sorted(wanted & set(range(first, first + count)))
        assert (first, end) == (inside[0], inside[-1])
        assert all(b - a - 1 <= gap for a, b in itertools.pairwise(inside))
    assert wanted <= held
    if flat_range(chunk, at, sizes):
        assert wanted == held


def test_a_rank_finds_its_own_among_thousands_of_chunks_at_once() -> None:
    count = 8192
    boxes = [((rank * 3, 0), (3, 8)) for rank in range(count)]
    began_s = time.process_time()
    chunks = Chunks.of(boxes)
    for rank in range(count):
        assert [Intersection(rank, (0, 0), (0, 0), (3, 8))] == chunks.overlaps(*boxes[rank])
    # To compare each with each takes many seconds of the processor.
    assert time.process_time() - began_s < 2
