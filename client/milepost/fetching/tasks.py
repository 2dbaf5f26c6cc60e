"""What to do with the bytes of one file, as tasks.

A task names a range of the file and what to do with it. All tasks except `SmallTask` may be served
in parts, since a file is read in blocks that may end anywhere. `FilePlan` gathers tasks; it opens
and reads nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple

import torch

from milepost.fetching.checksums import Check
from milepost.fetching.copying import (
    address_of,
    as_bits,
    copy_elements,
    elements_at,
    narrowed,
    row_major,
)
from milepost.fetching.intersection import boxes_within, flat_range, flat_spans
from milepost.wire.offers import Box

GAP_BYTES: Final = 64 << 10
"""Gaps up to this length between two wanted ranges are read, too: that is faster than another
call.
"""


class SmallTask(NamedTuple):
    """A small container; a run of its payload goes into contiguous host memory.

    begin, end: the container in the file. prefix: how it begins if its payload is at the expected
    place. at, nbytes: the run in the file. crc_at: where in the file the payload's CRC is; 0 if it
    is checked in another way. payload_bytes: the length of the whole payload, which ends where the
    descriptor with its CRC begins.
    """

    begin: int
    end: int
    prefix: bytes
    at: int
    nbytes: int
    address: int
    read: int
    crc_at: int
    payload_bytes: int


class RunTask(NamedTuple):
    """A range that goes into contiguous host memory unchanged."""

    begin: int
    end: int
    address: int
    read: int


class BoxTask:
    """A box of a payload that is copied element by element: to memory that is not contiguous, has
    another dtype, or is on a device.

    begin, end: the range of the file that holds the box. origin: where the chunk's first element
    would be in the file. chunk, at, sizes: the chunk's sizes, dimensions in the order of the file,
    and the box within it. memory: has the box's sizes, in the same order.
    """

    __slots__ = ("_strides", "at", "begin", "chunk", "dtype", "end", "memory", "origin", "read",
                 "sizes")  # fmt: skip

    def __init__(
        self,
        origin: int,
        dtype: torch.dtype,
        chunk: Box,
        at: Box,
        sizes: Box,
        memory: torch.Tensor,
        read: int,
    ) -> None:
        self.origin = origin
        self.memory, self.dtype = as_bits(memory, dtype)
        self.chunk = chunk
        self.at = at
        self.sizes = sizes
        self.read = read
        self._strides = row_major(chunk)
        first = sum(n * by for n, by in zip(at, self._strides, strict=True))
        last = first + sum((n - 1) * by for n, by in zip(sizes, self._strides, strict=True))
        self.begin = origin + first * dtype.itemsize
        self.end = origin + (last + 1) * dtype.itemsize

    def put(
        self,
        begin: int,
        end: int,
        address: int,
        give: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Copy the elements that lie completely between two places of the file.

        Args:
            address: the address in memory of the byte at `begin`.
            give: copies at once, or in a device's queue.
        """
        nbytes = self.dtype.itemsize
        low, high = max(begin, self.begin), min(end, self.end)
        first, over = -(-(low - self.origin) // nbytes), (high - self.origin) // nbytes
        if first >= over:
            return
        there = address + self.origin + first * nbytes - begin
        source = elements_at(there, over - first, self.dtype)
        for where, extent in boxes_within(self.chunk, self.at, self.sizes, first, over):
            offset = sum(n * by for n, by in zip(where, self._strides, strict=True)) - first
            into = tuple(n - at for n, at in zip(where, self.at, strict=True))
            give(
                narrowed(self.memory, into, extent),
                source.as_strided(extent, self._strides, offset),
            )

    def cut_element(self, place: int) -> tuple[int, int] | None:
        """Return the range of the element that a cut at this place would divide, if there is
        one.
        """
        over = (place - self.origin) % self.dtype.itemsize
        if not over or not self.begin < place < self.end:
            return None
        return place - over, place - over + self.dtype.itemsize


class WholeTask:
    """A range that is needed as a whole. It is gathered in memory of its own; the thread that
    brings the last part hands it over.
    """

    __slots__ = ("_left", "_lock", "_memory", "begin", "done", "end")

    def __init__(self, begin: int, end: int, done: Callable[[bytearray], None]) -> None:
        self.begin = begin
        self.end = end
        self.done = done
        self._left = end - begin
        self._lock = threading.Lock()
        self._memory: bytearray | None = None

    def put(self, at: int, part: memoryview) -> None:
        """Add bytes of the file from `at` on; add each byte once."""
        with self._lock:
            if self._memory is None:
                self._memory = bytearray(self.end - self.begin)
            memory = self._memory
        memory[at - self.begin : at - self.begin + len(part)] = part
        with self._lock:
            self._left -= len(part)
            if self._left:
                return
        self._memory = None
        self.done(memory)


@dataclass
class FilePlan:
    """Tasks of one file, and the ranges to read for them."""

    name: str
    smalls: list[SmallTask] = field(default_factory=list)
    runs: list[RunTask] = field(default_factory=list)
    elements: list[BoxTask] = field(default_factory=list)
    wholes: list[WholeTask] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    wanted: list[tuple[int, int]] = field(default_factory=list)
    """Ranges to read besides `smalls`; they may overlap."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """All that is to be read, ascending and apart; set when all is planned. `smalls` are sorted
    then."""

    def add_box(
        self,
        origin: int,
        dtype: torch.dtype,
        chunk: Box,
        at: Box,
        sizes: Box,
        memory: torch.Tensor,
        read: int,
        widen: Callable[[int, int], tuple[int, int]],
    ) -> None:
        """Plan a box of a contiguous payload.

        Args:
            origin: where the payload begins in the file.
            chunk, at, sizes: as in `BoxTask`; the box is not empty.
            widen: returns the range to read for a needed range.
        """
        address, nbytes = address_of(memory, dtype), dtype.itemsize
        flat = flat_range(chunk, at, sizes) if address else None
        if flat is not None:
            begin, end = origin + flat[0] * nbytes, origin + sum(flat) * nbytes
            self.runs.append(RunTask(begin, end, address, read))
            self.wanted.append(widen(begin, end))
            return
        self.elements.append(BoxTask(origin, dtype, chunk, at, sizes, memory, read))
        for first, count in flat_spans(chunk, at, sizes, GAP_BYTES // nbytes):
            begin = origin + first * nbytes
            self.wanted.append(widen(begin, begin + count * nbytes))

    def add_whole(self, begin: int, end: int, done: Callable[[bytearray], None]) -> None:
        """Plan a range that is needed as a whole."""
        self.wanted.append((begin, end))
        if begin == end:
            done(bytearray())
        else:
            self.wholes.append(WholeTask(begin, end, done))


def put_view(
    payload: bytearray, dtype: torch.dtype, size: Box, stride: Box, offset: int,
    at: Box, sizes: Box, memory: torch.Tensor,
) -> None:  # fmt: skip
    """Copy a box of a tensor that is any view of its payload. Raises torch's exceptions."""
    count = len(payload) // dtype.itemsize
    flat = (
        torch.frombuffer(payload, dtype=dtype, count=count)
        if count
        else torch.empty(0, dtype=dtype)
    )
    copy_box(flat.as_strided(size, stride, offset), at, sizes, memory)


def copy_box(tensor: torch.Tensor, at: Box, sizes: Box, memory: torch.Tensor) -> None:
    """Copy a box of a tensor in host memory to memory anywhere, and wait for it."""
    source = narrowed(tensor, at, sizes)
    with torch.no_grad():
        copy_elements(memory, source)


def payload_bytes(chunk: Box, dtype: torch.dtype) -> int:
    """Return how many bytes the elements of a chunk take."""
    return prod(chunk) * dtype.itemsize
