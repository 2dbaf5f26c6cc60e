"""Finding a torn copy: a few elements of each tensor are read again and compared with the image.

Knows tensors and where their copies lie; nothing of threads, optimizers or saves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple

import torch

from milepost.format.layout import align
from milepost.wire.offers import Box

SAMPLE_ELEMENTS: Final = 4
"""Elements of a tensor that are read again, at most: the first, the last, and between them one or
two where they can be spread evenly. The ends tell most: a copy and a change that run through a
tensor at different speeds leave at least one of them behind."""


def _sample_count(total: int) -> int:
    """Return how many elements to read of so many: the last must be a whole number of strides from
    the first.
    """
    if total < 2:
        return total
    return next(count for count in range(SAMPLE_ELEMENTS, 1, -1) if (total - 1) % (count - 1) == 0)


_LOWEST: Final = 4096
"""Nothing lies below."""

_Memory: Final = ctypes.c_ubyte * (2**56 - _LOWEST)


def _memory() -> torch.Tensor:
    """Return this process's memory, from `_LOWEST` on, as one tensor: to pick bytes out of 10,000
    tensors in one call. Only what is known to be there may be read.
    """
    return torch.frombuffer(_Memory.from_address(_LOWEST), dtype=torch.uint8)


class _Rows(NamedTuple):
    """The bytes that are read, one a row, in columns."""

    owners: torch.Tensor
    """The tensor it is of."""
    numbers: torch.Tensor
    """The how manieth of its elements that are read."""
    within: torch.Tensor
    """Which byte of the element."""
    offsets: torch.Tensor
    """Where it is from the tensor's first element, if the memory is in the order of elements."""
    scratch_at: torch.Tensor
    image_at: torch.Tensor


class Sampler:
    """Reads a few elements of each of some tensors, and the same elements from an image.

    Made once a layout, used by one save at a time. What it knows of a tensor is size and dtype;
    the tensors themselves come with each reading.

    Args:
        sizes, dtypes: of the tensors.
        payloads_at: where each begins in an image.
        by_address: the host reads their memory, in one call for all; only for host memory. Else
            the device does, each by itself.
    """

    def __init__(
        self,
        sizes: Sequence[Box],
        dtypes: Sequence[torch.dtype],
        payloads_at: Sequence[int],
        *,
        by_address: bool,
    ) -> None:
        self._by_address = by_address
        self._dtypes = dtypes
        self._payloads_at = payloads_at
        totals = [prod(size) for size in sizes]
        self._counts = list(map(_sample_count, totals))
        self._strides = [
            (total - 1) // (count - 1) if count > 1 else 1
            for total, count in zip(totals, self._counts, strict=True)
        ]
        self._starts = []
        """Of each tensor's elements in the scratch."""
        end = 0
        for count, dtype in zip(self._counts, dtypes, strict=True):
            self._starts.append(end)
            # Every element type then begins at a multiple of its size.
            end = align(end + count * dtype.itemsize, 16)
        self._bytes = end
        self._rows: _Rows | None = None
        self._scratch: torch.Tensor | None = None
        """What a device reads the elements into."""
        self._views: list[torch.Tensor] = []
        self._host: torch.Tensor | None = None
        """The scratch in host memory."""
        self._read: torch.Tensor | None = None
        """What the host has read, by row."""

    def make_room(self, device: torch.device) -> None:
        """Make what the elements of tensors on a device are read with, unless it is there."""
        if self._rows is None:
            self._rows = self._make_rows()
        is_there = self._scratch is not None and self._scratch.device == device
        if self._by_address or is_there:
            return
        self._scratch = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        self._host = (
            self._scratch
            if device.type == "cpu"
            else torch.zeros(self._bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        )
        typed = {dtype: self._scratch.view(dtype) for dtype in set(self._dtypes)}
        self._views = [
            typed[dtype].as_strided((count,), (1,), start // dtype.itemsize)
            for dtype, count, start in zip(self._dtypes, self._counts, self._starts, strict=True)
        ]

    def read(self, sources: Sequence[torch.Tensor]) -> None:
        """Read the elements; on a device, when the stream comes to it. All on one device.

        Their memory must stay until this is done.
        """
        if not sources:
            return
        self.make_room(sources[0].device)
        if self._by_address:
            self._read = self._from_memory(sources)
            return
        with torch.no_grad():
            torch._foreach_copy_(
                self._views,
                [
                    source.as_strided((count,), (stride,))
                    if source.is_contiguous()
                    else self._elements(source, index)
                    for index, (source, count, stride) in enumerate(
                        zip(sources, self._counts, self._strides, strict=True)
                    )
                ],
                non_blocking=True,
            )

    def _from_memory(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the elements' bytes, by row; without a call for each tensor."""
        rows = self._rows
        assert rows is not None
        pointers = _integers(list(map(torch.Tensor.data_ptr, sources)))
        offsets = rows.offsets
        if not all(map(torch.Tensor.is_contiguous, sources)):
            elements = _integers([self._strided(*each) for each in enumerate(sources)])
            offsets = elements[rows.owners, rows.numbers] + rows.within
        found = torch.index_select(_memory(), 0, pointers[rows.owners] + offsets - _LOWEST)
        for index, source in enumerate(sources):
            if source.is_neg() or source.is_conj():
                # A view that turns signs when it is read.
                elements = self._elements(source, index).resolve_conj().resolve_neg()
                found[rows.owners == index] = elements.view(torch.uint8)
        return found

    def _strided(self, index: int, source: torch.Tensor) -> list[int]:
        """Return how many bytes from its first element each of a tensor's elements begins."""
        offsets = [0] * SAMPLE_ELEMENTS
        for number in range(self._counts[index]):
            rest = number * self._strides[index]
            for size, stride in zip(reversed(source.shape), reversed(source.stride()), strict=True):
                rest, at = divmod(rest, size)
                offsets[number] += at * stride * source.itemsize
        return offsets

    def _elements(self, source: torch.Tensor, index: int) -> torch.Tensor:
        """Return the elements of a tensor whose memory is not in the order of its elements."""
        picked = []
        for number in range(self._counts[index]):
            element, rest = source, number * self._strides[index]
            for size in reversed(source.shape):
                rest, at = divmod(rest, size)
                element = element.select(-1, at)
            picked.append(element)
        return torch.stack(picked)

    def fetch(self) -> None:
        """Bring what was read to host memory, when the stream comes to it."""
        if self._host is not None and self._host is not self._scratch:
            assert self._scratch is not None
            self._host.copy_(self._scratch, non_blocking=True)

    def differing(self, image: torch.Tensor) -> list[int]:
        """Return which tensors differ from the image (its bytes) in what was read, bit for bit."""
        rows, read = self._rows, self._read
        if self._host is not None and rows is not None:
            read = self._host[rows.scratch_at]
        if read is None or rows is None:
            return []
        is_other = read != torch.index_select(image, 0, rows.image_at)
        if not bool(is_other.any()):
            return []
        return sorted(set(rows.owners[is_other].tolist()))

    def _make_rows(self) -> _Rows:
        itemsizes = _column([dtype.itemsize for dtype in self._dtypes])
        counts, strides = _column(self._counts), _column(self._strides)
        numbers = _column(range(SAMPLE_ELEMENTS)).view(1, -1, 1)
        within = _column(range(int(itemsizes.max()))).view(1, 1, -1)
        is_read = (numbers < counts) & (within < itemsizes)
        offsets = numbers * strides * itemsizes + within
        owners = _column(range(len(self._counts)))
        columns = (
            owners,
            numbers,
            within,
            offsets,
            _column(self._starts) + numbers * itemsizes + within,
            _column(self._payloads_at) + offsets,
        )
        return _Rows(*(column.expand_as(is_read)[is_read] for column in columns))


def _integers(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
    # Whatever the default device is.
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _column(values: Sequence[int]) -> torch.Tensor:
    """Return numbers along the first of three dimensions."""
    return _integers(values).view(-1, 1, 1)
