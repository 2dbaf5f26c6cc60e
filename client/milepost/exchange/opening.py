"""Unpickling what torch.save wrote: plain data only, unless the caller trusts the file."""

from __future__ import annotations

import pickle
import re
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from milepost.errors import LoadFailed, listed
from milepost.reading.objects import ObjectRefused, load_archive, load_object

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+) (?:was not an allowed|whose module)")
"""How torch's error names what it refuses in a file from before 1.6."""


def open_object(blob: bytes, what: str, *, allow_pickle: bool = False) -> Any:
    """Return the object in a blob, on the CPU.

    Args:
        what: names it in errors.
        allow_pickle: also unpickle classes that are not plain data, which runs their code.

    Raises:
        LoadFailed: `unsafe-object` if it names a class that is not plain data, `load-failed` if
            torch.save did not write it.
    """
    with _reported(what):
        return load_object(blob, allow_pickle=allow_pickle, map_location="cpu")


def open_archive(file: Path, *, allow_pickle: bool, is_mapped: bool) -> Any:
    """Return what torch.save put into a file, on the CPU; see `open_object`.

    is_mapped: map the tensors' bytes instead of reading them; not for files of torch before 1.6.
    """
    with _reported(str(file)):
        return load_archive(file, allow_pickle=allow_pickle, is_mapped=is_mapped)


@contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            # Ignore deprecations of storage classes that the file itself names.
            warnings.simplefilter("ignore")
            yield
    except MemoryError:
        raise
    except ObjectRefused as refused:
        raise _unsafe(what, refused.names) from refused
    # Unpickling may fail in any way, since opcodes may meet anything. With `allow_pickle`, a class
    # may raise anything, too.
    except Exception as error:
        named = _GLOBAL.search(str(error))
        if isinstance(error, pickle.UnpicklingError) and named is not None:
            raise _unsafe(what, [named[1]]) from error
        line = next(iter(str(error).splitlines()), "")
        raise LoadFailed(
            "load-failed", f"{what} cannot be unpickled: {type(error).__name__}: {line}"
        ) from error


def _unsafe(what: str, names: Sequence[str]) -> LoadFailed:
    return LoadFailed(
        "unsafe-object",
        f"{what} names a class or function that is not allowed: {listed(names)}; nothing was run",
        "if you trust whoever wrote it, --allow-pickle unpickles it",
    )
