"""Compares two sources: their keys, what each key is, and every byte.

It does not matter how either side is sharded. Both streams are read side by side, so memory does
not grow with the size of a tensor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from isal import isal_zlib

from milepost.errors import LoadFailed
from milepost.exchange.checkpoint import CheckpointSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from milepost.exchange.source import Source, TensorForm

_CELLS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Values(NamedTuple):
    """Two tensors of one shape and dtype whose elements differ.

    crc_a, crc_b: CRC-32 of all bytes, contiguous and row-major. differing: how many elements differ
    in their bytes. largest: the largest difference between two elements; None if any is not a
    number.
    """

    crc_a: int
    crc_b: int
    differing: int
    largest: float | None


def compare_tensors(
    a: Source, b: Source, key: str, on_bytes: Callable[[int], None]
) -> Values | None:
    """Compare two tensors of one shape and dtype byte by byte; None if they are equal.

    Args:
        on_bytes: called with the number of bytes read from each side since its last call.

    Raises whatever reading either side raises.
    """
    form = a.tensors[key]
    crc_a = crc_b = differing = 0
    largest: float | None = 0.0
    for block_a, block_b in _paired(a.blocks(key), b.blocks(key)):
        crc_a, crc_b = isal_zlib.crc32(block_a, crc_a), isal_zlib.crc32(block_b, crc_b)
        cells = _CELLS[form.dtype.itemsize]
        bits_a = torch.frombuffer(block_a, dtype=torch.uint8).view(cells)
        bits_b = torch.frombuffer(block_b, dtype=torch.uint8).view(cells)
        # As bits: a NaN equals itself, and 0.0 is not -0.0.
        if cells.is_complex:
            bits_a, bits_b = bits_a.view(torch.int64), bits_b.view(torch.int64)
        if not torch.equal(bits_a, bits_b):
            unequal = bits_a != bits_b
            if cells.is_complex:
                unequal = unequal.view(-1, 2).any(1)
            differing += int(unequal.sum())
            found = _largest(form, block_a, block_b)
            largest = None if largest is None or found is None else max(largest, found)
        on_bytes(len(block_a))
    return Values(crc_a, crc_b, differing, largest) if differing else None


def _paired(
    a: Iterator[memoryview], b: Iterator[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Yield blocks of equal length of two streams that are equally long."""
    rest_a = rest_b = memoryview(b"")
    while True:
        rest_a = rest_a or next(a, rest_a)
        rest_b = rest_b or next(b, rest_b)
        length = min(len(rest_a), len(rest_b))
        if not length:
            assert len(rest_a) == len(rest_b)
            return
        yield rest_a[:length], rest_b[:length]
        rest_a, rest_b = rest_a[length:], rest_b[length:]


def _largest(form: TensorForm, a: memoryview, b: memoryview) -> float | None:
    """Return the largest difference between elements at the same place."""
    wide = torch.complex128 if form.dtype.is_complex else torch.float64
    try:
        one, other = (torch.frombuffer(x, dtype=torch.uint8).view(form.dtype).to(wide)
                      for x in (a, b))  # fmt: skip
        found = float((one - other).abs().max())
    except (RuntimeError, NotImplementedError):
        return None  # A dtype that this torch stores and does not calculate with.
    return None if math.isnan(found) else found


def equal_objects(a: Source, b: Source, key: str) -> bool:
    """Whether both sides hold an equal object. If the pickled bytes are equal, nothing is
    unpickled. If they differ, objects that are not plain data count as different.

    Raises whatever reading the files raises.
    """
    checkpoints = [each for each in (a, b) if isinstance(each, CheckpointSource)]
    if len(checkpoints) == 2 and checkpoints[0].records(key) == checkpoints[1].records(key):
        return True
    try:
        return equal(a.value(key), b.value(key))
    except LoadFailed as error:
        if error.code not in ("load-failed", "unsafe-object"):
            raise
        return False


def equal(a: Any, b: Any) -> bool:
    """Whether two values are of the same type and equal, including tensors in them."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return _equal_tensors(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    try:
        return bool(a == b) or (a != a and b != b)
    except (ValueError, TypeError, RuntimeError):
        return False  # An array, say, that answers for each of its elements.


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.size() != b.size() or a.layout != b.layout:
        return False
    try:
        return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())
    except (RuntimeError, NotImplementedError):
        return False  # A kind of tensor that cannot be compared.


def same_by_manifests(a: Source, b: Source, key: str) -> bool:
    """Whether the manifests of two checkpoints have the same checksums for the same shards."""
    if not (isinstance(a, CheckpointSource) and isinstance(b, CheckpointSource)):
        return False
    found = a.checksums(key)
    return found is not None and found == b.checksums(key)
