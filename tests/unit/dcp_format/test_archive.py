"""Archives that others wrote: found what torch.load finds, and damage told from what is only
unusual.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from milepost.dcp_format.archive import (
    Archive,
    ArchiveError,
    StoredTensor,
    check_archive,
    find_tensor,
    looks_like_an_archive,
    storage_order,
)
from milepost.dcp_format.container import template


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def find(data: bytes) -> StoredTensor | None:
    return find_tensor(lambda at, length: data[at : at + length], len(data))


def restored(data: bytes, found: StoredTensor) -> torch.Tensor:
    payload = bytearray(data[found.payload_at : found.payload_at + found.payload_bytes])
    return torch.frombuffer(payload, dtype=found.dtype).as_strided(
        found.size, found.stride, found.offset
    )


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: torch.randn(5, 7),
    "transposed": lambda: torch.randn(5, 7).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels-last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part of a storage": lambda: torch.arange(40)[7:19],
    "every second": lambda: torch.arange(40)[::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "scalar": lambda: torch.tensor(3.5, dtype=torch.float64),
    "float8": lambda: torch.randn(9).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "bool": lambda: torch.tensor([True, False, True]),
    "large": lambda: torch.randn(600_000),
    "parameter": lambda: nn.Parameter(torch.randn(4)),
}


@pytest.mark.parametrize("name", VALUES)
def test_the_payload_is_where_it_is_said_to_be(name: str) -> None:
    value = VALUES[name]().detach()
    data = saved(VALUES[name]() if name == "parameter" else value)
    found = find(data)
    assert found is not None
    if name == "parameter":
        value = torch.load(io.BytesIO(data)).detach()
    assert torch.equal(value.view(-1, 1) if value.dim() == 0 else value,
                       restored(data, found).view(-1, 1) if value.dim() == 0
                       else restored(data, found))  # fmt: skip
    assert value.stride() == found.stride


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.ones(3)},
        [torch.ones(3), torch.zeros(2)],
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, 3).to_sparse(),
        7,
    ],
    ids=str,
)
def test_what_is_no_one_tensor_is_left_to_torch(value: object) -> None:
    assert find(saved(value)) is None


def test_a_quantised_tensor_is_left_to_torch() -> None:
    with warnings.catch_warnings(action="ignore"):
        data = saved(torch.quantize_per_tensor(torch.ones(3), 0.5, 1, torch.qint8))
    assert find(data) is None


def test_a_pickle_that_would_run_something_is_left_to_torch_which_refuses_it() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            raise_on_call = exec
            return raise_on_call, ("raise SystemExit",)

    assert find(saved(Evil())) is None


def test_above_4_gib_lengths_come_from_zip64() -> None:
    whole = template((5 << 28,), torch.float32)
    tail_at = whole.payload_at + whole.payload_bytes

    def read_at(at: int, length: int) -> bytes:
        assert length <= 1024
        in_payload = bytes(max(0, min(at + length, tail_at) - max(at, whole.payload_at)))
        head = whole.prefix[at : at + length]
        return (
            head + in_payload + whole.suffix[max(0, at - tail_at) : max(0, at + length - tail_at)]
        )

    found = find_tensor(read_at, whole.total_bytes)
    assert found is not None
    assert (whole.payload_at, 5 << 30) == (found.payload_at, found.payload_bytes)
    assert (5 << 28,) == found.size


def test_an_archive_without_checksums_has_none_to_compare() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = saved(torch.ones(50))
    finally:
        torch.serialization.set_crc32_options(True)
    found = find(data)
    assert found is not None
    assert found.crc is None
    assert not check_archive(data)


@pytest.mark.parametrize("length", [0, 1, 21, 22, 60, 500, 1100, -1])
def test_what_is_cut_short_is_no_archive(length: int) -> None:
    data = saved(torch.ones(50))[:length]
    with pytest.raises(ArchiveError):
        find(data)
    with pytest.raises(ArchiveError):
        check_archive(data)


@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
@settings(max_examples=300)
def test_a_flipped_byte_is_an_error_of_the_archive_or_outside_of_what_is_used(
    at: float, flip: int
) -> None:
    value = torch.arange(50)
    data = bytearray(saved(value))
    data[int(at * len(data))] ^= flip
    try:
        found = find(bytes(data))
    except ArchiveError:
        return
    if found is None:
        return
    # The payload is the caller's to compare; all else that is used was right.
    assert (torch.int64, (50,), (1,), 0) == found[:4]
    assert 400 == found.payload_bytes
    assert find(saved(value)) == found or found.crc is not None


def test_a_flipped_byte_of_a_payload_is_found() -> None:
    data = bytearray(saved(torch.arange(50)))
    found = find(bytes(data))
    assert found is not None
    assert check_archive(bytes(data))
    data[found.payload_at + 3] ^= 1
    with pytest.raises(ArchiveError, match="CRC-32 of archive/data/0 is"):
        check_archive(bytes(data))


def test_names_of_an_archive() -> None:
    data = saved(torch.ones(2))
    archive = Archive(lambda at, length: data[at : at + length], len(data))
    assert "archive/data/0" in archive.names()
    assert looks_like_an_archive(data)
    assert not looks_like_an_archive(b"bytes of a planner of one's own")


@pytest.mark.parametrize(
    ("size", "stride", "order"),
    [
        ((), (), ()),
        ((3,), (1,), (0,)),
        ((2, 3), (3, 1), (0, 1)),
        ((3, 2), (1, 3), (1, 0)),
        ((4, 2, 3), (1, 12, 4), (1, 2, 0)),
        ((1, 3), (77, 1), (0, 1)),
        ((3,), (2,), None),
        ((3, 4), (1, 0), None),
    ],
)
def test_the_order_in_memory(
    size: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...] | None
) -> None:
    assert order == storage_order(size, stride)
