"""Dict keys that are not text, in a plain form from which a load restores them.

A key that has no plain form comes back as its text.
"""

from __future__ import annotations

import enum
import numbers
import sys
from typing import Any, Final

import torch

_INT_MAX: Final = 2**63
"""Integers below this fit into msgpack."""

NO_FORM: Final = object()
"""Result for a key that has no plain form."""


def plain_form(key: Any) -> Any:
    """Return a key as None, bool, int, float, str, bytes, or a list that begins with the name of
    its type; `NO_FORM` if the type is unknown.
    """
    if isinstance(key, enum.Enum):
        cls = type(key)
        return ["enum", cls.__module__, cls.__qualname__, key.name]
    if key is None or isinstance(key, bool | str | bytes):
        return key
    if isinstance(key, numbers.Integral):
        number = int(key)
        return number if -_INT_MAX <= number < _INT_MAX else ["int", str(number)]
    if isinstance(key, float):
        return float(key)
    if isinstance(key, torch.dtype | torch.device):
        return [type(key).__name__, str(key).removeprefix("torch.")]
    if isinstance(key, tuple):
        forms = [plain_form(each) for each in key]
        name = "size" if isinstance(key, torch.Size) else "tuple"
        return NO_FORM if NO_FORM in forms else [name, forms]
    return NO_FORM


def key_of(form: Any) -> Any:
    """Return the key of a plain form. Imports nothing.

    Raises ValueError, also for a member of an enum that is not imported.
    """
    if not isinstance(form, list | tuple):
        return form
    name, *rest = form
    match name, rest:
        case "int", [str(digits)]:
            return int(digits)
        case (("tuple" | "size"), [forms]):
            made = tuple(key_of(each) for each in forms)
            return torch.Size(made) if name == "size" else made
        case "dtype", [str(text)] if isinstance(vars(torch).get(text), torch.dtype):
            return vars(torch)[text]
        case "device", [str(text)]:
            return torch.device(text)
        case "enum", [str(module), str(path), str(member)]:
            cls = imported_enum(module, path)
            if cls is not None and member in cls.__members__:
                return cls.__members__[member]
    raise ValueError(f"{form!r} is not the plain form of a key")


def imported_enum(module: str, path: str) -> enum.EnumMeta | None:
    """Return an enum class that the program has imported, or None; imports nothing."""
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        # Do not use getattr: a module may import something when it is asked for a name.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, enum.EnumMeta) else None
