"""Reads blobs of a checkpoint's data files, once, from front to back, and checks them on the way.

Compares a blob's bytes with the manifest's checksum of the whole container. Without a manifest,
uses the checksum that torch itself put into the container. Sources: torch/serialization.py and
torch/distributed/checkpoint/filesystem.py (2.13); APPNOTE.TXT of the zip format.
"""

from __future__ import annotations

import ctypes
import os
from collections import OrderedDict
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from isal import isal_zlib

from milepost.dcp_format.archive import (
    ArchiveError,
    check_archive,
    find_tensor,
    storage_order,
)
from milepost.dcp_format.container import ContainerTemplate, template
from milepost.errors import CorruptCheckpoint, LoadFailed, UsageError
from milepost.exchange.opening import open_object
from milepost.format.opening import open_regular

if TYPE_CHECKING:
    from pathlib import Path

    from milepost.wire.offers import Box

FILES_MAX: Final = 64
"""How many files are open at the same time. A checkpoint of thousands of ranks has more files than
a process may open."""

HELD_BYTES: Final = 16 << 10
"""Blobs up to this length are read at once and kept until they are used up. A tensor may have
thousands of them."""


class BlobPlace(NamedTuple):
    """Where a blob lies. crc: the manifest's checksum of the whole container; None if there is
    none.
    """

    file: str
    offset: int
    length: int
    crc: int | None


class DataFiles:
    """The data files of a checkpoint, a few of them open at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self._open: OrderedDict[str, int] = OrderedDict()

    def read_into(self, name: str, at: int, view: memoryview) -> None:
        """Fill `view` with a file's bytes from `at` on. Raises CorruptCheckpoint, LoadFailed."""
        file = self._descriptor(name)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(file, [view[done:]], at + done)
            except OSError as error:
                raise self._unreadable(name, error) from error
            if not count:
                raise damage(self.folder, name, "", f"the file ends at {at + done} already")
            done += count

    def read(self, name: str, at: int, length: int) -> bytes:
        """Return a stretch of a file. Raises as `read_into`."""
        buffer = bytearray(length)
        self.read_into(name, at, memoryview(buffer))
        return bytes(buffer)

    def length(self, name: str) -> int:
        return os.fstat(self._descriptor(name)).st_size

    def _descriptor(self, name: str) -> int:
        file = self._open.get(name)
        if file is not None:
            self._open.move_to_end(name)
            return file
        if len(self._open) >= FILES_MAX:
            _let_go(self._open.popitem(last=False)[1])
        try:
            file = open_regular(self.folder / name)
        except FileNotFoundError as error:
            raise damage(self.folder, name, "", "the file is missing") from error
        except OSError as error:
            raise self._unreadable(name, error) from error
        self._open[name] = file
        return file

    def _unreadable(self, name: str, error: OSError) -> LoadFailed:
        code = "permission" if isinstance(error, PermissionError) else "io-error"
        reason = (error.strerror or str(error)).lower()
        return LoadFailed(code, f"{self.folder / name} cannot be read: {reason}")

    def close(self) -> None:
        """Close all files; they can be read again."""
        while self._open:
            _let_go(self._open.popitem()[1])


def _let_go(file: int) -> None:
    # Nobody will read these bytes again soon; leave the page cache to training.
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def damage(folder: Path, name: str, key: str, text: str) -> CorruptCheckpoint:
    """Return the error that names file and key."""
    return CorruptCheckpoint(
        "corrupt",
        f"{folder / name}: {f'{key!r}: ' if key else ''}{text}",
        f"`milepost verify {folder}` lists all damage; use another checkpoint",
    )


# --- a tensor's blob ----------------------------------------------------------------------------


class Payload:
    """The elements of one shard, contiguous and row-major, read once from front to back."""

    def __init__(
        self, files: DataFiles, key: str, place: BlobPlace, size: Box, dtype: torch.dtype
    ) -> None:
        """Open the blob; nothing is read yet.

        Args:
            size, dtype: the shard's, according to the index.
        """
        self._files = files
        self._key = key
        self._place = place
        self._size = size
        self._dtype = dtype
        self.left: int = prod(size) * dtype.itemsize
        """How many bytes are not read yet."""
        self.is_unchecked = False
        """Whether the bytes carry no checksum; known once everything is read."""
        self._crc = 0

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next elements. After the last ones, compare the checksum. Raises
        CorruptCheckpoint, LoadFailed, UsageError.
        """
        opened = self._opened
        if opened.held is not None:
            at = len(opened.held) - self.left
            view[:] = opened.held[at : at + len(view)]
        else:
            end = opened.payload_at + opened.payload_bytes
            self._files.read_into(self._place.file, self._place.offset + end - self.left, view)
            self._crc = isal_zlib.crc32(view, self._crc)
        self.left -= len(view)
        if not self.left and opened.held is None:
            self._compare(opened)

    @cached_property
    def _opened(self) -> _Opened:
        place = self._place
        length = self._files.length(place.file)
        if not 0 <= place.offset <= place.offset + place.length <= length:
            end = place.offset + place.length
            raise self._damage(f"bytes {place.offset} to {end} lie beyond the end at {length}")
        known = template(self._size, self._dtype)
        if place.length <= HELD_BYTES:
            return self._hold(known)
        opened = self._streamed(known)
        if place.crc is not None:
            self._crc = isal_zlib.crc32(self._read_at(0, opened.payload_at))
        return opened

    def _hold(self, known: ContainerTemplate) -> _Opened:
        """Read a small blob at once, and check it at once."""
        blob = self._read_at(0, self._place.length)
        at = known.payload_at
        if len(blob) == known.total_bytes and blob.startswith(known.prefix):
            elements = blob[at : at + self.left]
            if self._place.crc is None:
                crc = int.from_bytes(blob[known.crc_at : known.crc_at + 4], "little")
                self._expect(isal_zlib.crc32(elements), crc)
            else:
                self._check_whole(blob)
            return _Opened(at, self.left, None, elements)
        self._check_whole(blob)
        return _Opened(0, self.left, None, self._loaded(blob))

    def _streamed(self, known: ContainerTemplate) -> _Opened:
        """Find a large blob's payload by the usual form of a container, or by its zip directory."""
        place = self._place
        if place.length == known.total_bytes and self._read_at(0, known.payload_at) == known.prefix:
            crc = None
            if place.crc is None:
                crc = int.from_bytes(self._read_at(known.crc_at, 4), "little")
            return _Opened(known.payload_at, known.payload_bytes, crc)
        try:
            stored = find_tensor(self._read_at, place.length)
        except ArchiveError as error:
            raise self._damage(f"not a whole torch container: {error}") from error
        if (
            stored is None
            or (stored.dtype, stored.size, stored.offset) != (self._dtype, self._size, 0)
            or stored.payload_bytes != self.left
            or storage_order(stored.size, stored.stride) != tuple(range(len(stored.size)))
        ):
            # The elements are stored in another order, as those of a transposed tensor are. This is
            # rare; then one shard is held in memory.
            blob = self._read_at(0, place.length)
            self._check_whole(blob)
            return _Opened(0, self.left, None, self._loaded(blob))
        self.is_unchecked = place.crc is None and stored.crc is None
        return _Opened(stored.payload_at, self.left, stored.crc)

    def _read_at(self, at: int, length: int) -> bytes:
        return self._files.read(self._place.file, self._place.offset + at, length)

    def _compare(self, opened: _Opened) -> None:
        """Compare the checksum of all that was read."""
        place = self._place
        if place.crc is not None:
            end = opened.payload_at + opened.payload_bytes
            tail = self._read_at(end, place.length - end)
            self._expect(isal_zlib.crc32(tail, self._crc), place.crc)
        elif opened.crc is not None:
            self._expect(self._crc, opened.crc)

    def _check_whole(self, blob: bytes) -> None:
        """Check a blob that was read at once."""
        try:
            self.is_unchecked = not check_whole(blob, self._place.crc)
        except ArchiveError as error:
            raise self._damage(f"the blob at {self._place.offset}: {error}") from error

    def _expect(self, found: int, written: int) -> None:
        if found != written:
            at = self._place.offset
            text = f"the blob at {at}: CRC-32 is {found:08x}, written was {written:08x}"
            raise self._damage(text)

    def _loaded(self, blob: bytes) -> bytes:
        """Return the elements of a blob that only torch can read."""
        try:
            value = open_object(blob, f"{self._files.folder}: {self._key!r}")
        except LoadFailed as error:
            raise UsageError("unsupported-tensor", error.message, error.hint) from error
        if (
            type(value) is not torch.Tensor
            or value.layout is not torch.strided
            or value.dtype != self._dtype
        ):
            raise UsageError(
                "unsupported-tensor",
                f"{self._files.folder}: {self._key!r} is stored as {describe(value)}, "
                f"the index has a tensor of {str(self._dtype).removeprefix('torch.')}",
                "save its parts, or its dense form, under keys of their own",
            )
        if tuple(value.size()) != self._size:
            raise self._damage(
                f"the container at {self._place.offset} holds a tensor of size "
                f"{list(value.size())}, the index asks for {list(self._size)}"
            )
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return bytes(memory_of(plain))

    def _damage(self, text: str) -> CorruptCheckpoint:
        return damage(self._files.folder, self._place.file, self._key, text)


class _Opened(NamedTuple):
    """A blob whose payload was found. crc: the payload's, if that is the one to compare. held: the
    elements, if they were read (and checked) already.
    """

    payload_at: int
    payload_bytes: int
    crc: int | None
    held: bytes | None = None


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. Only read them, and keep the tensor
    meanwhile.
    """
    count = tensor.numel() * tensor.itemsize
    if not count:
        return memoryview(b"")
    view: memoryview = _VIEW_OF(tensor.data_ptr(), count, _WRITABLE)
    return view


_WRITABLE: Final = 0x200
"""Since torch.frombuffer warns of anything else."""
_VIEW_OF: Final = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))


def describe(value: Any) -> str:
    """Describe a value that is not a plain tensor."""
    if isinstance(value, torch.Tensor):
        layout = str(value.layout).removeprefix("torch.")
        kind = "" if value.layout is torch.strided else f" of layout {layout}"
        return f"a {type(value).__name__}{kind} of dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"


def check_whole(blob: bytes, crc: int | None) -> bool:
    """Compare a blob with the manifest's checksum or, without one, with torch's own checksums in
    it. False if it has none. Raises ArchiveError.
    """
    if crc is None:
        return check_archive(blob)
    found = isal_zlib.crc32(blob)
    if found != crc:
        raise ArchiveError(f"CRC-32 is {found:08x}, written was {crc:08x}")
    return True
