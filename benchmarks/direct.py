"""The bare writer: large sequential direct writes of what lies in memory, and one fsync. The bare
reader: large sequential reads of files into memory, by a few threads.

The floors for every way of saving and loading. No torch; `python -m benchmarks.direct SOURCE`
writes the file SOURCE, mapped, to each path that it reads from stdin, and answers each with a line.

Source: fcntl(2) on O_DIRECT.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 16 << 20

READ_BYTES: Final = 8 << 20
"""A block of a read: the fastest here, with two or four under way."""


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


def read_files(paths: Sequence[Path], memory: memoryview, threads: int, *, direct: bool) -> None:
    """Read files into memory, one behind the other.

    Args:
        paths: each is read from its start, up to a whole number of pages.
        memory: begins on a page; long enough for all, each rounded up to whole pages.
        threads: how many reads are under way at once.
        direct: past the page cache; else through it.

    Raises OSError, also where direct I/O is refused.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    files = [os.open(path, flags) for path in paths]
    errors: list[OSError] = []

    def blocks() -> Iterator[tuple[int, int, memoryview]]:
        at = 0
        for file in files:
            length = os.fstat(file).st_size
            for begin in range(0, length, READ_BYTES):
                # A direct read asks for whole pages, and gets what there is.
                wanted = -(-min(READ_BYTES, length - begin) // mmap.PAGESIZE) * mmap.PAGESIZE
                yield file, begin, memory[at : at + wanted]
                at += wanted

    queue, lock = blocks(), threading.Lock()

    def work() -> None:
        try:
            while not errors:
                with lock:
                    block = next(queue, None)
                if block is None:
                    return
                file, begin, part = block
                os.preadv(file, [part], begin)
        except OSError as error:
            errors.append(error)

    others = [threading.Thread(target=work) for _ in range(threads - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    for file in files:
        os.close(file)
    if errors:
        raise errors[0]


def drop_cached(folder: Path) -> None:
    """Have the kernel drop all files of a folder from the page cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # What is dirty stays.
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


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
