"""The modes of new files and directories: by the umask of the trainer, though the daemon that makes
them may have another one.

A umask travels as a number, `UNKNOWN` where nobody has said one: then the kernel applies that of
this process, as always. Where the two are equal the kernel does, too, so that a directory's default
ACL counts. Source: umask(2).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

UNKNOWN: Final = -1

FILE_MODE: Final = 0o666
DIRECTORY_MODE: Final = 0o777

_OWNER_FILE: Final = 0o600
_OWNER_DIRECTORY: Final = 0o700
"""What the owner is never denied: the files have to be written, and removed again."""


def own_umask() -> int:
    """Return this process's umask, which no call tells without changing it; `UNKNOWN` where /proc
    does not say it. For any thread.
    """
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("Umask:"):
                    return int(line.split()[1], 8)
    except (OSError, ValueError, IndexError):
        pass
    return UNKNOWN


def open_new(path: str | Path, umask: int = UNKNOWN, *, folder: int | None = None) -> int:
    """Create the file `path`, which must not exist, and return its descriptor, for writing.

    Args:
        umask: by which it gets its mode.
        folder: descriptor of the directory that a relative path begins in.

    Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    if umask in (UNKNOWN, own_umask()):
        return os.open(path, flags, FILE_MODE, dir_fd=folder)
    mode = FILE_MODE & ~umask | _OWNER_FILE
    # Never more than it is to be, not even for a moment.
    file = os.open(path, flags, mode, dir_fd=folder)
    try:
        if stat.S_IMODE(os.fstat(file).st_mode) != mode:
            os.fchmod(file, mode)
    except BaseException:
        os.close(file)
        raise
    return file


def make_directory(path: Path, umask: int = UNKNOWN) -> None:
    """Make a directory; an existing one stays unchanged. Raises OSError."""
    if umask in (UNKNOWN, own_umask()):
        path.mkdir(exist_ok=True)
        return
    mode = DIRECTORY_MODE & ~umask | _OWNER_DIRECTORY
    try:
        path.mkdir(mode)
    except FileExistsError:
        if not path.is_dir():
            raise
        return
    if stat.S_IMODE(path.stat().st_mode) & DIRECTORY_MODE != mode:
        path.chmod(mode | stat.S_IMODE(path.stat().st_mode) & ~DIRECTORY_MODE)
