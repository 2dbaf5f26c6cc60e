"""The layout of an image: aligned, in order, without overlap, the same on both sides."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.format.layout import (
    LARGE_BYTES,
    PAGE_BYTES,
    SMALL_ALIGN_BYTES,
    TableRow,
    align,
    pack_table,
    place,
    unpack_table,
)

LENGTHS = st.lists(
    st.one_of(
        st.integers(1, 5000),
        st.integers(LARGE_BYTES - 2, LARGE_BYTES + 2),
        st.integers(LARGE_BYTES, 1 << 40),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(offset=st.integers(0, 1 << 60), to=st.sampled_from([1, 64, 4096]))
def test_align_returns_the_nearest_multiple_that_is_not_below(offset: int, to: int) -> None:
    aligned = align(offset, to)
    assert aligned % to == 0
    assert 0 <= aligned - offset < to


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_containers_are_aligned_and_never_overlap(lengths: list[int]) -> None:
    offsets, objects_at = place(lengths)
    assert len(lengths) == len(offsets)
    end = 0
    for offset, length in zip(offsets, lengths, strict=True):
        to = PAGE_BYTES if length >= LARGE_BYTES else SMALL_ALIGN_BYTES
        assert align(end, to) == offset
        end = offset + length
    assert align(end, SMALL_ALIGN_BYTES) == objects_at


@settings(deadline=None)
@given(lengths=LENGTHS)
def test_what_lies_before_a_container_does_not_depend_on_what_follows(lengths: list[int]) -> None:
    whole = place(lengths).offsets
    for count in range(len(lengths)):
        assert whole[:count] == place(lengths[:count]).offsets


def test_a_rank_without_tensors_has_its_objects_at_the_start() -> None:
    offsets, objects_at = place([])
    assert offsets == []
    assert objects_at == 0


ROWS = st.lists(st.builds(TableRow, *[st.integers(0, 2**64 - 1)] * 7), max_size=20)


@settings(deadline=None)
@given(rows=ROWS)
def test_a_table_reads_back_as_it_was_packed(rows: list[TableRow]) -> None:
    table = pack_table(rows)
    assert 56 * len(rows) == len(table)
    assert rows == unpack_table(table)
    assert rows == unpack_table(memoryview(table))


@pytest.mark.parametrize("length", [1, 55, 57, 111])
def test_a_table_of_a_broken_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} bytes"):
        unpack_table(bytes(length))
