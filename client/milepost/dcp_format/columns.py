"""The content of `.metadata` as columns, which are quick to read and to search for boxes.

torch's index is a pickle with four objects for each stored chunk; reading a million chunks takes a
minute. The manifest holds the same as columns of numbers. They are made from the same `Metadata`
and name the checksum of its pickle. `.metadata` decides: if there are no columns, or if they name
another checksum, columns are made from it. `as_metadata` returns torch's form, and makes its parts
when they are asked for.

Sources: torch/distributed/checkpoint/metadata.py and filesystem.py (2.13).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any, Final, TypeAlias, cast, overload

import msgspec
import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from milepost.concurrency.collector import collector_paused
from milepost.dcp_format.container import dtype_from_name, dtype_name
from milepost.errors import CorruptCheckpoint, MilepostError
from milepost.wire.offers import Box, pack_plain, unpack_plain

Ints: TypeAlias = Sequence[int]
"""A column: a list, or the packed numbers of a manifest."""

NO_PLACE: Final = -1
"""Stands for the file of a chunk that no file holds."""

_WIDTHS: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """A column of non-negative numbers, little-endian, each of `width` bytes."""

    width: int
    data: bytes


def pack_ints(values: Ints) -> _Packed:
    """Return a packed column, with the smallest width that holds its numbers."""
    top = max(values, default=0)
    width = next(width for width in _WIDTHS if top < 1 << (8 * width))
    packed = array(_WIDTHS[width], values)
    if sys.byteorder == "big":
        packed.byteswap()
    return _Packed(width, packed.tobytes())


def unpack_ints(packed: _Packed) -> Ints:
    """Return the numbers of a column. Little-endian machines read them in place, without a copy.
    Raises ValueError.
    """
    code = _WIDTHS.get(packed.width)
    if code is None or len(packed.data) % packed.width:
        raise ValueError(f"a column of {len(packed.data)} bytes has numbers of {packed.width}")
    if sys.byteorder == "little":
        return cast("Ints", memoryview(packed.data).cast(cast("Any", code)))
    numbers = array(code, packed.data)
    numbers.byteswap()
    return numbers


class _Form(msgspec.Struct, frozen=True):
    """`index` of a manifest. The first six columns have an entry for each key, the others have one
    for each chunk, in the order of the keys. An object counts as one chunk without dimensions.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    """Distinct names; "" stands for objects."""
    dtypes_of: _Packed
    flags: bytes
    """1: requires a gradient; 2: was pinned."""
    dims: _Packed
    counts: _Packed
    """Number of chunks."""
    sizes: _Packed
    """Sizes of whole tensors, one after another."""
    chunk_offsets: _Packed
    chunk_sizes: _Packed
    files: tuple[str, ...]
    files_of: _Packed
    ats: _Packed
    lengths: _Packed
    crcs: _Packed
    """CRC-32 of each container."""
    planner_data: bytes
    """By `pack_plain`."""


_SAME_IN_ALL_SAVES: Final = frozenset(_Form.__struct_fields__) - {"ats", "lengths", "crcs"}
"""The columns that are the same in all saves with the same layouts and files."""


class Columns:
    """The columns of an index.

    Attributes:
        keys, dtypes, flags, sizes: for each key; dtype "" means an object.
        counts, firsts: for each key, the number of its chunks, and the first of them.
        files: names of files.
        files_of, ats, lengths: for each chunk, where its container lies.
        crcs: for each chunk, if they are known.
        planner_data: as in torch's index.
    """

    def __init__(
        self,
        keys: Sequence[str],
        dtypes: Sequence[str],
        flags: bytes,
        sizes: Sequence[Box],
        counts: Ints,
        chunk_offsets: Ints,
        chunk_sizes: Ints,
        files: Sequence[str],
        files_of: Ints,
        ats: Ints,
        lengths: Ints,
        crcs: Ints | None,
        planner_data: Any,
    ) -> None:
        """Raises ValueError if the columns do not agree."""
        self.keys = keys
        self.dtypes = dtypes
        self.flags = flags
        self.sizes = sizes
        self.counts = counts
        self.chunk_offsets = chunk_offsets
        self.chunk_sizes = chunk_sizes
        self.files = files
        self.files_of = files_of
        self.ats = ats
        self.lengths = lengths
        self.crcs = crcs
        self.planner_data = planner_data
        dims = list(map(len, sizes))
        chunks = sum(counts)
        numbers = sum(count * dim for count, dim in zip(counts, dims, strict=True))
        if (
            {len(column) for column in (keys, dtypes, flags, sizes, counts)} != {len(keys)}
            or {len(files_of), len(ats), len(lengths)} | ({chunks} if crcs is None else {len(crcs)})
            != {chunks}
            or {len(chunk_offsets), len(chunk_sizes)} != {numbers}
            or max(files_of, default=-1) >= len(files)
        ):
            raise ValueError("its columns do not agree")
        for file in files:
            path = PurePosixPath(file)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ValueError(f"it names the file {file!r}, outside the checkpoint")
        self.firsts = [0, *accumulate(counts)]
        self._flat_at = [0, *accumulate(n * dim for n, dim in zip(counts, dims, strict=True))]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each key."""
        return {key: number for number, key in enumerate(self.keys)}

    def boxes(self, number: int) -> tuple[list[Ints], list[Ints]]:
        """Return offsets and sizes of a key's chunks, by dimension."""
        low, high = self._flat_at[number], self._flat_at[number + 1]
        dims = len(self.sizes[number])
        return (
            [self.chunk_offsets[low + dim : high : dims] for dim in range(dims)],
            [self.chunk_sizes[low + dim : high : dims] for dim in range(dims)],
        )

    def bounds(self, number: int) -> tuple[Ints, Ints]:
        """Return offsets and sizes of a key's chunks, one chunk after another."""
        low, high = self._flat_at[number], self._flat_at[number + 1]
        return self.chunk_offsets[low:high], self.chunk_sizes[low:high]

    def is_object(self, number: int) -> bool:
        """Whether a key is the key of an object."""
        return not self.dtypes[number]


# --- torch's form ---------------------------------------------------------------------------------


def columns_of(metadata: Metadata) -> Columns:
    """Return the columns of torch's index. Chunks keep their order; a chunk that no file holds has
    `NO_PLACE` as its file.
    """
    with collector_paused():
        return _columns_of(metadata)


def _columns_of(metadata: Metadata) -> Columns:
    places: dict[tuple[str, object], _StorageInfo] = {
        (index.fqn, index.offset): info for index, info in metadata.storage_data.items()
    }
    files: dict[str, int] = {}
    keys, dtypes, sizes, flags = [], [], list[Box](), bytearray()
    counts, chunk_offsets, chunk_sizes = array("Q"), array("Q"), array("Q")
    files_of, ats, lengths = array("q"), array("Q"), array("Q")

    def put_place(info: _StorageInfo | None) -> None:
        if info is None:
            files_of.append(NO_PLACE)
            ats.append(0)
            lengths.append(0)
            return
        files_of.append(files.setdefault(str(info.relative_path), len(files)))
        ats.append(info.offset)
        lengths.append(info.length)

    for key, entry in metadata.state_dict_metadata.items():
        keys.append(key)
        if isinstance(entry, BytesStorageMetadata):
            dtypes.append("")
            sizes.append(())
            flags.append(0)
            counts.append(1)
            put_place(places.get((key, None)) or places.get((key, ())))
            continue
        properties, chunks = entry.properties, entry.chunks
        dtypes.append(_name(properties.dtype))
        sizes.append(tuple(entry.size))
        flags.append(bool(properties.requires_grad) | bool(properties.pin_memory) << 1)
        counts.append(len(chunks))
        for chunk in chunks:
            chunk_offsets.extend(chunk.offsets)
            chunk_sizes.extend(chunk.sizes)
            info = places.get((key, chunk.offsets))
            if info is None and len(chunks) == 1:
                # A whole tensor may have been stored without an offset.
                info = places.get((key, None))
            put_place(info)
    return Columns(
        keys, dtypes, bytes(flags), sizes, counts, chunk_offsets, chunk_sizes, list(files),
        files_of, ats, lengths, None, getattr(metadata, "planner_data", None),
    )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    try:
        return dtype_name(dtype)
    except MilepostError:
        # milepost does not store this dtype, but a reader can still name it.
        return str(dtype)


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name in `Columns.dtypes`. Raises UsageError if there is none."""
    if name.startswith("torch."):
        found = getattr(torch, name.removeprefix("torch."), None)
        if isinstance(found, torch.dtype):
            return found
    return dtype_from_name(name)


# --- packed ---------------------------------------------------------------------------------------


def pack_columns(columns: Columns) -> bytes:
    """Return the columns in the manifest's form.

    Raises ValueError if columns cannot say all of the index: a chunk has no place or no checksum,
        or
    `planner_data` is not plain data.
    """
    if columns.crcs is None:
        raise ValueError("there are no checksums")
    return msgspec.msgpack.encode(_form_of(columns))


def _form_of(columns: Columns) -> _Form:
    if NO_PLACE in columns.files_of:
        raise ValueError("a chunk has no place")
    names = list(dict.fromkeys(columns.dtypes))
    numbers = {name: number for number, name in enumerate(names)}
    try:
        plain = columns.planner_data
        planner_data = pack_plain(dict(plain) if isinstance(plain, _PackedDict) else plain)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"planner_data is not plain data: {error}") from error
    return _Form(
        keys=tuple(columns.keys),
        dtypes=tuple(names),
        dtypes_of=pack_ints([numbers[name] for name in columns.dtypes]),
        flags=columns.flags,
        dims=pack_ints(list(map(len, columns.sizes))),
        counts=pack_ints(columns.counts),
        sizes=pack_ints([length for size in columns.sizes for length in size]),
        chunk_offsets=pack_ints(columns.chunk_offsets),
        chunk_sizes=pack_ints(columns.chunk_sizes),
        files=tuple(columns.files),
        files_of=pack_ints(columns.files_of),
        ats=pack_ints(columns.ats),
        lengths=pack_ints(columns.lengths),
        crcs=pack_ints(columns.crcs or ()),
        planner_data=planner_data,
    )


def unpack_columns(data: bytes) -> Columns:
    """Read columns back. Raises CorruptCheckpoint."""
    try:
        with collector_paused():
            return _unpack(msgspec.msgpack.decode(data, type=_Form))
    except (ValueError, TypeError, IndexError, msgspec.DecodeError) as error:
        raise CorruptCheckpoint("corrupt", f"malformed index in the manifest: {error}") from error


def _unpack(form: _Form) -> Columns:
    dims, flat = unpack_ints(form.dims), unpack_ints(form.sizes)
    if sum(dims) != len(flat):
        raise ValueError("its sizes do not agree")
    ends = list(accumulate(dims))
    numbers = list(flat)
    return Columns(
        keys=form.keys,
        dtypes=[form.dtypes[number] for number in unpack_ints(form.dtypes_of)],
        flags=form.flags,
        sizes=[tuple(numbers[end - dim : end]) for end, dim in zip(ends, dims, strict=True)],
        counts=unpack_ints(form.counts),
        chunk_offsets=unpack_ints(form.chunk_offsets),
        chunk_sizes=unpack_ints(form.chunk_sizes),
        files=form.files,
        files_of=unpack_ints(form.files_of),
        ats=unpack_ints(form.ats),
        lengths=unpack_ints(form.lengths),
        crcs=unpack_ints(form.crcs),
        planner_data=_planner_data(form.planner_data),
    )


class _PackedDict(Mapping[Any, Any]):
    """A dict as `pack_plain` packs it, unpacked when it is first asked for: few loads ask for the
    paths of keys. Raises ValueError then, if it is malformed.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data

    @cached_property
    def _unpacked(self) -> dict[Any, Any]:
        found: dict[Any, Any] = unpack_plain(self._data)
        return found

    def __getitem__(self, key: Any) -> Any:
        return self._unpacked[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._unpacked)

    def __len__(self) -> int:
        return len(self._unpacked)

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        return dict, (self._unpacked,)


def _planner_data(packed: bytes) -> Any:
    """Return what was packed, a dict in its packed form."""
    # msgpack's marks of a map: with its length in the mark itself, or behind it.
    is_dict = packed[:1] in (b"\xde", b"\xdf") or (packed[:1] > b"\x7f" and packed[:1] < b"\x90")
    return _PackedDict(packed) if is_dict else unpack_plain(packed)


class ColumnsDraft:
    """Columns for all saves with the same layouts and files. Checksums, and the places of objects,
    are filled in for each save.

    Args:
        columns: of an index in which a number stands for each object's offset: `first_gap` plus
            twice the object's number.

    Raises ValueError for columns that cannot be packed; see `pack_columns`.
    """

    def __init__(self, columns: Columns, first_gap: int) -> None:
        self._columns = columns
        self._objects = {
            (at - first_gap) // 2: chunk for chunk, at in enumerate(columns.ats) if at >= first_gap
        }
        self.objects = self._objects.keys()
        """Numbers of the objects."""
        self.files = columns.files
        of_objects = set(self._objects.values())
        ranks = [each for each in range(len(columns.files_of)) if each not in of_objects]
        # A file's number and an offset in it, below 2 ** 48, are one number to sort by.
        places = [columns.files_of[each] << 48 | columns.ats[each] for each in ranks]
        self._in_files = [ranks[each] for each in torch.tensor(places).argsort().tolist()]
        """Chunks of tensors, ordered by file and by place in the file."""
        form = msgspec.structs.asdict(_form_of(columns))
        self._form = {name: form[name] for name in _SAME_IN_ALL_SAVES}

    def fill(
        self,
        objects: Mapping[int, tuple[int, int, int]],
        tensors: Sequence[int],
    ) -> bytes:
        """Return the columns of one save, in the manifest's form.

        Args:
            objects: offset, length and CRC of each object, by its number.
            tensors: the CRC of each tensor's container, ordered by file (as in `columns.files`) and
                by offset.

        Raises ValueError if any of these are missing.
        """
        columns = self._columns
        if len(tensors) != len(self._in_files) or objects.keys() != self._objects.keys():
            raise ValueError("not every blob of the index has a checksum")
        crcs = array("I", bytes(4 * len(columns.ats)))
        for chunk, crc in zip(self._in_files, tensors, strict=True):
            crcs[chunk] = crc
        ats, lengths = array("Q", columns.ats), array("Q", columns.lengths)
        for number, (at, length, crc) in objects.items():
            chunk = self._objects[number]
            ats[chunk], lengths[chunk], crcs[chunk] = at, length, crc
        form = _Form(
            **self._form, ats=pack_ints(ats), lengths=pack_ints(lengths), crcs=pack_ints(crcs)
        )
        return msgspec.msgpack.encode(form)


# --- back to torch's form -------------------------------------------------------------------------


class _Chunks(Sequence[ChunkStorageMetadata]):
    """The chunks of a key. Each is made when it is asked for."""

    def __init__(self, columns: Columns, number: int) -> None:
        self._columns = columns
        self._number = number

    def __len__(self) -> int:
        return self._columns.counts[self._number]

    @overload
    def __getitem__(self, at: int) -> ChunkStorageMetadata: ...
    @overload
    def __getitem__(self, at: slice) -> list[ChunkStorageMetadata]: ...
    def __getitem__(self, at: int | slice) -> ChunkStorageMetadata | list[ChunkStorageMetadata]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        offsets, sizes = self._boxes
        # A scalar's chunk has no dimension that would say that there is no second one.
        chunk = range(len(self))[at]
        return ChunkStorageMetadata(
            torch.Size([column[chunk] for column in offsets]),
            torch.Size([column[chunk] for column in sizes]),
        )

    @cached_property
    def _boxes(self) -> tuple[list[Ints], list[Ints]]:
        return self._columns.boxes(self._number)

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[ChunkStorageMetadata]]]:
        return list, (list(self),)

    def __eq__(self, other: object) -> bool:
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]


class _Storage(Mapping[MetadataIndex, _StorageInfo]):
    """torch's `storage_data`; each entry is made when it is asked for."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._by_offset: dict[str, dict[Box | None, int]] = {}

    def __len__(self) -> int:
        return len(self._columns.files_of)

    def __iter__(self) -> Iterator[MetadataIndex]:
        columns = self._columns
        for number, key in enumerate(columns.keys):
            if columns.is_object(number):
                yield MetadataIndex(key)
                continue
            for hint, chunk in enumerate(_Chunks(columns, number)):
                yield MetadataIndex(key, chunk.offsets, hint)

    def __getitem__(self, index: MetadataIndex) -> _StorageInfo:
        found = self._by_offset.get(index.fqn)
        if found is None:
            found = self._by_offset[index.fqn] = self._chunks_by_offset(index.fqn)
        offset = None if index.offset is None else tuple(index.offset)
        chunk = found.get(offset)
        if chunk is None:
            raise KeyError(index)
        columns = self._columns
        file = columns.files[columns.files_of[chunk]]
        return _StorageInfo(file, columns.ats[chunk], columns.lengths[chunk])

    def _chunks_by_offset(self, key: str) -> dict[Box | None, int]:
        number = self._columns.numbers[key]
        first = self._columns.firsts[number]
        if self._columns.is_object(number):
            return {None: first}
        return {
            tuple(chunk.offsets): first + at
            for at, chunk in enumerate(_Chunks(self._columns, number))
        }

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[MetadataIndex, _StorageInfo]]]:
        return dict, (dict(self),)


def as_metadata(columns: Columns) -> Metadata:
    """Return torch's form of an index. Makes its chunks and places when they are asked for, and
    leaves out `storage_meta`. Raises UsageError for a dtype that this torch does not have.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    known: dict[tuple[str, int], TensorProperties] = {}
    entries: Iterable[tuple[str, str, int, Box]] = zip(
        columns.keys, columns.dtypes, columns.flags, columns.sizes, strict=True
    )
    with collector_paused():
        for number, (key, dtype, flags, size) in enumerate(entries):
            if not dtype:
                described[key] = BytesStorageMetadata()
                continue
            properties = known.get((dtype, flags))
            if properties is None:
                properties = known[dtype, flags] = TensorProperties(
                    dtype=dtype_named(dtype),
                    requires_grad=bool(flags & 1),
                    pin_memory=bool(flags & 2),
                )
            chunks: Any = _Chunks(columns, number)
            described[key] = TensorStorageMetadata(properties, torch.Size(size), chunks)
    storage_data: Any = _Storage(columns)
    return Metadata(
        state_dict_metadata=described,
        planner_data=columns.planner_data,
        storage_data=storage_data,
        version=CURRENT_DCP_VERSION,
    )
