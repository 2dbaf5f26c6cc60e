"""What can be exported, imported and compared: tensors as streams of bytes, and objects.

A checkpoint is one source, a file of another format another. None holds more than a few blocks of
its tensors in memory.
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
    """What a tensor is, without its values."""

    dtype: torch.dtype
    size: Box
    requires_grad: bool = False

    @property
    def elements(self) -> int:
        """How many there are."""
        return prod(self.size)

    @property
    def bytes(self) -> int:
        """Of all elements, contiguous."""
        return self.elements * self.dtype.itemsize

    @property
    def name(self) -> str:
        """The dtype's name without `torch.`: "float32"."""
        return str(self.dtype).removeprefix("torch.")


class Source(ABC):
    """Something with named tensors and objects, by the keys of a flattened state.

    Attributes:
        tensors: what each tensor is.
        objects: keys of objects.
        paths: where each key stands in the nested state, in the order of the state.
        nesting: what the paths do not tell of the state's dicts.
        unreadable: tensors that have no plain bytes, and why; they are among neither of the above.
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
        """Raise UsageError (`unsupported-tensor`) that names those of the keys that have no plain
        bytes.
        """
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

        A block is to be read only, and until the next one is asked for. The stream ends with an
        error if a checksum does not match: what was made of the blocks before is to be thrown away.
        """

    @abstractmethod
    def value(self, key: str) -> Any:
        """Return an object."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""


def is_plain(dtype: torch.dtype) -> bool:
    """Tell whether tensors of this dtype are their bytes and nothing else."""
    try:
        dtype_name(dtype)
    except UsageError:
        return False
    return True
