"""Finds tied weights: tensors of a checkpoint that are one tensor in the model.

A checkpoint holds such a weight under each of its names and does not say that they are one. So it
has to be found by its bytes. But equal tensors need not be tied: layers that were copied from one
another, or initialised alike, are equal until they are trained, and a loader needs each of them.
Two tensors count as tied if all of this is true: dtype, shape and every byte are equal; they have
two dimensions or more; they do not have the same value everywhere; and the modules that own them
have different names. That name is the next to last part of the key: `wte` and `lm_head` differ, but
the names in two layers, or in a model and its average, do not.
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
"""How much of each tensor is compared first, before whole tensors of the same shape are
compared.
"""

_CELLS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tied_to(
    source: Source,
    keys: Iterable[str],
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> dict[str, str]:
    """Return, for each alias, the first key that holds the same tensor. Among a model's tied
    weights this is usually the input embedding, from which loaders make the others.

    Args:
        keys: keys of tensors, in the order of the state.
        on_more: called with the number of bytes that will be read in addition.
        on_bytes: called with the number of bytes read since its last call.

    Raises whatever reading the source raises.
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
    """Return the name of the module that owns a parameter, without numbers: `lm_head` for
    `lm_head.weight`, or the key itself if it has one part. The names of tied tensors differ.
    """
    parts = key.split(".")
    return re.sub(r"\d+", "", parts[-2] if len(parts) > 1 else parts[0])


def _sample(source: Source, key: str) -> bytes:
    return bytes(next(source.blocks(key, SAMPLE_BYTES)))


def _digest(source: Source, key: str, on_bytes: Callable[[int], None]) -> bytes | None:
    """Return a digest of a tensor's bytes; None if all its elements have the same value."""
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
