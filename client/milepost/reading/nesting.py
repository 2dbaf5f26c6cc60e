"""A nested state put together from flattened keys, where no template shows its containers.

Paths are torch's: an int is an index of a list, text the key of a dict. Whether a key was text when
it was saved is told by others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

from milepost.state.flattening import Path

Naming: TypeAlias = Callable[[Path, str], Any]
"""Of a dict at a path, and of the text of a key there: the key itself."""


class CannotNest(Exception):
    """Two keys of the checkpoint want the same place to be different things."""


def as_text(_path: Path, text: str) -> Any:
    """Take every key as text."""
    return text


def put(container: Any, base: Path, path: Path, value: Any, name_of: Naming) -> None:
    """Set the value at `path` below a container that stands at `base`; make what is between.

    Lists grow by None. Raises CannotNest if something else stands in the way.
    """
    for depth, part in enumerate(path[:-1]):
        name = _name(container, (*base, *path[:depth]), part, name_of)
        inner = _get(container, name)
        if inner is None:
            inner = [] if isinstance(path[depth + 1], int) else {}
            _set(container, name, inner)
        container = inner
    _set(container, _name(container, (*base, *path[:-1]), path[-1], name_of), value)


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
    """Give the entries of optimizers back their numbers: torch counts parameters, and flattening
    makes text of that.

    Changes, in place and at any depth, each dict that looks like the `state_dict()` of an optimizer
    and whose `state` has a key that is the text of one of its parameters.
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
    """Return what an optimizer's `param_groups` call its parameters, in their order."""
    return [
        name
        for group in groups
        if isinstance(group, Mapping) and isinstance(group.get("params"), list)
        for name in group["params"]
    ]
