"""Finding a torn copy: a few elements of each tensor are read again and compared with the image.

Knows tensors and where their copies lie; nothing of threads, optimizers or saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Final

import torch

from milepost.format.layout import align
from milepost.offer import Box

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


class Sampler:
    """Reads a few elements of each of some tensors, and the same elements from an image.

    Made once a layout, used by one save at a time. What it knows of a tensor is size and dtype;
    the tensors themselves come with each reading.
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
        self._shapes = [((count,), (stride,)) for count, stride in
                        zip(self._counts, self._strides, strict=True)]  # fmt: skip
        self._starts = []
        end = 0
        for count, dtype in zip(self._counts, dtypes, strict=True):
            self._starts.append(end)
            # Every element type then begins at a multiple of its size.
            end = align(end + count * dtype.itemsize, 16)
        self._bytes = end
        self._scratch: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._host: torch.Tensor | None = None
        self._rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def make_room(self, device: torch.device) -> None:
        """Make what the elements of tensors on a device are read into, unless it is there."""
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
        self._rows = self._addresses()

    def read(self, sources: Sequence[torch.Tensor]) -> None:
        """Read the elements; on a device, when the stream comes to it. All on one device."""
        if not sources:
            return
        self.make_room(sources[0].device)
        with torch.no_grad():
            torch._foreach_copy_(
                self._views,
                [
                    source.as_strided(size, stride)
                    if source.is_contiguous()
                    else self._elements(source, index)
                    for index, (source, (size, stride)) in enumerate(
                        zip(sources, self._shapes, strict=True)
                    )
                ],
                non_blocking=True,
            )

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
        if self._host is None:
            return []
        assert self._rows is not None
        owners, here, there = self._rows
        is_other = self._host[here] != image[there]
        if not bool(is_other.any()):
            return []
        return sorted(set(owners[is_other].tolist()))

    def _addresses(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return for every byte read its tensor, its place among the samples and in the image."""
        itemsizes = _column([dtype.itemsize for dtype in self._dtypes])
        counts, strides = _column(self._counts), _column(self._strides)
        starts, payloads_at = _column(self._starts), _column(self._payloads_at)
        numbers = _column(range(SAMPLE_ELEMENTS)).view(1, -1, 1)
        within = _column(range(int(itemsizes.max()))).view(1, 1, -1)
        is_read = (numbers < counts) & (within < itemsizes)
        owners = _column(range(len(self._counts))).expand_as(is_read)
        here = starts + numbers * itemsizes + within
        there = payloads_at + numbers * strides * itemsizes + within
        return owners[is_read], here[is_read], there[is_read]


def _column(values: Sequence[int]) -> torch.Tensor:
    """Return numbers along the first of three dimensions."""
    return torch.tensor(values, dtype=torch.int64, device="cpu").view(-1, 1, 1)
