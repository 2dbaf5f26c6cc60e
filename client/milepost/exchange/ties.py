"""Which tensors of a checkpoint are one and the same: weights that a model ties.

A checkpoint holds such a weight once under each name and does not say that they are one, so what is
one has to be told by its bytes, and not everything that is equal is tied: layers that were copied
from one another, and whatever was initialised alike, are equal too until they are trained, and a
loader needs each of them. Tensors are taken for tied if they are equal in dtype, shape and every
byte, have two dimensions or more, are not one value throughout, and go by different names: of the
name without its last part (`weight`), the last part has to differ, as `wte` and `lm_head` do, and
those of two layers or of a model and its average do not.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from milepost.exchange.source import Source

SAMPLE_BYTES: Final = 4096
"""Of each tensor that shares its shape with another, so much is looked at before all of it is."""

_CELLS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tied_to(
    source: Source,
    keys: Iterable[str],
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> dict[str, str]:
    """Return for each alias the first key that holds the same tensor: of a model's weights, that is
    its input embedding, of which loaders make the others.

    Args:
        keys: of tensors, in the order of the state.
        on_more: told how many bytes more will be read.
        on_bytes: told how many of them were.

    Raises what reading the source raises.
    """
    forms = source.tensors
    matrices = [key for key in keys if len(forms[key].size) > 1 and forms[key].bytes]
    groups = _alike(matrices, lambda key: (forms[key].dtype, forms[key].size))
    likely = [part for group in groups for part in _alike(group, lambda k: _sample(source, k))]
    on_more(sum(forms[key].bytes for group in likely for key in group))
    return {
        alias: first
        for group in likely
        for first, *others in _alike(group, lambda k: _digest(source, k, on_bytes))
        for alias in others
        if _module(alias) != _module(first)
    }


def _alike(keys: Sequence[str], trait: Callable[[str], Hashable]) -> Iterator[list[str]]:
    """Yield the keys that share a trait, if they could be tied; those without one are left out."""
    groups: dict[Hashable, list[str]] = {}
    for key in keys:
        found = trait(key)
        if found is not None:
            groups.setdefault(found, []).append(key)
    for group in groups.values():
        if len(set(map(_module, group))) > 1:
            yield group


def _module(key: str) -> str:
    """Return the name of the module that owns a parameter, by which tied ones differ, without
    numbers: `lm_head` of `lm_head.weight`, the key itself if that has one part.
    """
    parts = key.split(".")
    return re.sub(r"\d+", "", parts[-2] if len(parts) > 1 else parts[0])


def _sample(source: Source, key: str) -> bytes:
    return bytes(next(source.blocks(key, SAMPLE_BYTES)))


def _digest(source: Source, key: str, on_bytes: Callable[[int], None]) -> bytes | None:
    """Return what tells a tensor's bytes from others; None if all its elements are one value."""
    digest = hashlib.blake2b(digest_size=32)
    cell = _CELLS[min(8, source.tensors[key].dtype.itemsize)]
    first, is_one_value = None, True
    for block in source.blocks(key):
        digest.update(block)
        on_bytes(len(block))
        if is_one_value:
            elements = torch.frombuffer(block, dtype=cell)
            first = elements[0].item() if first is None else first
            is_one_value = bool((elements == first).all())
    return None if is_one_value else digest.digest()
