"""Builds a nested state from flattened keys, without a template that shows its containers.

Paths are torch's: an int is an index into a list, text is the key of a dict. Other modules know
whether a key was text when it was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path as FilePath
from typing import Any, TypeAlias

from milepost.format.nesting import read_nesting
from milepost.state.flattening import Path
from milepost.state.keys import key_of

Naming: TypeAlias = Callable[[Path, str], Any]
"""Returns a key, given the path of its dict and the key's text."""


class CannotNest(Exception):
    """Two keys of the checkpoint need different containers at the same place."""


def as_text(_path: Path, text: str) -> Any:
    """Take every key as text."""
    return text


class SavedNesting:
    """What a checkpoint's manifest says about the dicts in it. Read at the first use."""

    def __init__(self, checkpoint: FilePath) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def _read(self) -> tuple[dict[Path, dict[str, Any]], tuple[Path, ...]]:
        nesting = read_nesting(self._checkpoint)
        names: dict[Path, dict[str, Any]] = {}
        for path, texts, forms in nesting.names:
            known = names[path] = {}
            for text, form in zip(texts, forms, strict=False):
                # The manifest is damaged or newer, or an enum is not imported here.
                with suppress(ValueError, RuntimeError):
                    known[text] = key_of(form)
        return names, nesting.empty

    def names(self, path: Path) -> Mapping[str, Any]:
        """Return of the dict at a path the keys that were no text, by their text."""
        return self._read[0].get(path, {})

    def empty(self) -> Iterable[Path]:
        """Return the paths of empty dicts."""
        return self._read[1]


def put(container: Any, base: Path, path: Path, value: Any, name_of: Naming) -> None:
    """Set the value at `path` below a container at `base`; make the containers between.

    Lists grow by None. Raises CannotNest if something else is in the way.
    """
    for depth, part in enumerate(path[:-1]):
        name = _name(container, (*base, *path[:depth]), part, name_of)
        inner = _get(container, name)
        if inner is None:
            inner = [] if isinstance(path[depth + 1], int) else {}
            _set(container, name, inner)
        container = inner
    _set(container, _name(container, (*base, *path[:-1]), path[-1], name_of), value)


def add_empty(container: Any, base: Path, path: Path, name_of: Naming) -> None:
    """Put an empty dict at `path`, unless something is there. Raises CannotNest."""
    for depth, part in enumerate(path):
        name = _name(container, (*base, *path[:depth]), part, name_of)
        inner = _get(container, name)
        if inner is None:
            put(container, (*base, *path[:depth]), path[depth:], {}, name_of)
            return
        container = inner


def _name(container: Any, path: Path, part: str | int, name_of: Naming) -> Any:
    """Return the container's own key for a part of a path."""
    if isinstance(part, int):
        if not isinstance(container, list):
            raise CannotNest
        return part
    if not isinstance(container, MutableMapping):
        raise CannotNest
    if part in container:
        return part
    name = name_of(path, part)
    return name if str(name) == part else part


def _get(container: Any, name: Any) -> Any:
    if isinstance(container, list):
        return container[name] if name < len(container) else None
    return container.get(name)


def _set(container: Any, name: Any, value: Any) -> None:
    if isinstance(container, list):
        container += [None] * (name + 1 - len(container))
    container[name] = value


def rename_parameters(state: Any) -> None:
    """Turn the keys of optimizers' entries back into numbers. torch numbers parameters, and
    flattening turns the numbers into text.

    Changes, in place and at any depth, each dict that looks like the `state_dict()` of an optimizer
    and whose `state` has a key that is the text of a parameter's number.
    """
    if isinstance(state, Mapping):
        groups, moments = state.get("param_groups"), state.get("state")
        if isinstance(groups, list) and isinstance(moments, dict):
            names = {str(name): name for name in parameter_names(groups) if type(name) is not str}
            for text in [text for text in moments if text in names]:
                moments[names[text]] = moments.pop(text)
        for value in state.values():
            rename_parameters(value)
    elif isinstance(state, list):
        for value in state:
            rename_parameters(value)


def parameter_names(groups: Sequence[Any]) -> list[Any]:
    """Return the names of parameters in an optimizer's `param_groups`, in their order."""
    return [
        name
        for group in groups
        if isinstance(group, Mapping) and isinstance(group.get("params"), list)
        for name in group["params"]
    ]
