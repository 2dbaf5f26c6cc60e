"""Where each blob of a rank lies in its image, and so in its `.distcp` file.

Pure arithmetic, no torch. The trainer lays out its image with it, the planner's child computes the
same offsets for `.metadata`, and the daemon finds payloads and their CRC fields by the table.
Tensors come first, in the order of the offer, at offsets that depend only on the lengths of their
containers. Serialised objects follow, whose lengths may change with every save. Sources for the
containers: torch/serialization.py and torch/distributed/checkpoint/filesystem.py (2.13).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

PAGE_BYTES: Final = 4096
"""Unit of direct I/O and of memory protection; images, files and large blobs start and end on
it."""

SMALL_ALIGN_BYTES: Final = 64
"""torch aligns payloads to 64 bytes within a container, so a container aligned to 64 keeps that in
the file."""

LARGE_BYTES: Final = 1 << 20
"""Containers of at least this size start on a page; smaller ones would waste more than they gain.
"""


def align(offset: int, to: int) -> int:
    """Return the smallest multiple of `to` that is not below `offset`."""
    return -(-offset // to) * to


class Placement(NamedTuple):
    """Offsets of the tensors' containers, and where the objects begin."""

    offsets: list[int]
    objects_at: int


def place(container_bytes: Sequence[int]) -> Placement:
    """Lay tensors' containers of these lengths out in order, starting at 0."""
    offsets: list[int] = []
    end = 0
    for length in container_bytes:
        start = align(end, PAGE_BYTES if length >= LARGE_BYTES else SMALL_ALIGN_BYTES)
        offsets.append(start)
        end = start + length
    return Placement(offsets, align(end, SMALL_ALIGN_BYTES))


class TableRow(NamedTuple):
    """One tensor's container in an image; all offsets are in bytes from the image's start.

    item: index in the rank's offer. crc_at, central_crc_at: where the container has the payload's
    CRC-32, little-endian: in its data descriptor and in its central directory.
    """

    item: int
    blob_at: int
    blob_bytes: int
    payload_at: int
    payload_bytes: int
    crc_at: int
    central_crc_at: int


_ROW: Final = struct.Struct("<7Q")


def pack_table(rows: Iterable[TableRow]) -> bytes:
    """Return the rows as the arena stores them: 56 bytes each, little-endian."""
    return b"".join(_ROW.pack(*row) for row in rows)


def unpack_table(table: bytes | memoryview) -> list[TableRow]:
    """Read the rows back. Raises ValueError if the length is not a whole number of rows."""
    if len(table) % _ROW.size:
        raise ValueError(f"a layout table of {len(table)} bytes is not a multiple of {_ROW.size}")
    return [TableRow(*values) for values in _ROW.iter_unpack(table)]
