"""The demonstration's folder: made afresh each time, and used by one demonstration at a time."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

from milepost.errors import UsageError

MARKER: Final = ".milepost-demo"
"""A file in each folder that a demonstration made; locked while one runs."""


@contextlib.contextmanager
def make_afresh(folder: Path) -> Iterator[None]:
    """Make the folder, or empty it if a demonstration made it. Nobody else uses it until the end.

    Raises UsageError if it holds something that no demonstration made, or if one is using it.
    """
    marker = folder / MARKER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError("usage", f"{folder} is not a directory", "move it away")
    if folder.exists() and not marker.is_file() and any(folder.iterdir()):
        raise UsageError(
            "usage",
            f"{folder} holds files, but no {MARKER}: no demonstration made it",
            "move it away, or run the demonstration in another directory",
        )
    folder.mkdir(exist_ok=True)
    with marker.open("a") as lock:
        _lock(lock, folder)
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
        yield


def _lock(marker: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            "usage", f"a demonstration is running in {folder}", "let it end first"
        ) from None
