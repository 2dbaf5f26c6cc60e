"""Items: what this rank could write, each with its key, its box and its source.

`collecting` makes them from a state, `planners` from a user's plan; `fingerprint`, `offering` and
`staging` read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from milepost.state.flattening import Path
from milepost.state.tensors import TensorFacts
from milepost.wire.offers import Box, Kind


class Item(NamedTuple):
    """One thing that a rank could write. `source` is a live plain tensor of exactly its box, or the
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
    """Address of the source's first element; 0 for objects and for tensors without bytes."""
    placements: list[str] = field(default_factory=list)
    """What determines a shard's box: the whole tensor's size with the mesh, the place in it and the
    cut, or the box itself; "" for whole tensors and objects."""
    requires_grad: bytearray = field(default_factory=bytearray)
    """Whether the value in the state requires a gradient; 0 or 1 for each."""
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
        self, keys: Sequence[str], sources: Sequence[torch.Tensor], facts: TensorFacts
    ) -> None:
        """Append the columns that describe tensors; the caller appends the other columns."""
        self.keys += keys
        self.sources += sources
        self.dtypes += facts.dtypes
        self.sizes += facts.sizes
        self.devices += facts.devices
        self.addresses += facts.addresses


def explicit_placement(by: str, global_size: Box, offsets: Box) -> str:
    """Return the entry of `Items.placements` for a shard whose box does not follow from a DTensor's
    placements.
    """
    return f"{by} {global_size} {offsets}"
