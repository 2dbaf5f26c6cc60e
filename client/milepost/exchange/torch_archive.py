"""Writes what torch.save would write, without the tensors in memory.

torch itself writes the archive around stand-ins and leaves out their bytes (`skip_data`). Then the
real bytes are written into the holes as they are read, and their checksums are filled in.
torch.load reads the result as any other file. Sources: torch/serialization.py (2.13); APPNOTE.TXT
of the zip format, 4.3 and 4.5.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import torch
from isal import isal_zlib

from milepost.errors import UsageError
from milepost.exchange.blobs import memory_of
from milepost.exchange.drafts import Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import ModuleType

    from milepost.exchange.source import Source, TensorForm

_SPACING: Final = 64
"""Bytes between the addresses that stand-ins claim. torch distinguishes storages by address."""


class _Keys:
    """Stands in for the pickle module: notes which storage gets which record."""

    def __init__(self) -> None:
        self.storages: dict[str, torch.UntypedStorage] = {}
        keys = self.storages

        class Pickler(pickle.Pickler):
            """torch derives its own pickler from this one."""

            def __init_subclass__(cls) -> None:
                named = cls.persistent_id

                def persistent_id(self: Any, value: Any) -> Any:
                    found = named(self, value)
                    if found is not None:
                        keys[found[2]] = getattr(value, "_untyped_storage", value)
                    return found

                cls.persistent_id = persistent_id  # type: ignore[method-assign]

        self.module = cast("ModuleType", SimpleNamespace(__name__="pickle", Pickler=Pickler))


class _StandIns:
    """Tensors that only claim their bytes, each at an address of its own. Never touch their
    bytes.
    """

    def __init__(self, forms: Mapping[str, TensorForm]) -> None:
        self._anchor = (ctypes.c_uint8 * (_SPACING * max(1, len(forms))))()
        base = ctypes.addressof(self._anchor)
        self.tensors: dict[str, torch.Tensor] = {}
        self.key_of: dict[int, str] = {}
        """By address."""
        for number, (key, form) in enumerate(forms.items()):
            address = base + _SPACING * number
            if form.bytes:
                claimed = (ctypes.c_uint8 * form.bytes).from_address(address)
                flat = torch.frombuffer(claimed, dtype=torch.uint8)
                self.key_of[address] = key
            else:
                flat = torch.empty(0, dtype=torch.uint8)
            self.tensors[key] = flat.view(form.dtype).view(form.size)


def write_archive(
    path: Path,
    source: Source,
    tensors: Mapping[str, TensorForm],
    nest: Callable[[Mapping[str, torch.Tensor]], Any],
    on_bytes: Callable[[int], None],
) -> None:
    """Write a new file that torch.load reads back as the nested state, and sync it.

    Args:
        tensors: which of the source's tensors to write.
        nest: makes the state, objects included, from the stand-ins for the tensors.
        on_bytes: called with the number of the tensors' bytes written since its last call.

    Raises:
        UsageError: `unpicklable` for an object that torch cannot pickle.
        StorageError, and whatever `nest` or reading the source raises.
    """
    stand_ins = _StandIns(tensors)
    state = nest(stand_ins.tensors)
    keys = _Keys()
    with path.open("xb") as file:
        try:
            with torch.serialization.skip_data():
                torch.save(state, file, pickle_module=keys.module)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(
                "unpicklable", f"an object of the state cannot be pickled: {error}"
            ) from error
    with Draft(path) as draft:
        for record in _records(path):
            storage = keys.storages[record.key]
            key = stand_ins.key_of.get(storage.data_ptr())
            blocks = source.blocks(key) if key is not None else _bytes_of(storage)
            draft.skip_to(record.at)
            crc = 0
            for block in blocks:
                draft.write(block)
                crc = isal_zlib.crc32(block, crc)
                on_bytes(len(block))
            for place in record.crcs_at:
                draft.patch(crc.to_bytes(4, "little"), place)


def _bytes_of(storage: torch.UntypedStorage) -> Iterator[memoryview]:
    """Yield the bytes of a tensor that is part of an object."""
    yield memory_of(torch.empty(0, dtype=torch.uint8).set_(storage))


class _Record(NamedTuple):
    """A storage's place in the archive. at: its first byte. crcs_at: where its checksum goes."""

    key: str
    at: int
    crcs_at: tuple[int, int]


_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")
_DESCRIPTOR: Final = b"PK\x07\x08"
_CENTRAL_ENTRY: Final = struct.Struct("<4s16xIIHHH8xI")
"""Signature, stored and original length, lengths of name, extra field and comment, offset of the
local header."""
_CENTRAL_CRC_AT: Final = 16
_END: Final = struct.Struct("<4s6xH4xI2x")
_END64: Final = struct.Struct("<4s28xQ8xQ")
_LOCATOR64: Final = struct.Struct("<4s4xQ4x")
_EXTRA: Final = struct.Struct("<HH")
_ZIP64: Final = 1
_IN_EXTRA: Final = 0xFFFFFFFF


def _records(path: Path) -> list[_Record]:
    """Return the archive's holes in the order of the file.

    torch wrote the archive a moment ago, so a deviation is a bug of ours and fails an assertion.
    """
    found = []
    with path.open("rb") as file:
        end_at = file.seek(-_END.size, os.SEEK_END)
        signature, count, directory_at = _END.unpack(file.read(_END.size))
        assert signature == b"PK\x05\x06"
        file.seek(end_at - _LOCATOR64.size)
        signature, end64_at = _LOCATOR64.unpack(file.read(_LOCATOR64.size))
        if signature == b"PK\x06\x07":
            file.seek(end64_at)
            signature, count, directory_at = _END64.unpack(file.read(_END64.size))
            assert signature == b"PK\x06\x06"
        at = directory_at
        file.seek(at)
        directory = file.read(end_at - at)
        for _ in range(count):
            entry = _CENTRAL_ENTRY.unpack_from(directory, at - directory_at)
            signature, stored, length, name_bytes, extra_bytes, comment_bytes, header_at = entry
            assert signature == b"PK\x01\x02"
            name_at = at - directory_at + _CENTRAL_ENTRY.size
            name = directory[name_at : name_at + name_bytes].decode()
            extra = directory[name_at + name_bytes :][:extra_bytes]
            length, _, header_at = _wide(extra, length, stored, header_at)
            folder, _, key = name.partition("/data/")
            if key and "/" not in folder and length:
                file.seek(header_at)
                signature, *parts = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                assert signature == b"PK\x03\x04"
                data_at = header_at + _LOCAL_HEADER.size + sum(parts)
                file.seek(data_at + length)
                assert file.read(len(_DESCRIPTOR)) == _DESCRIPTOR
                crc_at = data_at + length + len(_DESCRIPTOR)
                found.append(_Record(key, data_at, (crc_at, at + _CENTRAL_CRC_AT)))
            at += _CENTRAL_ENTRY.size + name_bytes + extra_bytes + comment_bytes
    return sorted(found, key=lambda record: record.at)


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Return the values. A value that does not fit into 32 bits is taken from the zip64 extra
    field, which has such values in this order.
    """
    at = 0
    while at < len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _ZIP64:
            numbers = struct.unpack_from(f"<{length // 8}Q", extra, at)
            wide = iter(numbers)
            return tuple(next(wide) if value == _IN_EXTRA else value for value in values)
        at += length
    return values
