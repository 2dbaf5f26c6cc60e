"""Where everything lies in a rank's images: made once for a structure, used by every save of it.

Owns the table that the daemon reads, the containers around the payloads, and the views that copies
go to. Holds shapes and dtypes, never a tensor of the state. Knows nothing of arenas or slots.

Source: torch/serialization.py (2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from milepost.dcp_format import container
from milepost.errors import SaveFailed
from milepost.format.layout import TableRow, pack_table, place
from milepost.state.items import Items
from milepost.wire.offers import Box, Kind


class TensorColumns(NamedTuple):
    """The tensors of a layout, as columns in the order in which they lie in the image.

    A tensor's index in these columns is its *position*.
    """

    items: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    sizes: tuple[Box, ...]
    payloads_at: tuple[int, ...]
    """Where each payload begins, in bytes from the image's start."""


class ImageLayout(NamedTuple):
    """Where everything lies in a rank's images."""

    layout_id: str
    table: bytes
    """What the daemon reads: see `format.layout.TableRow`."""
    tensors: TensorColumns
    containers: tuple[tuple[int, container.ContainerTemplate], ...]
    """Offset in the image and form of each tensor's container."""
    objects: tuple[int, ...]
    """The items to serialise, ascending."""
    objects_at: int
    """Where the objects begin in the image."""


def make_layout(items: Items, assigned: Sequence[int], layout_id: str) -> ImageLayout:
    """Lay out the assigned items; `assigned` is ascending. Pure; about 3 us an item."""
    chosen = [item for item in assigned if items.kinds[item] != Kind.OBJECT]
    templates = []
    for item in chosen:
        dtype = items.dtypes[item]
        assert dtype is not None
        templates.append(container.template(tuple(items.sizes[item]), dtype))
    placement = place([template.total_bytes for template in templates])
    rows = [
        TableRow(
            item,
            at,
            template.total_bytes,
            at + template.payload_at,
            template.payload_bytes,
            at + template.crc_at,
            at + template.central_crc_at,
        )
        for item, at, template in zip(chosen, placement.offsets, templates, strict=True)
    ]
    tensors = TensorColumns(
        tuple(chosen),
        tuple(items.dtypes[item] for item in chosen),
        tuple(tuple(items.sizes[item]) for item in chosen),
        tuple(row.payload_at for row in rows),
    )
    return ImageLayout(
        layout_id,
        pack_table(rows),
        tensors,
        tuple(zip(placement.offsets, templates, strict=True)),
        tuple(item for item in assigned if items.kinds[item] == Kind.OBJECT),
        placement.objects_at,
    )


def check_fits(layout: ImageLayout, items: Items) -> None:
    """Refuse items for which the layout was not made: a copy would broadcast or convert them.

    Raises SaveFailed("structure-changed").
    """
    tensors, sizes, dtypes, kinds = layout.tensors, items.sizes, items.dtypes, items.kinds
    hint = "offer the new structure before staging it"
    last = max(tensors.items[-1:] + layout.objects[-1:], default=-1)
    if last >= len(items):
        raise SaveFailed(
            "structure-changed",
            f"layout {layout.layout_id} has a place for item {last}, and the state has "
            f"{len(items)} items",
            hint,
        )
    # Compare whole columns, since every save does this. Look for the item only if one differs.
    is_same = tensors.sizes == tuple([sizes[item] for item in tensors.items]) and (
        tensors.dtypes == tuple([dtypes[item] for item in tensors.items])
    )
    differing = () if is_same else zip(tensors.items, tensors.sizes, tensors.dtypes, strict=True)
    for item, size, dtype in differing:
        if sizes[item] != size or dtypes[item] is not dtype:
            raise SaveFailed(
                "structure-changed",
                f"{items.keys[item]!r} is {dtypes[item]} {tuple(sizes[item])} where layout "
                f"{layout.layout_id} has {dtype} {tuple(size)}",
                hint,
            )
    for item in layout.objects:
        if kinds[item] != Kind.OBJECT:
            raise SaveFailed(
                "structure-changed",
                f"{items.keys[item]!r} is a tensor where layout {layout.layout_id} has an object",
                hint,
            )


def write_containers(layout: ImageLayout, image: memoryview) -> None:
    """Write into an image everything but the payloads and the objects."""
    for at, template in layout.containers:
        payload_at = at + template.payload_at
        image[at:payload_at] = template.prefix
        after = payload_at + template.payload_bytes
        image[after : after + len(template.suffix)] = template.suffix


def payload_views(layout: ImageLayout, image: memoryview) -> list[torch.Tensor | None]:
    """Return a view of the image for each tensor's payload; None if there is nothing to copy."""
    tensors = layout.tensors
    if not len(image):
        return [None] * len(tensors.items)
    base = torch.frombuffer(image, dtype=torch.uint8)
    return tensor_views(base, tensors.dtypes, tensors.sizes, tensors.payloads_at)


def tensor_views(
    base: torch.Tensor,
    dtypes: Sequence[torch.dtype | None],
    sizes: Sequence[Box],
    offsets: Sequence[int],
) -> list[torch.Tensor | None]:
    """Return contiguous tensors over some bytes; None for those without elements.

    Args:
        base: uint8, one dimension, aligned to 64 bytes, its length a multiple of every item's.
        dtypes, sizes: of each tensor.
        offsets: where each begins, in bytes from the start of `base`; a multiple of 64.
    """
    # Nobody could write to views made in inference mode outside of that mode.
    with torch.inference_mode(mode=False):
        typed: dict[torch.dtype, torch.Tensor] = {}
        made: list[torch.Tensor | None] = []
        for dtype, size, at in zip(dtypes, sizes, offsets, strict=True):
            assert dtype is not None
            if 0 in size:
                made.append(None)
                continue
            whole = typed.get(dtype)
            if whole is None:
                whole = typed[dtype] = base.view(dtype)
            strides, step = [0] * len(size), 1
            for dim in range(len(size) - 1, -1, -1):
                strides[dim] = step
                step *= size[dim]
            made.append(whole.as_strided(size, strides, at // dtype.itemsize))
        return made
