"""The requests to a fetch, and its answer.

Independent of the kind of index: the caller says which box of which stored chunk goes into which
memory, and which blobs it wants unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from milepost.wire.offers import Box


class Blob(NamedTuple):
    """Where a container lies, and the CRC-32 of the whole container; -1 if it is not known. `file`
    is relative to the checkpoint.
    """

    file: str
    offset: int
    length: int
    crc: int = -1


class TensorRead(NamedTuple):
    """A box of a stored chunk, and the memory that gets its elements.

    key: for messages. dtype, chunk: what the index says of the stored chunk: dtype and sizes.
    at, sizes: the box within the chunk. memory: a tensor of these sizes, on any device, contiguous
    or not; of another dtype, elements are converted as `Tensor.copy_` does.
    """

    key: str
    blob: Blob
    dtype: torch.dtype
    chunk: Box
    at: Box
    sizes: Box
    memory: torch.Tensor


class ObjectRead(NamedTuple):
    """A blob that is wanted unchanged."""

    key: str
    blob: Blob


class FoundDamage(NamedTuple):
    """One thing that is wrong: in which file, and which tensor or object it concerns (or none)."""

    file: str
    key: str
    text: str


@dataclass
class Fetched:
    """The result of a fetch. Objects are complete, and memory is right, only if there is no
    damage.
    """

    damages: list[FoundDamage] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    """The tensor reads that have written to their memory, ascending."""
    objects: list[bytes] = field(default_factory=list)
    """The bytes of each object read."""
    unchecked: list[str] = field(default_factory=list)
    """Keys that were read and have no checksum."""
    read_bytes: int = 0
    """How much was read from files, past the page cache or through it."""
