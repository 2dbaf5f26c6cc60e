"""A checkpoint's index as a load reads it, and the reads of chunks for what is wanted.

Uses the manifest's columns if they belong to this `.metadata`; otherwise makes columns from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from isal import isal_zlib
from torch.distributed.checkpoint.metadata import Metadata

from milepost.concurrency.collector import collector_paused
from milepost.dcp_format.columns import (
    NO_PLACE,
    Columns,
    as_metadata,
    columns_of,
    dtype_named,
    unpack_columns,
)
from milepost.dcp_format.index import read_metadata
from milepost.errors import CorruptCheckpoint
from milepost.fetching.copying import narrowed
from milepost.fetching.intersection import Chunks, missing
from milepost.fetching.requests import Blob, ObjectRead, TensorRead
from milepost.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    Summary,
    read_manifest,
    read_summary,
)
from milepost.format.opening import read_regular
from milepost.wire.offers import Box


class Destination(NamedTuple):
    """A box of a tensor, and the memory to fill with it; `memory` has the box's sizes."""

    key: str
    offsets: Box
    memory: torch.Tensor


class CheckpointIndex:
    """What a checkpoint says about itself.

    Attributes:
        columns: its index.
        manifest: its manifest without blobs; None if there is none.
        damage: what is wrong with manifest or `.metadata`, or empty.
    """

    def __init__(
        self,
        columns: Columns,
        manifest: Summary | None = None,
        damage: str = "",
        metadata: Metadata | None = None,
    ) -> None:
        self.columns = columns
        self.manifest = manifest
        self.damage = damage
        self._metadata = metadata
        self._chunks: dict[int, Chunks] = {}

    @cached_property
    def metadata(self) -> Metadata:
        """The index in torch's form. Raises UsageError for a dtype that this torch lacks."""
        return as_metadata(self.columns) if self._metadata is None else self._metadata

    @cached_property
    def is_transformed(self) -> bool:
        """Whether blobs were written through torch's stream extensions, as compression is."""
        return self._metadata is not None and any(
            getattr(info, "transform_descriptors", None)
            for info in self._metadata.storage_data.values()
        )

    def tensor_reads(self, wanted: Iterable[Destination]) -> list[TensorRead]:
        """Return the reads that fill memory; several for a box that lies in several chunks.

        Raises CorruptCheckpoint for elements that no chunk or no file holds, KeyError for unknown
        keys, UsageError for keys of objects.
        """
        columns, reads = self.columns, list[TensorRead]()
        numbers, counts, firsts, sizes = (
            columns.numbers, columns.counts, columns.firsts, columns.sizes,
        )  # fmt: skip
        names, bounds, blob_of = columns.dtypes, columns.bounds, self._blob
        dtypes: dict[str, torch.dtype] = {}
        zeros: dict[int, Box] = {}
        # Written out, since there may be tens of thousands.
        with collector_paused():
            for each in wanted:
                key, _, memory = each
                number = numbers[key]
                name = names[number]
                dtype = dtypes.get(name)
                if dtype is None:
                    dtype = dtypes[name] = dtype_named(name)
                size = sizes[number]
                if counts[number] == 1 and memory.shape == size:
                    at, extent = bounds(number)
                    # The only chunk of a tensor is all of it.
                    if not any(at) and tuple(extent) == size:
                        zero = zeros.get(len(size))
                        if zero is None:
                            zero = zeros[len(size)] = (0,) * len(size)
                        blob = blob_of(key, firsts[number])
                        reads.append(TensorRead(key, blob, dtype, size, zero, size, memory))
                        continue
                reads += self._parts(each, number, dtype)
        return reads

    def _parts(self, wanted: Destination, number: int, dtype: torch.dtype) -> Iterable[TensorRead]:
        key, offsets, memory = wanted
        chunks = self._chunks.get(number)
        if chunks is None:
            count = self.columns.counts[number]
            chunks = self._chunks[number] = Chunks(*self.columns.boxes(number), count)
        sizes = tuple(memory.shape)
        found = chunks.overlaps(offsets, sizes)
        if missing(sizes, found) > 0:
            raise CorruptCheckpoint(
                "corrupt",
                f"no shard holds {missing(sizes, found)} of the elements of {key!r} that are "
                f"wanted from {list(offsets)} on, {list(sizes)} long",
            )
        for chunk, stored_at, wanted_at, extent in found:
            blob = self._blob(key, self.columns.firsts[number] + chunk)
            part = narrowed(memory, wanted_at, extent)
            yield TensorRead(key, blob, dtype, chunks.sizes_of(chunk), stored_at, extent, part)

    def object_reads(self, keys: Iterable[str]) -> list[ObjectRead]:
        """Return the reads of objects. Raises CorruptCheckpoint for an object that no file
        holds.
        """
        columns = self.columns
        return [ObjectRead(key, self._blob(key, columns.firsts[columns.numbers[key]]))
                for key in keys]  # fmt: skip

    def _blob(self, key: str, chunk: int) -> Blob:
        columns = self.columns
        file = columns.files_of[chunk]
        if file == NO_PLACE:
            raise CorruptCheckpoint("corrupt", f"no file holds a part of {key!r}")
        crc = -1 if columns.crcs is None else columns.crcs[chunk]
        return Blob(columns.files[file], columns.ats[chunk], columns.lengths[chunk], crc)


def read_index(checkpoint: Path, *, allow_pickle: bool = False) -> CheckpointIndex:
    """Read a checkpoint's index, from the manifest's columns if they belong to `.metadata`.

    If the manifest is damaged or does not agree, the result's `damage` says so, and the index comes
    from `.metadata`. `allow_pickle` and the exceptions are those of `read_metadata`.
    """
    summary, damage = _read_summary(checkpoint)
    if summary is not None and summary.index_crc >= 0:
        damage = _compare(checkpoint, summary.index_crc)
        if summary.index and not damage:
            with suppress(CorruptCheckpoint):
                return CheckpointIndex(unpack_columns(summary.index), summary)
    metadata = read_metadata(checkpoint, allow_pickle=allow_pickle)
    try:
        columns = columns_of(metadata)
    except ValueError as error:
        raise CorruptCheckpoint("corrupt", f"{checkpoint / METADATA_NAME}: {error}") from error
    if summary is not None:
        try:
            columns.crcs = _crcs(columns, read_manifest(checkpoint) or Manifest())
        except (CorruptCheckpoint, ValueError, IndexError) as error:
            summary, damage = None, damage or f"{MANIFEST_NAME}: its columns do not agree: {error}"
    return CheckpointIndex(columns, summary, damage, metadata)


def _read_summary(checkpoint: Path) -> tuple[Summary | None, str]:
    """Return the manifest without its blobs, or why it cannot be read."""
    try:
        return read_summary(checkpoint), ""
    except CorruptCheckpoint as error:
        return None, f"{MANIFEST_NAME}: {error.message}"
    except OSError as error:
        reason = str(error.strerror or error).lower()
        return None, f"{MANIFEST_NAME}: cannot be read: {reason}"


def _compare(checkpoint: Path, written: int) -> str:
    """Return what is wrong with `.metadata` according to the checksum in the manifest."""
    try:
        found = isal_zlib.crc32(read_regular(checkpoint / METADATA_NAME))
    except OSError as error:
        # The code that reads it as an index reports more.
        return f"{METADATA_NAME}: {error}"
    if found == written:
        return ""
    return f"{METADATA_NAME}: its checksum is {found:08x}, but the manifest has {written:08x}"


def _crcs(columns: Columns, manifest: Manifest) -> Sequence[int]:
    """Return the checksum of each chunk's container; -1 if the manifest has none for it."""
    files = [manifest.files[file] for file in manifest.files_of]
    known = dict(
        zip(
            zip(files, manifest.offsets, manifest.lengths, strict=True),
            manifest.crcs,
            strict=True,
        )
    )
    names = [*columns.files, ""]
    return [
        known.get((names[file], at, length), -1)
        for file, at, length in zip(columns.files_of, columns.ats, columns.lengths, strict=True)
    ]
