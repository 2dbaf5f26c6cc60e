"""Shared memory: one file per rank with a header and slots, mapped by the trainer and by its node's
daemon.

Owns the file's form: [header page][layout table][record area of each slot][image of each slot].
Every part starts on a page. Knows nothing of tensors (`staging` does), of checkpoint directories
(`storage` does), of how memory is reserved (`pages` does) or of pinning, and never imports torch.
The file outlives both processes: whoever opens it next can read what was sealed in a slot. An open
arena holds one file descriptor, inside the mapping. multiprocessing.shared_memory is not used:
before Python 3.13 the first process to exit unlinks the segment while the other still needs it.

A slot's state is one byte, so it is never torn; the record is written before the state says STAGED,
and carries a CRC. Sources: mmap(2), tmpfs(5).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
import struct
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgpack
import msgspec
from isal import isal_zlib

from milepost.errors import Rejected
from milepost.format.layout import PAGE_BYTES, align
from milepost.memory import pages
from milepost.storage.refusals import storage_error
from milepost.wire.replicas import DIGESTS_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Iterator

ARENA_VERSION: Final = 1
"""Version of the file's form; the other side refuses any other."""

_MAGIC: Final = b"MILEPOST"
_HEADER: Final = struct.Struct("<8sIIQQQI64s")
"""Magic, version, slots, image bytes, record bytes, table bytes, CRC-32 of the table, layout id
(UTF-8, zero-padded).
"""
_CRC: Final = struct.Struct("<I")
_RECORD: Final = struct.Struct("<II")
"""Length and CRC-32 of a slot's record."""
_RECORD_AT: Final = 8
"""In a slot's record area: the state byte is at 0, `_RECORD` here, and the record follows it."""
_DATA_AT: Final = _RECORD_AT + _RECORD.size
_LAYOUT_ID_BYTES: Final = 64


class SlotState(IntEnum):
    """What a slot holds; the value is a byte in the file."""

    FREE = 0
    STAGING = 1
    """Being filled: after a crash its image is worth nothing."""
    STAGED = 2
    """Complete, and described by its record."""


class SlotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a staged image is."""

    job: str
    save_id: str
    step: int
    name: str
    rank: int
    layout_id: str
    image_bytes: int
    """Bytes of the image in use."""
    objects: tuple[tuple[int, int, int], ...] = ()
    """(item of the offer, offset in the image, length) of each serialised object."""
    digests: bytes = b""
    """Of the replicas that are due, by `milepost.wire.replicas.pack_digests`."""
    place: str = ""
    """As in `SaveRef`."""
    overwrite: bool = True


def record_bytes(objects: int) -> int:
    """Return the size of a record area that is enough for this many objects, for the longest names
    that milepost accepts, and for the digests of a save.
    """
    return 2 * PAGE_BYTES + 30 * objects + DIGESTS_BYTES_MAX


class _Shape(NamedTuple):
    """Sizes of the parts; all offsets follow from them. Image and record bytes are whole pages."""

    slots: int
    image_bytes: int
    record_bytes: int
    table_bytes: int

    @property
    def records_at(self) -> int:
        return PAGE_BYTES + align(self.table_bytes, PAGE_BYTES)

    @property
    def images_at(self) -> int:
        return self.records_at + self.slots * self.record_bytes

    @property
    def nbytes(self) -> int:
        return self.images_at + self.slots * self.image_bytes


class Slot:
    """One image and its record. Made by `Arena`; its memory is the arena's.

    Attributes:
        index: position in the arena.
        image: writable, page aligned, as long as the arena's `image_bytes`.
    """

    def __init__(self, path: Path, index: int, control: memoryview, image: memoryview) -> None:
        self.index: Final = index
        self.image: Final = image
        self._path = path
        self._control = control

    @property
    def state(self) -> SlotState:
        """What the slot holds now. Raises Rejected("arena-invalid") if the byte is not a state."""
        try:
            return SlotState(self._control[0])
        except ValueError:
            raise self._invalid(f"state {self._control[0]}") from None

    def begin(self) -> None:
        """Declare that the image is being filled; what it held is lost."""
        self._control[0] = SlotState.STAGING

    def seal(self, record: SlotRecord) -> None:
        """Describe the image and declare it complete. Raises Rejected if the record area is too
        small.
        """
        if record.image_bytes > len(self.image):
            raise AssertionError(f"{record.image_bytes} bytes staged in {len(self.image)}")
        data: bytes = msgpack.packb(msgspec.to_builtins(record, builtin_types=(bytes,)))
        if _DATA_AT + len(data) > len(self._control):
            raise self._invalid(f"record of {len(data)} bytes in {len(self._control)}")
        _RECORD.pack_into(self._control, _RECORD_AT, len(data), isal_zlib.crc32(data))
        self._control[_DATA_AT : _DATA_AT + len(data)] = data
        self._control[0] = SlotState.STAGED

    def record(self) -> SlotRecord:
        """Return what the image is. Raises Rejected("arena-invalid") if it is not staged, or
        damaged.
        """
        if self.state is not SlotState.STAGED:
            raise self._invalid(f"nothing staged, state {self.state.name}")
        length, crc = _RECORD.unpack_from(self._control, _RECORD_AT)
        data = bytes(self._control[_DATA_AT : _DATA_AT + length])
        if len(data) != length or isal_zlib.crc32(data) != crc:
            raise self._invalid("damaged record")
        try:
            record = msgspec.convert(
                msgpack.unpackb(data, use_list=False), SlotRecord, builtin_types=(bytes,)
            )
        except (ValueError, msgspec.ValidationError) as error:
            raise self._invalid(f"malformed record: {error}") from error
        if not 0 <= record.image_bytes <= len(self.image) or any(
            offset < 0 or length < 0 or offset + length > record.image_bytes
            for _, offset, length in record.objects
        ):
            raise self._invalid("record names bytes outside the image")
        return record

    def release(self) -> None:
        """Declare that the image is not needed any more."""
        self._control[0] = SlotState.FREE

    def close(self) -> None:
        """Release the memory, unless something else still refers to it."""
        for view in (self.image, self._control):
            with suppress(BufferError):
                view.release()

    def _invalid(self, what: str) -> Rejected:
        return Rejected("arena-invalid", f"slot {self.index} of arena {self._path}: {what}")


class Arena:
    """A mapped arena; made by `create` or `open`.

    Attributes:
        path: the file.
        layout_id: the layout its images follow.
        table: rows of `layout.TableRow`, packed; read-only.
        slots: the slots, all alike.
        image_bytes: capacity of one image: what was asked for, rounded up to a page.
        nbytes: size of the file.
    """

    def __init__(
        self, path: Path, descriptor: int, shape: _Shape, layout_id: str, table: bytes
    ) -> None:
        self.path: Final = path
        self.layout_id: Final = layout_id
        self.table: Final = table
        self.image_bytes: Final = shape.image_bytes
        self.nbytes: Final = shape.nbytes
        self._map = mmap.mmap(descriptor, shape.nbytes)
        pages.keep_from_children(self._map)
        self._view = memoryview(self._map)
        self.slots: Final = tuple(self._slots(shape))

    def _slots(self, shape: _Shape) -> Iterator[Slot]:
        for index in range(shape.slots):
            control = shape.records_at + index * shape.record_bytes
            image = shape.images_at + index * shape.image_bytes
            yield Slot(
                self.path,
                index,
                self._view[control : control + shape.record_bytes],
                self._view[image : image + shape.image_bytes],
            )

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        layout_id: str,
        table: bytes,
        slots: int,
        image_bytes: int,
        record_bytes: int,
    ) -> Arena:
        """Make the file with all its memory reserved and all slots free, and map it. After a
        failure there is no file.

        Args:
            table: packed rows.
            image_bytes: least capacity of an image; 0 is allowed.
            record_bytes: least size of a record area, see `record_bytes()`.

        Raises:
            Rejected: "shm-too-small" if the file system or the memory that this process may use is
                too small, or the directory is missing; "arena-invalid" if the file exists.
            StorageError: the system refused.
        """
        name = layout_id.encode()
        if not 0 < len(name) <= _LAYOUT_ID_BYTES or slots < 1:
            raise AssertionError(f"layout id {layout_id!r} or {slots} slots out of bounds")
        shape = _Shape(
            slots,
            align(image_bytes, PAGE_BYTES),
            align(max(record_bytes, 1), PAGE_BYTES),
            len(table),
        )
        try:
            pages.check_room(path.parent, shape.nbytes)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
        except FileExistsError as error:
            raise Rejected(
                "arena-invalid",
                f"arena {path} exists already",
                "another trainer of this job and rank may be running; if not, remove the file",
            ) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Rejected(
                "shm-too-small",
                f"there is no directory {path.parent} for shared memory",
                "make MILEPOST_SHM_DIR a memory file system, or unset it: /dev/shm is the default",
            ) from error
        except OSError as error:
            raise storage_error("create", path, error, shape.nbytes) from error
        try:
            try:
                pages.reserve_pages(path, descriptor, shape.nbytes)
                os.pwrite(descriptor, table, PAGE_BYTES)
                # Write the header last: a file without one is not an arena.
                fields = _HEADER.pack(_MAGIC, ARENA_VERSION, *shape, isal_zlib.crc32(table), name)
                os.pwrite(descriptor, fields + _CRC.pack(isal_zlib.crc32(fields)), 0)
                return cls(path, descriptor, shape, layout_id, table)
            except OSError as error:
                raise storage_error("create", path, error, shape.nbytes) from error
            finally:
                os.close(descriptor)  # The mapping has its own.
        except BaseException:
            with suppress(FileNotFoundError):
                path.unlink()
            raise

    @classmethod
    def open(cls, path: Path) -> Arena:
        """Map an arena that another process made. Checks that it is one, and that it is this
        user's.

        Raises:
            Rejected: "arena-invalid": missing, not a regular file of this user, wrong magic,
                version, size or CRC.
        """
        try:
            # Non-blocking, so that a pipe of that name cannot block us.
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags)
        except OSError as error:
            raise _invalid(path, os.strerror(error.errno or 0).lower()) from error
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _invalid(path, "not a regular file")
            if status.st_uid != os.geteuid():
                raise _invalid(path, f"belongs to user {status.st_uid}, not {os.geteuid()}")
            header = os.pread(descriptor, _HEADER.size + _CRC.size, 0)
            if len(header) < _HEADER.size + _CRC.size or not header.startswith(_MAGIC):
                raise _invalid(path, "no arena header")
            _, version, *sizes, table_crc, name = _HEADER.unpack_from(header)
            if version != ARENA_VERSION:
                raise _invalid(path, f"version {version}, this side speaks {ARENA_VERSION}")
            if _CRC.unpack_from(header, _HEADER.size)[0] != isal_zlib.crc32(header[: _HEADER.size]):
                raise _invalid(path, "damaged header")
            shape = _Shape(*sizes)
            if shape.nbytes != status.st_size:
                raise _invalid(path, f"{status.st_size} bytes long, should be {shape.nbytes}")
            table = os.pread(descriptor, shape.table_bytes, PAGE_BYTES)
            if isal_zlib.crc32(table) != table_crc:
                raise _invalid(path, "damaged layout table")
            return cls(path, descriptor, shape, name.rstrip(b"\0").decode(), table)
        except OSError as error:
            raise _invalid(path, os.strerror(error.errno or 0).lower()) from error
        finally:
            os.close(descriptor)

    def fault_in(self, threads: int | None = None) -> None:
        """Map every page, so that the first copy is as fast as the next; contents do not change.

        Never holds the GIL for long, and may run beside staging. One thread takes about a second
        per GiB of new pages.

        Args:
            threads: how many threads share the work; None: as many as help.
        """
        pages.fault_in(self._map, threads)

    def close(self) -> None:
        """Unmap, and close the descriptor. Views that are still in use keep the memory mapped."""
        for slot in self.slots:
            slot.close()
        with suppress(BufferError):
            self._view.release()
            self._map.close()

    def free(self) -> None:
        """Give the memory back to the system, even if other processes still map the file: they
        read zeros from then on. Only for an arena whose slots are all free.
        """
        # Otherwise the daemon's mapping would keep the memory until it opens the next arena.
        with suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE)

    def unlink(self) -> None:
        """Remove the file; mappings stay valid. Missing is fine."""
        self.path.unlink(missing_ok=True)


def arena_dir() -> Path:
    """Return where arenas lie, absolute: `$MILEPOST_SHM_DIR`, else `/dev/shm`."""
    return Path(os.environ.get("MILEPOST_SHM_DIR") or "/dev/shm").absolute()


def arena_path(job: str, attempt: int, rank: int, generation: int) -> Path:
    """Return the file of one arena; each new layout of a rank is a new generation."""
    return arena_dir() / f"{_prefix(job)}{attempt}-r{rank}-g{generation}"


class ArenaFile(NamedTuple):
    """An arena file found by name."""

    path: Path
    attempt: int
    rank: int
    generation: int


def find_arenas(job: str) -> list[ArenaFile]:
    """Return this user's arena files of a job, of all attempts, oldest first."""
    pattern = re.compile(re.escape(_prefix(job)) + r"(\d+)-r(\d+)-g(\d+)")
    directory = arena_dir()
    found = []
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []  # No arena can be there. `Arena.create` reports the missing directory.
    for name in names:
        if match := pattern.fullmatch(name):
            attempt, rank, generation = (int(number) for number in match.groups())
            found.append(ArenaFile(directory / name, attempt, rank, generation))
    return sorted(found, key=lambda each: each[1:])


def _prefix(job: str) -> str:
    return f"milepost-{os.geteuid()}-{hashlib.blake2b(job.encode(), digest_size=8).hexdigest()}-"


def _invalid(path: Path, what: str) -> Rejected:
    return Rejected("arena-invalid", f"arena {path}: {what}")
