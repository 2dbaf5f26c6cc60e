"""Data files: read past the cache and through it alike, and honest about what is in memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from milepost.fetching.files import Buffer, DataFile, ShortFile
from milepost.format.layout import PAGE_BYTES

CONTENT = os.urandom(5 * PAGE_BYTES + 123)
END = len(CONTENT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(CONTENT)
    return path


def make_cold(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_past_cache(file: DataFile, at: int, length: int) -> bytes:
    buffer = Buffer(length)
    file.read_past_cache(buffer.view, at, length)
    return bytes(buffer.view[:length])


@pytest.mark.parametrize(
    ("at", "length"),
    [(0, END), (0, 1), (PAGE_BYTES, 2 * PAGE_BYTES), (4 * PAGE_BYTES, PAGE_BYTES + 5)],
)
def test_both_ways_read_the_same(path: Path, at: int, length: int) -> None:
    with DataFile(path) as file:
        assert END == file.size
        assert CONTENT[at : at + length] == read_past_cache(file, at, length)
        through = bytearray(length)
        file.read(memoryview(through), at)
        assert CONTENT[at : at + length] == through


@pytest.mark.parametrize("can_count", [True, False])
def test_the_kernel_is_asked_what_it_has_in_memory(
    path: Path, can_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_count:
        monkeypatch.setattr(DataFile, "_count_pages", lambda *_: None)
    make_cold(path)
    with DataFile(path) as file:
        if file._count_pages(0, END) is None and can_count:
            pytest.skip("this kernel does not count pages")
        assert not file.is_cached(0, END)
        if can_count:
            assert not file.is_cached(0, END), "asking reads nothing"
        file.read(memoryview(bytearray(END)), 0)
        assert file.is_cached(0, END)
        assert not file.is_cached(END, END + 5)


def test_what_is_read_past_the_cache_does_not_come_to_lie_in_it(path: Path) -> None:
    make_cold(path)
    with DataFile(path) as file:
        if file._direct < 0:
            pytest.skip("no direct I/O here")
        read_past_cache(file, 0, END)
        assert not file.is_cached(0, END)


@pytest.mark.parametrize("refused", ["open", "read"])
def test_where_direct_io_is_refused_the_page_cache_is_used_and_given_back(
    path: Path, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cold(path)
    if refused == "open":
        opened = os.open

        def refuse_open(path: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return opened(path, flags)

        monkeypatch.setattr(os, "open", refuse_open)
    with DataFile(path) as file:
        if refused == "read":
            read, direct = os.preadv, file._direct

            def refuse_read(descriptor: int, *rest: object) -> int:
                if descriptor == direct:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                return read(descriptor, *rest)  # type: ignore[arg-type]

            monkeypatch.setattr(os, "preadv", refuse_read)
        assert CONTENT == read_past_cache(file, 0, END)
        assert not file.is_cached(0, END)


def test_a_short_direct_read_goes_on_through_the_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DataFile(path) as file:
        read, direct = os.preadv, file._direct

        def short(descriptor: int, memory: list[memoryview], at: int) -> int:
            if descriptor == direct:
                return read(descriptor, [memory[0][:PAGE_BYTES]], at) - 1000
            return read(descriptor, memory, at)

        monkeypatch.setattr(os, "preadv", short)
        assert CONTENT == read_past_cache(file, 0, END)


def test_an_error_of_the_medium_is_not_tried_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with DataFile(path) as file:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(OSError, match="Input/output error"):
            read_past_cache(file, 0, END)


def test_a_file_that_ends_early_is_told_from_others(path: Path) -> None:
    with DataFile(path) as file:
        os.truncate(path, 2 * PAGE_BYTES)
        with pytest.raises(ShortFile, match="it ends at 8192 while it is read"):
            read_past_cache(file, 0, END)
        with pytest.raises(ShortFile):
            file.read(memoryview(bytearray(END)), 0)


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(OSError, match="not a regular file"):
            DataFile(path)


def test_a_file_that_was_replaced_is_not_mixed_with_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def replace_between(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            path.unlink()
            path.write_bytes(bytes(END))
        return opened(name, flags)

    monkeypatch.setattr(os, "open", replace_between)
    with DataFile(path) as file:
        assert CONTENT == read_past_cache(file, 0, END)
