"""Builds a nested state from the keys of a source, without a template.

Uses what a checkpoint says about its dicts (keys that are not text, empty dicts), and can remove a
prefix from keys. `reading.nesting` is for states that show their containers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from milepost.errors import CorruptCheckpoint
from milepost.reading.nesting import rename_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from milepost.reading.nesting import SavedNesting

GAPS_MAX: Final = 1 << 16
"""Places of lists that no key names (empty containers leave such), beside two for each key. The
length of a list comes from an index, which must not be trusted."""

DEPTH_MAX: Final = 400
"""Deepest nesting: what Python can pickle."""


class Step(NamedTuple):
    """One step into a nested state: an index into a list, or a key of a dict."""

    key: Any
    is_index: bool


Steps = tuple[Step, ...]


def steps_of(path: Sequence[Any], saved: SavedNesting) -> Steps:
    """Return the steps of a path in torch's form, with the keys as they were when saved."""
    return tuple(
        Step(part, True)
        if isinstance(part, int) and depth
        else Step(saved.names(tuple(path[:depth])).get(part, part), False)
        for depth, part in enumerate(path)
    )


def without_prefix(steps: Steps, prefix: str) -> Steps | None:
    """Return the steps without a prefix of their text; the prefix may end within a key. None if
    they do not have this prefix.
    """
    left = prefix
    for depth, step in enumerate(steps):
        if not left:
            return steps[depth:]
        text = f"{step.key}."
        if left.startswith(text):
            left = left[len(text) :]
        elif text.startswith(left) and len(left) < len(text):
            return (Step(text[len(left) : -1], False), *steps[depth + 1 :])
        else:
            return None
    return None


def nested(
    values: Mapping[str, Any], steps: Mapping[str, Steps], empty: Iterable[Steps] = ()
) -> dict[Any, Any]:
    """Return the values nested as their steps say, and empty dicts where nothing else is.

    Places of a list that no key names hold None, as with torch. In the state of an optimizer, the
    numbers of parameters become numbers again.

    Raises CorruptCheckpoint for steps that contradict one another.
    """
    root: dict[Any, Any] = {}
    list_max = GAPS_MAX + 2 * len(values)
    for key, value in values.items():
        if not _put(root, steps[key], value, list_max):
            raise CorruptCheckpoint(
                "corrupt",
                f"the path of {key!r} in the nested state contradicts those of other keys, "
                "or is none that a state can have",
            )
    for path in empty:
        _put(root, path, {}, list_max)
    rename_parameters(root)
    return root


def _put(root: dict[Any, Any], steps: Steps, value: Any, list_max: int) -> bool:
    """Set the value there. Return False if something else is there or in the way, or if the place
    is too deep or too far down a list.
    """
    at: Any = root
    if len(steps) > DEPTH_MAX:
        return False
    for depth, step in enumerate(steps):
        if step.is_index:
            if not isinstance(at, list) or not 0 <= step.key < list_max:
                return False
            at.extend([None] * (step.key + 1 - len(at)))
            there = at[step.key]
        else:
            if not isinstance(at, dict):
                return False
            there = at.get(step.key)
        if depth + 1 == len(steps):
            if there is not None:
                return False
            at[step.key] = value
            return True
        if there is None:
            there = at[step.key] = [] if steps[depth + 1].is_index else {}
        at = there
    return False
