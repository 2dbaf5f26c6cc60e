"""A checkpoint's index as it is read for a load, and from what is wanted to reads of its chunks.

Columns where the manifest carries those of this very `.metadata`, else columns made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from milepost.errors import LoadFailed
from milepost.fetching.copying import narrowed
from milepost.fetching.intersection import Chunks, missing
from milepost.fetching.requests import Blob, ObjectRead, TensorRead
from milepost.format.manifest import METADATA_NAME, Manifest, Summary, read_manifest, read_summary
from milepost.wire.offers import Box


class Wanted(NamedTuple):
    """A box of a tensor, and the memory it is to fill, of the box's sizes."""

    key: str
    offsets: Box
    memory: torch.Tensor


class CheckpointIndex:
    """What a checkpoint says of itself.

    Attributes:
        columns: its index.
        manifest: its manifest, blobs left out; None without one.
        damage: what is wrong with `.metadata`, or nothing.
    """

    def __init__(
        self, columns: Columns, manifest: Summary | None, damage: str, metadata: Metadata | None
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

    def tensor_reads(self, wanted: Iterable[Wanted]) -> list[TensorRead]:
        """Return the reads that fill memory; several for what lies in several chunks.

        Raises LoadFailed for elements that no chunk holds or no file, KeyError for unknown keys,
        UsageError for those of objects.
        """
        columns, reads = self.columns, list[TensorRead]()
        numbers, counts, firsts, sizes = (
            columns.numbers, columns.counts, columns.firsts, columns.sizes,
        )  # fmt: skip
        dtypes: dict[str, torch.dtype] = {}
        with collector_paused():
            for each in wanted:
                number = numbers[each.key]
                name = columns.dtypes[number]
                dtype = dtypes.get(name)
                if dtype is None:
                    dtype = dtypes[name] = dtype_named(name)
                size = sizes[number]
                if counts[number] == 1 and each.memory.shape == size and self._is_one(number):
                    zeros = (0,) * len(size)
                    blob = self._blob(each.key, firsts[number])
                    reads.append(TensorRead(each.key, blob, dtype, size, zeros, size, each.memory))
                else:
                    reads += self._parts(each, number, dtype)
        return reads

    def _is_one(self, number: int) -> bool:
        """Tell whether the only chunk of a tensor is all of it."""
        offsets, sizes = self.columns.bounds(number)
        return not any(offsets) and tuple(sizes) == self.columns.sizes[number]

    def _parts(self, wanted: Wanted, number: int, dtype: torch.dtype) -> Iterable[TensorRead]:
        key, offsets, memory = wanted
        chunks = self._chunks.get(number)
        if chunks is None:
            count = self.columns.counts[number]
            chunks = self._chunks[number] = Chunks(*self.columns.boxes(number), count)
        sizes = tuple(memory.shape)
        found = chunks.overlaps(offsets, sizes)
        if missing(sizes, found) > 0:
            raise LoadFailed(
                "load-failed",
                f"the index has no shard for {missing(sizes, found)} elements of {key!r} that are "
                f"wanted from {list(offsets)} on, {list(sizes)} long",
                "`milepost verify` tells what else is wrong with the checkpoint",
            )
        for chunk, stored_at, wanted_at, extent in found:
            blob = self._blob(key, self.columns.firsts[number] + chunk)
            part = narrowed(memory, wanted_at, extent)
            yield TensorRead(key, blob, dtype, chunks.sizes_of(chunk), stored_at, extent, part)

    def object_reads(self, keys: Iterable[str]) -> list[ObjectRead]:
        """Return the reads of objects. Raises LoadFailed for one that no file holds."""
        columns = self.columns
        return [ObjectRead(key, self._blob(key, columns.firsts[columns.numbers[key]]))
                for key in keys]  # fmt: skip

    def _blob(self, key: str, chunk: int) -> Blob:
        columns = self.columns
        file = columns.files_of[chunk]
        if file == NO_PLACE:
            raise LoadFailed("load-failed", f"the index names no file for a part of {key!r}")
        crc = -1 if columns.crcs is None else columns.crcs[chunk]
        return Blob(columns.files[file], columns.ats[chunk], columns.lengths[chunk], crc)


def read_index(checkpoint: Path) -> CheckpointIndex:
    """Read a checkpoint's index, by the manifest's columns where they are those of `.metadata`.

    Raises LoadFailed, CorruptCheckpoint as `read_metadata` does; CorruptCheckpoint for a manifest
    that is damaged.
    """
    summary = _read_summary(checkpoint)
    damage = ""
    if summary is not None and summary.index_crc >= 0:
        damage, is_same = _compare(checkpoint, summary.index_crc)
        if summary.index and is_same:
            return CheckpointIndex(unpack_columns(summary.index), summary, "", None)
    metadata = read_metadata(checkpoint)
    columns = columns_of(metadata)
    if summary is not None:
        columns.crcs = _crcs(columns, read_manifest(checkpoint) or Manifest())
    return CheckpointIndex(columns, summary, damage, metadata)


def _read_summary(checkpoint: Path) -> Summary | None:
    try:
        return read_summary(checkpoint)
    except OSError as error:
        text = f"the manifest of {checkpoint} cannot be read: {error.strerror or error}"
        raise LoadFailed("io-error", text) from error


def _compare(checkpoint: Path, written: int) -> tuple[str, bool]:
    """Return what is wrong with `.metadata`, and whether it is the one the manifest is about."""
    try:
        found = isal_zlib.crc32((checkpoint / METADATA_NAME).read_bytes())
    except OSError:
        return "", False  # Whoever reads it as an index says so.
    if found == written:
        return "", True
    return f"its checksum is {found:08x}, the manifest has {written:08x}", False


def _crcs(columns: Columns, manifest: Manifest) -> Sequence[int]:
    """Return the checksum of each chunk's container, -1 where the manifest has none."""
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
