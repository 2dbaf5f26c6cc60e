"""`.metadata`: torch's index of a checkpoint, built from offers and read back without trusting it.

Makes torch's `Metadata` from our columns (offers, assignments, where objects lie), pickles it, and
reads it back. Of data files it knows only the names; it knows nothing of sockets or of how plans
are made. The pickle contains classes of torch but none of milepost's, so stock torch reads it
without milepost.

Sources: torch/distributed/checkpoint/{metadata,default_planner,planner_helpers,filesystem}.py
(2.13) for what is written; torch 2.0-2.12 for what may be read.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import struct
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, cast

import torch
from torch._weights_only_unpickler import _get_user_allowed_globals
from torch.distributed._shard.sharded_tensor import metadata as before_2_3
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from milepost.concurrency.collector import collector_paused
from milepost.dcp_format.columns import ColumnsDraft, columns_of
from milepost.dcp_format.container import dtype_from_name, dtype_name
from milepost.dcp_format.coverage import form_problem
from milepost.errors import CorruptCheckpoint, LoadFailed, SaveFailed, UsageError
from milepost.format.layout import place
from milepost.format.manifest import METADATA_NAME
from milepost.format.opening import opened
from milepost.wire.offers import Box, GlobalMetadata, Kind, pack_plain, unpack_plain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from milepost.wire.offers import Offer

PICKLE_PROTOCOL: Final = 4
"""The protocol that stock torch uses with the Pythons it supports. It is fixed, since an older
Python could not read a checkpoint with a newer Python's default."""

_Described: TypeAlias = dict[str, TensorStorageMetadata | BytesStorageMetadata]


# --- writing ----------------------------------------------------------------------------------


def build_metadata(
    offers: Mapping[int, Offer],
    assigned: Mapping[int, Sequence[int]],
    files: Mapping[int, str],
    objects: Mapping[int, Mapping[int, tuple[int, int]]],
    save_id: str,
    checkpoint_id: str,
) -> Metadata:
    """Return the index of a checkpoint, equivalent to what stock DCP would have written.

    Ranks come in ascending order and items in the order of their offer, as in torch's plans. If two
    ranks were assigned the same replica (both had staged it before there was a plan), it is listed
    once, in the lower rank's file. An empty box that begins where another box begins is left out.
    With a user's planner (`final` and `metadata` in rank 0's offer), its description is taken as it
    is, and only the places are added.

    Args:
        offers: of every rank of the save.
        assigned: by rank, the items of its offer that its file holds; a rank may be absent.
        files: by rank with items, the name of its file, relative to the checkpoint.
        objects: by rank and object item, its offset and length in the rank's file, in bytes. Where
            tensors lie follows from `layout.place`.
        save_id: recorded in `storage_meta`.
        checkpoint_id: recorded in `storage_meta`; stock puts the checkpoint's path there.

    Raises:
        SaveFailed: `key-conflict` or `coverage-overlap` if the items contradict one another,
            `plan-failed` if a file, the place of an object or a described key is missing.
        UsageError: `unsupported-tensor` for a dtype that this torch does not have.
    """
    first = offers[min(offers)] if offers else None
    with collector_paused():
        if first is not None and first.final and first.metadata is not None:
            described, planner_data = _from_global(first.metadata)
            storage_data = _place_final(offers, assigned, files, objects, described)
        else:
            described, storage_data = _describe(offers, assigned, files, objects)
            planner_data = {}
            # As with ChainMap in DefaultSavePlanner, the lowest rank's path wins.
            for rank in sorted(offers, reverse=True):
                planner_data.update(zip(offers[rank].keys, offers[rank].paths, strict=True))
    return Metadata(
        state_dict_metadata=described,
        planner_data=planner_data,
        storage_data=storage_data,
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id),
        version=CURRENT_DCP_VERSION,
    )


def _places(
    rank: int,
    offer: Offer,
    items: Sequence[int],
    files: Mapping[int, str],
    objects: Mapping[int, Mapping[int, tuple[int, int]]],
) -> Iterator[tuple[int, _StorageInfo]]:
    """Yield each assigned item of a rank, ascending, with its place. Raises SaveFailed."""
    if not items:
        return
    file = files.get(rank, "")
    if not file:
        raise SaveFailed(
            "plan-failed", f"rank {rank} was assigned {len(items)} items and reported no file"
        )
    ordered = sorted(items)
    kinds, container_bytes = offer.kinds, offer.container_bytes
    lengths = [container_bytes[item] for item in ordered if kinds[item] != Kind.OBJECT]
    offsets = iter(place(lengths).offsets)
    placed_objects = objects.get(rank, {})
    for item in ordered:
        if kinds[item] != Kind.OBJECT:
            yield item, _StorageInfo(file, next(offsets), container_bytes[item])
        elif item in placed_objects:
            yield item, _StorageInfo(file, *placed_objects[item])
        else:
            raise _no_place(rank, offer.keys[item])


def _no_place(rank: int, key: str) -> SaveFailed:
    return SaveFailed("plan-failed", f"rank {rank} reported no place for the object {key!r}")


class _Sizes(dict[Box, torch.Size]):
    """One torch.Size for each box: equal boxes share it, which halves the pickle."""

    def __missing__(self, box: Box) -> torch.Size:
        size = self[box] = torch.Size(box)
        return size


def _index(key: str, offset: torch.Size, hint: int | None) -> MetadataIndex:
    """Return MetadataIndex(key, offset, hint), with this very offset instead of a copy of it."""
    index = MetadataIndex(key, None, hint)
    object.__setattr__(index, "offset", offset)
    return index


def _describe(
    offers: Mapping[int, Offer],
    assigned: Mapping[int, Sequence[int]],
    files: Mapping[int, str],
    objects: Mapping[int, Mapping[int, tuple[int, int]]],
) -> tuple[_Described, dict[MetadataIndex, _StorageInfo]]:
    """Return what create_default_global_save_plan and FileSystemWriter.finish would make."""
    described: _Described = {}
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    properties: dict[tuple[str, int, int], TensorProperties] = {}
    sizes = _Sizes()
    written: dict[str, dict[torch.Size, ChunkStorageMetadata]] = {}
    for rank in sorted(offers):
        offer = offers[rank]
        for item, info in _places(rank, offer, assigned.get(rank, ()), files, objects):
            key, kind = offer.keys[item], offer.kinds[item]
            entry = described.get(key)
            if kind == Kind.OBJECT:
                if entry is None:
                    described[key] = BytesStorageMetadata()
                elif not isinstance(entry, BytesStorageMetadata):
                    _conflict(rank, key, "an object", "a tensor")
                storage_data.setdefault(MetadataIndex(key), info)
                continue
            size = sizes[offer.global_sizes[item]]
            if entry is None:
                wanted = (offer.dtypes[item], offer.requires_grad[item], offer.pinned[item])
                shared = properties.get(wanted)
                if shared is None:
                    shared = properties[wanted] = _properties(*wanted)
                entry = described[key] = TensorStorageMetadata(shared, size, [])
            elif isinstance(entry, BytesStorageMetadata):
                _conflict(rank, key, "a tensor", "an object")
            elif entry.size != size:
                _conflict(rank, key, f"of size {tuple(size)}", f"of size {tuple(entry.size)}")
            chunks = entry.chunks
            chunk = ChunkStorageMetadata(sizes[offer.offsets[item]], sizes[offer.sizes[item]])
            index = _index(key, chunk.offsets, len(chunks))
            if storage_data.setdefault(index, info) is info:
                chunks.append(chunk)
                continue
            # Rare: the offset is there already. Chunks by offset are kept for each key, so that
            # many of these take linear time.
            by_offset = written.setdefault(key, {})
            by_offset.update((known.offsets, known) for known in chunks[len(by_offset) :])
            known = by_offset[chunk.offsets]
            if known.sizes == chunk.sizes or 0 in chunk.sizes:
                continue  # a lower rank wrote the same box, or this one is empty
            if 0 not in known.sizes:
                raise SaveFailed(
                    "coverage-overlap",
                    f"two shards of {key!r} begin at {tuple(chunk.offsets)} with sizes "
                    f"{tuple(known.sizes)} and {tuple(chunk.sizes)} (rank {rank})",
                )
            # storage_data has one entry for an offset: the full box takes over that of the empty
            # one, with its hint, since the dict keeps its key.
            known.sizes = chunk.sizes
            storage_data[index] = info
    return described, storage_data


def _conflict(rank: int, key: str, here: str, before: str) -> NoReturn:
    raise SaveFailed(
        "key-conflict",
        f"{key!r} is {here} on rank {rank} and {before} on a lower rank",
        "give what differs by rank keys of its own, or pass it as per_rank",
    )


def _properties(dtype: str, requires_grad: int, pinned: int) -> TensorProperties:
    return TensorProperties(
        dtype=dtype_from_name(dtype), requires_grad=bool(requires_grad), pin_memory=bool(pinned)
    )


# --- a user's planner -------------------------------------------------------------------------


def to_global_metadata(metadata: Metadata) -> GlobalMetadata:
    """Return what a user's `create_global_plan` described, as columns that can travel.

    The deprecated properties layout and memory format are dropped: every saved tensor is strided
    and contiguous, and no reader uses them.

    Raises: UsageError (`usage`) for `planner_data` that is not plain data and for entries of other
    classes than torch's own, `unsupported-tensor` for a dtype that cannot be saved.
    """
    try:
        planner_data = pack_plain(metadata.planner_data)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            "usage",
            f"planner_data of the SavePlanner's Metadata cannot travel: {error}",
            "use None, bool, int, float, str, bytes, and lists, tuples and dicts of these",
        ) from error
    kinds, requires_grad, pinned = bytearray(), bytearray(), bytearray()
    dtypes: list[str] = []
    sizes: list[Box] = []
    chunks: list[tuple[tuple[Box, Box], ...]] = []
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            kinds.append(Kind.TENSOR)
            dtypes.append(dtype_name(entry.properties.dtype))
            requires_grad.append(entry.properties.requires_grad)
            pinned.append(entry.properties.pin_memory)
            sizes.append(tuple(entry.size))
            chunks.append(tuple((tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks))
        elif isinstance(entry, BytesStorageMetadata):
            kinds.append(Kind.OBJECT)
            dtypes.append("")
            requires_grad.append(False)
            pinned.append(False)
            sizes.append(())
            chunks.append(())
        else:
            raise UsageError(
                "usage",
                f"the SavePlanner's Metadata describes {key!r} by a {type(entry).__name__}",
                "describe it by a TensorStorageMetadata or a BytesStorageMetadata",
            )
    return GlobalMetadata(
        keys=tuple(metadata.state_dict_metadata),
        kinds=bytes(kinds),
        dtypes=tuple(dtypes),
        requires_grad=bytes(requires_grad),
        pinned=bytes(pinned),
        sizes=tuple(sizes),
        chunks=tuple(chunks),
        planner_data=planner_data,
    )


def _from_global(given: GlobalMetadata) -> tuple[_Described, Any]:
    """Return `state_dict_metadata` and `planner_data` as the user's planner made them."""
    described: _Described = {}
    sizes = _Sizes()
    try:
        columns = zip(
            given.keys, given.kinds, given.dtypes, given.requires_grad, given.pinned, given.sizes,
            given.chunks, strict=True,
        )  # fmt: skip
        for key, kind, dtype, requires_grad, pinned, size, chunks in columns:
            described[key] = (
                BytesStorageMetadata()
                if kind == Kind.OBJECT
                else TensorStorageMetadata(
                    _properties(dtype, requires_grad, pinned),
                    sizes[size],
                    [ChunkStorageMetadata(sizes[offset], sizes[box]) for offset, box in chunks],
                )
            )
        planner_data = unpack_plain(given.planner_data)
    except ValueError as error:
        raise SaveFailed(
            "plan-failed", f"malformed metadata of rank 0's SavePlanner: {error}"
        ) from error
    return described, planner_data


def _place_final(
    offers: Mapping[int, Offer],
    assigned: Mapping[int, Sequence[int]],
    files: Mapping[int, str],
    objects: Mapping[int, Mapping[int, tuple[int, int]]],
    described: _Described,
) -> dict[MetadataIndex, _StorageInfo]:
    """Return `storage_data` for items that a user's planner decided on; hints by its own chunks."""
    hints = {
        key: {chunk.offsets: hint for hint, chunk in enumerate(entry.chunks)}
        for key, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    sizes = _Sizes()
    for rank in sorted(offers):
        offer = offers[rank]
        for item, info in _places(rank, offer, assigned.get(rank, ()), files, objects):
            key = offer.keys[item]
            if key not in described:
                raise SaveFailed(
                    "plan-failed",
                    f"the SavePlanner has rank {rank} write {key!r}, which its Metadata lacks",
                    "describe every item of the global plan in state_dict_metadata",
                )
            if offer.kinds[item] == Kind.OBJECT:
                index = MetadataIndex(key)
            else:
                offset = sizes[offer.offsets[item]]
                index = _index(key, offset, hints.get(key, {}).get(offset))
            storage_data[index] = info
    return storage_data


def pickle_metadata(metadata: Metadata) -> bytes:
    """Return the content of `.metadata`."""
    with collector_paused():
        return pickle.dumps(metadata, protocol=PICKLE_PROTOCOL)


_GAP: Final = 0x7EF9FAF5 << 32
"""Plus its number, it stands for an unknown place. As a pickled int it takes eight bytes, and the
upper ones are in no text, since they are not UTF-8."""
_GAP_PICKLED: Final = re.compile(b"\x8a\x08(....)\xf5\xfa\xf9\x7e", re.DOTALL)
_INT: Final = struct.Struct("<q")
_FRAME: Final = struct.Struct("<cQ")


class IndexDraft:
    """The content of `.metadata` for all saves with the same layouts and files. It has gaps for
    what differs: the places of objects, and the save's name. Describing and pickling a million
        tensors
    takes many seconds; filling the gaps takes one copy.

    When it is filled, it unpickles to what `build_metadata` returns. Raises the same.
    """

    def __init__(
        self,
        offers: Mapping[int, Offer],
        assigned: Mapping[int, Sequence[int]],
        files: Mapping[int, str],
    ) -> None:
        self._objects = [
            (rank, item, offers[rank].keys[item])
            for rank in sorted(offers)
            for item in assigned.get(rank, ())
            if offers[rank].kinds[item] == Kind.OBJECT
        ]
        gaps: dict[int, dict[int, tuple[int, int]]] = {}
        for number, (rank, item, _) in enumerate(self._objects):
            gaps.setdefault(rank, {})[item] = (_GAP + 2 * number, _GAP + 2 * number + 1)
        metadata = build_metadata(offers, assigned, files, gaps, "", "")
        metadata.storage_meta = None
        self._columns = _draft_columns(metadata)
        self._pickled = pickle_metadata(metadata)
        self._gaps = [
            (found.start(1), int.from_bytes(found[1], "little"))
            for found in _GAP_PICKLED.finditer(self._pickled)
        ]

    def fill(
        self,
        objects: Mapping[int, Mapping[int, tuple[int, int]]],
        save_id: str,
        checkpoint_id: str,
    ) -> bytes:
        """Return the index of one save; see `build_metadata` for the arguments."""
        places: list[int] = []
        for rank, item, key in self._objects:
            place_of = objects.get(rank, {}).get(item)
            if place_of is None:
                raise _no_place(rank, key)
            places += place_of
        index = bytearray(self._pickled)
        for at, number in self._gaps:
            _INT.pack_into(index, at, places[number])
        # Replace the pickle's end (one more memoize changes nothing) by code that sets another
        # attribute. Use no references, since these count what was pickled before.
        index[-1:] = pickle.MEMOIZE
        named = io.BytesIO()
        pickler = pickle.Pickler(named, PICKLE_PROTOCOL)
        pickler.fast = True
        pickler.dump({"storage_meta": StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)})
        state = named.getvalue()[_STATE_AT:-1] + pickle.BUILD + pickle.STOP
        return bytes(index + _FRAME.pack(pickle.FRAME, len(state)) + state)

    @property
    def files(self) -> Sequence[str]:
        """The files in the order in which `columns` wants the checksums of their tensors."""
        return () if self._columns is None else self._columns.files

    def columns(
        self,
        objects: Mapping[int, Mapping[int, tuple[int, int, int]]],
        tensors: Sequence[int],
    ) -> bytes:
        """Return the same index as columns, for the manifest. Returns nothing if columns cannot say
        all of it, or if a blob has no checksum: a checkpoint is complete without columns.

        Args:
            objects: offset, length and CRC-32 by rank and object item; may have others, too.
            tensors: the CRC-32 of each tensor's container, ordered by `files` and offset.
        """
        if self._columns is None:
            return b""
        try:
            found = {
                number: objects[rank][item]
                for number in self._columns.objects
                for rank, item, _ in [self._objects[number]]
            }
            return self._columns.fill(found, tensors)
        except (KeyError, ValueError):
            return b""


def _draft_columns(metadata: Metadata) -> ColumnsDraft | None:
    try:
        return ColumnsDraft(columns_of(metadata), _GAP)
    except ValueError:
        # A user's planner may describe items that no rank writes.
        return None


_STATE_AT: Final = 2 + _FRAME.size
"""Where a pickle's content begins: after the protocol and the head of the frame."""


# --- reading ----------------------------------------------------------------------------------


def _memory_format(encoding: object, name: object) -> object:
    """Replace `getattr`, which some Pythons (3.11.0) pickle for a member of an Enum."""
    if encoding is _MEM_FORMAT_ENCODING:
        return _MEM_FORMAT_ENCODING[str(name)]
    if encoding is before_2_3.MEM_FORMAT_ENCODING:
        return before_2_3.MEM_FORMAT_ENCODING[str(name)]
    raise _UnknownName("builtins.getattr")


_METADATA: Final = "torch.distributed.checkpoint.metadata"
_BEFORE_2_3: Final = "torch.distributed._shard.sharded_tensor.metadata"

_ALLOWED: Final[dict[tuple[str, str], object]] = {
    (_METADATA, "Metadata"): Metadata,
    (_METADATA, "TensorStorageMetadata"): TensorStorageMetadata,
    (_METADATA, "BytesStorageMetadata"): BytesStorageMetadata,
    (_METADATA, "ChunkStorageMetadata"): ChunkStorageMetadata,
    (_METADATA, "TensorProperties"): TensorProperties,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MEM_FORMAT_ENCODING,
    (_METADATA, "MetadataIndex"): MetadataIndex,
    (_METADATA, "StorageMeta"): StorageMeta,
    (_BEFORE_2_3, "TensorProperties"): before_2_3.TensorProperties,
    (_BEFORE_2_3, "MEM_FORMAT_ENCODING"): before_2_3.MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "getattr"): _memory_format,
    # storage_meta.checkpoint_id is a path; pure, since the reader may run another system.
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib", "WindowsPath"): pathlib.PureWindowsPath,
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("pathlib._local", "WindowsPath"): pathlib.PureWindowsPath,
}
"""All that `.metadata` may name, besides dtypes. Classes of torch before 2.0 no longer exist."""


class _UnknownName(Exception):
    """The index names something that no index of torch contains."""


class _Unpickler(pickle.Unpickler):
    """An unpickler that only finds the classes of DCP's index."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get((module, name))
        if found is None and module == "torch":
            found = vars(torch).get(name)
            if not isinstance(found, torch.dtype):
                found = None
        if found is None:
            found = _get_user_allowed_globals().get(f"{module}.{name}")  # type: ignore[no-untyped-call]
        if found is None:
            raise _UnknownName(f"{module}.{name}")
        return found


def read_metadata(path: Path, *, allow_pickle: bool = False, data: bytes | None = None) -> Metadata:
    """Read a checkpoint's index. `path` is the checkpoint's directory, its `.metadata`, or one of
    the files that torch writes for each rank if the ranks save independently.

    Runs no code that the file names, unless `allow_pickle` is true. Allows classes that were passed
    to `torch.serialization.add_safe_globals`, too. Any torch since 2.0 may have written the index;
    fields that its version did not have are absent or None.

    data: the bytes of the file, if they were read before.

    Raises:
        LoadFailed: `not-found` if there is no index, `permission` or `io-error` if it cannot be
            read.
        CorruptCheckpoint: it is truncated or malformed, names something that no index contains, or
            points outside the checkpoint.
    """
    is_file = path.name.endswith(METADATA_NAME) and not path.is_dir()
    file = path if is_file else path / METADATA_NAME
    file_bytes = 0
    try:
        with (
            opened(file) if data is None else io.BytesIO(data) as stream,
            collector_paused(),
        ):
            file_bytes = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            unpickler = pickle.Unpickler if allow_pickle else _Unpickler
            metadata = unpickler(stream).load()
        problem = form_problem(metadata)
    except _UnknownName as error:
        named = str(error).rpartition(".")[2]
        raise CorruptCheckpoint(
            "corrupt",
            f"{file} names {error}, which no index of torch contains",
            "it was damaged or made to run code: do not load this checkpoint with stock torch. If "
            f"you trust it, torch.serialization.add_safe_globals([{named}]) allows the class, "
            "load(allow_pickle=True) anything",
        ) from None
    except FileNotFoundError as error:
        raise LoadFailed(
            "not-found",
            f"{file.parent} is not a checkpoint: it has no {METADATA_NAME}",
            "a save that did not complete has none; `milepost list` shows complete checkpoints",
        ) from error
    except OSError as error:
        code = "permission" if isinstance(error, PermissionError) else "io-error"
        raise LoadFailed(code, f"{file} cannot be read: {error.strerror or error}") from error
    # A malformed pickle may fail in any way: its opcodes work on anything that came before.
    except Exception as error:
        raise CorruptCheckpoint(
            "corrupt",
            f"{file} ({file_bytes} bytes) is not a whole index: {type(error).__name__}: {error}",
            "it was truncated or damaged; use another checkpoint",
        ) from error
    if problem:
        raise CorruptCheckpoint("corrupt", f"{file} is not an index: {problem}")
    return cast("Metadata", metadata)
