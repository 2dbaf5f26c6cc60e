"""Gathers many small tensors on a device, so that few transfers move them.

A transfer costs about 10 us whatever its length, so with thousands of small tensors the bus would
be idle most of the time. Instead the device keeps a *twin* of a stretch of the image, container
bytes included. One kernel copies the tensors into the twin, and one transfer copies the twin into
the image. Owns the choice of tensors that lie side by side, and the twins. It must not know of
streams, saves or slots: it yields copies, which the caller makes in the same order.

Sources: the CUDA C++ best practices guide, "Data Transfer Between Host and Device";
torch/_foreach (2.13).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from milepost.format.layout import SMALL_ALIGN_BYTES, align
from milepost.staging.layouts import TensorColumns, tensor_views

log = logging.getLogger(__name__)

GATHERED_BYTES_MAX: Final = 256 << 10
"""Larger tensors are copied alone: at 25 GB/s their bytes take longer than the fixed cost of a
transfer.
"""

STRETCH_TENSORS_MIN: Final = 4
"""Fewer neighbours are not worth a second copy on the device."""

CHUNK_TENSORS: Final = 1024
"""How many tensors one call copies at most. Making its arguments holds the GIL; the call does
not.
"""

TWINS_BYTES_MAX: Final = 256 << 20
"""Device memory that all twins of one layout may take; tensors beyond that are copied alone."""

GATHERED_ON: Final = frozenset({"cuda"})
"""Kinds of device on which gathering is worth it."""

Copies: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources of one `torch._foreach_copy_`."""


class _Stretch(NamedTuple):
    """Tensors that lie side by side in the image."""

    low: int
    high: int
    """Their range among the tensors that were asked for."""
    start: int
    end: int
    """Their range of bytes in the image, from the first payload to the end of the last."""


class Gathering:
    """The copies that bring some tensors of a layout from one device into an image.

    Holds device memory, at most `TWINS_BYTES_MAX`, and no tensor of the state. All copies share the
    twins, so two must not run at the same time.

    Args:
        layout: of the image.
        positions: of the tensors in the layout, ascending; each has bytes.
        image: the bytes of a slot that has its containers already.
        device: where the tensors are.
    """

    def __init__(
        self,
        layout: TensorColumns,
        positions: Sequence[int],
        image: torch.Tensor,
        device: torch.device,
    ) -> None:
        self.alone: list[int] = []
        """Tensors that are not gathered, as indices into `positions`."""
        self._twins: list[tuple[_Stretch, torch.Tensor, list[torch.Tensor]]] = []
        room = TWINS_BYTES_MAX
        for stretch in _stretches(layout, positions):
            nbytes = stretch.end - stretch.start
            is_worth_it = stretch.high - stretch.low >= STRETCH_TENSORS_MIN and nbytes <= room
            twin = _twin(image, stretch, device) if is_worth_it else None
            if twin is None:
                self.alone += range(stretch.low, stretch.high)
                continue
            room -= nbytes
            chosen = positions[stretch.low : stretch.high]
            made = tensor_views(
                twin,
                [layout.dtypes[position] for position in chosen],
                [layout.sizes[position] for position in chosen],
                [layout.payloads_at[position] - stretch.start for position in chosen],
            )
            self._twins.append((stretch, twin, [view for view in made if view is not None]))

    def gathered(self, image: torch.Tensor, sources: Sequence[torch.Tensor]) -> Iterator[Copies]:
        """Yield the copies of all tensors that are not `alone`; their order has to be kept.

        Args:
            image: the bytes of the slot to fill.
            sources: the tensors, in the order of `positions`.
        """
        for stretch, twin, into in self._twins:
            yield into, list(sources[stretch.low : stretch.high])
            start, end = stretch.start, stretch.end
            yield [image[start:end]], [twin[: end - start]]

    def rest(self, into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> Copies:
        """Return the copies of the tensors that are `alone`.

        Args:
            into, out_of: targets and sources of all tensors, in the order of `positions`.
        """
        return [into[index] for index in self.alone], [out_of[index] for index in self.alone]


def _stretches(layout: TensorColumns, positions: Sequence[int]) -> Iterator[_Stretch]:
    """Divide the tensors into stretches. A tensor that is too large or has no neighbour is
    alone.
    """
    lengths = [
        math.prod(size) * (0 if dtype is None else dtype.itemsize)
        for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)
    ]
    ordinals, seen = [], 0
    for length in lengths:
        # A tensor without bytes does not separate its neighbours.
        ordinals.append(seen)
        seen += length > 0
    low = 0
    for index in range(1, len(positions) + 1):
        if index < len(positions):
            before, here = positions[index - 1], positions[index]
            is_next = ordinals[here] == ordinals[before] + 1
            is_small = max(lengths[before], lengths[here]) <= GATHERED_BYTES_MAX
            if is_next and is_small and index - low < CHUNK_TENSORS:
                continue
        first, last = positions[low], positions[index - 1]
        start, end = layout.payloads_at[first], layout.payloads_at[last] + lengths[last]
        yield _Stretch(low, index, start, end)
        low = index


def _twin(image: torch.Tensor, stretch: _Stretch, device: torch.device) -> torch.Tensor | None:
    """Return a copy of the stretch in the device's memory; None if that is full."""
    nbytes = stretch.end - stretch.start
    try:
        with torch.inference_mode(mode=False):
            twin = torch.empty(align(nbytes, SMALL_ALIGN_BYTES), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        log.warning("the device has no memory left to gather %d bytes of small tensors", nbytes)
        return None
    with torch.no_grad():
        twin[:nbytes].copy_(image[stretch.start : stretch.end])
    return twin
