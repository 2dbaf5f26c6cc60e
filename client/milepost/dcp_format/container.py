"""The bytes that torch.save puts around a payload: made once per shape and dtype, then reused.

Owns what is inside one blob of a `.distcp` file; `format.layout` says where blobs lie in the file,
and nothing here knows of images, ranks or plans. A container is a complete torch.save archive: a
zip whose one large entry, `data/0`, is stored uncompressed and holds the payload. torch itself says
where the payload goes (`skip_data`), and the zip's own directory says where its CRC-32 is. So this
file contains no byte of the form.

Only two things differ from a container that stock torch wrote around the same payload:
`.data/serialization_id`, which torch derives from the CRCs of the records and never checks, and the
CRC fields until they are patched.

Sources: torch/serialization.py, caffe2/serialize/inline_container.cc (2.13); APPNOTE.TXT of the zip
format, 4.3 and 4.5.
"""

from __future__ import annotations

import ctypes
import io
import struct
from functools import lru_cache
from math import prod
from typing import IO, Final, NamedTuple, cast

import torch

from milepost.errors import UsageError
from milepost.format.layout import LARGE_BYTES

TEMPLATES_MAX: Final = 4096
"""How many templates are kept, about 2 KiB each. Making a dropped one again costs 0.1 ms."""


def _storable_dtypes() -> dict[str, torch.dtype]:
    """Return the dtypes of the plain dense tensors that torch saves and loads, by name.

    Leaves out quantised dtypes, whose tensors have scales that a payload lacks, and integers below
    a byte (`int4`, `uint1`), for which torch.save has no storage type. An alias (`half`) is the
    same dtype as its full name (`float16`); the full name is kept.
    """
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    names = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}
    below_a_byte = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    return {
        name: dtype
        for name, dtype in names.items()
        if not name.startswith(("qint", "quint")) and name not in below_a_byte
    }


_DTYPES: Final = _storable_dtypes()

DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
"""The storable dtypes, each with its name without `torch.`: "float32"."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without `torch.`: "float32".

    Raises: UsageError (`unsupported-tensor`) for a dtype whose tensors are not plain payload.
    """
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        raise UsageError(
            "unsupported-tensor",
            f"a tensor of dtype {str(dtype).removeprefix('torch.')} has no plain payload to save",
            "dequantise it, or save its parts (int_repr(), scale) as tensors of their own",
        )
    return name


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of this name. Raises UsageError (`unsupported-tensor`) if there is none."""
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise UsageError(
            "unsupported-tensor",
            f"torch {torch.__version__} has no storable dtype named {name!r}",
            "read the checkpoint with the torch version that wrote it",
        )
    return dtype


class ContainerTemplate(NamedTuple):
    """A container without its payload. Positions are in bytes from the container's first byte.

    prefix, suffix: what is before and after the payload. payload_at == len(prefix). crc_at,
    central_crc_at: where the payload's CRC-32 is, as 4 little-endian bytes: in the data descriptor
    and in the central directory; both are in the suffix and hold 0 until patched. An empty payload
    has no data descriptor: then both are the central one, and the 0 there is right.
    """

    prefix: bytes
    suffix: bytes
    payload_at: int
    payload_bytes: int
    total_bytes: int
    crc_at: int
    central_crc_at: int


class _Recorder:
    """A file for torch.save: keeps what is written, and where `skip_data` skipped the payload."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.end = 0
        self.gaps: list[tuple[int, int, int]] = []
        """(number of parts before it, offset, length) of each range that was skipped."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        part = bytes(data)
        self.parts.append(part)
        self.end += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        # torch only moves ahead from the current position; anything else would need a real file.
        if whence != io.SEEK_CUR or offset < 0:
            raise io.UnsupportedOperation(f"seek({offset}, {whence})")
        self.gaps.append((len(self.parts), self.end, offset))
        self.end += offset
        return self.end

    def tell(self) -> int:
        return self.end

    def flush(self) -> None:
        pass


_STAND_IN: Final = ctypes.c_uint8(0)


def _payload_stand_in(payload_bytes: int) -> torch.Tensor:
    """Return a uint8 tensor of this length, which nobody may read or write.

    A large one only claims its length and points at a single byte. torch.empty would fail for a
    tensor larger than this host's memory, and would fill the memory in torch's deterministic mode.
    """
    if payload_bytes < LARGE_BYTES:
        return torch.empty(payload_bytes, dtype=torch.uint8, device="cpu")
    claimed = (ctypes.c_uint8 * payload_bytes).from_address(ctypes.addressof(_STAND_IN))
    return torch.frombuffer(claimed, dtype=torch.uint8)


def is_possible(size: tuple[int, ...]) -> bool:
    """Tell whether a tensor can have this size: torch counts elements, and steps, in 63 bits."""
    return prod(max(1, length) for length in size) < 1 << 63


@lru_cache(maxsize=TEMPLATES_MAX)
def template(shape: tuple[int, ...], dtype: torch.dtype) -> ContainerTemplate:
    """Return the container of a contiguous CPU tensor of this kind, as stock DCP writes it.

    Allocates no memory for the payload, whatever its size. Takes about 0.1 ms once for each shape
    and dtype, and is cached after that; the result is shared. Any thread.

    Raises: UsageError for a dtype without a plain payload.
    """
    dtype_name(dtype)
    payload_bytes = prod(shape) * dtype.itemsize
    tensor = _payload_stand_in(payload_bytes).view(dtype).view(tuple(shape))
    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(tensor, cast("IO[bytes]", recorder))
    total_bytes = recorder.end
    if payload_bytes:
        ((parts_before, payload_at, skipped_bytes),) = recorder.gaps
        assert skipped_bytes == payload_bytes, (shape, dtype, recorder.gaps)
        prefix = b"".join(recorder.parts[:parts_before])
        suffix = b"".join(recorder.parts[parts_before:])
    else:
        # Nothing is skipped: the empty payload follows its entry's header, like any other.
        assert not recorder.gaps, (shape, dtype, recorder.gaps)
        whole = b"".join(recorder.parts)
        payload_at = _payload_entry(whole, 0).payload_at(whole)
        prefix, suffix = whole[:payload_at], whole[payload_at:]
    assert len(prefix) == payload_at, (shape, dtype)
    suffix_at = payload_at + payload_bytes
    entry = _payload_entry(suffix, suffix_at)
    assert payload_at == entry.payload_at(prefix), (shape, dtype)
    if payload_bytes:
        assert suffix.startswith(_DESCRIPTOR), (shape, dtype)
        crc_at = suffix_at + len(_DESCRIPTOR)
    else:
        crc_at = entry.crc_at
    return ContainerTemplate(
        prefix, suffix, payload_at, payload_bytes, total_bytes, crc_at, entry.crc_at
    )


_PAYLOAD_NAME: Final = b"/data/0"
_DESCRIPTOR: Final = b"PK\x07\x08"
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
"""Signature, lengths of name and extra field."""
_CENTRAL_ENTRY: Final = struct.Struct("<4s24xHHH8xI")
"""Signature, lengths of name, extra field and comment, offset of the local header."""
_CENTRAL_CRC_AT: Final = 16
_END: Final = struct.Struct("<4s6xH4xI2x")
"""Signature, number of entries, offset of the central directory."""
_END64: Final = struct.Struct("<4s28xQ8xQ")
"""The same in zip64."""
_LOCATOR64: Final = struct.Struct("<4s4xQ4x")
"""Signature, offset of the zip64 end record."""


class _PayloadEntry(NamedTuple):
    """The payload's entry in the central directory; offsets are from the container's start."""

    header_at: int
    crc_at: int

    def payload_at(self, prefix: bytes) -> int:
        """Return where the entry's data begin, by its local header, which is in `prefix`."""
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(prefix, self.header_at)
        assert signature == b"PK\x03\x04"
        return self.header_at + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _payload_entry(tail: bytes, tail_at: int) -> _PayloadEntry:
    """Find the payload's entry in the directory of a zip; `tail` is the zip from `tail_at` on.

    torch has just written the archive. So a deviation is a bug (for example with a new torch) and
    not damage: it fails an assertion. The offset of the local header fits into 32 bits, since torch
    writes only a few hundred bytes before the payload.
    """
    end_at = len(tail) - _END.size
    signature, count, directory_at = _END.unpack_from(tail, end_at)
    assert signature == b"PK\x05\x06"
    locator_at = end_at - _LOCATOR64.size
    if tail[locator_at : locator_at + 4] == b"PK\x06\x07":
        _, end64_at = _LOCATOR64.unpack_from(tail, locator_at)
        signature, count, directory_at = _END64.unpack_from(tail, end64_at - tail_at)
        assert signature == b"PK\x06\x06"
    at = int(directory_at) - tail_at
    for _ in range(count):
        signature, name_bytes, extra_bytes, comment_bytes, header_at = _CENTRAL_ENTRY.unpack_from(
            tail, at
        )
        assert signature == b"PK\x01\x02"
        name_at = at + _CENTRAL_ENTRY.size
        if tail[name_at : name_at + name_bytes].endswith(_PAYLOAD_NAME):
            return _PayloadEntry(int(header_at), tail_at + at + _CENTRAL_CRC_AT)
        at = name_at + name_bytes + extra_bytes + comment_bytes
    raise AssertionError("torch.save wrote no entry for the payload")


def serialise(key: str, value: object) -> bytes:
    """Return what stock DCP writes for an object: its torch.save archive.

    Raises: UsageError ("unpicklable"), which names the key and what the pickler refused.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    # A class's own __reduce__ may raise anything. In any case the object cannot be saved.
    except Exception as error:
        raise UsageError(
            "unpicklable",
            f"the value of {key!r}, a {type(value).__name__}, cannot be pickled: "
            f"{type(error).__name__}: {error}",
            "take it out of the state, or save plain data (numbers, strings, lists, dicts) instead",
        ) from error
    return buffer.getvalue()
