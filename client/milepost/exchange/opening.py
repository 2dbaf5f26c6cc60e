"""Unpickling what torch.save wrote: plain data only, unless the caller trusts the file."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from milepost.errors import LoadFailed

if TYPE_CHECKING:
    import os
    from typing import IO

_GLOBAL: Final = re.compile(r"(?:GLOBAL|class|function|global) ([A-Za-z_][\w.]*\.[\w.]+)")


def load_plain(
    file: str | os.PathLike[str] | IO[bytes],
    what: str,
    *,
    allow_pickle: bool = False,
    by_mapping: bool = False,
) -> Any:
    """Return what torch.save put into a file, on the CPU.

    Args:
        what: names the file in errors.
        allow_pickle: also classes that are no plain data, whose code runs then.
        by_mapping: map the tensors' bytes instead of reading them; of a path only.

    Raises:
        LoadFailed: `load-failed` if the file names a class that is no plain data, or is nothing
            that torch.save writes.
    """
    try:
        with warnings.catch_warnings():
            # Deprecations of the storage classes that the file itself names.
            warnings.simplefilter("ignore")
            return torch.load(
                file, map_location="cpu", weights_only=not allow_pickle, mmap=by_mapping
            )
    except MemoryError:
        raise
    # Unpickling may fail in any way, by what an opcode meets; with `allow_pickle`, by what a class
    # raises.
    except Exception as error:
        text = str(error)
        named = _GLOBAL.search(text)
        if not allow_pickle and named is not None:
            raise LoadFailed(
                "load-failed",
                f"{what} holds a {named[1]}, which is no plain data; nothing of it was run",
                "if you trust whoever wrote it, --allow-pickle unpickles it",
            ) from error
        line = next(iter(text.splitlines()), "")
        raise LoadFailed(
            "load-failed", f"{what} cannot be unpickled: {type(error).__name__}: {line}"
        ) from error
