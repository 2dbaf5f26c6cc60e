"""From a user's state to items.

Owns the reading of every kind of value, and the refusal of those that cannot be stored exactly. It
must not know of images, arenas, daemons or files. It copies nothing and keeps nothing: every save
looks up its sources anew, since an optimizer or an offloading model may have replaced any storage
since the last save.

Sources: torch/distributed/checkpoint/default_planner.py and planner_helpers.py (2.13).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.tensor import DTensor

from milepost.errors import UsageError
from milepost.state.boxes import LocalBox, local_boxes, splits_of
from milepost.state.flattening import Path
from milepost.state.items import Items, explicit_placement
from milepost.state.tensors import (
    QUANTIZED,
    Sort,
    facts_of,
    local_tensor,
    plain_tensor,
    requires_grad,
    sort_of,
)
from milepost.wire.offers import Box, Kind

FAULTS_SHOWN_MAX: Final = 10
"""How many faults one error lists. It only counts the rest."""

PARTS_KEPT: Final = 1 << 16
"""Local parts of DTensors that are remembered, by size and cut; about 1 KiB each."""

PIECE_TENSORS: Final = 256
"""How many tensors are read together. If one of them is unusual, they are all read one by one."""

_REQUIRES_GRAD: Final = attrgetter("requires_grad")


class _LocalPart(NamedTuple):
    """What one rank holds of a DTensor with a certain size and placement."""

    placement: str
    """As in `Items.placements`."""
    global_size: Box
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
    # If several mesh dimensions cut a tensor dimension, they cut from left to right unless the spec
    # says otherwise.
    order = [dim for entry in shard_order or () for dim in entry.mesh_dims]
    order += [dim for dim in range(len(placements)) if dim not in order]
    boxes = local_boxes(tuple(size), splits_of(placements, mesh_shape, place, order))
    placement = f"{tuple(size)} {mesh_shape} {place} {placements!r} {order}"
    return _LocalPart(placement, tuple(size), boxes)


class _Collector:
    """Turns values into items, and notes what has to be refused. Lives for one call of `sort_out`.

    Most values are plain tensors and DTensors of one box. These are read in pieces, a column at a
    time. Everything else, and every piece that contains anything else, is read value by value.
    """

    def __init__(self, items: Items) -> None:
        self.items = items
        self.faults: list[tuple[str, str]] = []
        """Key, and why its value cannot be stored exactly."""
        # By id, since hashing meshes and specs is slow; the DTensors keep the ids valid.
        self._meshes: dict[int, tuple[Box, Box | None]] = {}
        self._parts: dict[int, _LocalPart] = {}
        """By id of a spec, which many DTensors share."""

    def add(self, key: str, value: Any, sort: Sort) -> None:
        """Add one value of any sort, or note why it cannot be stored."""
        try:
            _ADD_BY_SORT[sort](self, key, value)
        except ValueError as error:
            self.faults.append((key, str(error)))
        except (RuntimeError, TypeError) as error:
            # A tensor subclass raises this for an operation that it does not have.
            text = f"reading it, a {type(value).__name__}, raised {type(error).__name__}: {error}"
            self.faults.append((key, text))

    # --- many at once

    def add_tensors(self, keys: Sequence[str], values: Sequence[Any], sorts: bytes) -> None:
        """Add plain tensors and DTensors."""
        for low in range(0, len(keys), PIECE_TENSORS):
            piece = slice(low, low + PIECE_TENSORS)
            if not self._add_usual(keys[piece], values[piece], sorts[piece]):
                for key, value, sort in zip(keys[piece], values[piece], sorts[piece], strict=True):
                    self.add(key, value, Sort(sort))

    def _add_usual(self, keys: Sequence[str], values: Sequence[Any], sorts: bytes) -> bool:
        """Add a piece unless it contains anything unusual; return whether it was added."""
        parts, sources = [_WHOLE] * len(keys), values
        if Sort.DTENSOR in sorts:
            is_dtensor = [sort == Sort.DTENSOR for sort in sorts]
            each = list(zip(values, is_dtensor, strict=True))
            found = [self._one_box(value) if is_it else _WHOLE for value, is_it in each]
            parts = [part for part in found if part is not None]
            if len(parts) < len(found):
                return False
            sources = [local_tensor(value) if is_it else value for value, is_it in each]
        facts = facts_of(sources)
        if facts is None:
            return False
        sizes = facts.sizes
        if any(
            part is not _WHOLE and part.boxes[0].sizes != size
            for part, size in zip(parts, sizes, strict=True)
        ):
            return False
        items = self.items
        items.extend(keys, sources, facts)
        items.kinds += sorts.translate(_KINDS)
        items.global_sizes += [
            size if part is _WHOLE else part.global_size
            for part, size in zip(parts, sizes, strict=True)
        ]
        zeros = [(0,) * dims for dims in range(max(map(len, sizes)) + 1)]
        items.offsets += [
            zeros[len(size)] if part is _WHOLE else part.boxes[0].offsets
            for part, size in zip(parts, sizes, strict=True)
        ]
        items.placements += [part.placement for part in parts]
        items.requires_grad += bytes(map(_REQUIRES_GRAD, values))
        return True

    def _one_box(self, value: DTensor) -> _LocalPart | None:
        """Return what this rank holds of a DTensor if that is one box, else None."""
        known = self._parts.get(id(value._spec))
        if known is not None:
            return known
        try:
            part = self._part(value)
        except ValueError:
            return None
        if part is None or len(part.boxes) > 1:
            return None
        self._parts[id(value._spec)] = part
        return part

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

    # --- one value

    def _add_object(self, key: str, value: Any) -> None:
        self.items.add(key, Kind.OBJECT, value)

    def _add_plain(self, key: str, value: torch.Tensor) -> None:
        if type(value) in (torch.Tensor, nn.Parameter) and value.dtype in QUANTIZED:
            # torch's own pickle keeps scale, zero point and bits, and stock dcp.load puts the
            # object in place. Clone it: a view would take its whole storage along.
            self.items.add(key, Kind.OBJECT, value.detach().clone())
            return
        source = plain_tensor(value)
        self.items.add(
            key,
            Kind.TENSOR,
            source,
            global_size=source.shape,
            offsets=(0,) * source.dim(),
            requires_grad=requires_grad(value),
        )

    def _add_dtensor(self, key: str, value: DTensor) -> None:
        part = self._part(value)
        if part is None:
            return
        local = local_tensor(value)
        if sort_of(type(local)) is Sort.DECLARED:
            self._add_declared(key, value)
            return
        is_one = len(part.boxes) == 1
        whole = local if is_one else plain_tensor(local).detach()
        for box in part.boxes:
            self._add_shard(
                key,
                whole if is_one else _cut_out(whole, box),
                owner=value,
                global_size=part.global_size,
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
                placement=explicit_placement("sharded", size, offsets),
            )

    def _add_declared(self, key: str, value: Any) -> None:
        """Read a tensor that describes its own shards, by torch's `_Checkpointable` protocol."""
        for item in value.__create_write_items__(key, value):
            data = item.tensor_data
            if item.type == WriteItemType.BYTE_IO or data is None:
                raise ValueError(
                    f"its class {type(value).__name__} declares bytes instead of shards"
                )
            size, offsets = tuple(data.size), tuple(data.chunk.offsets)
            self._add_shard(
                key,
                value.__get_tensor_shard__(item.index),
                owner=value,
                global_size=size,
                offsets=offsets,
                sizes=tuple(data.chunk.sizes),
                placement=explicit_placement(type(value).__name__, size, offsets),
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
            requires_grad=requires_grad(owner),
        )


_WHOLE: Final = _LocalPart("", (), [])
"""Stands for the part of a plain tensor: all of it."""

_KINDS: Final = bytes.maketrans(bytes([Sort.PLAIN, Sort.DTENSOR]), bytes([Kind.TENSOR, Kind.SHARD]))
"""From the sort of a usual tensor to its kind."""

# Not a dict of bound methods in the collector: a cycle would keep the whole state alive.
_ADD_BY_SORT: Final[dict[Sort, Callable[[_Collector, str, Any], None]]] = {
    Sort.PLAIN: _Collector._add_plain,
    Sort.SUBCLASS: _Collector._add_plain,
    Sort.REFUSED: _Collector._add_plain,
    Sort.DTENSOR: _Collector._add_dtensor,
    Sort.SHARDED: _Collector._add_sharded,
    Sort.DECLARED: _Collector._add_declared,
    Sort.OBJECT: _Collector._add_object,
}


def _cut_out(local: torch.Tensor, box: LocalBox) -> torch.Tensor:
    """Return the view of a rank's local tensor that is one of its boxes."""
    return local[
        tuple(
            slice(at, at + length) for at, length in zip(box.local_offsets, box.sizes, strict=True)
        )
    ]


_RUNS: Final = re.compile(
    rb"(?P<tensors>[%c%c]+)|[^%c%c]+" % (Sort.PLAIN, Sort.DTENSOR, Sort.PLAIN, Sort.DTENSOR)
)
"""Matches a run of plain tensors and DTensors, or a run of other values. One byte a value, by
sort.
"""


def collect(flat: Mapping[str, Any], paths: Mapping[str, Path]) -> Items:
    """Return this rank's items in the order of the flattened state, but with tensors on a device
    first. Copies nothing.

    A plain tensor becomes one TENSOR, a DTensor or ShardedTensor one SHARD for each box that this
    rank holds (none outside its mesh), everything else an OBJECT. A local shard without elements is
    an item too, as in torch. Quantised tensors are stored as objects. About 1 us an entry.

    Raises: UsageError("unsupported-tensor"), listing up to `FAULTS_SHOWN_MAX` entries that cannot
    be stored exactly.
    """
    items, faults = sort_out(flat, paths)
    if faults:
        raise _unsupported(faults)
    return _device_first(items)


def sort_out(
    flat: Mapping[str, Any], paths: Mapping[str, Path]
) -> tuple[Items, list[tuple[str, str]]]:
    """Return the items in the order of the flattened state, and the key and the fault of each entry
    that cannot be stored exactly.
    """
    collector = _Collector(Items(paths=paths))
    keys, values = list(flat), list(flat.values())
    sort_by_class = {cls: sort_of(cls) for cls in set(map(type, values))}
    sorts = bytes([sort_by_class[type(value)] for value in values])
    for run in _RUNS.finditer(sorts):
        low, high = run.span()
        if run["tensors"] is not None:
            collector.add_tensors(keys[low:high], values[low:high], sorts[low:high])
        else:
            for at in range(low, high):
                collector.add(keys[at], values[at], Sort(sorts[at]))
    return collector.items, collector.faults


def _device_first(items: Items) -> Items:
    """Put items on a device before the others.

    An optimizer's counters stay on the host while its moments are on the device. In the state's
    order, the counters would separate the moments in the image, so that these could not be copied
    together.
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


def _unsupported(faults: Sequence[tuple[str, str]]) -> UsageError:
    shown = "; ".join(f"{key!r}: {text}" for key, text in faults[:FAULTS_SHOWN_MAX])
    more = len(faults) - FAULTS_SHOWN_MAX
    entries = "entry" if len(faults) == 1 else "entries"
    return UsageError(
        "unsupported-tensor",
        f"{len(faults)} {entries} of the state cannot be stored exactly: {shown}"
        + (f"; and {more} more" if more > 0 else ""),
        "change or leave out these entries; nothing was staged",
    )
