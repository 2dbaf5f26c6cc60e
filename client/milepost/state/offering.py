"""From items to an offer: what a rank tells the planner it could write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from isal import isal_zlib

from milepost.dcp_format import container
from milepost.format.nesting import pack_nesting
from milepost.state.digests import TensorDigests, plain_digest
from milepost.state.flattening import Paths
from milepost.state.items import Items
from milepost.state.tensors import dtype_names
from milepost.wire.offers import Kind, Offer


def serialise_objects(items: Items, chosen: Iterable[int] | None = None) -> dict[int, bytes]:
    """Return the serialised form of all objects among the items, or of the chosen ones, by item.

    The form is what stock DCP writes for BYTE_IO. Raises UsageError("unpicklable"), which names the
    key.
    """
    considered = range(len(items)) if chosen is None else chosen
    return {
        item: container.serialise(items.keys[item], items.sources[item])
        for item in considered
        if items.kinds[item] == Kind.OBJECT
    }


def make_offer(
    items: Items,
    objects: Mapping[int, bytes],
    *,
    digests: Mapping[int, int] = MappingProxyType({}),
    check_replicas: str = "off",
    to_lowest_rank: bool = False,
) -> Offer:
    """Return what this rank tells the planner.

    Args:
        items: of the state.
        objects: the result of `serialise_objects(items)`; it can be staged unchanged.
        digests: of the items whose replicas are to be compared; see `digests_of`.
        check_replicas: see `Offer.check_replicas`.
        to_lowest_rank: see `Offer.to_lowest_rank`.
    """
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
        check_replicas=check_replicas,
        nesting=pack_nesting(items.paths.nesting()) if isinstance(items.paths, Paths) else b"",
    )


def digests_of(items: Items, objects: Mapping[int, bytes]) -> dict[int, int]:
    """Return the digests of all items, by which the planner compares replicas.

    Objects that are not plain data are compared by their stored bytes, so equal objects may seem to
    differ. Reads every small tensor, and a part of each large one.

    Args:
        items: of the state.
        objects: what `serialise_objects(items)` returned.
    """
    digests = TensorDigests(items, range(len(items)))
    of_objects = {}
    for item, data in objects.items():
        plain = plain_digest(items.sources[item])
        of_objects[item] = isal_zlib.crc32(data) if plain is None else plain
    return digests.get() | of_objects


def container_bytes(items: Items) -> tuple[int, ...]:
    """Return the length of each item's container, 0 for objects."""
    return tuple(
        0 if dtype is None else container.template(tuple(size), dtype).total_bytes
        for size, dtype in zip(items.sizes, items.dtypes, strict=True)
    )
