"""Where the elements of tensors go: describes each tensor to fill as boxes of memory on this rank.

Finds boxes as saving does, so that every tensor that can be saved can also be filled.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from milepost.fetching.index import Destination
from milepost.state.collecting import sort_out
from milepost.state.tensors import Sort, sort_of
from milepost.wire.offers import Kind


def destinations_of(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[list[Destination], list[tuple[str, str]]]:
    """Return the boxes of tensors that this rank holds, and the key and the reason for each tensor
    that cannot be filled.

    A DTensor outside its mesh has no box.
    """
    items, faults = sort_out(tensors, {})
    found = [
        Destination(
            key,
            tuple(offsets) if kind != Kind.OBJECT else (0,) * source.dim(),
            source.detach() if source.requires_grad else source,
        )
        for key, kind, source, offsets in zip(
            items.keys, items.kinds, items.sources, items.offsets, strict=True
        )
    ]
    refused = []
    for key, text in faults:
        value = tensors[key]
        # A subclass with operations of its own may still support `copy_`; torch needs no more.
        if sort_of(type(value)) is Sort.REFUSED:
            found.append(Destination(key, (0,) * value.dim(), value.detach()))
        else:
            refused.append((key, text))
    return found, refused
