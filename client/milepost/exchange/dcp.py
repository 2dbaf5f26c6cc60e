"""Writing a source as a checkpoint: one data file, torch's index, and our manifest.

Byte for byte the form that a save has, so that stock torch, `load` and every command read it. What
it lacks is a save: the manifest has no save id, so that retention counts it as another program's.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from isal import isal_zlib

from milepost.dcp_format.container import serialise, template
from milepost.dcp_format.index import build_metadata, pickle_metadata
from milepost.exchange.drafts import Draft
from milepost.format.layout import PAGE_BYTES, SMALL_ALIGN_BYTES, align, place
from milepost.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    STRETCH_BYTES,
    Manifest,
    encode,
    pack_crcs,
)
from milepost.storage.durable import create_file
from milepost.storage.refusals import reported
from milepost.wire.offers import Kind, Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from _typeshed import ReadableBuffer

    from milepost.exchange.source import Source

DATA_NAME: Final = "__0_0.distcp"


class _DataFile:
    """The data file: what is written in order, with zeros in between, and a checksum of each
    stretch.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._at = 0
        self._crc = 0
        self._crcs: list[int] = []

    def write(self, data: ReadableBuffer) -> None:
        rest = memoryview(data)
        self._draft.write(rest)
        while rest:
            part = rest[: STRETCH_BYTES - self._at % STRETCH_BYTES]
            self._crc = isal_zlib.crc32(part, self._crc)
            self._at += len(part)
            rest = rest[len(part) :]
            if not self._at % STRETCH_BYTES:
                self._close_stretch()

    def fill_to(self, at: int) -> None:
        self.write(bytes(at - self._at))

    def _close_stretch(self) -> None:
        self._crcs.append(self._crc)
        self._crc = 0

    def stretches(self) -> bytes:
        """Return the checksums, once all is written."""
        if self._at % STRETCH_BYTES:
            self._close_stretch()
        return pack_crcs(self._crcs)


class _Blob(NamedTuple):
    """Where a blob was put, and the checksum of its whole container."""

    key: str
    offset: int
    length: int
    crc: int


def write_checkpoint(
    folder: Path,
    source: Source,
    names: Mapping[str, str],
    paths: Mapping[str, tuple[str | int, ...]],
    final: Path,
    on_bytes: Callable[[int], None],
) -> int:
    """Write the files of a checkpoint into an empty directory and sync them; return their bytes.

    Args:
        names: the key in the checkpoint of each of the source's keys.
        paths: by key in the checkpoint, where it stands in the nested state.
        final: how the directory will be called: the index records it.
        on_bytes: told how many bytes more of the tensors were written.

    Raises: UsageError for what cannot be stored, StorageError, and what reading the source raises.
    """
    tensors = [key for key in names if key in source.tensors]
    objects = [key for key in names if key not in source.tensors]
    templates = [template(source.tensors[k].size, source.tensors[k].dtype) for k in tensors]
    placed = place([each.total_bytes for each in templates])
    pickled = {key: serialise(key, source.value(key)) for key in objects}
    end, places = placed.objects_at, {}
    for key in objects:
        at = align(end, SMALL_ALIGN_BYTES)
        places[key] = (at, len(pickled[key]))
        end = at + len(pickled[key])
    file_bytes = align(end, PAGE_BYTES)
    blobs = []
    with Draft(folder / DATA_NAME, file_bytes) as draft:
        file = _DataFile(draft)
        for key, known, offset in zip(tensors, templates, placed.offsets, strict=True):
            file.fill_to(offset)
            file.write(known.prefix)
            whole, crc = isal_zlib.crc32(known.prefix), 0
            for block in source.blocks(key):
                file.write(block)
                whole, crc = isal_zlib.crc32(block, whole), isal_zlib.crc32(block, crc)
                on_bytes(len(block))
            suffix = bytearray(known.suffix)
            for at in {known.crc_at, known.central_crc_at} if known.payload_bytes else ():
                suffix_at = at - known.payload_at - known.payload_bytes
                suffix[suffix_at : suffix_at + 4] = crc.to_bytes(4, "little")
            file.write(suffix)
            whole = isal_zlib.crc32(suffix, whole)
            blobs.append(_Blob(names[key], offset, known.total_bytes, whole))
        for key in objects:
            offset, length = places[key]
            file.fill_to(offset)
            file.write(pickled[key])
            blobs.append(_Blob(names[key], offset, length, isal_zlib.crc32(pickled[key])))
        file.fill_to(file_bytes)
    offer = _offer(source, tensors, objects, names, paths, [t.total_bytes for t in templates])
    numbered = {len(tensors) + number: places[key] for number, key in enumerate(objects)}
    items = range(len(tensors) + len(objects))
    metadata = build_metadata({0: offer}, {0: items}, {0: DATA_NAME}, {0: numbered}, "", str(final))
    index = pickle_metadata(metadata)
    manifest = encode(
        Manifest(
            torch_version=str(torch.__version__),
            milepost_version=version("milepost"),
            committed_at_ms=time.time_ns() // 1_000_000,
            world=1,
            files=(DATA_NAME,),
            file_bytes=(file_bytes,),
            keys=tuple(blob.key for blob in blobs),
            files_of=(0,) * len(blobs),
            offsets=tuple(blob.offset for blob in blobs),
            lengths=tuple(blob.length for blob in blobs),
            crcs=tuple(blob.crc for blob in blobs),
            index_crc=isal_zlib.crc32(index),
            stretch_bytes=STRETCH_BYTES,
            stretches=(file.stretches(),),
        )
    )
    with reported("write", folder):
        create_file(folder / MANIFEST_NAME, manifest)
        create_file(folder / METADATA_NAME, index)
    return file_bytes + len(manifest) + len(index)


def _offer(
    source: Source,
    tensors: list[str],
    objects: list[str],
    names: Mapping[str, str],
    paths: Mapping[str, tuple[str | int, ...]],
    container_bytes: list[int],
) -> Offer:
    """Return what a single rank would offer: the tensors, then the objects."""
    forms = [source.tensors[key] for key in tensors]
    count, left = len(tensors) + len(objects), len(objects)
    keys = tuple(names[key] for key in (*tensors, *objects))
    return Offer(
        keys=keys,
        kinds=bytes([Kind.TENSOR] * len(tensors) + [Kind.OBJECT] * left),
        dtypes=(*(form.name for form in forms), *[""] * left),
        global_sizes=(*(form.size for form in forms), *[()] * left),
        offsets=(*((0,) * len(form.size) for form in forms), *[()] * left),
        sizes=(*(form.size for form in forms), *[()] * left),
        container_bytes=(*container_bytes, *[0] * left),
        requires_grad=bytes([*(form.requires_grad for form in forms), *[False] * left]),
        pinned=bytes(count),
        digests=(-1,) * count,
        paths=tuple(paths[key] for key in keys),
    )
