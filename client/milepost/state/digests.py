"""Digests: how a rank says in four bytes what value it holds.

Values that are equal bit for bit have the same digest on every rank; others almost never have. Bits
count, since a checkpoint keeps bits: NaNs with the same payload are equal, and 0.0 and -0.0 are
not. Owns the choice of elements that are read of a large tensor. Knows tensors and plain data;
nothing of ranks, plans or saves.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple, Protocol

import torch
from isal import isal_zlib

from milepost.dcp_format.container import DTYPE_NAMES
from milepost.format.layout import align
from milepost.state.items import Items
from milepost.wire.offers import Kind

log = logging.getLogger("milepost")

WHOLE_BYTES_MAX: Final = 64 << 10
"""Tensors up to this size are read whole."""

BLOCK_BYTES: Final = 256
"""Of larger ones, blocks of this size are read: the first, the last, and between them"""
BLOCKS: Final = 62
"""so many, evenly spread. They move on from reading to reading, so that what changed in one place
only is met in the end."""

HOST_SCRATCH_BYTES: Final = 256 << 10
"""Read at once from host memory: what fits into a core's own cache."""

DEVICE_SCRATCH_BYTES: Final = 8 << 20
"""Read at once from a device, where each transfer costs as much as some MiB. Also the most memory
that is taken there."""

_GOLDEN: Final = 2_654_435_769
"""2^32 divided by the golden ratio: its multiples, modulo 2^32, are spread most evenly."""


class Scratch(Protocol):
    """Memory on the device of some tensors, into which they are read."""

    @property
    def memory(self) -> torch.Tensor:
        """The bytes."""

    def fetch(self, end: int) -> Callable[[], memoryview]:
        """Have the first bytes brought to host memory; return what waits for that, and returns
        them. To be called before the memory is written again.
        """


class _HostScratch:
    """Host memory: reads are complete at once."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(HOST_SCRATCH_BYTES))
        self.memory = torch.frombuffer(self._view, dtype=torch.uint8)

    def fetch(self, end: int) -> Callable[[], memoryview]:
        found = self._view[:end]
        return lambda: found


class _DeviceScratch:
    """Device memory: reading and fetching are queued in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self.memory = torch.empty(DEVICE_SCRATCH_BYTES, dtype=torch.uint8, device=device)

    def fetch(self, end: int) -> Callable[[], memoryview]:
        host = torch.empty(end, dtype=torch.uint8, device="cpu", pin_memory=True)
        host.copy_(self.memory[:end], non_blocking=True)
        done = torch.accelerator.current_stream(self.memory.device).record_event()

        def wait() -> memoryview:
            done.synchronize()
            view = memoryview(bytearray(end))
            torch.frombuffer(view, dtype=torch.uint8).copy_(host)
            return view

        return wait


def scratch_on(device: torch.device) -> Scratch:
    """Return memory for reading tensors of a device."""
    return _HostScratch() if device.type == "cpu" else _DeviceScratch(device)


# --- tensors ------------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """Which elements of a large tensor are read."""

    block: int
    """Elements in a block."""
    first: int
    """Where the second block begins; the first one begins at 0."""
    stride: int
    """Distance from each block to the next one."""
    last: int
    """Where the last block begins."""

    @classmethod
    def of(cls, count: int, itemsize: int, moved: int) -> _Sample:
        """Choose blocks of a tensor with this many elements; it is larger than
        `WHOLE_BYTES_MAX`.
        """
        block = BLOCK_BYTES // itemsize
        stride = (count - 2 * block) // BLOCKS
        shift = (moved * _GOLDEN & 0xFFFFFFFF) * (stride - block + 1) >> 32
        return cls(block, block + shift, stride, count - block)

    def blocks_of(self, source: torch.Tensor) -> list[torch.Tensor]:
        """Return the blocks of a contiguous tensor, as views."""
        at = source.storage_offset()
        return [
            source.as_strided((self.block,), (1,)),
            source.as_strided((BLOCKS, self.block), (self.stride, 1), at + self.first),
            source.as_strided((self.block,), (1,), at + self.last),
        ]

    def picked(self, source: torch.Tensor) -> torch.Tensor:
        """Return the elements of the blocks, in the same order, for a tensor that is not
        contiguous.
        """
        device = source.device
        starts = torch.arange(BLOCKS, device=device) * self.stride + self.first
        ends = torch.tensor([0, self.last], device="cpu").to(device)
        starts = torch.cat([ends[:1], starts, ends[1:]])
        within = torch.arange(self.block, device=device)
        if source.dtype == torch.complex128:
            # No integer is as long. Both halves are read, each as an element.
            source = torch.view_as_real(source)
            starts, within = 2 * starts, torch.arange(2 * self.block, device=device)
        bits = source.view(_BITS[source.itemsize])
        return torch.take(bits, (starts[:, None] + within).flatten())


_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the size of an element, an integer of the same size."""


class _Read(NamedTuple):
    """Where a tensor's elements lie in the scratch."""

    item: int
    at: int
    nbytes: int


class _Copies(NamedTuple):
    """Copies that a device makes in few steps, if all are dense and of one dtype."""

    typed: torch.Tensor
    """The scratch, as elements of the dtype."""
    into: list[torch.Tensor]
    out_of: list[torch.Tensor]


class _Batch:
    """Tensors of one device that are read together."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._room = memory.numel()
        self._dense: dict[torch.dtype, _Copies] = {}
        self._others: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self.reads: list[_Read] = []
        self.end = 0

    def add(self, item: int, source: torch.Tensor, moved: int) -> bool:
        """Add a tensor; return False if there is no room for it."""
        count, itemsize = source.numel(), source.itemsize
        is_whole = count * itemsize <= WHOLE_BYTES_MAX
        nbytes = count * itemsize if is_whole else (BLOCKS + 2) * BLOCK_BYTES
        at = self.end
        if at + nbytes > self._room:
            return False
        self.reads.append(_Read(item, at, nbytes))
        # Every element type then begins at a multiple of its size.
        self.end = align(at + nbytes, 16)
        if is_whole and source.is_contiguous():
            # By far the most.
            dense = self._of(source.dtype)
            dense.into.append(dense.typed.as_strided((count,), (1,), at // itemsize))
            dense.out_of.append(source.as_strided((count,), (1,)))
            return True
        if is_whole:
            bits = _BITS.get(itemsize)
            parts = [source if bits is None else source.view(bits)]
        else:
            sample = _Sample.of(count, itemsize, moved)
            parts = sample.blocks_of(source) if source.is_contiguous() else [sample.picked(source)]
        for part in parts:
            typed = self._of(part.dtype).typed
            target = typed.as_strided((part.numel(),), (1,), at // part.itemsize)
            into, out_of = self._others
            into.append(target.view(part.shape))
            out_of.append(part)
            at += part.nbytes
        return True

    def read(self) -> None:
        """Copy them into the scratch; on a device, queue that."""
        for into, out_of in [copies[1:] for copies in self._dense.values()] + [self._others]:
            if into:
                torch._foreach_copy_(into, out_of, non_blocking=True)

    def _of(self, dtype: torch.dtype) -> _Copies:
        found = self._dense.get(dtype)
        if found is None:
            found = self._dense[dtype] = _Copies(self._memory.view(dtype), [], [])
        return found


class TensorDigests:
    """The digests of some tensors as they are now. Digests from a device arrive a little later.

    Takes memory beside the tensors: `DEVICE_SCRATCH_BYTES` on a device; where there is not so much,
    its tensors have no digests, and the log says so. Waits for a device only if more than that is
    read of it. About 4 us an item, and the reading.

    Args:
        items: of a state.
        chosen: those to read; objects are left out.
        moved: how far the blocks of large tensors have moved on. Only digests with the same number
            can be compared.
        make_scratch: see `scratch_on`.
    """

    def __init__(
        self,
        items: Items,
        chosen: Iterable[int],
        moved: int = 0,
        make_scratch: Callable[[torch.device], Scratch] = scratch_on,
    ) -> None:
        self._digests: dict[int, int] = {}
        self._fetched: dict[torch.device, tuple[list[_Read], Callable[[], memoryview]]] = {}
        """By device, what is on its way."""
        by_device: dict[torch.device, list[int]] = {}
        for item in chosen:
            if items.kinds[item] != Kind.OBJECT:
                by_device.setdefault(items.sources[item].device, []).append(item)
        with torch.no_grad():
            for device, found in by_device.items():
                try:
                    self._read_all(items, found, moved, device, make_scratch(device))
                except torch.OutOfMemoryError as error:
                    log.warning("replicas on %s are not compared this time: %s", device, error)

    def get(self) -> dict[int, int]:
        """Return the digests by item. Waits until each device has passed what was read of it."""
        for device in list(self._fetched):
            self._take(device)
        return self._digests

    def _read_all(
        self,
        items: Items,
        chosen: Iterable[int],
        moved: int,
        device: torch.device,
        scratch: Scratch,
    ) -> None:
        batch = _Batch(scratch.memory)
        for item in chosen:
            source = items.sources[item]
            if not batch.add(item, source, moved):
                self._read(device, scratch, batch)
                batch = _Batch(scratch.memory)
                batch.add(item, source, moved)
        self._read(device, scratch, batch)

    def _read(self, device: torch.device, scratch: Scratch, batch: _Batch) -> None:
        self._take(device)
        batch.read()
        self._fetched[device] = batch.reads, scratch.fetch(batch.end)

    def _take(self, device: torch.device) -> None:
        if device in self._fetched:
            reads, wait = self._fetched.pop(device)
            view = wait()
            for item, at, nbytes in reads:
                self._digests[item] = isal_zlib.crc32(view[at : at + nbytes])


# --- objects ------------------------------------------------------------------------------------


class _Unusual(Exception):
    """A value is not plain data, or has too much of it."""


def plain_digest(value: object) -> int | None:
    """Return the digest of plain data; None for anything else, and for much of it.

    Plain data are None, numbers, text, bytes, what shows its memory (arrays of numpy's), tensors in
    host memory, and lists, tuples, dicts and sets of these, exactly of those classes. The order of
    dicts and sets makes no difference, as for `==`; the class of a number does. Runs no code of the
    value's. At most `PLAIN_BYTES_MAX`, so it takes a few milliseconds at most.
    """
    try:
        return isal_zlib.crc32(_Encoding().of(value, 0))
    except _Unusual:
        return None


PLAIN_BYTES_MAX: Final = 64 << 10
"""Most plain data that are read, a value counting as `VALUE_BYTES` at least."""

VALUE_BYTES: Final = 32

_DEPTH_MAX: Final = 32
_LENGTH: Final = struct.Struct("<cQ")
_FLOAT: Final = struct.Struct("<d")


class _Encoding:
    """Turns plain data into bytes that are equal exactly for equal data."""

    def __init__(self) -> None:
        self._room = PLAIN_BYTES_MAX

    def of(self, value: Any, depth: int) -> bytes:
        """Return the bytes of a value. Raises _Unusual."""
        self._take(VALUE_BYTES)
        if depth > _DEPTH_MAX:
            raise _Unusual
        kind = type(value)
        if value is None or kind is bool:
            return b"N" if value is None else b"T" if value else b"F"
        if kind is int:
            self._take(value.bit_length() >> 3)
            return self._framed(b"i", b"%d" % value)
        if kind is float:
            return b"f" + _FLOAT.pack(value)
        if kind is complex:
            return b"c" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag)
        if kind is str:
            self._take(len(value))
            return self._framed(b"s", value.encode("utf-8", "surrogatepass"))
        if kind is dict:
            pairs = [(self.of(key, depth + 1), value) for key, value in value.items()]
            return self._framed(
                b"d", *sorted(key + self.of(value, depth + 1) for key, value in pairs)
            )
        if kind in (list, tuple):
            tag = b"l" if kind is list else b"t"
            return self._framed(tag, *[self.of(each, depth + 1) for each in value])
        if kind in (set, frozenset):
            tag = b"u" if kind is set else b"z"
            return self._framed(tag, *sorted(self.of(each, depth + 1) for each in value))
        if kind is torch.Tensor:
            return self._tensor(value)
        return self._memory(value)

    def _tensor(self, value: torch.Tensor) -> bytes:
        if (
            value.device.type != "cpu"
            or value.layout is not torch.strided
            or value.dtype not in DTYPE_NAMES
        ):
            raise _Unusual
        self._take(value.nbytes)
        data = bytearray(value.nbytes)
        if data:
            with torch.no_grad():
                bits = torch.frombuffer(data, dtype=torch.uint8)
                bits.view(value.dtype).view(value.shape).copy_(value)
        return self._framed(b"x", f"{DTYPE_NAMES[value.dtype]} {tuple(value.shape)}".encode(), data)

    def _memory(self, value: Any) -> bytes:
        try:
            view = memoryview(value)
        except (TypeError, ValueError, BufferError):
            raise _Unusual from None
        # What Python objects a value refers to shows in no memory of its own.
        if "O" in view.format or "P" in view.format:
            raise _Unusual
        self._take(view.nbytes)
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__} {view.format} {view.shape}"
        return self._framed(b"m", name.encode(), view.tobytes())

    def _take(self, nbytes: int) -> None:
        self._room -= nbytes
        if self._room < 0:
            raise _Unusual

    @staticmethod
    def _framed(tag: bytes, *parts: bytes | bytearray) -> bytes:
        whole = b"".join(_LENGTH.pack(b"-", len(part)) + part for part in parts)
        return _LENGTH.pack(tag, len(whole)) + whole
