"""Containers: what torch.save puts around a payload, without the payload."""

from __future__ import annotations

import io
import resource
import struct
import threading
import zipfile
import zlib
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.dcp_format.container import (
    ContainerTemplate,
    dtype_from_name,
    dtype_name,
    serialise,
    template,
)
from milepost.errors import UsageError

NAMES = (
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "bfloat16", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
)  # fmt: skip
REFUSED = ("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "int4", "uint1", "uint7")
SHAPES = ((), (1,), (3, 5), (2, 1, 3), (1, 4, 1), (0,), (2, 0, 3))


def fill(made: ContainerTemplate, payload: bytes) -> bytes:
    """Assemble a container as the trainer (prefix, payload, suffix) and the writer (CRC) do."""
    assert len(payload) == made.payload_bytes
    blob = bytearray(made.prefix + payload + made.suffix)
    for at in (made.crc_at, made.central_crc_at):
        struct.pack_into("<I", blob, at, zlib.crc32(payload))
    return bytes(blob)


def payload_of(shape: tuple[int, ...], dtype: torch.dtype) -> bytes:
    """Bytes that are no pattern of the format, and valid for every dtype, bool included."""
    count = prod(shape) * dtype.itemsize
    return bytes(i % 2 if dtype == torch.bool else (i * 37 + 11) % 251 for i in range(count))


def tensor_of(payload: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    raw = torch.tensor(list(payload), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


@pytest.mark.filterwarnings("ignore:ComplexHalf support")  # torch.load's own, for complex32
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_filled_container_loads_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    dtype = dtype_from_name(name)
    payload = payload_of(shape, dtype)
    blob = fill(template(shape, dtype), payload)
    loaded = torch.load(io.BytesIO(blob), weights_only=True)
    assert (dtype, shape, payload) == (loaded.dtype, tuple(loaded.shape), bytes_of(loaded))
    assert (tensor_of(payload, shape, dtype).stride(), False) == (
        loaded.stride(),
        loaded.requires_grad,
    )
    assert loaded.device.type == "cpu"
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "complex128", "float8_e5m2"])
def test_a_filled_container_is_stock_torchs_but_for_its_serialisation_id(
    name: str, shape: tuple[int, ...]
) -> None:
    dtype = dtype_from_name(name)
    payload = payload_of(shape, dtype)
    stock = io.BytesIO()
    torch.save(tensor_of(payload, shape, dtype), stock)
    ours = fill(template(shape, dtype), payload)
    assert len(stock.getvalue()) == len(ours)
    with zipfile.ZipFile(stock) as expected, zipfile.ZipFile(io.BytesIO(ours)) as found:
        assert _entries(expected) == _entries(found)


def _entries(archive: zipfile.ZipFile) -> list[tuple[str, int, bytes]]:
    return [
        (entry.filename, entry.header_offset, archive.read(entry))
        for entry in archive.infolist()
        if not entry.filename.endswith("serialization_id")
    ]


def test_every_dtype_of_torch_is_either_storable_or_refused_by_stock_too() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    storable = {dtype_from_name(name) for name in NAMES}
    assert len(NAMES) == len(storable)
    for dtype in dtypes - storable:
        with pytest.raises(UsageError) as caught:
            template((2,), dtype)
        assert caught.value.code == "unsupported-tensor"
        if not str(dtype).startswith(("torch.q",)):
            with pytest.raises(KeyError, match="not recognized"):
                torch.save(torch.empty(2, dtype=dtype), io.BytesIO())


@pytest.mark.parametrize("name", NAMES)
def test_a_dtypes_name_leads_back_to_it(name: str) -> None:
    assert name == dtype_name(dtype_from_name(name))


@pytest.mark.parametrize("name", [*REFUSED, "half", "", "Tensor", "nn", "float128", "torch.int8"])
def test_a_name_that_is_no_storable_dtype_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}'") as caught:
        dtype_from_name(name)
    assert caught.value.code == "unsupported-tensor"


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=5).map(tuple),
    name=st.sampled_from(["uint8", "int16", "float32", "complex128"]),
)
def test_a_templates_numbers_agree_for_any_shape(shape: tuple[int, ...], name: str) -> None:
    made = template(shape, dtype_from_name(name))
    assert made.payload_at == len(made.prefix)
    assert made.total_bytes == len(made.prefix) + made.payload_bytes + len(made.suffix)
    assert made.payload_at % 64 == 0 or made.payload_bytes == 0
    payload = bytes(range(256)) * (made.payload_bytes // 256 + 1)
    blob = fill(made, payload[: made.payload_bytes])
    if made.payload_bytes:
        assert made.payload_at + made.payload_bytes + 4 == made.crc_at
        assert blob[made.crc_at - 4 : made.crc_at] == b"PK\x07\x08"
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        assert archive.testzip() is None
        (entry,) = (e for e in archive.infolist() if e.filename.endswith("/data/0"))
        assert zlib.crc32(payload[: made.payload_bytes]) == entry.CRC


class SparseZip(io.RawIOBase):
    """A container whose payload is zeros that are nowhere in memory."""

    def __init__(self, made: ContainerTemplate) -> None:
        self.made, self.at = made, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.made.total_bytes)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        suffix_at = self.made.payload_at + self.made.payload_bytes
        if self.at < self.made.payload_at:
            part = self.made.prefix[self.at :]
        elif self.at < suffix_at:
            part = bytes(min(len(buffer), suffix_at - self.at))
        else:
            part = self.made.suffix[self.at - suffix_at :]
        part = part[: len(buffer)]
        buffer[: len(part)] = part
        self.at += len(part)
        return len(part)


@pytest.mark.parametrize("gib", [4, 5, 1 << 14])
def test_a_template_above_four_gib_costs_no_memory_and_knows_its_crcs(gib: int) -> None:
    """The position of each CRC is checked against the zip module's reading of the directory."""
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made = template((gib, 1 << 28), torch.float32)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 8 << 10
    assert gib << 30 == made.payload_bytes
    suffix_at = made.payload_at + made.payload_bytes
    marked = bytearray(made.suffix)
    struct.pack_into("<I", marked, made.central_crc_at - suffix_at, 0x12345678)
    with zipfile.ZipFile(io.BufferedReader(SparseZip(made._replace(suffix=bytes(marked))))) as zf:
        (entry,) = (e for e in zf.infolist() if e.filename.endswith("/data/0"))
        others = [e for e in zf.infolist() if e is not entry]
        found = (entry.CRC, entry.file_size)
        assert (0x12345678, made.payload_bytes) == found
        for other in others:
            zf.read(other)  # raises BadZipFile on a wrong CRC
        descriptor = struct.pack("<4sIQQ", b"PK\x07\x08", 0, made.payload_bytes, made.payload_bytes)
        assert descriptor == made.suffix[:24]
        assert suffix_at + 4 == made.crc_at
        assert made.payload_at == _data_at(made.prefix, entry.header_offset)


def _data_at(prefix: bytes, header_at: int) -> int:
    name_bytes, extra_bytes = struct.unpack_from("<HH", prefix, header_at + 26)
    return int(header_at + 30 + name_bytes + extra_bytes)


def test_a_default_device_and_deterministic_mode_do_not_reach_the_template() -> None:
    """Deterministic mode fills what torch.empty returns: for 1 TiB that would never end."""
    expected = template.__wrapped__((3, 4), torch.float16)
    torch.set_deterministic_debug_mode("warn")
    try:
        with torch.device("meta"):
            assert expected == template.__wrapped__((3, 4), torch.float16)
            tebibyte = 1 << 40
            assert tebibyte == template.__wrapped__((tebibyte,), torch.uint8).payload_bytes
    finally:
        torch.set_deterministic_debug_mode("default")


def test_a_template_is_made_once_per_shape_and_dtype() -> None:
    first = template((7, 11), torch.float32)
    assert template(tuple(torch.Size((7, 11))), torch.float32) is first
    assert template((7, 11), torch.int32) is not first


def test_an_object_is_serialised_as_stock_dcp_does() -> None:
    value = {"epoch": 3, "names": ["a", "b"], "lr": torch.tensor(0.5)}
    stock = io.BytesIO()
    torch.save(value, stock)
    assert stock.getvalue() == serialise("state", value)


class Unwilling:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("not me")


def _endless() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


@pytest.mark.parametrize(
    "value", [lambda: 0, Unwilling(), threading.Lock(), _endless()], ids=lambda v: type(v).__name__
)
def test_an_object_that_cannot_be_pickled_is_refused_by_key(value: object) -> None:
    with pytest.raises(UsageError, match=r"'optimizer\.hook'") as caught:
        serialise("optimizer.hook", value)
    assert caught.value.code == "unpicklable"
    assert caught.value.__cause__ is not None
