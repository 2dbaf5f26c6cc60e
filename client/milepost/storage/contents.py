"""Which entries of a checkpoint's directory are its own, and which ones people put there.

*Own* entries are those that milepost and torch write; their names tell. All others are *foreign*:
configs, logs, whole directories. Foreign entries are never deleted. When the checkpoint is replaced
or removed, each of them moves to the directory that has the checkpoint's name then.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from milepost.storage.durable import sync_directory

_OWN: Final = re.compile(
    r"""
    \.metadata | \.milepost
    | __\d+_\d+\.distcp
    | __\d+\.metadata        # torch's, where each rank has an index of its own
    | \.fragment-.+ | \.tmp-[0-9a-f]{16}
    """,
    re.VERBOSE | re.DOTALL,
)

_NOT_THERE: Final = (FileNotFoundError, NotADirectoryError)


def is_own(name: str) -> bool:
    """Whether an entry of this name is part of a checkpoint."""
    return _OWN.fullmatch(name) is not None


def foreign_in(directory: Path) -> list[str]:
    """Return the foreign entries of a directory, sorted; none if there is no such directory. Raises
    OSError.
    """
    try:
        return sorted(name for name in os.listdir(directory) if not is_own(name))
    except _NOT_THERE:
        return []


def holds_own(directory: Path) -> bool:
    """Whether a directory has any part of a checkpoint. Raises OSError."""
    try:
        return any(map(is_own, os.listdir(directory)))
    except _NOT_THERE:
        return False


def carry_over(source: Path, target: Path) -> None:
    """Move the foreign entries of a directory into another one on the same file system, durably.

    Safe to repeat, and while another process does the same. An entry whose name is taken gets a
    number appended. An entry that the system does not move (a mount point, a directory that another
    user owns) stays where it is. Raises OSError.
    """
    names = foreign_in(source)
    for name in names:
        with suppress(OSError):
            os.rename(source / name, _free(target, name))
    if names:
        sync_directory(target)
        sync_directory(source)


def _free(directory: Path, name: str) -> Path:
    path, number = directory / name, 0
    while os.path.lexists(path):
        number += 1
        path = directory / f"{name}.{number}"
    return path


def copy_mode(source: Path, target: Path) -> None:
    """Give a directory the mode of another one, and its group if the system allows that. Does
    nothing if `source` is not a directory. Raises OSError.
    """
    try:
        wanted = os.stat(source, follow_symlinks=False)
    except _NOT_THERE:
        return
    found = os.stat(target)
    if not stat.S_ISDIR(wanted.st_mode):
        return
    if wanted.st_gid != found.st_gid:
        with suppress(PermissionError):
            os.chown(target, -1, wanted.st_gid)
    if stat.S_IMODE(wanted.st_mode) != stat.S_IMODE(found.st_mode):
        os.chmod(target, stat.S_IMODE(wanted.st_mode))
