"""Every kind of tensor that torch has: how each is read, and why some cannot be stored exactly.

Only this module and `collecting` use torch's private attributes. Reads descriptions of tensors,
never their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from milepost.dcp_format.container import DTYPE_NAMES, dtype_name
from milepost.errors import UsageError
from milepost.wire.offers import Box


class Sort(IntEnum):
    """How values of a class are read."""

    PLAIN = 0
    """Class `torch.Tensor` or `Parameter`: it is its own memory."""
    DTENSOR = 1
    SHARDED = 2
    """torch's older ShardedTensor."""
    DECLARED = 3
    """It describes its own shards, by torch's `_Checkpointable` protocol."""
    SUBCLASS = 4
    """A tensor subclass over ordinary storage."""
    REFUSED = 5
    """A tensor subclass that may have no storage of its own."""
    OBJECT = 6
    """Not a tensor."""


QUANTIZED: Final = frozenset(
    {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)

_UNINITIALIZED: Final = (UninitializedParameter, UninitializedBuffer)

_PLAIN_CLASSES: Final = frozenset({torch.Tensor, nn.Parameter})

_SHAPE, _DTYPE, _IS_CPU = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu")


def sort_of(cls: type) -> Sort:
    """Return how values of a class are read."""
    if cls in _PLAIN_CLASSES:
        return Sort.PLAIN
    if issubclass(cls, DTensor):
        return Sort.DTENSOR
    if issubclass(cls, ShardedTensor):
        return Sort.SHARDED
    if hasattr(cls, "__create_write_items__"):
        return Sort.DECLARED
    if not issubclass(cls, torch.Tensor):
        return Sort.OBJECT
    if issubclass(cls, AsyncCollectiveTensor):
        return Sort.SUBCLASS
    dispatches = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return Sort.REFUSED if dispatches or issubclass(cls, _UNINITIALIZED) else Sort.SUBCLASS


def dtype_names(dtypes: Iterable[torch.dtype | None]) -> list[str]:
    """Return the names of storable dtypes; "" for None, which stands for an object."""
    return ["" if dtype is None else DTYPE_NAMES[dtype] for dtype in dtypes]


def local_tensor(value: DTensor) -> torch.Tensor:
    """Return a DTensor's memory on this rank. Unlike `to_local()` it costs only a look-up."""
    return value._local_tensor


def requires_grad(owner: Any) -> bool:
    """Return whether torch records that a value requires a gradient."""
    if isinstance(owner, ShardedTensor):
        # Asking the tensor itself warns that its class is deprecated.
        return bool(owner.metadata().tensor_properties.requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        return bool(getattr(owner, "requires_grad", False))


def plain_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of class torch.Tensor or Parameter over the same dense storage, ready to be
    copied.

    Raises ValueError for a tensor that has no such storage or would lose something: wrapper
    subclasses, sparse, nested, quantised and meta tensors, freed storages. Its text says why, and
    what to do.
    """
    cls = type(value)
    sort = sort_of(cls)
    if sort is Sort.SUBCLASS:
        if isinstance(value, AsyncCollectiveTensor):
            value = value.wait()
        else:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                value = value.as_subclass(torch.Tensor)
        sort = sort_of(type(value))
    if issubclass(cls, _UNINITIALIZED):
        raise ValueError(f"it is a {cls.__name__}; run the model once so that it gets its shape")
    if sort is not Sort.PLAIN:
        raise ValueError(
            f"it is a {cls.__name__}, a tensor subclass that need not have storage of its own; "
            "put the plain tensors inside it into the state"
        )
    if value.is_nested:
        raise ValueError("it is a nested tensor; store its values and offsets, or a padded tensor")
    if value.layout is not torch.strided:
        raise ValueError(f"its layout is {value.layout}; store its dense form or its parts")
    if value.device.type == "meta":
        raise ValueError("it is on the meta device and has no values; materialise it first")
    if value.dtype in QUANTIZED:
        raise ValueError(
            f"it is quantised ({value.dtype}); store int_repr() with scale and zero point"
        )
    if value.dtype not in DTYPE_NAMES:
        try:
            dtype_name(value.dtype)
        except UsageError as error:
            raise ValueError(f"{error.message}; {error.hint}") from error
    if value.numel() and not value.data_ptr():
        raise ValueError("its storage was freed; gather or reload it before saving")
    return value


class TensorFacts(NamedTuple):
    """Properties of some plain tensors, as columns."""

    addresses: list[int]
    """Address of the first element; 0 for a tensor without bytes."""
    sizes: list[Box]
    dtypes: list[torch.dtype]
    devices: list[str]
    """Kind of device: "cpu", "cuda"."""


def facts_of(sources: Sequence[torch.Tensor]) -> TensorFacts | None:
    """Read many tensors, a column at a time. None if `plain_tensor` would refuse or change any of
    them.

    A call for each of 11,000 tensors would cost as much as their copies.
    """
    if not _PLAIN_CLASSES.issuperset(map(type, sources)):
        return None
    try:
        # A tensor that is not one dense storage has no address or no shape.
        addresses = list(map(torch.Tensor.data_ptr, sources))
        sizes = list(map(_SHAPE, sources))
    except RuntimeError:
        return None
    dtypes = list(map(_DTYPE, sources))
    if not DTYPE_NAMES.keys() >= set(dtypes):
        return None
    if all(map(_IS_CPU, sources)):
        devices = ["cpu"] * len(sources)
    else:
        devices = [each.device.type for each in sources]
        if "meta" in devices:
            return None
    # An address of 0 is right for a tensor without bytes; otherwise the storage was freed.
    if not all(addresses) and not all(
        address or 0 in size for address, size in zip(addresses, sizes, strict=True)
    ):
        return None
    return TensorFacts(addresses, sizes, dtypes, devices)
