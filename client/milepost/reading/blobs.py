"""Reads a checkpoint's blobs: by `fetch`, or by torch's own reader if only that one can.

Other modules decide what is wanted and where it goes: a `BlobReader` gets keys and memory. It is
made once for each load, and all ranks of the group call the same methods in the same order.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from milepost.errors import CorruptCheckpoint, listed
from milepost.fetching.checksums import KnownChecksums
from milepost.fetching.fetch import fetch
from milepost.fetching.index import CheckpointIndex, Destination
from milepost.fetching.neighbours import Neighbours
from milepost.fetching.overlaps import apart
from milepost.fetching.requests import Fetched, ObjectRead, TensorRead

log = logging.getLogger("milepost")


class BlobReader(Protocol):
    """Reads what is wanted of one checkpoint."""

    def expect(self, keys: Sequence[str], destinations: Sequence[Destination]) -> None:
        """Be told all that will be asked for, before any rank asks for anything."""
        ...

    def objects(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Return the serialised objects under these keys."""
        ...

    def fill(self, destinations: Sequence[Destination]) -> None:
        """Fill memory with elements of tensors. Converts dtypes as `Tensor.copy_` does."""
        ...


class FetchReader:
    """Reads by `fetch`, which checks what it reads.

    Args:
        checkpoint: its directory.
        index: the result of `read_index` for it.
        is_checked: whether to compare checksums.
        neighbours: the ranks with which it shares reads.

    Raises CorruptCheckpoint for damage. It names files and keys, and the tensors that were written
    to before the damage was found.
    """

    def __init__(
        self,
        checkpoint: Path,
        index: CheckpointIndex,
        *,
        is_checked: bool,
        neighbours: Neighbours,
    ) -> None:
        self._checkpoint = checkpoint
        self._index = index
        self._checksums = KnownChecksums(index.manifest)
        self._is_checked = is_checked
        self._neighbours = neighbours

    def expect(self, keys: Sequence[str], destinations: Sequence[Destination]) -> None:
        """See `BlobReader`."""
        if self._neighbours.are_possible:
            objects, tensors = (
                self._index.object_reads(keys),
                self._index.tensor_reads(destinations),
            )
            self._neighbours.tell([*objects, *tensors], self._is_in_parts)

    def _is_in_parts(self, file: str) -> bool:
        return not self._is_checked or self._checksums.stretches(file) is not None

    def objects(self, keys: Sequence[str]) -> dict[str, bytes]:
        """See `BlobReader`."""
        found = self._fetch([], self._index.object_reads(keys))
        return dict(zip(keys, found.objects, strict=True))

    def fill(self, destinations: Sequence[Destination]) -> None:
        """See `BlobReader`."""
        for group in apart(self._index.tensor_reads(destinations)):
            self._fetch(group, [])

    def _fetch(self, tensors: Sequence[TensorRead], objects: Sequence[ObjectRead]) -> Fetched:
        self._neighbours.listen()
        found = fetch(
            self._checkpoint,
            tensors,
            objects,
            self._checksums,
            is_checked=self._is_checked,
            neighbours=self._neighbours,
        )
        return settled(self._checkpoint, tensors, found)


def settled(checkpoint: Path, tensors: Sequence[TensorRead], found: Fetched) -> Fetched:
    """Return the result of a fetch if it is undamaged. The log names keys that could not be
    checked.

    tensors: the tensors that were asked for.

    Raises CorruptCheckpoint for damage, with files and keys, and the tensors written to before.
    """
    if found.unchecked:
        log.info(
            "%s has no checksums for %d keys: %s",
            checkpoint, len(found.unchecked), listed(list(map(repr, found.unchecked))),
        )  # fmt: skip
    if not found.damages:
        return found
    damages = [
        f"{file}: {key + ': ' if key else ''}{text}"
        for file, key, text in dict.fromkeys(found.damages)
    ]
    told = [listed(damages, "; ")]
    written = list(dict.fromkeys(tensors[number].key for number in found.touched))
    if written:
        told.append(
            f"{len(written)} tensors were written to before this was found: "
            f"{listed(list(map(repr, written)))}"
        )
    raise damaged(checkpoint, "; ".join(told))


def damaged(checkpoint: Path, text: str) -> CorruptCheckpoint:
    """Return the error for a damaged checkpoint."""
    return CorruptCheckpoint(
        "corrupt",
        f"{checkpoint} is damaged: {text}",
        "load another step, or use fallback=True; verify=False loads it without checks",
    )


class TorchReader:
    """Reads item by item, on one thread, as `torch.distributed.checkpoint.load` does.

    Raises what torch raises: OSError, RuntimeError, KeyError and others for files that are missing
    or damaged.
    """

    def __init__(self, checkpoint: Path, metadata: Metadata) -> None:
        self._reader = FileSystemReader(checkpoint)
        self._reader.set_up_storage_reader(metadata, is_coordinator=False)
        self._described = metadata.state_dict_metadata

    def expect(self, keys: Sequence[str], destinations: Sequence[Destination]) -> None:
        """See `BlobReader`."""

    def objects(self, keys: Sequence[str]) -> dict[str, bytes]:
        """See `BlobReader`."""
        nothing = torch.Size((0,))
        items = [
            ReadItem(
                type=LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(key),
                dest_offsets=nothing,
                storage_index=MetadataIndex(key),
                storage_offsets=nothing,
                lengths=nothing,
            )
            for key in keys
        ]
        planner = _Planner({})
        self._reader.read_data(LoadPlan(items), planner)
        return planner.objects

    def fill(self, destinations: Sequence[Destination]) -> None:
        """See `BlobReader`."""
        by_key: dict[str, list[Destination]] = {}
        for destination in destinations:
            by_key.setdefault(destination.key, []).append(destination)
        items: list[ReadItem] = []
        for key, boxes in by_key.items():
            described = cast("TensorStorageMetadata", self._described[key])
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offsets), box.memory.size()) for box in boxes
            ]
            items += create_read_items_for_chunk_list(key, described, chunks)
        self._reader.read_data(LoadPlan(items), _Planner(by_key))


class _Planner(DefaultLoadPlanner):
    """Puts what torch's reader reads where it is wanted; has nothing to plan."""

    def __init__(self, destinations: dict[str, list[Destination]]) -> None:
        super().__init__()
        self._destinations = destinations
        self.objects: dict[str, bytes] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = value.getvalue()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.index is not None
        memory = self._destinations[index.fqn][index.index].memory
        for dim, (at, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            if length < memory.size(dim):
                memory = memory.narrow(dim, at, length)
        return memory
