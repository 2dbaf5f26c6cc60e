"""`milepost verify`: are the bytes on disk the bytes that were written?

With our manifest, checks every file's length and the CRC-32 of every blob. This finds flipped bits,
holes, and truncated, missing and swapped files. Without a manifest, as in a checkpoint that stock
torch wrote, checks the CRCs inside each blob's zip container, which torch writes but never checks,
and compares the payload's length with the index. In both cases the index has to describe every
tensor completely, and to agree with a manifest. Source: torch/distributed/checkpoint/filesystem.py
(2.13), APPNOTE.TXT of the zip format.
"""

from __future__ import annotations

import io
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from isal import isal_zlib

from milepost.errors import CorruptCheckpoint, LoadFailed
from milepost.format.manifest import MANIFEST_NAME, METADATA_NAME, Manifest, read_manifest
from milepost.format.opening import open_regular, read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

BLOCK_BYTES: Final = 8 << 20
"""How much to read at once: large enough for the disk, small enough for a moving progress bar."""

READERS: Final = 4
"""How many files to read at the same time. Parallel file systems are faster with several, and CRCs
take little processor time."""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong: in which file, and which tensor or object it concerns (or none)."""

    file: str
    key: str
    text: str


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """What was checked, and what was found."""

    checkpoint: str
    method: str
    """`manifest` or `containers`."""
    files: int
    blobs: int
    bytes: int
    """Bytes that were read and checked."""
    damages: tuple[Damage, ...]
    unchecked: tuple[str, ...]
    """Keys whose bytes carry no checksum we can read: written through a stream extension, or with
    torch's `set_crc32_options(False)`."""


class _Blob(NamedTuple):
    """One stretch of a file. crc: expected, or None. payload_bytes: expected, or None."""

    key: str
    offset: int
    length: int
    crc: int | None = None
    payload_bytes: int | None = None


class _Plan(NamedTuple):
    """What to read: blobs by file, and lengths if they are known."""

    method: str
    blobs: dict[str, list[_Blob]]
    file_bytes: dict[str, int]
    damages: list[Damage]
    unchecked: list[str]


def verify(
    checkpoint: Path,
    *,
    on_total: Callable[[int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    allow_pickle: bool = False,
) -> Verification:
    """Read and check all of a checkpoint. Damage is returned, not raised.

    Args:
        checkpoint: its directory.
        allow_pickle: as for `read_metadata`.
        on_total: called once with the number of bytes that will be read.
        on_bytes: called with the number of bytes read since its last call; from several threads.

    Raises:
        LoadFailed: `not-found` if this is not a checkpoint at all.
    """
    plan = _plan(checkpoint, allow_pickle)
    if on_total is not None:
        on_total(sum(blob.length for blobs in plan.blobs.values() for blob in blobs))
    names = sorted(plan.blobs.keys() | plan.file_bytes.keys())
    report = on_bytes or (lambda _: None)
    with ThreadPoolExecutor(READERS, thread_name_prefix="verify") as readers:
        found = list(
            readers.map(
                lambda name: _check_file(
                    checkpoint / name,
                    name,
                    plan.file_bytes.get(name),
                    plan.blobs.get(name, []),
                    report,
                ),
                names,
            )
        )
    return Verification(
        checkpoint=str(checkpoint),
        method=plan.method,
        files=len(names),
        blobs=sum(len(blobs) for blobs in plan.blobs.values()),
        bytes=sum(each.bytes for each in found),
        damages=(*plan.damages, *(damage for each in found for damage in each.damages)),
        unchecked=(*plan.unchecked, *(key for each in found for key in each.unchecked)),
    )


def _plan(checkpoint: Path, allow_pickle: bool) -> _Plan:
    """Read manifest and index, compare them, and lay out what is to be read."""
    damages: list[Damage] = []
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(checkpoint)
    except CorruptCheckpoint as error:
        damages.append(Damage(file=MANIFEST_NAME, key="", text=error.message))
    except OSError as error:
        text = f"cannot be read: {str(error.strerror).lower()}"
        damages.append(Damage(file=MANIFEST_NAME, key="", text=text))
    metadata = _read_index(checkpoint, manifest, damages, allow_pickle)
    if metadata is not None:
        from milepost.dcp_format.coverage import index_problems

        damages += [
            Damage(file=METADATA_NAME, key=problem.key, text=problem.text)
            for problem in index_problems(metadata)
        ]
    if manifest is None:
        return _plan_containers(metadata, damages)
    text = _index_damage(checkpoint, manifest)
    if text:
        damages.append(Damage(file=METADATA_NAME, key="", text=text))
    columns = (manifest.files_of, manifest.offsets, manifest.lengths, manifest.crcs)
    if (
        any(len(column) != len(manifest.keys) for column in columns)
        or len(manifest.files) != len(manifest.file_bytes)
        or any(not 0 <= index < len(manifest.files) for index in manifest.files_of)
        or not _are_inside(manifest.files)
    ):
        damages.append(Damage(file=MANIFEST_NAME, key="", text="its columns do not agree"))
        return _plan_containers(metadata, damages)
    blobs: dict[str, list[_Blob]] = {}
    for key, file, *rest in zip(manifest.keys, *columns, strict=True):
        blobs.setdefault(manifest.files[file], []).append(_Blob(key, *rest))
    if metadata is not None:
        damages += _disagreements(manifest, metadata)
    file_bytes = dict(zip(manifest.files, manifest.file_bytes, strict=True))
    return _Plan("manifest", blobs, file_bytes, damages, [])


def _read_index(
    checkpoint: Path, manifest: Manifest | None, damages: list[Damage], allow_pickle: bool
) -> Metadata | None:
    """Return the index. A faulty index counts as damage, unless there is no checkpoint at all."""
    from milepost.dcp_format.index import read_metadata

    try:
        return read_metadata(checkpoint, allow_pickle=allow_pickle)
    except CorruptCheckpoint as error:
        damages.append(Damage(file=METADATA_NAME, key="", text=error.message))
    except LoadFailed as error:
        if manifest is None and not damages:
            raise
        text = "missing" if error.code == "not-found" else error.message
        damages.append(Damage(file=METADATA_NAME, key="", text=text))
    return None


def _index_damage(checkpoint: Path, manifest: Manifest) -> str:
    """Compare the index's bytes with the manifest, which knows them since format 1."""
    if manifest.index_crc < 0:
        return ""
    try:
        found = isal_zlib.crc32(read_regular(checkpoint / METADATA_NAME))
    except OSError:
        return ""  # The code that reads the index has reported this.
    if found == manifest.index_crc:
        return ""
    return f"its checksum is {found:08x}, but the manifest has {manifest.index_crc:08x}"


def _are_inside(names: Iterable[str]) -> bool:
    """Whether all names stay below the checkpoint's directory."""
    paths = [PurePosixPath(name) for name in names]
    return not any(path.is_absolute() or ".." in path.parts or not path.parts for path in paths)


def _disagreements(manifest: Manifest, metadata: Metadata) -> list[Damage]:
    """Return the places that only the index or only the manifest knows: one of the two belongs to
    another save.
    """
    known = {
        (key, manifest.files[file], offset, length)
        for key, file, offset, length in zip(
            manifest.keys, manifest.files_of, manifest.offsets, manifest.lengths, strict=True
        )
    }
    indexed = {
        (index.fqn, info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    }
    return [
        Damage(
            file=METADATA_NAME,
            key=key,
            text=f"{'the index' if place in indexed else 'the manifest'} alone places it in {file} "
            f"at {offset}, {length} bytes long",
        )
        for place in sorted(known ^ indexed)
        for key, file, offset, length in [place]
    ]


def _plan_containers(metadata: Metadata | None, damages: list[Damage]) -> _Plan:
    blobs: dict[str, list[_Blob]] = {}
    unchecked: list[str] = []
    if metadata is None:
        return _Plan("containers", blobs, {}, damages, unchecked)
    payload_bytes = _payloads(metadata)
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            unchecked.append(index.fqn)
            continue
        expected = payload_bytes.get((index.fqn, index.offset))
        blob = _Blob(index.fqn, info.offset, info.length, None, expected)
        blobs.setdefault(info.relative_path, []).append(blob)
    for found in blobs.values():
        found.sort(key=lambda blob: blob.offset)
    return _Plan("containers", blobs, {}, damages, unchecked)


def _payloads(metadata: Metadata) -> dict[tuple[str, object], int]:
    """Return how many bytes the elements of each shard take."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return {
        (key, chunk.offsets): prod(chunk.sizes) * entry.properties.dtype.itemsize
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }


class _FileReport(NamedTuple):
    """What was found while reading one file."""

    bytes: int
    damages: list[Damage]
    unchecked: list[str]


def _check_file(
    path: Path,
    name: str,
    file_bytes: int | None,
    blobs: list[_Blob],
    report: Callable[[int], None],
) -> _FileReport:
    """Check one file's length and blobs."""
    damages: list[Damage] = []
    unchecked: list[str] = []

    def damage(key: str, text: str) -> None:
        damages.append(Damage(file=name, key=key, text=text))

    checked = 0
    try:
        file = open_regular(path)
    except OSError as error:
        reason = "missing" if isinstance(error, FileNotFoundError) else str(error.strerror).lower()
        keys = sorted({blob.key for blob in blobs})
        for key in keys or [""]:
            damage(key, f"the file is {reason}" if reason == "missing" else reason)
        return _FileReport(0, damages, unchecked)
    try:
        length = os.fstat(file).st_size
        if file_bytes is not None and length != file_bytes:
            damage("", f"{length} bytes long, written were {file_bytes}")
        for blob in blobs:
            if blob.offset < 0 or blob.length < 0 or blob.offset + blob.length > length:
                end = blob.offset + blob.length
                damage(blob.key, f"bytes {blob.offset} to {end} lie beyond the end at {length}")
                continue
            try:
                text = (
                    _check_container(file, blob, report)
                    if blob.crc is None
                    else _check_crc(file, blob, report)
                )
            except OSError as error:
                text = f"cannot be read: {str(error.strerror).lower()}"
            checked += blob.length
            if text is None:
                unchecked.append(blob.key)
            elif text:
                damage(blob.key, text)
        # Nobody will read these bytes again soon; leave the page cache to training.
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
    return _FileReport(checked, damages, unchecked)


def _check_crc(file: int, blob: _Blob, report: Callable[[int], None]) -> str:
    """Return what is wrong with a blob whose CRC is known, or nothing."""
    crc, at, end = 0, blob.offset, blob.offset + blob.length
    while at < end:
        block = os.pread(file, min(BLOCK_BYTES, end - at), at)
        if not block:
            return f"the file ends at {at} while it is read"
        crc = isal_zlib.crc32(block, crc)
        at += len(block)
        report(len(block))
    if crc == blob.crc:
        return ""
    return f"CRC-32 of bytes {blob.offset} to {end} is {crc:08x}, written was {blob.crc:08x}"


class _Window(io.RawIOBase):
    """A stretch of a file as a file of its own, for zipfile."""

    def __init__(self, file: int, offset: int, length: int, report: Callable[[int], None]) -> None:
        super().__init__()
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0
        self._report = report
        self._seen = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        # Use a view: a slice of a bytearray would be a copy.
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        count = os.preadv(self._file, [view], self._offset + self._at) if view else 0
        self._at += count
        if self._at > self._seen:
            self._report(self._at - self._seen)
            self._seen = self._at
        return count


def _check_container(file: int, blob: _Blob, report: Callable[[int], None]) -> str | None:
    """Return what is wrong with a blob that has only the CRCs of its own zip, or nothing.

    None: it looks whole, but carries no CRCs.
    """
    window = _Window(file, blob.offset, blob.length, report)
    try:
        with zipfile.ZipFile(io.BufferedReader(window, 1 << 20)) as archive:
            entries = archive.infolist()
            has_crcs = any(entry.CRC for entry in entries)
            damaged = archive.testzip() if has_crcs else None
            payloads = [
                entry.file_size
                for entry in entries
                if PurePosixPath(entry.filename).match("*/data/*")
            ]
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError) as error:
        return f"not a whole torch container at {blob.offset}: {str(error).lower()}"
    if damaged is not None:
        return f"CRC-32 of {damaged} in the container at {blob.offset} does not match"
    # Subclasses of Tensor are stored as several payloads, and the index does not name them.
    if len(payloads) == 1 and blob.payload_bytes not in (None, payloads[0]):
        return (
            f"the container at {blob.offset} holds {payloads[0]} bytes of elements, "
            f"the index asks for {blob.payload_bytes}"
        )
    return "" if has_crcs else None
