"""The bare writer: large sequential direct writes of what lies in memory, and one fsync.

The floor for every way of saving. No torch; `python -m benchmarks.direct SOURCE` writes the file
SOURCE, mapped, to each path that it reads from stdin, and answers each with a line.

Source: fcntl(2) on O_DIRECT.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 16 << 20


def write_direct(path: Path, content: memoryview) -> bool:
    """Write a new file and sync it; return whether it went past the page cache.

    Args:
        path: must not exist.
        content: begins on a page; its length is a whole number of pages.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        is_direct = False
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
            is_direct = True
        at = 0
        while at < len(content):
            at += os.write(file, content[at : at + BLOCK_BYTES])
        os.fsync(file)
    finally:
        os.close(file)
    return is_direct


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file for reading and writing."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, 0)
    finally:
        os.close(file)


def sync_file(path: Path) -> None:
    """Sync a file or a directory."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def main() -> None:
    with map_file(Path(sys.argv[1])) as mapped, memoryview(mapped) as content:
        for line in sys.stdin:
            write_direct(Path(line.rstrip("\n")), content)
            print("written", flush=True)


if __name__ == "__main__":
    main()
