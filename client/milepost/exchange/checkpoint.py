"""A checkpoint as a source: any that DCP's file system writer wrote, ours and stock torch's.

Reads the index without running anything, and every blob once, comparing checksums. A tensor's bytes
do not depend on how it was sharded. Memory: two blocks, and a few KiB for each shard of one tensor.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from isal import isal_zlib
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from milepost.dcp_format.archive import Archive, ArchiveError
from milepost.dcp_format.coverage import index_problems
from milepost.dcp_format.index import read_metadata
from milepost.errors import CorruptCheckpoint, LoadFailed
from milepost.exchange.bands import bands, meet
from milepost.exchange.blobs import BlobPlace, DataFiles, Payload, check_whole, damage
from milepost.exchange.opening import open_object
from milepost.exchange.source import BLOCK_BYTES, Source, TensorForm, is_plain
from milepost.format.manifest import METADATA_NAME, Manifest, read_manifest
from milepost.format.opening import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

    from milepost.wire.offers import Box

_CELLS: Final = {
    1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128
}  # fmt: skip
"""For each size of an element, a dtype with which to copy elements of any dtype of this size."""


class CheckpointSource(Source):
    """See `Source`. Not for several threads at a time."""

    def __init__(self, checkpoint: Path, *, allow_pickle: bool = False) -> None:
        """Read index and manifest.

        Raises:
            LoadFailed: `not-found` if this is not a checkpoint.
            CorruptCheckpoint: index or manifest are damaged, or do not belong together.
        """
        super().__init__()
        self.checkpoint: Final = checkpoint
        self._allow_pickle = allow_pickle
        self._files = DataFiles(checkpoint)
        self._metadata = metadata = read_metadata(checkpoint)
        self._crcs = self._read_manifest()
        self._problems = {problem.key: problem.text for problem in index_problems(metadata)}
        self._places: dict[str, dict[Box | None, BlobPlace]] = {}
        extended = self._read_places()
        for key, entry in metadata.state_dict_metadata.items():
            if key in extended:
                self.unreadable[key] = "it was written through a stream extension"
            elif not isinstance(entry, TensorStorageMetadata):
                self.objects.append(key)
            elif getattr(entry.properties, "layout", torch.strided) is not torch.strided:
                layout = str(entry.properties.layout).removeprefix("torch.")
                self.unreadable[key] = f"its layout is {layout}"
            elif not is_plain(entry.properties.dtype):
                self.unreadable[key] = f"its dtype is {entry.properties.dtype}"
            else:
                self.tensors[key] = TensorForm(entry.properties.dtype, tuple(entry.size))
                self._compare_lengths(key, entry)
        self.paths = _paths(metadata)
        self._block = mmap.mmap(-1, BLOCK_BYTES)
        self._scratch = mmap.mmap(-1, BLOCK_BYTES)

    def _compare_lengths(self, key: str, entry: TensorStorageMetadata) -> None:
        """Note a shard that its blob cannot hold, before memory is made for the size it claims."""
        places = self._places.get(key, {})
        for chunk in entry.chunks:
            place = places.get(tuple(chunk.offsets), places.get(None))
            nbytes = prod(chunk.sizes) * entry.properties.dtype.itemsize
            if place is not None and nbytes > place.length:
                text = f"a shard of it takes {nbytes} bytes, its blob has {place.length}"
                self._problems.setdefault(key, text)

    def require_readable(self, keys: Sequence[str]) -> None:
        """See `Source`. Also raises CorruptCheckpoint for a key that the index does not describe
        completely.
        """
        for key in keys:
            if key in self._problems:
                raise damage(self.checkpoint, METADATA_NAME, key, self._problems[key])
        super().require_readable(keys)

    def _read_manifest(self) -> dict[tuple[str, str, int, int], int]:
        """Return the manifest's checksums by key, file, offset and length."""
        try:
            manifest = read_manifest(self.checkpoint)
            index = read_regular(self.checkpoint / METADATA_NAME)
        except OSError as error:
            raise LoadFailed(
                "io-error", f"{self.checkpoint} cannot be read: {str(error.strerror).lower()}"
            ) from error
        if manifest is None:
            return {}
        if manifest.index_crc >= 0:
            found = isal_zlib.crc32(index)
            if found != manifest.index_crc:
                text = f"its checksum is {found:08x}, the manifest has {manifest.index_crc:08x}"
                raise damage(self.checkpoint, METADATA_NAME, "", text)
        return _checksums(self.checkpoint, manifest)

    def _read_places(self) -> set[str]:
        """Read from the index where the blobs lie; return the keys of blobs that are not plain."""
        extended = set()
        for index, info in self._metadata.storage_data.items():
            file, offset, length = info.relative_path, info.offset, info.length
            crc = self._crcs.get((index.fqn, file, offset, length))
            if self._crcs and crc is None:
                text = f"the manifest does not know its blob in {file} at {offset}"
                raise damage(self.checkpoint, METADATA_NAME, index.fqn, text)
            if getattr(info, "transform_descriptors", None):
                extended.add(index.fqn)
            at = None if index.offset is None else tuple(index.offset)
            places = self._places.setdefault(index.fqn, {})
            places[at] = BlobPlace(file, offset, length, crc)
        return extended

    def blocks(self, key: str, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """See `Source`. Raises CorruptCheckpoint by name, LoadFailed, UsageError."""
        if key in self._problems:
            raise damage(self.checkpoint, METADATA_NAME, key, self._problems[key])
        form = self.tensors[key]
        cell = _CELLS[form.dtype.itemsize]
        shards = self._shards(key, form)
        block, scratch = memoryview(self._block), memoryview(self._scratch)
        cells = torch.frombuffer(self._block, dtype=cell)
        loose = torch.frombuffer(self._scratch, dtype=cell)
        for offsets, sizes in bands(form.size, cell.itemsize, block_bytes):
            band = torch.Size(sizes)
            end = offsets[0] + sizes[0] if offsets else 1
            for box, payload in shards:
                if box[0] and box[0][0] >= end:
                    break
                part = meet((offsets, sizes), box) if payload.left else None
                if part is None:
                    continue
                count = torch.Size(part.sizes).numel()
                if part.start >= 0:
                    at = part.start * cell.itemsize
                    payload.read_into(block[at : at + count * cell.itemsize])
                else:
                    payload.read_into(scratch[: count * cell.itemsize])
                    there = cells[: band.numel()].view(band)
                    for dim, (low, length) in enumerate(zip(part.within, part.sizes, strict=True)):
                        there = there.narrow(dim, low, length)
                    there.copy_(loose[:count].view(part.sizes))
                if payload.is_unchecked and not payload.left and key not in self.unchecked[-1:]:
                    self.unchecked.append(key)
            yield block[: band.numel() * cell.itemsize]

    def _shards(self, key: str, form: TensorForm) -> list[tuple[tuple[Box, Box], Payload]]:
        """Return a tensor's shards, each as (offsets, sizes) with its elements, by offsets."""
        entry = self._metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        places = self._places[key]
        boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        return [
            (box, Payload(self._files, key, self._place(places, box[0]), box[1], form.dtype))
            for box in sorted(boxes)
            if 0 not in box[1]
        ]

    @staticmethod
    def _place(places: Mapping[Box | None, BlobPlace], offsets: Box) -> BlobPlace:
        # A whole tensor may have been stored without its offset.
        return places[offsets] if offsets in places else places[None]

    def value(self, key: str) -> Any:
        """See `Source`. Raises CorruptCheckpoint by name, LoadFailed."""
        blob = self._object(key)
        return open_object(blob, f"{self.checkpoint}: {key!r}", allow_pickle=self._allow_pickle)

    def records(self, key: str) -> dict[str, bytes]:
        """Return an object's pickled bytes, by the names of torch's records, without records that
        only distinguish one archive from another. Raises the same as `value`.
        """
        blob = self._object(key)
        archive = Archive(lambda at, length: blob[at : at + length], len(blob))
        entries = {name: archive.entry(name) for name in archive.names()}
        return {
            name.partition("/")[2]: blob[entry.at : entry.at + entry.length]
            for name, entry in entries.items()
            if "/.data/" not in name
        }

    def _object(self, key: str) -> bytes:
        """Return an object's blob, checked."""
        place = self._object_place(key)
        blob = self._files.read(place.file, place.offset, place.length)
        self._check(key, place, blob)
        return blob

    def _object_place(self, key: str) -> BlobPlace:
        places = self._places.get(key, {})
        place = places.get(None, places.get(()))
        if place is None:
            raise damage(self.checkpoint, METADATA_NAME, key, "no file holds the object")
        length = self._files.length(place.file)
        if not 0 <= place.offset <= place.offset + place.length <= length:
            end = place.offset + place.length
            text = f"bytes {place.offset} to {end} lie beyond the end at {length}"
            raise damage(self.checkpoint, place.file, key, text)
        return place

    def _check(self, key: str, place: BlobPlace, blob: bytes) -> None:
        try:
            if not check_whole(blob, place.crc):
                self.unchecked.append(key)
        except ArchiveError as error:
            text = f"the blob at {place.offset}: {error}"
            raise damage(self.checkpoint, place.file, key, text) from error

    def checksums(self, key: str) -> dict[object, tuple[int, int]] | None:
        """Return length and checksum of each blob of a key, by its box, from the manifest alone;
        None without a manifest.
        """
        if not self._crcs:
            return None
        places = self._places.get(key, {})
        entry = self._metadata.state_dict_metadata[key]
        if not isinstance(entry, TensorStorageMetadata):
            boxes: list[tuple[Box, Box]] = [((), ())]
        else:
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        found: dict[object, tuple[int, int]] = {}
        for box in boxes:
            place = places.get(box[0], places.get(None))
            if place is None or place.crc is None:
                return None
            found[box] = (place.length, place.crc)
        return found

    def close(self) -> None:
        """Close the data files."""
        self._files.close()


def _checksums(checkpoint: Path, manifest: Manifest) -> dict[tuple[str, str, int, int], int]:
    try:
        columns = zip(
            manifest.keys,
            [manifest.files[index] for index in manifest.files_of],
            manifest.offsets,
            manifest.lengths,
            manifest.crcs,
            strict=True,
        )
        return {(key, file, offset, length): crc for key, file, offset, length, crc in columns}
    except (ValueError, IndexError) as error:
        raise CorruptCheckpoint(
            "corrupt", f"{checkpoint}: the columns of its manifest do not agree"
        ) from error


def _paths(metadata: Metadata) -> dict[str, tuple[Any, ...]]:
    """Return where each key was in the nested state. A key without a path is a name at the top."""
    known = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return {key: _path(key, known.get(key)) for key in metadata.state_dict_metadata}


def _path(key: str, told: object) -> tuple[Any, ...]:
    is_path = isinstance(told, tuple) and told and all(isinstance(p, str | int) for p in told)
    return cast("tuple[Any, ...]", told) if is_path else (key,)
