"""From items to an offer: what a rank tells the planner it could write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from isal import isal_zlib

from milepost.dcp_format import container
from milepost.format.nesting import pack_nesting
from milepost.state.flattening import Paths
from milepost.state.items import Items
from milepost.state.tensors import dtype_names
from milepost.wire.offers import Kind, Offer

DIGEST_BYTES_MAX: Final = 64 << 10
"""Replicas on the CPU up to this size get a digest; reading larger ones costs more than the finding
is worth."""


def serialise_objects(items: Items, chosen: Iterable[int] | None = None) -> dict[int, bytes]:
    """Return the serialised form of all objects among the items, or of the chosen ones, by item.

    It is what stock DCP writes for BYTE_IO. Raises UsageError("unpicklable"), naming the key.
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
    """Return what this rank tells the planner. Reads every small tensor, but is needed only once
    for a structure.

    Args:
        items: of the state.
        objects: what `serialise_objects(items)` returned; they can be staged as they are.
        with_digests: find replicas that differ; a rank that is alone needs none.
        to_lowest_rank: see `Offer.to_lowest_rank`.
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
        nesting=pack_nesting(items.paths.nesting()) if isinstance(items.paths, Paths) else b"",
    )


def container_bytes(items: Items) -> tuple[int, ...]:
    """Return the length of each item's container, 0 for objects."""
    return tuple(
        0 if dtype is None else container.template(tuple(size), dtype).total_bytes
        for size, dtype in zip(items.sizes, items.dtypes, strict=True)
    )
