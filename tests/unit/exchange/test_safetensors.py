"""The safetensors format: what is written is what its description says, and what is read is checked
before it is believed.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch

from milepost.errors import CorruptCheckpoint, UsageError
from milepost.exchange.safetensors import (
    aligned_first,
    encode_header,
    read_header,
    require_dtypes,
)
from milepost.exchange.source import TensorForm

if TYPE_CHECKING:
    from pathlib import Path

FORMS = {
    "bytes": TensorForm(torch.uint8, (3,)),
    "wide": TensorForm(torch.float64, (2,)),
    "empty": TensorForm(torch.float32, (0, 4)),
    "scalar": TensorForm(torch.bfloat16, ()),
    'odd "\n\\ ключ': TensorForm(torch.float8_e4m3fn, (5,)),
}


def test_a_header_is_a_length_and_json_on_a_multiple_of_eight() -> None:
    data = encode_header(FORMS, {"format": "pt"})
    (length,) = struct.unpack_from("<Q", data)
    assert (len(data), 0) == (8 + length, len(data) % 8)
    header = json.loads(data[8:])
    assert {"format": "pt"} == header.pop("__metadata__")
    assert list(FORMS) == list(header)
    assert {"dtype": "F64", "shape": [2], "data_offsets": [3, 19]} == header["wide"]
    assert {"dtype": "F32", "shape": [0, 4], "data_offsets": [19, 19]} == header["empty"]
    assert {"dtype": "BF16", "shape": [], "data_offsets": [19, 21]} == header["scalar"]


def test_tensors_are_laid_so_that_each_begins_on_a_multiple_of_its_element() -> None:
    ordered = aligned_first(FORMS, FORMS)
    header = json.loads(encode_header({key: FORMS[key] for key in ordered}, {})[8:])
    for key, form in FORMS.items():
        assert 0 == header[key]["data_offsets"][0] % form.dtype.itemsize


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    header = encode_header(FORMS, {"format": "pt", "alias": "wide"})
    path.write_bytes(header + bytes(3 + 16 + 2 + 5))
    found, metadata = read_header(path)
    assert FORMS == {key: stored.form for key, stored in found.items()}
    assert len(header) + 3 == found["wide"].begin
    assert {"format": "pt", "alias": "wide"} == metadata


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.bits8])
def test_a_dtype_that_the_format_lacks_is_refused_by_key(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=f"'w' is {str(dtype)[6:]}, and safetensors has no such"):
        require_dtypes({"v": TensorForm(torch.float32, (1,)), "w": TensorForm(dtype, (1,))})


def test_the_one_name_that_the_format_keeps_for_itself_is_refused() -> None:
    with pytest.raises(UsageError, match="__metadata__"):
        require_dtypes({"__metadata__": TensorForm(torch.float32, (1,))})


def file_of(path: Path, header: Any, payload: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "payload", "text"),
    [
        (b"{", b"", "does not fit"),
        (b"[]", b"", "is no JSON object"),
        (b"{]", b"", "is no JSON"),
        (b'{"a":{},"a":{}}', b"", "a name is in it twice"),
        (b"\xff\xfe", b"", "is no JSON"),
        (b"[" * 5000, b"", "is no JSON"),
        ({"__metadata__": 3}, b"", "is no JSON object"),
        ({"a": entry("F32", [1], 0, 4)}, b"123", "describes"),
        ({"a": entry("F32", [1], 0, 4)}, b"12345", "describes"),
        ({"a": entry("F32", [2], 0, 4)}, b"1234", "and \\[2\\] of F32 have 8"),
        ({"a": entry("F32", [1], 4, 8)}, b"12345678", "'a' leaves a gap"),
        (
            {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)},
            b"123456",
            "'b' overlaps the one before",
        ),
        ({"a": entry("F32", [-1], 0, -4)}, b"", "entry for 'a' is malformed"),
        ({"a": entry("F32", ["1"], 0, 4)}, b"1234", "entry for 'a' is malformed"),
        ({"a": entry("F32", [True], 0, 4)}, b"1234", "entry for 'a' is malformed"),
        ({"a": entry("F32", 3, 0, 4)}, b"1234", "entry for 'a' is malformed"),
        ({"a": entry("F32", [1], 0)}, b"1234", "entry for 'a' is malformed"),
        ({"a": {"dtype": "F32"}}, b"", "entry for 'a' is malformed"),
        ({"a": 3}, b"", "entry for 'a' is malformed"),
    ],
)
def test_a_malformed_file_is_refused_and_says_how(
    tmp_path: Path, header: Any, payload: bytes, text: str
) -> None:
    with pytest.raises(CorruptCheckpoint, match=text):
        read_header(file_of(tmp_path / "m.safetensors", header, payload))


@pytest.mark.parametrize("data", [b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}"])
def test_a_file_that_is_too_short_for_its_header_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="does not fit"):
        read_header(path)


@pytest.mark.parametrize("dtype", ["F4", "F99", 3, None])
def test_a_dtype_of_another_world_is_refused_by_key(tmp_path: Path, dtype: Any) -> None:
    path = file_of(tmp_path / "m.safetensors", {"a": entry(dtype, [2], 0, 1)}, b"1")
    with pytest.raises(UsageError, match="'a' is of the dtype"):
        read_header(path)
