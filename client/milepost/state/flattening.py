"""Flattens a nested state into leaves by key, with their paths: as torch's own planner does, but
faster.

Calls the `state_dict()` of Stateful entries; reads no tensor. Sources:
torch/distributed/checkpoint/ _nested_dict.py, _traverse.py and state_dict_saver.py (2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from milepost.errors import UsageError
from milepost.format.nesting import Nesting
from milepost.state.keys import NO_FORM, plain_form

Path: TypeAlias = tuple[str | int, ...]
"""Where a value is in the nested state."""

Flat: TypeAlias = dict[str, Any]
"""Flattened key to value, in the state's order."""

PER_RANK: Final = "per_rank"
"""First component of the top-level names under which state that differs by rank is stored."""


LEAF: Final = 0
MAPPING: Final = 1
LIST: Final = 2


def form_of(cls: type) -> int:
    """Return how torch's traversal treats values of a class; tuples and sets are leaves to it."""
    if issubclass(cls, Mapping):
        return MAPPING
    return LIST if issubclass(cls, list) else LEAF


def is_traversed(values: list[Any]) -> bool:
    """Whether a list is flattened: it holds a tensor, a mapping, or a list that is flattened."""
    # Look at the classes first: a list can hold a million numbers.
    classes = set(map(type, values))
    if any(issubclass(cls, torch.Tensor | Mapping) for cls in classes):
        return True
    return any(issubclass(cls, list) for cls in classes) and any(
        isinstance(value, list) and is_traversed(value) for value in values
    )


class Paths(Mapping[str, Path]):
    """The path of each key of a flattened state.

    Filled as columns, one entry a leaf. The paths are put together only when a plan asks for them.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self.containers: list[tuple[Path, bool]] = []
        """Each container that holds leaves: where it is, and whether it is a list."""
        self.holders: list[int] = []
        """For each leaf, its container."""
        self.names: list[str | int] = []
        """For each leaf, its key or index in the container."""
        self.odd_names: list[tuple[Path, list[Any], list[str]]] = []
        """For each dict with keys that are not text: where it is, these keys, and their texts."""
        self.empty: list[Path] = []
        """Where empty dicts are."""

    @cached_property
    def _by_key(self) -> dict[str, Path]:
        leaves = zip(self._flat, self.holders, self.names, strict=True)
        return {key: (*self.containers[holder][0], name) for key, holder, name in leaves}

    def columns(self) -> tuple[object, ...]:
        """Return, as plain data, what distinguishes these paths from others of the same keys."""
        # The type of a key and its text identify the key.
        odd = [(path, texts, _type_names(keys)) for path, keys, texts in self.odd_names]
        return (self.containers, self.holders, odd, self.empty)

    def nesting(self) -> Nesting:
        """Return what flattening loses."""
        names = []
        for path, keys, texts in self.odd_names:
            forms = [plain_form(key.key if isinstance(key, _OwnName) else key) for key in keys]
            known = [each for each in zip(texts, forms, strict=True) if each[1] is not NO_FORM]
            names.append((path, tuple(text for text, _ in known), tuple(form for _, form in known)))
        return Nesting(tuple(names), tuple(self.empty))

    def __getitem__(self, key: str) -> Path:
        return self._by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._flat)

    def __len__(self) -> int:
        return len(self._flat)


class _OwnName(str):
    """The top-level name of a per-rank entry whose key is not text."""

    key: Any


def _type_names(keys: list[Any]) -> list[str]:
    """Return the names of the keys' types; a single name if all keys have the same type."""
    types = [type(key.key) if isinstance(key, _OwnName) else type(key) for key in keys]
    if len(set(types)) == 1:
        del types[1:]
    return [f"{each.__module__}.{each.__qualname__}" for each in types]


def _walk(
    entries: Iterable[tuple[Any, Any]],
    is_list: bool,
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
    put_holder, put_name = paths.holders.append, paths.names.append
    holder = -1
    odd: tuple[Path, list[Any], list[str]] | None = None
    for name, value in entries:
        if not is_list and type(name) is not str:
            if odd is None:
                odd = (path, [], [])
                paths.odd_names.append(odd)
            odd[1].append(name)
            name = str(name)
            odd[2].append(name)
        form = forms.get(type(value))
        if form is None:
            form = forms[type(value)] = form_of(type(value))
        if form == LEAF or (form == LIST and not is_traversed(value)):
            flat[f"{prefix}{name}"] = value
            if holder < 0:
                holder = len(paths.containers)
                paths.containers.append((path, is_list))
            put_holder(holder)
            put_name(name)
        else:
            is_inner_list = form == LIST
            inner = enumerate(value) if is_inner_list else value.items()
            inner_path = (*path, name)
            if not value:
                paths.empty.append(inner_path)
            _walk(inner, is_inner_list, f"{prefix}{name}.", inner_path, flat, paths, forms)


def _raw_paths(
    entries: Iterable[tuple[Any, Any]], path: tuple[Any, ...]
) -> Iterable[tuple[Any, ...]]:
    """Yield the path of every leaf, with mapping keys that are not yet turned into strings."""
    for name, value in entries:
        form = form_of(type(value))
        if form == MAPPING:
            yield from _raw_paths(value.items(), (*path, name))
        elif form == LIST and is_traversed(value):
            yield from _raw_paths(enumerate(value), (*path, name))
        else:
            yield (*path, name)


def collision(state: Mapping[Any, Any]) -> UsageError:
    """Return the error that names both paths of the first key that two entries share."""
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
"""Classes whose instances cannot satisfy the protocol. A check by a runtime protocol costs 5 us an
entry."""


def call_stateful(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a shallow copy in which each Stateful entry of the top level is replaced by its
    `state_dict()`.

    Does exactly what torch's `dcp.save` does: nested Stateful objects are left alone. Raises
    UsageError if `state` is not a mapping. Exceptions of a `state_dict()` pass through.
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
    """Return the prefix of the top-level names of one rank's own state."""
    return f"{PER_RANK}/{rank}/"


def with_per_rank(
    state: Mapping[Any, Any], per_rank: Mapping[Any, Any] | None, rank: int
) -> Mapping[Any, Any]:
    """Return the state with this rank's own entries added, each under the one top-level name
    `per_rank/<rank>/<key>`.

    Raises UsageError("key-collision") if a name is taken.
    """
    if per_rank is None:
        return state
    if not isinstance(per_rank, Mapping):
        raise UsageError(
            "usage",
            f"per_rank is a {type(per_rank).__name__}, not a dict",
            'pass a dict such as {"rng": torch.get_rng_state()}',
        )
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
        if type(key) is not str:
            name = _OwnName(name)
            name.key = key
        merged[name] = value
    return merged


def flatten(state: Mapping[Any, Any]) -> tuple[Flat, Paths]:
    """Return the state's leaves by flattened key, and each key's path, as torch's
    DefaultSavePlanner has them.

    Calls Stateful entries of the top level first. The values are the live ones, not copies. Takes
    about 0.3 us an entry. Raises UsageError: "key-collision", or "usage" for a state that is not a
    mapping or contains itself.
    """
    called = call_stateful(state)
    flat: Flat = {}
    paths = Paths(flat)
    try:
        _walk(called.items(), False, "", (), flat, paths, {})
    except RecursionError as error:
        raise UsageError(
            "usage", "the state contains itself, or is nested too deeply", "pass a finite state"
        ) from error
    if len(paths.names) != len(flat):
        raise collision(called)
    return flat, paths
