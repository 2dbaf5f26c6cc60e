"""What can be exported, imported and compared: tensors as streams of bytes, and objects.

A checkpoint is a source, and so is a file of another format. A source never holds more than a few
blocks of its tensors in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from milepost.dcp_format.container import dtype_name
from milepost.errors import UsageError, listed
from milepost.format.nesting import Nesting

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from milepost.wire.offers import Box

BLOCK_BYTES: Final = 8 << 20
"""Largest block of a stream: large enough for the disk, small enough for a moving progress bar."""


class TensorForm(NamedTuple):
    """A tensor's dtype and size, without its values."""

    dtype: torch.dtype
    size: Box
    requires_grad: bool = False

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.size)

    @property
    def bytes(self) -> int:
        """The number of bytes of all elements, contiguous."""
        return self.elements * self.dtype.itemsize

    @property
    def name(self) -> str:
        """The dtype's name without `torch.`: "float32"."""
        return str(self.dtype).removeprefix("torch.")


class Source(ABC):
    """Something with named tensors and objects, by the keys of a flattened state.

    Attributes:
        tensors: dtype and size of each tensor.
        objects: keys of objects.
        paths: where each key is in the nested state, in the order of the state.
        nesting: what the paths do not say about the state's dicts.
        unreadable: tensors without plain bytes, and why; they are not in `tensors` or `objects`.
        unchecked: tensors and objects that were read and whose bytes carry no checksum.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, TensorForm] = {}
        self.objects: list[str] = []
        self.paths: Mapping[str, tuple[Any, ...]] = {}
        self.nesting = Nesting()
        self.unreadable: dict[str, str] = {}
        self.unchecked: list[str] = []

    def require_readable(self, keys: Sequence[str]) -> None:
        """Raise UsageError if any of the keys has no plain bytes (`unsupported-tensor`) or is no
        text that a file can hold (`usage`); names these keys.
        """
        for key in keys:
            if not _is_text(key):
                raise UsageError(
                    "usage", f"the key {key!r} is no text: UTF-8 has no such characters"
                )
        faults = [f"{key!r}: {self.unreadable[key]}" for key in keys if key in self.unreadable]
        if faults:
            raise UsageError(
                "unsupported-tensor",
                f"{len(faults)} of the tensors have no plain elements: {listed(faults, '; ')}",
                "save their parts, or their dense form, under keys of their own",
            )

    @abstractmethod
    def blocks(self, key: str, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """Yield a tensor's bytes, contiguous and row-major, in blocks of at most `block_bytes`.

        Only read a block, and only until you ask for the next one. If a checksum does not match,
        the stream ends with an error: then throw away what you made of the earlier blocks.
        """

    @abstractmethod
    def value(self, key: str) -> Any:
        """Return an object."""

    @abstractmethod
    def close(self) -> None:
        """Close all files."""


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_plain(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype consist of their bytes and nothing else."""
    try:
        dtype_name(dtype)
    except UsageError:
        return False
    return True
