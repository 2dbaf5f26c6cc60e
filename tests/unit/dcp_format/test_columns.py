"""Columns of an index: they say what `.metadata` says, for any index, and know when they cannot."""

from __future__ import annotations

import copy
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.dcp_format.test_index import NAMES, case_of, one_tensor, places, ranks, with_final
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)

from milepost.dcp_format.columns import (
    NO_PLACE,
    Columns,
    as_metadata,
    columns_of,
    pack_columns,
    pack_ints,
    unpack_columns,
    unpack_ints,
)
from milepost.dcp_format.index import IndexDraft
from milepost.errors import CorruptCheckpoint


def assert_alike(metadata: Metadata, columns: Columns) -> None:
    """The columns give torch's form back."""
    again = as_metadata(columns)
    assert list(metadata.state_dict_metadata) == list(again.state_dict_metadata)
    assert metadata.state_dict_metadata == again.state_dict_metadata
    assert metadata.planner_data == again.planner_data
    for index, info in metadata.storage_data.items():
        assert info == again.storage_data[index], index
    assert len(metadata.storage_data) == len(again.storage_data)
    # What has no hint stands for its only chunk.
    hinted = {
        (fqn, offset, hint or 0): (fqn, offset, info)
        for (fqn, offset, hint), (_, info) in places(metadata).items()
    }
    found = {
        (fqn, offset, hint or 0): (fqn, offset, info)
        for (fqn, offset, hint), (_, info) in places(again).items()
    }
    assert hinted == found


def with_crcs(columns: Columns) -> Columns:
    """The columns, each chunk with a checksum that says where it lies."""
    columns.crcs = [
        zlib.crc32(f"{columns.files[file]} {at}".encode())
        for file, at in zip(columns.files_of, columns.ats, strict=True)
    ]
    return columns


@pytest.mark.parametrize("name", NAMES)
def test_columns_say_what_the_index_says(name: str, tmp_path: Path) -> None:
    metadata = case_of(ranks(name), tmp_path).build()
    columns = columns_of(metadata)
    assert_alike(metadata, columns)
    assert_alike(metadata, unpack_columns(pack_columns(with_crcs(columns))))


@pytest.mark.parametrize("is_final", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_gives_the_columns_of_the_index_that_it_gives(
    name: str, is_final: bool, tmp_path: Path
) -> None:
    case = case_of(ranks(name), tmp_path)
    case = with_final(case) if is_final else case
    draft = IndexDraft(case.offers, case.assigned, case.files)
    expected = with_crcs(columns_of(case.build()))
    assert expected.crcs is not None
    known = dict(zip(zip(expected.files_of, expected.ats, strict=True), expected.crcs, strict=True))
    objects = {
        rank: {
            item: (at, length, zlib.crc32(f"{case.files[rank]} {at}".encode()))
            for item, (at, length) in of_rank.items()
        }
        for rank, of_rank in case.objects.items()
    }
    are_objects = {crc for of_rank in objects.values() for *_, crc in of_rank.values()}
    tensors = [
        crc
        for number, file in enumerate(draft.files)
        for (of, _), crc in sorted(known.items())
        if expected.files[of] == file and crc not in are_objects and number >= 0
    ]
    packed = draft.columns(objects, tensors)
    filled = unpack_columns(packed)
    assert_alike(case.build(), filled)
    assert filled.crcs is not None
    assert list(expected.crcs) == list(filled.crcs)
    assert packed == draft.columns(objects, tensors)


def test_a_draft_that_does_not_know_all_checksums_gives_no_columns(tmp_path: Path) -> None:
    case = case_of(ranks("shards"), tmp_path)
    draft = IndexDraft(case.offers, case.assigned, case.files)
    assert b"" == draft.columns({}, [])


def test_an_index_that_names_no_file_for_a_chunk_says_so_in_columns() -> None:
    metadata = one_tensor(TensorProperties(dtype=torch.float32))
    metadata.storage_data = {}
    columns = columns_of(metadata)
    assert [NO_PLACE] == list(columns.files_of)
    columns.crcs = [0]
    with pytest.raises(ValueError, match="no place"):
        pack_columns(columns)


@pytest.mark.parametrize("planner_data", [None, {"w": ("w", 0)}, {"w": object()}])
def test_planner_data_of_any_kind_is_kept_or_there_are_no_columns(planner_data: Any) -> None:
    metadata = one_tensor(TensorProperties(dtype=torch.float32))
    metadata.planner_data = planner_data
    columns = with_crcs(columns_of(metadata))
    if planner_data and not isinstance(planner_data["w"], tuple):
        with pytest.raises(ValueError, match="not plain"):
            pack_columns(columns)
        return
    packed = pack_columns(columns)
    again = unpack_columns(packed)
    assert packed == pack_columns(again)
    assert planner_data == again.planner_data
    assert repr(planner_data) == repr(pickle.loads(pickle.dumps(again.planner_data)))


def test_places_stored_without_an_offset_or_with_an_empty_one_are_found() -> None:
    metadata = one_tensor(TensorProperties(dtype=torch.float32))
    (info,) = metadata.storage_data.values()
    metadata.state_dict_metadata["o"] = BytesStorageMetadata()
    metadata.storage_data = {MetadataIndex("w"): info, MetadataIndex("o", ()): info}
    assert [0, 0] == list(columns_of(metadata).files_of)


def test_torchs_form_can_be_copied_and_pickled(tmp_path: Path) -> None:
    metadata = case_of(ranks("shards"), tmp_path).build()
    again = as_metadata(columns_of(metadata))
    for made in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert metadata.state_dict_metadata == made.state_dict_metadata
        assert metadata.storage_data == made.storage_data
    entry: Any = again.state_dict_metadata["w"]
    assert entry.chunks[-1] == entry.chunks[:][-1]


@given(values=st.lists(st.integers(0, 2**64 - 1)))
def test_numbers_come_back(values: list[int]) -> None:
    packed = pack_ints(values)
    assert values == list(unpack_ints(packed))
    assert packed.width <= 8


@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(max_examples=200)
def test_damaged_columns_are_damage_or_other_columns(at: float, flip: int) -> None:
    metadata = one_tensor(TensorProperties(dtype=torch.float32))
    metadata.planner_data = {"w": ("w",)}
    data = bytearray(pack_columns(with_crcs(columns_of(metadata))))
    data[int(at * len(data))] ^= flip
    try:
        columns = unpack_columns(bytes(data))
    except CorruptCheckpoint:
        return
    assert len(columns.keys) == len(columns.counts)
