"""Writing a source as a checkpoint: one data file, torch's index, and our manifest.

The form is byte for byte that of a save, so stock torch, `load` and every command read it. Only the
save id is missing from the manifest, so retention counts the checkpoint as another program's.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from isal import isal_zlib

from milepost.dcp_format.container import ContainerTemplate, serialise, template
from milepost.dcp_format.index import build_metadata, pickle_metadata
from milepost.exchange.drafts import Draft
from milepost.exchange.source import TensorForm
from milepost.format.layout import PAGE_BYTES, SMALL_ALIGN_BYTES, align, place
from milepost.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    STRETCH_BYTES,
    Manifest,
    encode_manifest,
    pack_crcs,
)
from milepost.format.nesting import Nesting, pack_nesting
from milepost.storage.durable import create_file
from milepost.storage.refusals import reported
from milepost.wire.offers import Kind, Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from _typeshed import ReadableBuffer

    from milepost.exchange.source import Source

DATA_NAME: Final = "__0_0.distcp"


class _DataFile:
    """The data file. Bytes are written in order, with zeros in the gaps; each stretch gets a
    checksum.
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

    name: str
    offset: int
    length: int
    crc: int


def write_checkpoint(
    folder: Path,
    source: Source,
    keys: Mapping[str, str],
    paths: Mapping[str, tuple[str | int, ...]],
    nesting: Nesting,
    final: Path,
    on_bytes: Callable[[int], None],
) -> int:
    """Write the files of a checkpoint into an empty directory and sync them; return their bytes.

    Args:
        keys: the source's key for each name in the checkpoint, in the order of the state.
        paths: where each name is in the nested state.
        nesting: what the paths do not say.
        final: the final path of the directory, which the index records.
        on_bytes: called with the number of the tensors' bytes written since its last call.

    Raises: UsageError for tensors that cannot be stored, StorageError, and whatever reading the
    source raises.
    """
    pickled = {
        name: serialise(name, source.value(key))
        for name, key in keys.items()
        if key not in source.tensors
    }
    tensors = {name: source.tensors[key] for name, key in keys.items() if name not in pickled}
    placed = place([_template(form).total_bytes for form in tensors.values()])
    offsets = dict(zip(tensors, placed.offsets, strict=True))
    end = placed.objects_at
    for name, data in pickled.items():
        offsets[name] = align(end, SMALL_ALIGN_BYTES)
        end = offsets[name] + len(data)
    file_bytes = align(end, PAGE_BYTES)
    with Draft(folder / DATA_NAME, file_bytes) as draft:
        file = _DataFile(draft)
        blobs = [
            _write_tensor(file, name, offsets[name], form, source.blocks(keys[name]), on_bytes)
            for name, form in tensors.items()
        ]
        for name, data in pickled.items():
            file.fill_to(offsets[name])
            file.write(data)
            blobs.append(_Blob(name, offsets[name], len(data), isal_zlib.crc32(data)))
        file.fill_to(file_bytes)
    offer = _offer(keys, tensors, paths)
    objects = {
        item: (offsets[name], len(pickled[name]))
        for item, name in enumerate(keys)
        if name in pickled
    }
    index = pickle_metadata(
        build_metadata(
            {0: offer}, {0: range(len(keys))}, {0: DATA_NAME}, {0: objects}, "", str(final)
        )
    )
    manifest = encode_manifest(
        Manifest(
            torch_version=str(torch.__version__),
            milepost_version=version("milepost"),
            committed_at_ms=time.time_ns() // 1_000_000,
            world=1,
            nesting=pack_nesting(nesting),
            files=(DATA_NAME,),
            file_bytes=(file_bytes,),
            keys=tuple(blob.name for blob in blobs),
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


def _template(form: TensorForm) -> ContainerTemplate:
    return template(form.size, form.dtype)


def _write_tensor(
    file: _DataFile,
    name: str,
    offset: int,
    form: TensorForm,
    blocks: Iterable[memoryview],
    on_bytes: Callable[[int], None],
) -> _Blob:
    """Write a tensor's container, and its checksum into it."""
    known = _template(form)
    file.fill_to(offset)
    file.write(known.prefix)
    whole, crc = isal_zlib.crc32(known.prefix), 0
    for block in blocks:
        file.write(block)
        whole, crc = isal_zlib.crc32(block, whole), isal_zlib.crc32(block, crc)
        on_bytes(len(block))
    suffix = bytearray(known.suffix)
    for crc_at in (known.crc_at, known.central_crc_at) if known.payload_bytes else ():
        at = crc_at - known.payload_at - known.payload_bytes
        suffix[at : at + 4] = crc.to_bytes(4, "little")
    file.write(suffix)
    return _Blob(name, offset, known.total_bytes, isal_zlib.crc32(suffix, whole))


_OBJECT: Final = TensorForm(torch.uint8, ())
"""Stands for an object in the columns."""


def _offer(
    names: Iterable[str],
    tensors: Mapping[str, TensorForm],
    paths: Mapping[str, tuple[str | int, ...]],
) -> Offer:
    """Return what a single rank would offer."""
    keys = tuple(names)
    is_tensor = [key in tensors for key in keys]
    forms = [tensors.get(key, _OBJECT) for key in keys]
    return Offer(
        keys=keys,
        kinds=bytes(Kind.TENSOR if is_one else Kind.OBJECT for is_one in is_tensor),
        dtypes=tuple(f.name if is_one else "" for f, is_one in zip(forms, is_tensor, strict=True)),
        global_sizes=tuple(form.size for form in forms),
        offsets=tuple((0,) * len(form.size) for form in forms),
        sizes=tuple(form.size for form in forms),
        container_bytes=tuple(
            _template(form).total_bytes if is_one else 0
            for form, is_one in zip(forms, is_tensor, strict=True)
        ),
        requires_grad=bytes(form.requires_grad for form in forms),
        pinned=bytes(len(keys)),
        digests=(-1,) * len(keys),
        paths=tuple(paths[key] for key in keys),
    )
