"""`Reader`: a storage reader for torch's planners that reads and checks as a milepost load does.

Provides what torch asks of a `StorageReader`: the index, and the read items of a plan, which become
requests of a fetch. Knows of other ranks only what `share_with` was told. Sources:
torch/distributed/checkpoint/{filesystem,planner,default_planner}.py (2.13).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from milepost.dcp_format.index import read_metadata
from milepost.errors import CorruptCheckpoint, LoadFailed
from milepost.fetching.checksums import KnownChecksums
from milepost.fetching.fetch import fetch
from milepost.fetching.index import CheckpointIndex, read_index
from milepost.fetching.neighbours import Neighbours
from milepost.fetching.overlaps import apart
from milepost.fetching.requests import Blob, Fetched, ObjectRead, TensorRead
from milepost.format.manifest import METADATA_NAME
from milepost.reading.blobs import damaged, settled
from milepost.reading.objects import load_objects
from milepost.storage.claims import reading
from milepost.storage.root import Root

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint._extension import ExtensionRegistry
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from milepost.link.rendezvous import Group

log = logging.getLogger("milepost")

ALLOWING: Final = "storage_reader=milepost.dcp.Reader(path, allow_pickle=True)"
"""How a caller of torch's interface lets objects of any class be loaded."""


class Reader(FileSystemReader):
    """Reads checkpoints of milepost and of stock torch, in file order, checked in the same pass.

    Args:
        path: the checkpoint's directory.
        _extension_registry: as for `FileSystemReader`; torch's own code reads files that were
            written through extensions.
        allow_pickle: unpickle objects and `.metadata` without checks, as torch does; only for
            checkpoints that you trust.
        verify: compare checksums.

    Asks the planner for the memory of all tensors before it reads one of them, and tells the
    planner when all tensors are read. Not thread-safe, as torch's reader.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: ExtensionRegistry | None = None,
        *,
        allow_pickle: bool = False,
        verify: bool = True,
    ) -> None:
        super().__init__(path, _extension_registry)
        self._allow_pickle = allow_pickle
        self._verify = verify
        self._forget()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """See `StorageReader`."""
        super().reset(checkpoint_id)
        self._forget()

    def _forget(self) -> None:
        self._neighbours: Neighbours | None = None
        self._place: Path | None = None
        """The checkpoint itself, where `path` may be a link that moves on."""
        self._index: CheckpointIndex | None = None
        self._described: dict[str, Any] = {}
        self._crcs: dict[str, dict[tuple[str, int], int]] = {}
        """By key, the checksums of its containers, by file and offset."""

    # --- the index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index; that of one rank, if `rank` is given.

        Raises FileNotFoundError and other OSErrors as torch does; CorruptCheckpoint if it is
        damaged, or names what no index has.
        """
        place = self._place = Path(self.path).resolve()
        rank = kwargs.get("rank")
        try:
            if rank is None:
                index = self._index = read_index(place, allow_pickle=self._allow_pickle)
                if self._verify and index.damage:
                    raise damaged(place, index.damage)
                metadata = index.metadata
            else:
                file = place / f"__{rank}{METADATA_NAME}"
                metadata = read_metadata(file, allow_pickle=self._allow_pickle)
        except LoadFailed as error:
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See `StorageReader`."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._described = metadata.state_dict_metadata
        self._crcs = {}

    # --- the data

    def share_with(self, group: Group, topic: str, plan: LoadPlan) -> Neighbours:
        """Tell the other ranks of this host what a plan is going to read; return them, to be closed
        when all ranks have read.

        Args:
            group: the ranks that load together; they all call this before one of them reads.
            topic: names the load in the group's store; never used before.
        """
        place = self._place or Path(self.path).resolve()
        self._neighbours = neighbours = Neighbours(group, topic, place)
        # Who reads in a way of his own knows best what.
        if neighbours.are_possible and type(self).read_data is Reader.read_data:
            nothing = torch.empty(0)
            objects, tensors = self._wanted(plan)
            reads = [ObjectRead(item.storage_index.fqn, blob) for item, blob in objects]
            known = self._checksums()

            def is_in_parts(file: str) -> bool:
                return not self._verify or known.stretches(file) is not None

            neighbours.tell(
                [*reads, *(self._request(each, nothing) for each in tensors)], is_in_parts
            )
        return neighbours

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of a plan. The returned future is done already.

        Raises CorruptCheckpoint, naming files and tensors, LoadFailed("unsafe-object"), OSError.
        Objects are read before any tensor is written to.
        """
        place = self._place or Path(self.path).resolve()
        places = [self.storage_data[item.storage_index] for item in plan.items]
        if any(getattr(each, "transform_descriptors", None) for each in places):
            log.info("%s was written through extensions: torch's own code reads it", place)
            return super().read_data(plan, _Guarded(self, planner))  # type: ignore[arg-type]
        objects, tensors = self._wanted(plan)
        checksums = self._checksums()
        if self._neighbours is not None:
            self._neighbours.listen()
        with reading(Root(place.parent), place.name):
            self._read_objects(place, objects, planner, checksums)
            for batch in _batches(tensors, planner):
                self._read_tensors(place, batch, planner, checksums)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _wanted(self, plan: LoadPlan) -> tuple[list[_Wanted], list[_Wanted]]:
        """Return the objects and the tensors of a plan, with where they lie."""
        objects, tensors = list[_Wanted](), list[_Wanted]()
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            file = str(info.relative_path)
            crc = self._crc(item.storage_index.fqn, file, info.offset)
            wanted = _Wanted(item, Blob(file, info.offset, info.length, crc))
            (objects if item.type == LoadItemType.BYTE_IO else tensors).append(wanted)
        return objects, tensors

    def _checksums(self) -> KnownChecksums:
        return KnownChecksums(None if self._index is None else self._index.manifest)

    def _fetch(
        self,
        place: Path,
        tensors: list[TensorRead],
        objects: list[ObjectRead],
        checksums: KnownChecksums,
    ) -> Fetched:
        found = fetch(
            place,
            tensors,
            objects,
            checksums,
            is_checked=self._verify,
            neighbours=self._neighbours,
        )
        return settled(place, tensors, found)

    def _read_objects(
        self,
        place: Path,
        wanted: Sequence[_Wanted],
        planner: LoadPlanner,
        checksums: KnownChecksums,
    ) -> None:
        reads = [ObjectRead(item.storage_index.fqn, blob) for item, blob in wanted]
        contents = self._fetch(place, [], reads, checksums).objects
        items = [item for item, _ in wanted]
        self._give(place, list(zip(items, contents, strict=True)), planner)

    def _read_tensors(
        self,
        place: Path,
        batch: Sequence[_Filled],
        planner: LoadPlanner,
        checksums: KnownChecksums,
    ) -> None:
        reads = [self._request(wanted, memory) for wanted, memory in batch
                 if memory.device.type != "meta"]  # fmt: skip
        for group in apart(reads):
            self._fetch(place, group, [], checksums)
        for (item, _), memory in batch:
            planner.commit_tensor(item, memory)

    def _request(self, wanted: _Wanted, memory: torch.Tensor) -> TensorRead:
        item, blob = wanted
        index = item.storage_index
        described = self._described[index.fqn]
        if not isinstance(described, TensorStorageMetadata):
            raise CorruptCheckpoint("corrupt", f"{index.fqn!r} is an object, not a tensor")
        return TensorRead(
            index.fqn,
            blob,
            described.properties.dtype,
            tuple(_chunk_of(described, index).sizes),
            tuple(item.storage_offsets),
            tuple(item.lengths),
            memory,
        )

    def _crc(self, key: str, file: str, offset: int) -> int:
        """Return the checksum of a container, -1 if it is not known."""
        columns = None if self._index is None else self._index.columns
        if columns is None or (crcs := columns.crcs) is None:
            return -1
        known = self._crcs.get(key)
        if known is None:
            known = {}
            number = columns.numbers.get(key)
            if number is not None:
                first = columns.firsts[number]
                for chunk in range(first, first + columns.counts[number]):
                    if columns.files_of[chunk] >= 0:
                        at = columns.files[columns.files_of[chunk]], columns.ats[chunk]
                        known[at] = crcs[chunk]
            self._crcs[key] = known
        return known.get((file, offset), -1)

    # --- objects

    def _give(
        self, place: Path, found: Sequence[tuple[ReadItem, bytes]], planner: LoadPlanner
    ) -> None:
        """Hand objects to a planner, if they are safe to load."""
        if self._allow_pickle:
            for item, data in found:
                planner.load_bytes(item, io.BytesIO(data))
            return
        by_key = {item.storage_index.fqn: data for item, data in found}
        objects = load_objects(place, by_key, allowing=ALLOWING)
        is_usual = (
            isinstance(planner, DefaultLoadPlanner)
            and type(planner).load_bytes is DefaultLoadPlanner.load_bytes
            and "load_bytes" not in vars(planner)
        )
        for item, data in found:
            key, name = item.storage_index.fqn, item.dest_index.fqn
            # Two items of one key are two objects, as in torch.
            value = objects.pop(key) if key in objects else load_objects(place, {key: data})[key]
            if not is_usual:
                # It may unpickle in its own way, so it gets what this process has pickled.
                content = io.BytesIO()
                torch.save(value, content)
                content.seek(0)
                planner.load_bytes(item, content)
            elif planner.flatten_state_dict:  # type: ignore[attr-defined]
                set_element(planner.original_state_dict, planner.mappings[name], value)  # type: ignore[attr-defined]
            else:
                planner.state_dict[name] = value  # type: ignore[attr-defined]


class _Wanted(NamedTuple):
    item: ReadItem
    blob: Blob


class _Filled(NamedTuple):
    wanted: _Wanted
    memory: torch.Tensor


def _batches(wanted: Sequence[_Wanted], planner: LoadPlanner) -> Iterator[list[_Filled]]:
    """Yield items with their memory, in as few batches as possible.

    Items that share memory, such as tied weights or a planner's buffer, go into different batches:
    a batch is written in any order, and with torch the last item wins.
    """
    batch, taken = list[_Filled](), set[tuple[object, ...]]()
    for each in wanted:
        item = each.item
        memory = planner.resolve_tensor(item).detach()
        if memory.size() != item.lengths:
            raise AssertionError(
                f"req {item.storage_index} mismatch sizes {memory.size()} vs {item.lengths}"
            )
        place = _place_of(memory)
        if place in taken:
            yield batch
            batch, taken = [], set()
        if place is not None:
            taken.add(place)
        batch.append(_Filled(each, memory))
    yield batch


def _place_of(memory: torch.Tensor) -> tuple[object, ...] | None:
    """Return where a tensor's elements begin; None if it has none, or if that is not known."""
    if not memory.numel() or memory.device.type == "meta":
        return None
    try:
        return memory.device, memory.data_ptr()
    except RuntimeError:
        return None  # A subclass without memory of its own.


def _chunk_of(described: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    """Return the stored chunk of an index. Raises CorruptCheckpoint if there is none."""
    chunks, hint = described.chunks, index.index
    if hint is not None and 0 <= hint < len(chunks) and chunks[hint].offsets == index.offset:
        return chunks[hint]
    for chunk in chunks:
        if chunk.offsets == index.offset or (index.offset is None and len(chunks) == 1):
            return chunk
    raise CorruptCheckpoint("corrupt", f"no shard of {index.fqn!r} begins at {index.offset}")


class _Guarded:
    """A planner as torch's reader uses one, which gets objects only if they are safe."""

    def __init__(self, reader: Reader, planner: LoadPlanner) -> None:
        self._reader = reader
        self._planner = planner
        self.resolve_tensor = planner.resolve_tensor
        self.commit_tensor = planner.commit_tensor

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        place = Path(self._reader.path)
        self._reader._give(place, [(read_item, value.getvalue())], self._planner)
