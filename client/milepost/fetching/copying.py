"""Copies bytes from a buffer to elements of a tensor.

Owns the ways to copy: whole runs by address, boxes by torch, and on a device behind an event.
Releases the GIL during long copies. Does not wake torch's thread pool: each reading thread would
get a pool of its own, with a thread for each core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from milepost.wire.offers import Box

GIL_BYTES: Final = 32 << 10
"""From this length on, copies release the GIL. For shorter ones, taking it back would cost more."""

SLAB_ELEMENTS: Final = 32 << 10
"""Below this number, torch copies elements on the calling thread alone
(at::internal::GRAIN_SIZE)."""

_MEMMOVE_ARGUMENTS: Final = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _memmove(library: ctypes.CDLL) -> Callable[[int, int, int], Any]:
    function = library.memmove
    function.argtypes = _MEMMOVE_ARGUMENTS
    function.restype = None
    return function


copy_few: Final = _memmove(ctypes.PyDLL(None))
"""Copies bytes; arguments: to, from, how many. Keeps the GIL."""

copy_many: Final = _memmove(ctypes.CDLL(None))
"""The same without the GIL."""


def copy_bytes(to: int, source: int, length: int) -> None:
    """Copy bytes from one address to another."""
    (copy_few if length < GIL_BYTES else copy_many)(to, source, length)


def bytes_at(address: int, length: int) -> memoryview:
    """Return the memory at an address, which the caller keeps alive."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def address_in(memory: bytearray) -> int:
    """Return the address of a bytearray's bytes; valid while the bytearray is kept and not
    resized.
    """
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory else 0


_BITS: Final = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


PLAIN: Final = frozenset({torch.Tensor, nn.Parameter})
_STRIDED: Final = torch.strided


def is_plain(memory: torch.Tensor) -> bool:
    """Whether a tensor is dense memory whose elements need no conversion when read."""
    return (
        type(memory) in PLAIN
        and memory.layout is _STRIDED
        and not memory.is_neg()
        and not (memory.is_complex() and memory.is_conj())
        and not memory.is_quantized
        and not memory.is_meta
    )


def as_bits(memory: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.dtype]:
    """Return the memory, and the dtype in which stored elements of `dtype` are copied to it. If
    nothing is converted, copy bit patterns, since torch cannot copy every dtype.
    """
    if memory.dtype is dtype and is_plain(memory):
        bits = _BITS[dtype.itemsize]
        return memory.detach().view(bits), bits
    return memory, dtype


def address_of(memory: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the address at which stored elements of `dtype` can be put one after another; 0: there
    is none.
    """
    # The same as `is_plain`, without the checks that dtype and host make superfluous. This runs for
    # every tensor.
    if (
        memory.dtype is dtype
        and type(memory) in PLAIN
        and memory.is_cpu
        and memory.layout is _STRIDED
        and memory.is_contiguous()
        and not memory.is_neg()
        and not (dtype.is_complex and memory.is_conj())
    ):
        return memory.data_ptr()
    return 0


def elements_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements at an address as a tensor over that memory, which the caller keeps. If
    they are not aligned, return a copy.
    """
    length = count * dtype.itemsize
    if address % dtype.itemsize:
        aligned = torch.empty(length, dtype=torch.uint8)
        copy_bytes(aligned.data_ptr(), address, length)
        return aligned.view(dtype)
    return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=dtype)


def row_major(sizes: Box) -> Box:
    """Return the strides of a contiguous tensor, in elements."""
    strides, stride = [], 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def narrowed(memory: torch.Tensor, at: Box, sizes: Box) -> torch.Tensor:
    """Return the box of a tensor."""
    for dim, (begin, size) in enumerate(zip(at, sizes, strict=True)):
        if size < memory.size(dim):
            memory = memory.narrow(dim, begin, size)
    return memory


def copy_elements(memory: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor to memory of the same sizes; on the host, only on this thread."""
    if not memory.is_cpu or not is_plain(memory):
        memory.copy_(source)
        return
    is_same = memory.dtype is source.dtype
    pending = [(memory, source)]
    while pending:
        memory, source = pending.pop()
        if source.numel() < SLAB_ELEMENTS:
            memory.copy_(source)
        elif is_same and memory.is_contiguous() and source.is_contiguous():
            copy_bytes(memory.data_ptr(), source.data_ptr(), source.nbytes)
        else:
            dim = next(dim for dim, size in enumerate(source.shape) if size > 1)
            rows = max(1, (SLAB_ELEMENTS - 1) * source.size(dim) // source.numel())
            for at in range(0, source.size(dim), rows):
                count = min(rows, source.size(dim) - at)
                pending.append((memory.narrow(dim, at, count), source.narrow(dim, at, count)))
