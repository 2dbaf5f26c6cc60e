"""Finding a torn copy: a few elements of each tensor are read again and compared with the image.

Knows tensors and where their copies lie; nothing of threads, optimizers or saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final, NamedTuple

import torch

from milepost.format.layout import align
from milepost.wire.offers import Box

SAMPLE_ELEMENTS: Final = 4
"""How many elements of a tensor are read again, at most: the first, the last, and one or two
between them if these can be spread evenly. The ends tell most: if a copy and a change run through a
tensor at different speeds, at least one end differs."""


def _sample_count(total: int) -> int:
    """Return how many of a tensor's elements to read. They are spaced evenly, from the first to the
    last.
    """
    if total < 2:
        return total
    return next(count for count in range(SAMPLE_ELEMENTS, 1, -1) if (total - 1) % (count - 1) == 0)


class _Rows(NamedTuple):
    """The sampled bytes, one a row, in columns."""

    owners: torch.Tensor
    """Index of the tensor."""
    scratch_at: torch.Tensor
    """Where the byte is in the scratch."""
    image_at: torch.Tensor
    """Where the byte is in an image."""


class Sampler:
    """Reads a few elements of each tensor, and the same elements from an image.

    Made once for a layout, and used by one save at a time. It knows sizes and dtypes; each call of
    `read` gets the tensors.

    Args:
        sizes, dtypes: of the tensors.
        payloads_at: where each tensor begins in an image, in bytes.
    """

    def __init__(
        self, sizes: Sequence[Box], dtypes: Sequence[torch.dtype], payloads_at: Sequence[int]
    ) -> None:
        self._dtypes = dtypes
        self._payloads_at = payloads_at
        totals = [prod(size) for size in sizes]
        self._counts = list(map(_sample_count, totals))
        self._strides = [
            (total - 1) // (count - 1) if count > 1 else 1
            for total, count in zip(totals, self._counts, strict=True)
        ]
        self._starts = []
        """Where each tensor's elements begin in the scratch, in bytes."""
        end = 0
        for count, dtype in zip(self._counts, dtypes, strict=True):
            self._starts.append(end)
            # Every element type then begins at a multiple of its size.
            end = align(end + count * dtype.itemsize, 16)
        self._bytes = end
        self._rows: _Rows | None = None
        self._scratch: torch.Tensor | None = None
        """What the elements are read into, on the tensors' device."""
        self._views: list[torch.Tensor] = []
        """The scratch, as one tensor for each sampled tensor."""
        self._host: torch.Tensor | None = None
        """The scratch in host memory."""

    def make_room(self, device: torch.device) -> None:
        """Make the scratch memory for tensors on a device, unless it exists."""
        if self._rows is None:
            self._rows = self._make_rows()
        if self._scratch is not None and self._scratch.device == device:
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
        """Read the elements of the tensors, which are all on one device.

        On a device this only queues the read: the tensors' memory must stay until it is done.
        """
        if not sources:
            return
        self.make_room(sources[0].device)
        with torch.no_grad():
            torch._foreach_copy_(
                self._views,
                [
                    source.as_strided((count,), (stride,))
                    if source.is_contiguous()
                    else _elements(source, count, stride)
                    for source, count, stride in zip(
                        sources, self._counts, self._strides, strict=True
                    )
                ],
                non_blocking=True,
            )

    def fetch(self) -> None:
        """Copy the samples to host memory; on a device this only queues the copy."""
        if self._host is not None and self._host is not self._scratch:
            assert self._scratch is not None
            self._host.copy_(self._scratch, non_blocking=True)

    def differing(self, image: torch.Tensor) -> list[int]:
        """Return which tensors differ from the image in their sampled elements, bit for bit.

        Args:
            image: the bytes of the image.
        """
        rows, host = self._rows, self._host
        if rows is None or host is None:
            return []
        read = torch.index_select(host, 0, rows.scratch_at)
        is_other = read != torch.index_select(image, 0, rows.image_at)
        if not bool(is_other.any()):
            return []
        return sorted(set(rows.owners[is_other].tolist()))

    def _make_rows(self) -> _Rows:
        itemsizes = _column([dtype.itemsize for dtype in self._dtypes])
        counts, strides = _column(self._counts), _column(self._strides)
        numbers = _column(range(SAMPLE_ELEMENTS)).view(1, -1, 1)
        """Index of the sampled element."""
        within = _column(range(int(itemsizes.max()))).view(1, 1, -1)
        """Index of the byte in its element."""
        is_read = (numbers < counts) & (within < itemsizes)
        columns = (
            _column(range(len(self._counts))),
            _column(self._starts) + numbers * itemsizes + within,
            _column(self._payloads_at) + numbers * strides * itemsizes + within,
        )
        return _Rows(*(column.expand_as(is_read)[is_read] for column in columns))


def _elements(source: torch.Tensor, count: int, stride: int) -> torch.Tensor:
    """Return the sampled elements of a tensor whose memory is not in the order of its elements."""
    picked = []
    for number in range(count):
        element, rest = source, number * stride
        for size in reversed(source.shape):
            rest, at = divmod(rest, size)
            element = element.select(-1, at)
        picked.append(element)
    return torch.stack(picked)


def _column(values: Sequence[int]) -> torch.Tensor:
    """Return numbers along the first of three dimensions, whatever the default device is."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").view(-1, 1, 1)
