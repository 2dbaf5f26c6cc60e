"""Which unpickled indexes are none, whatever somebody has put into their fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from milepost.dcp_format.coverage import form_problem, index_problems


def index() -> Metadata:
    """Return the index of a tensor and an object."""
    zero = torch.Size([0])
    tensor = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size([4]),
        chunks=[ChunkStorageMetadata(offsets=zero, sizes=torch.Size([4]))],
    )
    return Metadata(
        {"w": tensor, "lr": BytesStorageMetadata()},
        storage_data={
            MetadataIndex("w", zero): _StorageInfo("__0_0.distcp", 0, 1024),
            MetadataIndex("lr"): _StorageInfo("__0_0.distcp", 1024, 16),
        },
    )


def changed(what: Callable[[Any], Any], name: str, value: object) -> Callable[[Any], None]:
    return lambda metadata: object.__setattr__(what(metadata), name, value)


def tensor(metadata: Any) -> Any:
    return metadata.state_dict_metadata["w"]


def chunk(metadata: Any) -> Any:
    return tensor(metadata).chunks[0]


def place(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


def place_index(metadata: Any) -> Any:
    return next(iter(metadata.storage_data))


def test_an_index_as_torch_makes_it_has_no_problem() -> None:
    assert "" == form_problem(index())
    assert [] == index_problems(index())


def test_boxes_may_be_tuples_of_integers() -> None:
    metadata = index()
    changed(chunk, "offsets", (0,))(metadata)
    assert "" == form_problem(metadata)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.state_dict_metadata.update({3: tensor(m)}), "a int as a key"),
        (changed(tensor, "size", 4), "entry of the tensor 'w'"),
        (changed(tensor, "size", torch.Size([-4])), "entry of the tensor 'w'"),
        (changed(tensor, "size", (4.0,)), "entry of the tensor 'w'"),
        (changed(tensor, "size", torch.Size([2, 2])), "entry of the tensor 'w'"),
        (changed(tensor, "properties", None), "entry of the tensor 'w'"),
        (lambda m: setattr(tensor(m).properties, "dtype", "float32"), "entry of the tensor 'w'"),
        (changed(tensor, "chunks", None), "entry of the tensor 'w'"),
        (changed(tensor, "chunks", [3]), "entry of the tensor 'w'"),
        (changed(chunk, "offsets", "0"), "entry of the tensor 'w'"),
        (changed(chunk, "offsets", (True,)), "entry of the tensor 'w'"),
        (changed(chunk, "sizes", torch.Size([4, 1])), "entry of the tensor 'w'"),
        (changed(place, "offset", "0"), "place of 'w'"),
        (changed(place, "length", 1.0), "place of 'w'"),
        (changed(place, "offset", -1), "place of 'w'"),
        (changed(place, "length", 1 << 63), "place of 'w'"),
        (changed(place, "relative_path", b"__0_0.distcp"), "place of 'w'"),
        (changed(place_index, "offset", "0"), "place of 'w'"),
        (changed(place_index, "fqn", 3), "place of 3"),
        (changed(place, "relative_path", ""), "the file '', outside"),
        (changed(place, "relative_path", "a\0b"), r"the file 'a\x00b', outside"),
    ],
)
def test_a_field_of_another_type_is_malformed(change: Callable[[Any], Any], said: str) -> None:
    metadata = index()
    change(metadata)
    assert said in form_problem(metadata)


def test_a_field_that_is_not_there_is_malformed() -> None:
    for what in (tensor, chunk, place):
        metadata = index()
        vars(what(metadata)).clear()
        assert "malformed" in form_problem(metadata)
