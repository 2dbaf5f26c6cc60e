"""Finds the payload in any `torch.save` archive, whoever wrote it.

For containers that differ from those of `container.template`: of another torch version, of tensors
that are not contiguous, or that are smaller than their storage. Reads an archive's directory
strictly, and its pickle only with torch's `weights_only` unpickler, over storages without memory.
So nothing that an archive names is run, and no archive can make us allocate memory. Damage is an
`ArchiveError`. For a whole archive that is not one tensor over one storage, the answer is None:
torch.load has to read it.

Sources: torch/serialization.py, caffe2/serialize/inline_container.cc (2.4 to 2.13); APPNOTE.TXT of
the zip format, 4.3 to 4.5.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from isal import isal_zlib
from torch._weights_only_unpickler import Unpickler

from milepost.wire.offers import Box

Bytes: TypeAlias = bytes | memoryview

ReadAt: TypeAlias = Callable[[int, int], Bytes]
"""Returns bytes of the archive, by offset and length."""

DIRECTORY_BYTES_MAX: Final = 16 << 20
"""Largest directory that is read. A tensor's archive has seven entries; torch.load may judge an
archive with a hundred thousand."""

PICKLE_BYTES_MAX: Final = 1 << 20

TAIL_BYTES: Final = 1024
"""How much to read at once from the end. The directory of an archive that torch wrote fits."""

PICKLES_KEPT: Final = 4096


class ArchiveError(ValueError):
    """The bytes are not a whole archive; the text says why, in lower case."""


class ArchiveEntry(NamedTuple):
    """One file of an archive, stored as it is. `at`: where its bytes begin."""

    at: int
    length: int
    crc: int


class StoredTensor(NamedTuple):
    """A tensor over one storage; it may be a view of a part."""

    dtype: torch.dtype
    size: Box
    stride: Box
    offset: int
    """Where its first element is in the storage, in elements."""
    payload_at: int
    """Where the storage lies in the archive, in bytes."""
    payload_bytes: int
    crc: int | None
    """CRC-32 of the storage; None: the archive was written without checksums."""


# --- the archive ----------------------------------------------------------------------------------

_END: Final = struct.Struct("<4s4xHHIIH")
"""Signature, entries on this disk and in all, length and offset of the directory, comment length.
The four bytes left out are numbers of disks."""
_LOCATOR64: Final = struct.Struct("<4s4xQ4x")
_END64: Final = struct.Struct("<4s20xQQQQ")
_CENTRAL: Final = struct.Struct("<4s4xHH4xIIIHHH8xI")
"""Signature, flags, method, CRC, lengths as packed and as they were, lengths of name, extra field
and comment, offset of the header."""
_LOCAL: Final = struct.Struct("<4s2xHH16xHH")
"""Signature, flags, method, lengths of name and extra."""
_EXTRA: Final = struct.Struct("<HH")
_U64: Final = struct.Struct("<Q")
_FULL16: Final = 0xFFFF
_FULL32: Final = 0xFFFFFFFF
_STORED: Final = 0
_ENCRYPTED: Final = 1


class _Listed(NamedTuple):
    header_at: int
    length: int
    crc: int


class Archive:
    """A zip archive of stored entries, read by its directory.

    Raises ArchiveError for anything else.
    """

    def __init__(self, read_at: ReadAt, length: int) -> None:
        self._read_at = read_at
        self._length = length
        self._tail_at = max(0, length - TAIL_BYTES)
        self._tail = bytes(read_at(self._tail_at, length - self._tail_at))
        at, nbytes, count = self._find_directory()
        self._directory_at = at
        self._listed = self._list(self._read(at, nbytes), count)

    @property
    def has_crcs(self) -> bool:
        """Whether it was written with checksums (torch's `set_crc32_options`)."""
        return any(entry.crc for entry in self._listed.values())

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return list(self._listed)

    def entry(self, name: str) -> ArchiveEntry:
        """Return where an entry's bytes are, from its local header. Raises ArchiveError."""
        header_at, length, crc = self._listed[name]
        header = self._read(header_at, _LOCAL.size)
        signature, flags, method, name_bytes, extra_bytes = _LOCAL.unpack(header)
        if signature != b"PK\x03\x04" or method != _STORED or flags & _ENCRYPTED:
            raise ArchiveError(f"no header of a stored entry at {header_at}")
        found = bytes(self._read(header_at + _LOCAL.size, name_bytes))
        if found != name.encode():
            raise ArchiveError(f"the entry at {header_at} is {found!r}, not {name!r}")
        at = header_at + _LOCAL.size + name_bytes + extra_bytes
        if at + length > self._directory_at:
            raise ArchiveError(f"the entry {name!r} goes beyond the directory")
        return ArchiveEntry(at, length, crc)

    def read(self, name: str, limit: int) -> bytes:
        """Return a small entry's bytes, compared with its checksum. Raises ArchiveError."""
        at, length, crc = self.entry(name)
        if length > limit:
            raise ArchiveError(f"the entry {name!r} is {length} bytes long")
        data = bytes(self._read(at, length))
        if self.has_crcs and isal_zlib.crc32(data) != crc:
            raise ArchiveError(
                f"CRC-32 of the entry {name!r} is {isal_zlib.crc32(data):08x}, written was "
                f"{crc:08x}"
            )
        return data

    def _read(self, at: int, length: int) -> Bytes:
        if at < 0 or length < 0 or at + length > self._length:
            raise ArchiveError(f"bytes {at} to {at + length} lie beyond its end")
        if at >= self._tail_at:
            return self._tail[at - self._tail_at : at - self._tail_at + length]
        return self._read_at(at, length)

    def _find_directory(self) -> tuple[int, int, int]:
        """Return offset and length of the directory, and the number of entries."""
        end_at = self._length - _END.size
        signature, here, count, nbytes, at, comment = _END.unpack(self._read(end_at, _END.size))
        if signature != b"PK\x05\x06" or comment:
            raise ArchiveError("no directory at its end")
        directory_end = end_at
        if _FULL16 in (here, count) or _FULL32 in (nbytes, at):
            locator_at = end_at - _LOCATOR64.size
            signature, end64_at = _LOCATOR64.unpack(self._read(locator_at, _LOCATOR64.size))
            if signature != b"PK\x06\x07":
                raise ArchiveError("no zip64 locator where there must be one")
            fields = _END64.unpack(self._read(end64_at, _END64.size))
            signature, here, count, nbytes, at = fields
            if signature != b"PK\x06\x06":
                raise ArchiveError("no zip64 record where its locator points")
            directory_end = end64_at
        if here != count or at + nbytes > directory_end:
            raise ArchiveError("its directory lies beyond its end")
        if nbytes > DIRECTORY_BYTES_MAX:
            raise ArchiveError(f"its directory is {nbytes} bytes long")
        return at, nbytes, count

    def _list(self, directory: Bytes, count: int) -> dict[str, _Listed]:
        listed: dict[str, _Listed] = {}
        at = 0
        for _ in range(count):
            if at + _CENTRAL.size > len(directory):
                raise ArchiveError("its directory ends early")
            (
                signature, flags, method, crc, packed, length, name_bytes, extra_bytes,
                comment_bytes, header_at,
            ) = _CENTRAL.unpack_from(directory, at)  # fmt: skip
            if signature != b"PK\x01\x02":
                raise ArchiveError("its directory has no entry where there must be one")
            name_at = at + _CENTRAL.size
            extra_at = name_at + name_bytes
            at = extra_at + extra_bytes + comment_bytes
            if at > len(directory):
                raise ArchiveError("its directory ends early")
            if _FULL32 in (packed, length, header_at):
                extra = bytes(directory[extra_at : extra_at + extra_bytes])
                length, packed, header_at = _zip64(extra, length, packed, header_at)
            try:
                name = bytes(directory[name_at:extra_at]).decode()
            except UnicodeDecodeError as error:
                raise ArchiveError("its directory has a name that is no text") from error
            if method != _STORED or flags & _ENCRYPTED or packed != length or name in listed:
                raise ArchiveError(f"the entry {name!r} is not one that torch stores")
            listed[name] = _Listed(header_at, length, crc)
        return listed


def _zip64(extra: bytes, *fields: int) -> list[int]:
    """Return the fields. Fields that are full are taken from the zip64 extra field."""
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, nbytes = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == 1:
            values = [value for (value,) in _U64.iter_unpack(extra[at : at + nbytes // 8 * 8])]
            if sum(field == _FULL32 for field in fields) <= len(values):
                found = iter(values)
                return [next(found) if field == _FULL32 else field for field in fields]
        at += nbytes
    raise ArchiveError("its directory lacks lengths above 4 GiB")


# --- the tensor in it -----------------------------------------------------------------------------


def find_tensor(read_at: ReadAt, length: int) -> StoredTensor | None:
    """Return where the bytes of an archive's tensor are; None if torch.load has to read it.

    Reads the ends of the archive and the pickle, but not the payload; the caller compares its
    checksum. Raises ArchiveError.
    """
    archive = Archive(read_at, length)
    names = archive.names()
    heads = [name.removesuffix("/data.pkl") for name in names if name.endswith("/data.pkl")]
    if len(heads) != 1:
        raise ArchiveError("it holds no data.pkl" if not heads else "it holds several data.pkl")
    (head,) = heads
    payloads = [name for name in names if name.startswith(f"{head}/data/")]
    if payloads != [f"{head}/data/0"]:
        return None
    if f"{head}/byteorder" in names:
        order = archive.read(f"{head}/byteorder", 16).decode("ascii", "replace")
        if order != sys.byteorder:
            return None
    pickled = archive.entry(f"{head}/data.pkl")
    if pickled.length > PICKLE_BYTES_MAX:
        return None
    described = _describe(archive.read(f"{head}/data.pkl", PICKLE_BYTES_MAX))
    if described is None:
        return None
    dtype, size, stride, offset, storage_bytes = described
    payload = archive.entry(f"{head}/data/0")
    if payload.length != storage_bytes:
        raise ArchiveError(
            f"its payload is {payload.length} bytes long where its pickle says {storage_bytes}"
        )
    crc = payload.crc if archive.has_crcs else None
    return StoredTensor(dtype, size, stride, offset, payload.at, payload.length, crc)


_UNTYPED: Final[Any] = torch.UntypedStorage
_TYPED: Final[Any] = torch.storage.TypedStorage


@lru_cache(maxsize=PICKLES_KEPT)
def _describe(pickled: bytes) -> tuple[torch.dtype, Box, Box, int, int] | None:
    """Return dtype, size, stride and offset of a pickled tensor, and the bytes of its storage."""
    storages: list[int] = []

    def storage_without_memory(saved: Any) -> Any:
        _, kind, name, _, count = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        if name != "0" or not 0 <= count < 1 << 62:
            raise ValueError("not the storage of one tensor")
        storages.append(count * dtype.itemsize)
        storage = _UNTYPED(count * dtype.itemsize, device="meta")
        return _TYPED(wrap_storage=storage, dtype=dtype, _internal=True)

    try:
        unpickler: Any = Unpickler(io.BytesIO(pickled), encoding="utf-8")
        unpickler.persistent_load = storage_without_memory
        tensor = unpickler.load()
        if (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter)
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.is_quantized
            or len(set(storages)) != 1
        ):
            return None
        size, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
        last = offset + sum((n - 1) * by for n, by in zip(size, stride, strict=True))
        if 0 not in size and (last + 1) * tensor.itemsize > storages[0]:
            return None
        return tensor.dtype, size, stride, int(offset), storages[0]
    # A pickle may make torch's unpickler raise anything. torch.load will say what it is.
    except Exception:
        return None


def storage_order(size: Box, stride: Box) -> tuple[int, ...] | None:
    """Return a tensor's dimensions in the order of its elements in memory. None if the elements
    have gaps or overlap.
    """
    order = sorted(range(len(size)), key=lambda dim: (-stride[dim], dim))
    expected = 1
    for dim in reversed(order):
        if size[dim] != 1 and stride[dim] != expected:
            return None
        expected *= size[dim]
    return tuple(order)


def check_archive(data: Bytes) -> bool:
    """Compare all entries of an archive in memory with their checksums; False if it has none.

    Raises ArchiveError.
    """
    archive = Archive(lambda at, length: data[at : at + length], len(data))
    if not archive.has_crcs:
        return False
    for name in archive.names():
        at, length, crc = archive.entry(name)
        found = isal_zlib.crc32(data[at : at + length])
        if found != crc:
            raise ArchiveError(f"CRC-32 of {name} is {found:08x}, written was {crc:08x}")
    return True


def looks_like_an_archive(data: Bytes) -> bool:
    """Whether bytes have the marks of an archive at both ends."""
    return bytes(data[:4]) == b"PK\x03\x04" or bytes(data[-_END.size :][:4]) == b"PK\x05\x06"
