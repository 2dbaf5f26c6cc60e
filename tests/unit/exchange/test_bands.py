"""Bands: a tensor's elements in order, whatever its shape; and what they have of a box."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.exchange.bands import bands, meet
from milepost.wire.offers import Box

SIZES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def places(size: Box, box: tuple[Box, Box]) -> list[int]:
    """Number the elements of a box by their place in the whole tensor, in the box's own order."""
    found = [0]
    for extent, at, length in zip(size, *box, strict=True):
        found = [place * extent + at + step for place in found for step in range(length)]
    return found


@given(SIZES, st.integers(1, 8), st.integers(1, 200))
def test_bands_one_after_the_other_are_the_tensor(size: Box, item: int, limit: int) -> None:
    found = [place for band in bands(size, item, limit) for place in places(size, band)]
    assert list(range(prod(size))) == found


@given(SIZES, st.integers(1, 8), st.integers(1, 200))
def test_no_band_is_larger_than_the_limit(size: Box, item: int, limit: int) -> None:
    for _, sizes in bands(size, item, limit):
        assert prod(sizes) * item <= max(limit, item)


def test_a_tensor_without_elements_has_no_band() -> None:
    assert [] == list(bands((3, 0, 2), 4, 100))


def test_a_scalar_is_one_band() -> None:
    assert [((), ())] == list(bands((), 4, 100))


@given(st.data())
def test_what_a_box_has_of_the_bands_is_the_box_from_front_to_back(data: st.DataObject) -> None:
    size = data.draw(SIZES)
    offsets = tuple(data.draw(st.integers(0, length - 1)) for length in size)
    box = (
        offsets,
        tuple(
            data.draw(st.integers(1, length - at)) for length, at in zip(size, offsets, strict=True)
        ),
    )
    found = []
    for at, sizes in bands(size, 1, data.draw(st.integers(1, 20))):
        part = meet((at, sizes), box)
        if part is None:
            continue
        inside = places(sizes, (part.within, part.sizes))
        band = places(size, (at, sizes))
        found += [band[place] for place in inside]
        are_neighbours = inside == list(range(inside[0], inside[0] + len(inside)))
        assert part.start == (inside[0] if are_neighbours else -1)
    assert places(size, box) == found


@pytest.mark.parametrize("box", [((4, 0), (1, 2)), ((0, 2), (4, 1))])
def test_what_does_not_meet_is_none(box: tuple[Box, Box]) -> None:
    assert meet(((0, 0), (4, 2)), box) is None
