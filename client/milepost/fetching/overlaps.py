"""Reads whose memory overlaps, as that of tied weights does: they are done one after another.

One fetch writes from several threads and compares checksums with what lies in memory then. Two
values that go to one place at once would be mixed, and be taken for damage.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from milepost.fetching.requests import TensorRead


def apart(reads: Sequence[TensorRead]) -> list[list[TensorRead]]:
    """Return the reads as groups to fetch one after another; of two keys that share memory the
    later one is in a later group, so that its value stays. The boxes of one key never overlap.

    About 3 us a read.
    """
    spans = sorted(
        (*_span(read.memory), number) for number, read in enumerate(reads) if read.memory.numel()
    )
    turns = [0] * len(reads)
    for first, last in _clusters(spans):
        numbers = sorted(span[-1] for span in spans[first:last])
        turn_of: dict[str, int] = {}
        for number in numbers:
            turns[number] = turn_of.setdefault(reads[number].key, len(turn_of))
    order = sorted(range(len(reads)), key=turns.__getitem__)
    return [
        [reads[number] for number in group] for _, group in groupby(order, key=turns.__getitem__)
    ] or [[]]


def _clusters(spans: Sequence[tuple[str, int, int, int]]) -> list[tuple[int, int]]:
    """Return where in the sorted spans those that hang together begin and end, two or more."""
    found: list[tuple[int, int]] = []
    first, device, reach = 0, "", 0
    for at, (where, begin, end, _) in enumerate(spans):
        if where != device or begin >= reach:
            if at - first > 1:
                found.append((first, at))
            first, device, reach = at, where, end
        else:
            reach = max(reach, end)
    if len(spans) - first > 1:
        found.append((first, len(spans)))
    return found


def _span(memory: torch.Tensor) -> tuple[str, int, int]:
    """Return the device of a tensor, and where on it the memory begins and ends that it lies in."""
    try:
        begin = memory.data_ptr()
    except RuntimeError:
        return "", 0, 0  # Its class does not tell, and then nobody can tell what overlaps it.
    if memory.is_contiguous():
        return str(memory.device), begin, begin + memory.nbytes
    reach = sum((size - 1) * step for size, step in zip(memory.shape, memory.stride(), strict=True))
    return str(memory.device), begin, begin + (reach + 1) * memory.element_size()
