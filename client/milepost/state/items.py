"""From a user's state to items: what this rank could write, each with its key, its box and its
source.

Owns the reading of every kind of tensor torch has, the refusal of those that cannot be stored
exactly, the fingerprint of a structure and the offer made from it. It must not know of images,
arenas, daemons or files. It copies nothing and keeps nothing: sources are looked up afresh in every
save, since an optimizer or an offloading model may have replaced any storage since the last one.
torch's private attributes are used here and nowhere else.

Sources: torch/distributed/checkpoint/default_planner.py and planner_helpers.py (2.13).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import msgpack
import torch
from isal import isal_zlib
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from milepost.dcp_format import container
from milepost.errors import UsageError
from milepost.state.boxes import LocalBox, local_boxes, splits_of
from milepost.state.flattening import Path, Paths
from milepost.wire.offers import Box, Kind, Offer

FAULTS_SHOWN_MAX: Final = 10
"""How many faults one error lists; the rest are counted."""

PARTS_KEPT: Final = 1 << 16
"""Parts of DTensors that are remembered, by size and cut; about 1 KiB each."""

DIGEST_BYTES_MAX: Final = 64 << 10
"""Replicas on the CPU up to this size get a digest; larger ones cost more than the finding is
worth."""


# --- items --------------------------------------------------------------------------------------


def _requires_grad(owner: Any) -> bool:
    """Return what torch records of a value's gradient."""
    if isinstance(owner, ShardedTensor):
        # Asking the tensor itself warns that its class is deprecated.
        return bool(owner.metadata().tensor_properties.requires_grad)
    with torch._C.DisableTorchFunctionSubclass():
        return bool(getattr(owner, "requires_grad", False))


class Item(NamedTuple):
    """One thing a rank could write; `source` is a live plain tensor, exactly its box, or the
    object.
    """

    key: str
    kind: Kind
    source: Any
    dtype: torch.dtype | None
    global_size: Box
    offsets: Box
    sizes: Box
    requires_grad: bool
    pinned: bool
    path: Path


@dataclass(slots=True, eq=False)
class Items:
    """All items of one rank in one save, as columns: entry i of each belongs to item i.

    It holds the live tensors: drop it when the save is staged. Objects have dtype None, device ""
    and empty boxes.
    """

    keys: list[str] = field(default_factory=list)
    kinds: bytearray = field(default_factory=bytearray)
    sources: list[Any] = field(default_factory=list)
    dtypes: list[torch.dtype | None] = field(default_factory=list)
    global_sizes: list[Box] = field(default_factory=list)
    offsets: list[Box] = field(default_factory=list)
    sizes: list[Box] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    """Kind of device the source lies on: "cpu", "cuda"."""
    addresses: list[int] = field(default_factory=list)
    """Where the source's first element lies; 0 for objects and what has no bytes."""
    placements: list[str] = field(default_factory=list)
    """For shards: from what their boxes follow, the whole tensor's size, and mesh, place in it and
    cut, or the box itself; "" for whole tensors and objects."""
    requires_grad: bytearray = field(default_factory=bytearray)
    """Whether the value in the state does, one 0 or 1 each."""
    paths: Mapping[str, Path] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, item: int) -> Item:
        key, source = self.keys[item], self.sources[item]
        is_tensor = self.kinds[item] != Kind.OBJECT
        return Item(
            key,
            Kind(self.kinds[item]),
            source,
            self.dtypes[item],
            tuple(self.global_sizes[item]),
            self.offsets[item],
            tuple(self.sizes[item]),
            bool(self.requires_grad[item]),
            is_tensor and bool(source.is_pinned()),
            self.paths.get(key, (key,)),
        )

    def __iter__(self) -> Iterator[Item]:
        return (self[item] for item in range(len(self.keys)))

    def add(
        self,
        key: str,
        kind: Kind,
        source: Any,
        *,
        global_size: Box = (),
        offsets: Box = (),
        placement: str = "",
        requires_grad: bool = False,
    ) -> None:
        """Append one item; a tensor's sizes, dtype and device are the source's own."""
        is_tensor = kind != Kind.OBJECT
        self.keys.append(key)
        self.kinds.append(kind)
        self.sources.append(source)
        self.dtypes.append(source.dtype if is_tensor else None)
        self.global_sizes.append(global_size)
        self.offsets.append(offsets)
        self.sizes.append(source.shape if is_tensor else ())
        self.devices.append(source.device.type if is_tensor else "")
        self.addresses.append(source.data_ptr() if is_tensor else 0)
        self.placements.append(placement)
        self.requires_grad.append(requires_grad)

    def extend(
        self, keys: Sequence[str], kind: Kind, sources: Sequence[torch.Tensor], columns: _Columns
    ) -> None:
        """Append the columns that sources tell of themselves; the caller appends the others."""
        is_host = all(map(_IS_CPU, sources))
        self.keys += keys
        self.kinds += bytes([kind]) * len(keys)
        self.sources += sources
        self.dtypes += columns.dtypes
        self.sizes += columns.sizes
        self.devices += ["cpu"] * len(keys) if is_host else [each.device.type for each in sources]
        self.addresses += columns.addresses


class _Columns(NamedTuple):
    """What is read of many tensors, a column at a time."""

    addresses: list[int]
    sizes: list[Box]
    dtypes: list[torch.dtype]


_DTYPE_NAMES: Final[dict[torch.dtype | None, str]] = {None: ""}
"""Names of the storable dtypes met so far; None stands for objects."""


def dtype_names(dtypes: Iterable[torch.dtype | None]) -> list[str]:
    """Return the names of dtypes that `collect` has let through."""
    names = _DTYPE_NAMES
    return [names[dtype] for dtype in dtypes]


_QUANTIZED: Final = frozenset(
    {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)

_UNINITIALIZED: Final = (UninitializedParameter, UninitializedBuffer)

_PLAIN: Final = "plain"
_DTENSOR: Final = "dtensor"
_SHARDED: Final = "sharded"
_DECLARED: Final = "declared"
_SUBCLASS: Final = "subclass"
_REFUSED: Final = "refused"
_OBJECT: Final = "object"


def _sort(cls: type) -> str:
    """Return how values of a class are read."""
    if cls is torch.Tensor or cls is nn.Parameter:
        return _PLAIN
    if issubclass(cls, DTensor):
        return _DTENSOR
    if issubclass(cls, ShardedTensor):
        return _SHARDED
    if hasattr(cls, "__create_write_items__"):
        return _DECLARED
    if not issubclass(cls, torch.Tensor):
        return _OBJECT
    if issubclass(cls, AsyncCollectiveTensor):
        return _SUBCLASS
    dispatches = cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return _REFUSED if dispatches or issubclass(cls, _UNINITIALIZED) else _SUBCLASS


def local_tensor(value: DTensor) -> torch.Tensor:
    """Return a DTensor's memory on this rank. Unlike `to_local()` it costs a look-up."""
    return value._local_tensor


def plain_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of class torch.Tensor or Parameter over the same dense storage, ready to be
    copied.

    Raises ValueError, saying why and what to do, for whatever has no such storage or would lose
    something: wrapper subclasses, sparse, nested, quantised and meta tensors, freed storages.
    """
    cls = type(value)
    sort = _sort(cls)
    if sort == _SUBCLASS:
        if isinstance(value, AsyncCollectiveTensor):
            value = value.wait()
        else:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                value = value.as_subclass(torch.Tensor)
        sort = _sort(type(value))
    if issubclass(cls, _UNINITIALIZED):
        raise ValueError(f"it is a {cls.__name__}; run the model once so that it gets its shape")
    if sort != _PLAIN:
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
    if value.dtype in _QUANTIZED:
        raise ValueError(
            f"it is quantised ({value.dtype}); store int_repr() with scale and zero point"
        )
    if value.dtype not in _DTYPE_NAMES:
        try:
            _DTYPE_NAMES[value.dtype] = container.dtype_name(value.dtype)
        except UsageError as error:
            raise ValueError(f"{error.message}; {error.hint}") from error
    if value.numel() and not value.data_ptr():
        raise ValueError("its storage was freed; gather or reload it before saving")
    return value


def placed(by: str, global_size: Box, offsets: Box) -> str:
    """Return the entry of `Items.placements` for a shard whose box something else has decided."""
    return f"{by} {global_size} {offsets}"


_SHAPE, _DTYPE, _IS_CPU = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu")
_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_SPEC, _LOCAL = attrgetter("_spec"), attrgetter("_local_tensor")


def _usual(sources: Sequence[torch.Tensor]) -> _Columns | None:
    """Read tensors that are one dense storage each, have bytes, and are of storable dtypes; None if
    not all are.
    """
    try:
        # What is not one dense storage has no address or no shape.
        addresses = list(map(torch.Tensor.data_ptr, sources))
        sizes = list(map(_SHAPE, sources))
    except RuntimeError:
        return None
    dtypes = list(map(_DTYPE, sources))
    if not all(addresses) or not _DTYPE_NAMES.keys() >= set(dtypes):
        return None
    return _Columns(addresses, sizes, dtypes)


class _LocalPart(NamedTuple):
    """What one rank holds of a DTensor of some size, cut in some way."""

    placement: str
    """As in `Items.placements`."""
    global_size: Box
    offsets: Box
    sizes: Box
    """Of the first box."""
    boxes: list[LocalBox]


@lru_cache(maxsize=PARTS_KEPT)
def _local_part(
    size: Box,
    placements: tuple[Any, ...],
    mesh_shape: Box,
    place: Box,
    shard_order: tuple[Any, ...] | None,
) -> _LocalPart:
    """Return the part at a place in the mesh. Raises ValueError as `splits_of` does."""
    # A tensor dimension cut by several mesh dimensions is cut from left to right unless the spec
    # says otherwise.
    order = [dim for entry in shard_order or () for dim in entry.mesh_dims]
    order += [dim for dim in range(len(placements)) if dim not in order]
    boxes = local_boxes(tuple(size), splits_of(placements, mesh_shape, place, order))
    placement = f"{tuple(size)} {mesh_shape} {place} {placements!r} {order}"
    return _LocalPart(placement, tuple(size), boxes[0].offsets, boxes[0].sizes, boxes)


class _Collector:
    """Turns values into items, and remembers what had to be refused. Lives for one call of
    `collect`.
    """

    def __init__(self, items: Items) -> None:
        self.items = items
        self.faults: list[str] = []
        # By id, since hashing meshes and specs is slow; the DTensors keep the ids valid.
        self._meshes: dict[int, tuple[Box, Box | None]] = {}
        self.parts: dict[int, _LocalPart | None] = {}
        """By id of a spec, which many DTensors share."""

    def add(self, key: str, value: Any, sort: str) -> None:
        try:
            _ADD_BY_SORT[sort](self, key, value)
        except ValueError as error:
            self.faults.append(f"{key!r}: {error}")
        except (RuntimeError, TypeError) as error:
            # What a tensor subclass raises for an operation it does not have.
            self.faults.append(
                f"{key!r}: reading it, a {type(value).__name__}, raised "
                f"{type(error).__name__}: {error}"
            )

    # The usual cases are written out, and a column at a time: a call for each of 11,000 tensors
    # costs as much as their copies.

    def add_plain_run(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> None:
        """Add values of sort `_PLAIN`."""
        columns = _usual(values)
        if columns is None:
            for key, value in zip(keys, values, strict=True):
                self.add(key, value, _PLAIN)
            return
        dims = list(map(len, columns.sizes))
        zeros = [(0,) * count for count in range(max(dims) + 1)]
        items = self.items
        items.extend(keys, Kind.TENSOR, values, columns)
        items.global_sizes += columns.sizes
        items.offsets += [zeros[count] for count in dims]
        items.placements += [""] * len(keys)
        items.requires_grad += bytes(map(_REQUIRES_GRAD, values))

    def add_dtensor_run(self, keys: Sequence[str], values: Sequence[DTensor]) -> None:
        """Add values of sort `_DTENSOR`."""
        if not self._add_usual_dtensors(keys, values):
            self._add_dtensors(keys, values)

    def _add_usual_dtensors(self, keys: Sequence[str], values: Sequence[DTensor]) -> bool:
        """Add values if each holds one box as a plain tensor; tell whether."""
        known = self.parts
        specs, local = list(map(_SPEC, values)), list(map(_LOCAL, values))
        parts = [
            known.get(id(spec)) or self.look_at(value)
            for spec, value in zip(specs, values, strict=True)
        ]
        usual = [part for part in parts if part is not None]
        if len(usual) < len(parts) or set(map(type, local)) != {torch.Tensor}:
            return False
        columns = _usual(local)
        if columns is None or columns.sizes != [part.sizes for part in usual]:
            return False
        items = self.items
        items.extend(keys, Kind.SHARD, local, columns)
        items.global_sizes += [part.global_size for part in usual]
        items.offsets += [part.offsets for part in usual]
        items.placements += [part.placement for part in usual]
        items.requires_grad += bytes(map(_REQUIRES_GRAD, values))
        return True

    def _add_dtensors(self, keys: Sequence[str], values: Sequence[DTensor]) -> None:
        items, parts, storable, plain = self.items, self.parts, _DTYPE_NAMES, torch.Tensor
        put_key, put_kind, put_source = items.keys.append, items.kinds.append, items.sources.append
        put_dtype, put_size = items.dtypes.append, items.sizes.append
        put_device, put_address = items.devices.append, items.addresses.append
        put_global, put_offsets = items.global_sizes.append, items.offsets.append
        put_placement, put_requires_grad = items.placements.append, items.requires_grad.append
        for key, value in zip(keys, values, strict=True):
            part = parts.get(id(value._spec)) or self.look_at(value)
            local = value._local_tensor
            dtype = local.dtype
            try:
                address = local.data_ptr() if part is not None and type(local) is plain else 0
            except RuntimeError:
                address = 0
            if part is None or not address or dtype not in storable or local.shape != part.sizes:
                self.add(key, value, _DTENSOR)
                continue
            put_key(key)
            put_kind(Kind.SHARD)
            put_source(local)
            put_dtype(dtype)
            put_global(part.global_size)
            put_offsets(part.offsets)
            put_size(local.shape)
            put_device("cpu" if local.is_cpu else local.device.type)
            put_address(address)
            put_placement(part.placement)
            put_requires_grad(value.requires_grad)

    def _add_object(self, key: str, value: Any) -> None:
        self.items.add(key, Kind.OBJECT, value)

    def _add_plain(self, key: str, value: torch.Tensor) -> None:
        if type(value) in (torch.Tensor, nn.Parameter) and value.dtype in _QUANTIZED:
            # torch's own pickle keeps scale, zero point and bits, and stock dcp.load puts the
            # object in place. The clone keeps a view from dragging its whole storage along.
            self.items.add(key, Kind.OBJECT, value.detach().clone())
            return
        source = plain_tensor(value)
        self.items.add(
            key,
            Kind.TENSOR,
            source,
            global_size=source.shape,
            offsets=(0,) * source.dim(),
            requires_grad=_requires_grad(value),
        )

    def _add_shard(
        self,
        key: str,
        tensor: torch.Tensor,
        *,
        owner: Any,
        global_size: Box,
        offsets: Box,
        sizes: Box,
        placement: str,
    ) -> None:
        source = plain_tensor(tensor)
        if tuple(source.shape) != tuple(sizes):
            raise ValueError(
                f"its local part has the shape {tuple(source.shape)} where its placement says "
                f"{tuple(sizes)}; "
                "make it with distribute_tensor, or give from_local the true shape and stride"
            )
        self.items.add(
            key,
            Kind.SHARD,
            source,
            global_size=global_size,
            offsets=offsets,
            placement=placement,
            requires_grad=_requires_grad(owner),
        )

    def _part(self, value: DTensor) -> _LocalPart | None:
        """Return what this rank holds of a DTensor; None outside its mesh. Raises ValueError."""
        spec = value._spec
        mesh = spec.mesh
        found = self._meshes.get(id(mesh))
        if found is None:
            coordinate = mesh.get_coordinate()
            found = (tuple(mesh.shape), None if coordinate is None else tuple(coordinate))
            self._meshes[id(mesh)] = found
        mesh_shape, place = found
        if place is None:
            return None
        return _local_part(value.shape, spec.placements, mesh_shape, place, spec.shard_order)

    def look_at(self, value: DTensor) -> _LocalPart | None:
        """Return, and note for its spec, what this rank holds if that is one box; None for what
        `add` has to look at.
        """
        try:
            part = self._part(value)
        except ValueError:
            part = None
        usual = part if part is not None and len(part.boxes) == 1 else None
        self.parts[id(value._spec)] = usual
        return usual

    def _add_dtensor(self, key: str, value: DTensor) -> None:
        part = self._part(value)
        if part is None:
            return
        local, size, boxes = local_tensor(value), value.shape, part.boxes
        if _sort(type(local)) == _DECLARED:
            self._add_declared(key, value)
            return
        if len(boxes) == 1:
            self._add_shard(
                key,
                local,
                owner=value,
                global_size=size,
                offsets=part.offsets,
                sizes=part.sizes,
                placement=part.placement,
            )
            return
        local = plain_tensor(local).detach()
        for box in boxes:
            piece = local
            for dim, (at, length) in enumerate(zip(box.local_offsets, box.sizes, strict=True)):
                piece = piece[(slice(None),) * dim + (slice(at, at + length),)]
            self._add_shard(
                key,
                piece,
                owner=value,
                global_size=size,
                offsets=box.offsets,
                sizes=box.sizes,
                placement=part.placement,
            )

    def _add_sharded(self, key: str, value: ShardedTensor) -> None:
        size = tuple(value.metadata().size)
        for shard in value.local_shards():
            offsets, sizes = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
            tensor = shard.tensor
            if isinstance(tensor, ShardedTensor):
                # FSDP1 over another sharding nests one in the other; torch's planner adds the
                # offsets up.
                inner = tensor.local_shards()
                if len(inner) != 1:
                    raise ValueError(
                        f"it nests a ShardedTensor of {len(inner)} local shards, not one"
                    )
                offsets = tuple(
                    a + b for a, b in zip(offsets, inner[0].metadata.shard_offsets, strict=True)
                )
                sizes, tensor = tuple(inner[0].metadata.shard_sizes), inner[0].tensor
            self._add_shard(
                key,
                tensor,
                owner=value,
                global_size=size,
                offsets=offsets,
                sizes=sizes,
                placement=placed("sharded", size, offsets),
            )

    def _add_declared(self, key: str, value: Any) -> None:
        """Read a tensor that tells its shards itself, by torch's `_Checkpointable` protocol."""
        for item in value.__create_write_items__(key, value):
            data = item.tensor_data
            if item.type == WriteItemType.BYTE_IO or data is None:
                raise ValueError(f"its class {type(value).__name__} declares bytes and not shards")
            size, offsets = tuple(data.size), tuple(data.chunk.offsets)
            self._add_shard(
                key,
                value.__get_tensor_shard__(item.index),
                owner=value,
                global_size=size,
                offsets=offsets,
                sizes=tuple(data.chunk.sizes),
                placement=placed(type(value).__name__, size, offsets),
            )


# Not a dict of bound methods in the collector: a cycle would keep the whole state alive.
_ADD_BY_SORT: Final[dict[str, Callable[[_Collector, str, Any], None]]] = {
    _PLAIN: _Collector._add_plain,
    _SUBCLASS: _Collector._add_plain,
    _REFUSED: _Collector._add_plain,
    _DTENSOR: _Collector._add_dtensor,
    _SHARDED: _Collector._add_sharded,
    _DECLARED: _Collector._add_declared,
    _OBJECT: _Collector._add_object,
}


_RUNS: Final = re.compile(rb"(.)\1*", re.DOTALL)
"""Equal bytes in a row."""


def collect(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> Items:
    """Return this rank's items, in the order of the flattened state, but what lies on a device
    before what does not; nothing is copied.

    A plain tensor is one TENSOR, a DTensor or ShardedTensor one SHARD for each box this rank holds
    (none outside its mesh), everything else an OBJECT. A local shard without elements is an item
    too, as in torch. Quantised tensors go as objects. About 1 us an entry.

    Raises: UsageError("unsupported-tensor"), listing up to `FAULTS_SHOWN_MAX` entries that cannot
    be stored exactly.
    """
    collector = _Collector(Items(paths=paths))
    keys, values = list(flat), list(flat.values())
    sorts = {cls: _sort(cls) for cls in set(map(type, values))}
    # A byte each, for one expression then finds the runs: there may be 10,000 values.
    order = list(set(sorts.values()))
    codes = {cls: order.index(sort) for cls, sort in sorts.items()}
    for run in _RUNS.finditer(bytes([codes[type(value)] for value in values])):
        low, high = run.span()
        sort = order[run[0][0]]
        if sort is _PLAIN:
            collector.add_plain_run(keys[low:high], values[low:high])
        elif sort is _DTENSOR:
            collector.add_dtensor_run(keys[low:high], values[low:high])
        else:
            for at in range(low, high):
                collector.add(keys[at], values[at], sort)
    if collector.faults:
        raise _unsupported(collector.faults)
    return _device_first(collector.items)


def _device_first(items: Items) -> Items:
    """Put what lies on a device before what does not, if there is both; else nothing changes.

    An optimizer's counters stay on the host beside moments on the device. Between these they would
    keep the moments from lying side by side in the image, and so from being copied together.
    """
    devices = items.devices
    if len(set(devices) - {""}) < 2:
        return items
    order = sorted(range(len(devices)), key=lambda item: devices[item] in ("cpu", ""))
    pick = itemgetter(*order)
    return Items(
        list(pick(items.keys)),
        bytearray(pick(items.kinds)),
        list(pick(items.sources)),
        list(pick(items.dtypes)),
        list(pick(items.global_sizes)),
        list(pick(items.offsets)),
        list(pick(items.sizes)),
        list(pick(devices)),
        list(pick(items.addresses)),
        list(pick(items.placements)),
        bytearray(pick(items.requires_grad)),
        items.paths,
    )


def _unsupported(faults: Sequence[str]) -> UsageError:
    shown = "; ".join(faults[:FAULTS_SHOWN_MAX])
    more = len(faults) - FAULTS_SHOWN_MAX
    entries = "entry" if len(faults) == 1 else "entries"
    return UsageError(
        "unsupported-tensor",
        f"{len(faults)} {entries} of the state cannot be stored exactly: {shown}"
        + (f"; and {more} more" if more > 0 else ""),
        "change or leave out these entries; nothing was staged",
    )


# --- fingerprint and offer ----------------------------------------------------------------------


def _structure(items: Items, extra: Sequence[Any]) -> tuple[Any, ...]:
    """Return what tells one structure from another, without copying it."""
    devices, placements = items.devices, items.placements
    return (
        items.keys,
        bytes(items.kinds),
        items.dtypes,
        items.sizes,
        devices[:1] if len(set(devices)) == 1 else devices,
        # Global sizes and offsets follow from these, and of whole tensors from their sizes.
        placements if any(placements) else (),
        items.paths.columns() if isinstance(items.paths, Paths) else list(items.paths.items()),
        bytes(items.requires_grad),
        extra,
    )


def _hashed(structure: tuple[Any, ...]) -> str:
    keys, kinds, dtypes, *others = structure
    try:
        packed: bytes = msgpack.packb((keys, kinds, dtype_names(dtypes), *others))
    except UnicodeEncodeError as error:
        raise UsageError("usage", f"a key of the state is not valid Unicode: {error}") from error
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


def fingerprint(items: Items, extra: Sequence[Any] = ()) -> str:
    """Return a name for the structure: equal exactly if the same plan serves.

    Covers keys and their paths, kinds, dtypes, shapes, boxes, placements with this rank's mesh
    coordinates, kinds of device, whether gradients are required (`.metadata` records it), and
    `extra` (plain data: the world's size and the like). Not covered: values, objects, digests. The
    same in every process. About 0.2 us an item. Raises UsageError("usage") for a key that is not
    valid Unicode.
    """
    return _hashed(_structure(items, extra))


class Fingerprints:
    """Returns `fingerprint`s one after the other. Keeps the last structure, none of its tensors:
    most are the same again, and to compare takes a third of the time that to hash takes.
    """

    def __init__(self) -> None:
        self._known: tuple[tuple[Any, ...], str] = (), ""

    def take(self, items: Items, extra: Sequence[Any]) -> str:
        """Return `fingerprint(items, extra)`; the items' columns are not to be changed from now."""
        structure = _structure(items, extra)
        if structure != self._known[0]:
            # At once: an interrupt must not leave one structure with the name of another.
            self._known = structure, _hashed(structure)
        return self._known[1]


def serialise_objects(items: Items, chosen: Iterable[int] | None = None) -> dict[int, bytes]:
    """Return the serialised form of all objects among the items, or of the chosen ones: stock DCP's
    BYTE_IO.

    Raises UsageError("unpicklable") naming the key.
    """
    considered = range(len(items)) if chosen is None else chosen
    return {
        item: container.serialise(items.keys[item], items.sources[item])
        for item in considered
        if items.kinds[item] == Kind.OBJECT
    }


def _tensor_digests(items: Items) -> dict[int, int]:
    """Return the CRC-32 of each small whole tensor on the CPU, over its elements in order."""
    digests = {}
    scratch = bytearray(DIGEST_BYTES_MAX)
    base = torch.frombuffer(scratch, dtype=torch.uint8)
    view = memoryview(scratch)
    with torch.no_grad():
        for item, kind in enumerate(items.kinds):
            if kind != Kind.TENSOR or items.devices[item] != "cpu":
                continue
            source = items.sources[item]
            nbytes = source.numel() * source.itemsize
            if nbytes <= DIGEST_BYTES_MAX:
                if nbytes:
                    base[:nbytes].view(source.dtype).view(source.shape).copy_(source)
                digests[item] = isal_zlib.crc32(view[:nbytes])
    return digests


def make_offer(
    items: Items,
    objects: Mapping[int, bytes],
    *,
    with_digests: bool = True,
    to_lowest_rank: bool = False,
) -> Offer:
    """Return what this rank tells the planner.

    `objects` is what `serialise_objects(items)` returned; they can be staged as they are. Digests
    find replicas that differ, so a rank that is alone needs none. Costs a read of every small
    tensor: once a structure, not once a save.
    """
    digests = _tensor_digests(items) if with_digests else {}
    if with_digests:
        digests |= {item: isal_zlib.crc32(data) for item, data in objects.items()}
    keys = items.keys
    is_tensor = [kind != Kind.OBJECT for kind in items.kinds]
    return Offer(
        keys=tuple(keys),
        kinds=bytes(items.kinds),
        dtypes=tuple(dtype_names(items.dtypes)),
        global_sizes=tuple(map(tuple, items.global_sizes)),
        offsets=tuple(items.offsets),
        sizes=tuple(map(tuple, items.sizes)),
        container_bytes=container_bytes(items),
        requires_grad=bytes(items.requires_grad),
        pinned=bytes(
            tensor and bool(source.is_pinned())
            for tensor, source in zip(is_tensor, items.sources, strict=True)
        ),
        digests=tuple(digests.get(item, -1) for item in range(len(items))),
        paths=tuple(items.paths.get(key, (key,)) for key in keys),
        to_lowest_rank=to_lowest_rank,
    )


def container_bytes(items: Items) -> tuple[int, ...]:
    """Return the length of each item's container, 0 for objects."""
    return tuple(
        0 if dtype is None else container.template(tuple(size), dtype).total_bytes
        for size, dtype in zip(items.sizes, items.dtypes, strict=True)
    )
