"""The safetensors format: an 8-byte length, a JSON header, and the tensors' bytes.

This module does not use the `safetensors` package: the format is only these few lines, the
package's writer needs all tensors of a file in memory, and a checkpoint tool should add no
dependency to a trainer's environment. The tests read this module's files with that package, and the
other way round. Source: https://github.com/huggingface/safetensors, README.
"""

from __future__ import annotations

import json
import struct
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from milepost.dcp_format.container import is_possible
from milepost.errors import CorruptCheckpoint, UsageError
from milepost.exchange.source import TensorForm

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from milepost.wire.offers import Box

HEADER_BYTES_MAX: Final = 100_000_000
"""Largest header that the reference implementation reads."""

METADATA_KEY: Final = "__metadata__"

_NAMES: Final = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}

_LENGTH: Final = struct.Struct("<Q")


class Stored(NamedTuple):
    """A tensor in a file: `begin` is from the file's first byte."""

    form: TensorForm
    begin: int


def require_dtypes(forms: Mapping[str, TensorForm]) -> None:
    """Raise UsageError (`unsupported-tensor`) if the format lacks a tensor's dtype or name; names
    these tensors.
    """
    for key, form in forms.items():
        if form.dtype not in _NAMES:
            raise UsageError(
                "unsupported-tensor",
                f"{key!r} is {form.name}, and safetensors has no such dtype",
                "export --to torch, or convert the tensor before it is saved",
            )
        if key == METADATA_KEY:
            raise UsageError(
                "unsupported-tensor",
                f"a tensor called {METADATA_KEY!r} cannot be stored in safetensors",
                "export --to torch, or save it under another name",
            )


def encode_header(forms: Mapping[str, TensorForm], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a file. The tensors follow in the order of `forms`, without gaps."""
    header: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    at = 0
    for key, form in forms.items():
        header[key] = {
            "dtype": _NAMES[form.dtype],
            "shape": list(form.size),
            "data_offsets": [at, at + form.bytes],
        }
        at += form.bytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # Pad it, so that the elements begin on a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def aligned_first(keys: Iterable[str], forms: Mapping[str, TensorForm]) -> list[str]:
    """Return the keys in an order in which every tensor begins on a multiple of its element."""
    return sorted(keys, key=lambda key: -forms[key].dtype.itemsize)


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return a file's tensors in the order of their bytes, and its metadata.

    Raises: CorruptCheckpoint if the file is not whole or not a safetensors file; OSError.
    """
    with path.open("rb") as file:
        file_bytes = file.seek(0, 2)
        file.seek(0)
        start = file.read(_LENGTH.size)
        length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
        if not 2 <= length <= min(HEADER_BYTES_MAX, file_bytes - _LENGTH.size):
            raise _malformed(path, f"its header of {length} bytes does not fit {file_bytes}")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _malformed(path, "its header is no JSON object")
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict):
        raise _malformed(path, f"its {METADATA_KEY} is no JSON object")
    base = _LENGTH.size + length
    found = {key: _stored(path, key, entry, base) for key, entry in header.items()}
    found = dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].form.bytes)))
    end = base
    for key, stored in found.items():
        if stored.begin != end:
            text_of = "overlaps the one before" if stored.begin < end else "leaves a gap before it"
            raise _malformed(path, f"{key!r} {text_of}")
        end += stored.form.bytes
    if end != file_bytes:
        raise _malformed(path, f"it is {file_bytes} bytes long, its header describes {end}")
    return found, {str(key): str(value) for key, value in metadata.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in it twice")
    return found


def _stored(path: Path, key: str, entry: Any, base: int) -> Stored:
    """Read one entry of a header."""
    try:
        name, size, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        is_sound = all(type(n) is int and n >= 0 for n in (*size, begin, end)) and is_possible(size)
    except (TypeError, KeyError, ValueError) as error:
        raise _malformed(path, f"its entry for {key!r} is malformed") from error
    if not is_sound:
        raise _malformed(path, f"its entry for {key!r} is malformed")
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise UsageError(
            "unsupported-tensor",
            f"{path}: {key!r} is of the dtype {name}, which this torch does not have",
        )
    sizes: Box = tuple(size)
    if end - begin != prod(sizes) * dtype.itemsize:
        text = f"{key!r} has {end - begin} bytes, and {list(sizes)} of {name} have "
        raise _malformed(path, f"{text}{prod(sizes) * dtype.itemsize}")
    return Stored(TensorForm(dtype, sizes), base + begin)


def _malformed(path: Path, text: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        "corrupt", f"{path} is not a whole safetensors file: {text}", "get the file again"
    )
