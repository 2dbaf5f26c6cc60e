"""From a user's state to items: what this rank could write, each with its key, its box and its
source.

Owns flattening (the same keys and paths as torch's own planner gives), the reading of every kind of
tensor torch has, the refusal of those that cannot be stored exactly, the fingerprint of a structure
and the offer made from it. It must not know of images, arenas, daemons or files. It copies nothing
and keeps nothing: sources are looked up afresh in every save, since an optimizer or an offloading
model may have replaced any storage since the last one. torch's private attributes are used here and
nowhere else.

Sources: torch/distributed/checkpoint/_nested_dict.py, _traverse.py, state_dict_saver.py,
default_planner.py and planner_helpers.py, torch/distributed/tensor/_utils.py and placement_types.py
(2.13).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import msgpack
import torch
from isal import isal_zlib
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from milepost.errors import UsageError
from milepost.format import container
from milepost.offer import Box, Kind, Offer

Path: TypeAlias = tuple[str | int, ...]
"""Where a value stands in the nested state."""

Flat: TypeAlias = dict[str, Any]
"""Flattened key to value, in the state's order."""

FAULTS_SHOWN_MAX: Final = 10
"""How many faults one error lists; the rest are counted."""

BOXES_MAX: Final = 1024
"""Boxes one local shard may fall apart into; each costs a container of 1.5 KiB and an entry of the
index."""

PARTS_KEPT: Final = 1 << 16
"""Parts of DTensors that are remembered, by size and cut; about 1 KiB each."""

DIGEST_BYTES_MAX: Final = 64 << 10
"""Replicas on the CPU up to this size get a digest; larger ones cost more than the finding is
worth."""

PER_RANK: Final = "per_rank"
"""First component of the top-level names of state that differs by rank."""


# --- flattening ---------------------------------------------------------------------------------

_LEAF: Final = 0
_MAPPING: Final = 1
_LIST: Final = 2


def _form(cls: type) -> int:
    """Return how torch's traversal treats values of a class; tuples and sets are leaves to it."""
    if issubclass(cls, Mapping):
        return _MAPPING
    return _LIST if issubclass(cls, list) else _LEAF


def _is_traversed(values: list[Any]) -> bool:
    """Tell whether a list is taken apart: it holds a tensor, a mapping, or a list that is taken
    apart.
    """
    # By class first: such lists can hold a million numbers.
    classes = set(map(type, values))
    if any(issubclass(cls, torch.Tensor | Mapping) for cls in classes):
        return True
    return any(issubclass(cls, list) for cls in classes) and any(
        isinstance(value, list) and _is_traversed(value) for value in values
    )


class Paths(Mapping[str, Path]):
    """The path of each key of a flattened state.

    Filled as columns, one entry a leaf, and put together when first asked for: only a plan asks.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self.parents: list[Path] = []
        """Where the container stands."""
        self.names: list[str | int] = []
        """The key or index in it."""

    @cached_property
    def _by_key(self) -> dict[str, Path]:
        leaves = zip(self._flat, self.parents, self.names, strict=True)
        return {key: (*parent, name) for key, parent, name in leaves}

    def columns(self) -> tuple[object, ...]:
        """Return what tells these paths from others, as plain data. About 0.2 us an entry."""
        known: dict[Path, int] = {}
        at = [known.setdefault(parent, len(known)) for parent in self.parents]
        return (list(known), at, self.names)

    def __getitem__(self, key: str) -> Path:
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat)

    def __len__(self) -> int:
        return len(self._flat)


def _named(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    return zip(map(str, values), values.values(), strict=True)


def _walk(
    entries: Iterable[tuple[Any, Any]],
    prefix: str,
    path: Path,
    flat: Flat,
    paths: Paths,
    forms: dict[type, int],
) -> None:
    """Add all leaves below `entries` to `flat` and `paths`.

    A module-level function, since a recursive closure is a reference cycle that would keep the
    whole state alive.
    """
    put_parent, put_name = paths.parents.append, paths.names.append
    for name, value in entries:
        form = forms.get(type(value))
        if form is None:
            form = forms[type(value)] = _form(type(value))
        if form == _LEAF or (form == _LIST and not _is_traversed(value)):
            flat[f"{prefix}{name}"] = value
            put_parent(path)
            put_name(name)
        else:
            inner = _named(value) if form == _MAPPING else enumerate(value)
            _walk(inner, f"{prefix}{name}.", (*path, name), flat, paths, forms)


def _raw_paths(
    entries: Iterable[tuple[Any, Any]], path: tuple[Any, ...]
) -> Iterable[tuple[Any, ...]]:
    """Yield the path of every leaf, with mapping keys as they are and not yet turned into
    strings.
    """
    for name, value in entries:
        form = _form(type(value))
        if form == _MAPPING:
            yield from _raw_paths(value.items(), (*path, name))
        elif form == _LIST and _is_traversed(value):
            yield from _raw_paths(enumerate(value), (*path, name))
        else:
            yield (*path, name)


def _collision(state: Mapping[Any, Any]) -> UsageError:
    """Return the error that names the two paths of the first key that stands for two entries."""
    seen: dict[str, tuple[Any, ...]] = {}
    for path in _raw_paths(state.items(), ()):
        key = ".".join(map(str, path))
        if key in seen:
            first, second = (" / ".join(map(repr, found)) for found in (seen[key], path))
            return UsageError(
                "key-collision",
                f"the entries {first} and {second} of the state are both {key!r} once flattened",
                "rename one of them: dots join the keys of nested dicts, and keys become strings",
            )
        seen[key] = path
    raise AssertionError("no two entries share a key")


_NEVER_STATEFUL: Final = frozenset(
    {
        torch.Tensor,
        nn.Parameter,
        DTensor,
        dict,
        list,
        tuple,
        str,
        bytes,
        int,
        float,
        bool,
        type(None),
    }
)
"""Classes whose instances cannot satisfy the protocol; asking a runtime protocol costs 5 us an
entry."""


def call_stateful(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a shallow copy in which each Stateful entry of the top level is replaced by its
    `state_dict()`.

    Exactly what torch's `dcp.save` does: nested Stateful objects are left alone. Raises UsageError
    if `state` is not a mapping; what a `state_dict()` raises goes through.
    """
    if not isinstance(state, Mapping):
        raise UsageError(
            "usage",
            f"the state is a {type(state).__name__}, not a dict",
            'pass a dict such as {"model": model, "optimizer": optimizer}',
        )
    return {
        key: value.state_dict()
        if type(value) not in _NEVER_STATEFUL and isinstance(value, Stateful)
        else value
        for key, value in state.items()
    }


def per_rank_prefix(rank: int) -> str:
    """Return what the top-level names of one rank's own state begin with."""
    return f"{PER_RANK}/{rank}/"


def with_per_rank(
    state: Mapping[Any, Any], per_rank: Mapping[Any, Any] | None, rank: int
) -> Mapping[Any, Any]:
    """Return the state with this rank's own entries added, each under the one top-level name
    `per_rank/<rank>/<key>`.

    Raises UsageError("key-collision") if a name is taken.
    """
    if not per_rank:
        return state
    merged = dict(state)
    taken = set(map(str, state))
    for key, value in per_rank.items():
        name = f"{per_rank_prefix(rank)}{key}"
        if name in taken:
            raise UsageError(
                "key-collision",
                f"the per-rank entry {key!r} is stored as {name!r}, which the state holds already",
                "rename one of them",
            )
        taken.add(name)
        merged[name] = value
    return merged


def flatten(state: Mapping[Any, Any]) -> tuple[Flat, Paths]:
    """Return the state's leaves by flattened key, and each key's path, as torch's
    DefaultSavePlanner has them.

    Stateful entries of the top level are called first. The values are the live ones, not copies.
    About 0.3 us an entry. Raises UsageError: "key-collision", or "usage" for a state that is no
    mapping or contains itself.
    """
    called = call_stateful(state)
    flat: Flat = {}
    paths = Paths(flat)
    try:
        _walk(_named(called), "", (), flat, paths, {})
    except RecursionError as error:
        raise UsageError(
            "usage", "the state contains itself, or is nested too deeply", "pass a finite state"
        ) from error
    if len(paths.names) != len(flat):
        raise _collision(called)
    return flat, paths


# --- boxes of a sharded tensor ------------------------------------------------------------------

Split: TypeAlias = tuple[int, int, int]
"""One mesh dimension's cut of a tensor dimension: parts, this rank's part, split factor (1: a plain
Shard)."""


class LocalBox(NamedTuple):
    """One box of a tensor on this rank: where it lies in the whole tensor, its sizes, where it lies
    in the local one.
    """

    offsets: Box
    sizes: Box
    local_offsets: Box


def _cut(ranges: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Return positions [begin, end) of the sequence that `ranges` (start, length) stand for."""
    taken = []
    for start, length in ranges:
        low, high = max(begin, 0), min(end, length)
        if low < high:
            taken.append((start + low, high - low))
        begin, end = begin - length, end - length
        if end <= 0:
            break
    return taken


def local_ranges(size: int, splits: Sequence[Split]) -> list[tuple[int, int]]:
    """Return which indices of a dimension a rank holds, in the order it holds them, as (start,
    length) ranges.

    The cuts apply one after the other, each to what the one before left. A plain cut is
    torch.chunk; one with a split factor f cuts into f pieces first and takes this rank's chunk of
    each.
    """
    ranges = [(0, size)] if size else []
    for parts, index, factor in splits:
        total = sum(length for _, length in ranges)
        piece = -(-total // factor)
        left: list[tuple[int, int]] = []
        for begin in range(0, total, piece) if piece else ():
            end = min(begin + piece, total)
            chunk = -(-(end - begin) // parts)
            low = min(begin + index * chunk, end)
            for start, length in _cut(ranges, low, min(low + chunk, end)):
                if left and sum(left[-1]) == start:
                    left[-1] = (left[-1][0], left[-1][1] + length)
                else:
                    left.append((start, length))
        ranges = left
    return ranges


def local_boxes(size: Box, splits: Mapping[int, Sequence[Split]]) -> list[LocalBox]:
    """Return the boxes that make up a rank's local tensor, at least one; `splits` maps a tensor
    dimension to its cuts.

    An empty local tensor is one box without elements, at the offset where torch puts it: the end of
    the dimension.
    """
    axes = []
    for dim, length in enumerate(size):
        if dim not in splits:
            axes.append([(0, length, 0)])
            continue
        axis, at = [], 0
        for start, count in local_ranges(length, splits[dim]):
            axis.append((start, count, at))
            at += count
        axes.append(axis or [(length, 0, 0)])
    count = prod(map(len, axes))
    if count > BOXES_MAX:
        raise ValueError(f"its local part is {count} separate boxes, more than {BOXES_MAX}")
    return [
        LocalBox(
            tuple(start for start, _, _ in box),
            tuple(length for _, length, _ in box),
            tuple(at for _, _, at in box),
        )
        for box in product(*axes)
    ]


def _splits(
    placements: Sequence[Any], mesh_shape: Box, coordinate: Sequence[int], order: Sequence[int]
) -> dict[int, list[Split]]:
    """Return the cuts of each tensor dimension, in the order in which the mesh dimensions apply.

    Raises ValueError, with what to do, for a placement that is no cut of finished values.
    """
    splits: dict[int, list[Split]] = {}
    for mesh_dim in order:
        placement = placements[mesh_dim]
        if type(placement) is Replicate:
            continue
        if type(placement) is Shard:
            factor = 1
        elif type(placement) is _StridedShard:
            factor = int(placement.split_factor)
        elif isinstance(placement, Partial):
            raise ValueError(
                f"it is placed as {placement!r}, values not yet reduced; "
                "redistribute it to Shard or Replicate first"
            )
        else:
            raise ValueError(
                f"it is placed as {placement!r}, which is neither Shard nor Replicate; "
                "redistribute it first"
            )
        cut = (mesh_shape[mesh_dim], coordinate[mesh_dim], factor)
        splits.setdefault(placement.dim, []).append(cut)
    return splits


# --- items --------------------------------------------------------------------------------------


def _requires_grad(owner: Any) -> bool:
    """Return what torch records of a value's gradient."""
    if isinstance(owner, ShardedTensor):
        # Asking the tensor itself warns that its class is deprecated.
        return bool(owner.metadata().tensor_properties.requires_grad)
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
    owners: Mapping[str, Any] = field(default_factory=dict)
    """The value each key has in the flattened state."""
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
            is_tensor and _requires_grad(self.owners.get(key)),
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
    """Return the part at a place in the mesh. Raises ValueError as `_splits` does."""
    # A tensor dimension cut by several mesh dimensions is cut from left to right unless the spec
    # says otherwise.
    order = [dim for entry in shard_order or () for dim in entry.mesh_dims]
    order += [dim for dim in range(len(placements)) if dim not in order]
    boxes = local_boxes(tuple(size), _splits(placements, mesh_shape, place, order))
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
        )

    def _add_shard(
        self,
        key: str,
        tensor: torch.Tensor,
        *,
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
        local, size, boxes = value._local_tensor, value.shape, part.boxes
        if _sort(type(local)) == _DECLARED:
            self._add_declared(key, value)
            return
        if len(boxes) == 1:
            self._add_shard(
                key,
                local,
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


def collect(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> Items:
    """Return this rank's items, in the order of the flattened state; nothing is copied.

    A plain tensor is one TENSOR, a DTensor or ShardedTensor one SHARD for each box this rank holds
    (none outside its mesh), everything else an OBJECT. A local shard without elements is an item
    too, as in torch. Quantised tensors go as objects. About 1 us an entry.

    Raises: UsageError("unsupported-tensor"), listing up to `FAULTS_SHOWN_MAX` entries that cannot
    be stored exactly.
    """
    items = Items(owners=flat, paths=paths)
    collector = _Collector(items)
    parts = collector.parts
    sorts: dict[type, str] = {}
    storable, plain, dtensor = _DTYPE_NAMES, _PLAIN, _DTENSOR
    zeros = [(0,) * dims for dims in range(65)]
    put_key, put_kind, put_source = items.keys.append, items.kinds.append, items.sources.append
    put_dtype, put_size, put_device = items.dtypes.append, items.sizes.append, items.devices.append
    put_global, put_offsets = items.global_sizes.append, items.offsets.append
    put_address, put_placement = items.addresses.append, items.placements.append
    for key, value in flat.items():
        cls = type(value)
        sort = sorts.get(cls)
        if sort is None:
            sort = sorts[cls] = _sort(cls)
        # The usual cases are written out, since a call for each of 11,000 tensors costs as much as
        # their copies. What is not one dense storage has no address or no shape.
        try:
            if sort is plain:
                address, dtype, size = value.data_ptr(), value.dtype, value.shape
                if address and dtype in storable:
                    put_key(key)
                    put_kind(0)
                    put_source(value)
                    put_dtype(dtype)
                    put_global(size)
                    put_offsets(zeros[len(size)])
                    put_size(size)
                    put_device("cpu" if value.is_cpu else value.device.type)
                    put_address(address)
                    put_placement("")
                    continue
            elif sort is dtensor:
                part = parts.get(id(value._spec)) or collector.look_at(value)
                local = value._local_tensor
                if part is not None and type(local) is torch.Tensor:
                    address, dtype, size = local.data_ptr(), local.dtype, local.shape
                    if address and dtype in storable and size == part.sizes:
                        put_key(key)
                        put_kind(1)
                        put_source(local)
                        put_dtype(dtype)
                        put_global(part.global_size)
                        put_offsets(part.offsets)
                        put_size(size)
                        put_device("cpu" if local.is_cpu else local.device.type)
                        put_address(address)
                        put_placement(part.placement)
                        continue
        except RuntimeError:
            pass
        collector.add(key, value, sort)
    if collector.faults:
        raise _unsupported(collector.faults)
    return items


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


def fingerprint(items: Items, extra: Sequence[Any] = ()) -> str:
    """Return a name for the structure: equal exactly if the same plan serves.

    Covers keys and their paths, kinds, dtypes, shapes, boxes, placements with this rank's mesh
    coordinates, kinds of device, whether gradients are required (`.metadata` records it), and
    `extra` (plain data: the world's size and the like). Not covered: values, objects, digests. The
    same in every process. About 0.4 us an item. Raises UsageError("usage") for a key that is not
    valid Unicode.
    """
    devices, placements = items.devices, items.placements
    columns = (
        items.keys,
        bytes(items.kinds),
        dtype_names(items.dtypes),
        items.sizes,
        devices[:1] if len(set(devices)) == 1 else devices,
        # Global sizes and offsets follow from these, and of whole tensors from their sizes.
        placements if any(placements) else (),
        items.paths.columns() if isinstance(items.paths, Paths) else list(items.paths.items()),
        bytes(map(_requires_grad, items.owners.values())),
        extra,
    )
    try:
        packed: bytes = msgpack.packb(columns)
    except UnicodeEncodeError as error:
        raise UsageError("usage", f"a key of the state is not valid Unicode: {error}") from error
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


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
    owners, keys = items.owners, items.keys
    is_tensor = [kind != Kind.OBJECT for kind in items.kinds]
    return Offer(
        keys=tuple(keys),
        kinds=bytes(items.kinds),
        dtypes=tuple(dtype_names(items.dtypes)),
        global_sizes=tuple(map(tuple, items.global_sizes)),
        offsets=tuple(items.offsets),
        sizes=tuple(map(tuple, items.sizes)),
        container_bytes=container_bytes(items),
        requires_grad=bytes(
            tensor and _requires_grad(owners.get(key))
            for tensor, key in zip(is_tensor, keys, strict=True)
        ),
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
