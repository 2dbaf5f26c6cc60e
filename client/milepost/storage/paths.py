"""Which directory a path means. A name of its own, because `os.path.abspath` is wrong for some."""

from __future__ import annotations

import os


def absolute(path: str | os.PathLike[str]) -> str:
    """Return an absolute path to what the system would open now.

    Links are kept, so that nodes can compare the path as it was given. Only a path with `..` in it
    is resolved: `link/..` is the parent of the directory that the link leads to, whereas
    `os.path.abspath` would drop both names.
    """
    text = os.fspath(path)
    if os.pardir in text.split(os.sep):
        return os.path.realpath(text)
    return os.path.abspath(text)
