"""Writes docs/api.md: the docstrings of everything that `milepost` exports.

Run it to write the page anew: `python -m docs.generate.api_page > docs/api.md`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import milepost

HEAD = """\
# Python interface

Generated from the docstrings of `milepost` by `python -m docs.generate.api_page`. The daemon's
settings are in [config.md](config.md), the error codes in [errors.md](errors.md).
"""

INTERNAL = {"Save.add_guard", "Save.advance", "Save.await_end", "Save.commit", "Save.fail"}
"""What only the Checkpointer calls."""


def page() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_sections()])


def _sections() -> Iterator[str]:
    names = sorted(milepost.__all__, key=lambda name: (name != "Checkpointer", name))
    for name in names:
        thing = getattr(milepost, name)
        yield f"## {name}\n"
        if inspect.isfunction(thing) or not issubclass(thing, BaseException):
            yield _block(f"{name}{_signature(thing)}")
        yield _text(thing)
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if f"{name}.{member}" in INTERNAL or member.startswith("_") or not _is_told(value):
                continue
            yield f"### {name}.{member}\n"
            if inspect.isfunction(value):
                yield _block(f"{member}{_signature(value)}")
            yield _text(value)


def _is_told(value: Any) -> bool:
    return (inspect.isfunction(value) or isinstance(value, property)) and bool(value.__doc__)


def _signature(thing: Any) -> str:
    signature = inspect.signature(thing)
    told = []
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        told.append(f"{parameter.name}: {parameter.annotation}{default}")
    lines = "".join(f"    {each},\n" for each in told)
    returned = signature.return_annotation
    back = "" if inspect.isclass(thing) or returned == "None" else f" -> {returned}"
    return f"(\n{lines}){back}" if told else f"(){back}"


def _text(thing: Any) -> str:
    return _block(inspect.getdoc(thing) or "")


def _block(text: str) -> str:
    return f"```text\n{text}\n```\n"


if __name__ == "__main__":
    sys.stdout.write(page())
