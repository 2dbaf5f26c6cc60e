"""Writing an image: the file is exact or not there, and errors say why."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.storage.saves import SAVE, names

from milepost.errors import StorageError
from milepost.format.layout import PAGE_BYTES
from milepost.storage import blocks
from milepost.storage.blocks import BLOCK_BYTES
from milepost.storage.root import Root

LENGTHS = [0, 1, 4095, 4096, 4097, 3 * 4096, BLOCK_BYTES, BLOCK_BYTES + 4096, BLOCK_BYTES + 5]


def image_of(length: int) -> memoryview:
    """Page-aligned memory, as in an arena."""
    import mmap

    memory = mmap.mmap(-1, max(length, 1))
    view = memoryview(memory)[:length]
    for at in range(0, length, 4096):
        view[at : at + 8] = at.to_bytes(8, "little")[: length - at]
    return view


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("direct", [True, False])
def test_an_image_of_any_length_is_written_exactly(
    root: Root, monkeypatch: pytest.MonkeyPatch, length: int, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(blocks, "_set_direct", lambda file, direct: False)
    image = image_of(length)
    counts: list[int] = []
    path = root.open_save(SAVE) / "__0_0.distcp"
    root.write_image(path, image, on_block=counts.append)
    assert image == path.read_bytes()
    assert length == sum(counts)
    assert all(0 < count <= BLOCK_BYTES for count in counts)


def test_memory_that_is_not_aligned_is_written_all_the_same(root: Root) -> None:
    image = image_of(3 * PAGE_BYTES)[100:-100]
    path = root.open_save(SAVE) / "__0_0.distcp"
    root.write_image(path, image)
    assert image == path.read_bytes()


def test_an_existing_file_is_never_written_to(root: Root) -> None:
    path = root.open_save(SAVE) / "__0_0.distcp"
    path.write_bytes(b"another writer's")
    with pytest.raises(StorageError) as caught:
        root.write_image(path, image_of(4096))
    assert errno.EEXIST == caught.value.errno
    assert b"another writer's" == path.read_bytes()


class Writes:
    """`os.pwrite` with one scripted misbehaviour at the n-th call; notes which were direct."""

    def __init__(self, at: int, behave: int | str) -> None:
        self.at = at
        self.behave = behave
        self.direct: list[bool] = []
        self._real = os.pwrite

    def __call__(self, file: int, data: memoryview, offset: int) -> int:
        self.direct.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        if len(self.direct) - 1 == self.at:
            if self.behave == "short":
                return self._real(file, data[:512], offset)
            assert isinstance(self.behave, int)
            raise OSError(self.behave, "injected")
        return self._real(file, data, offset)


def takes_direct_writes(directory: Path) -> bool:
    path = directory / "probe"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
        os.pwrite(file, image_of(4096), 0)
    except OSError:
        return False
    finally:
        os.close(file)
        path.unlink()
    return True


@pytest.mark.parametrize("behave", [errno.EINVAL, errno.EOPNOTSUPP, "short"])
@pytest.mark.parametrize("at", [0, 1])
def test_after_a_direct_write_is_refused_or_cut_short_the_rest_goes_buffered(
    root: Root, monkeypatch: pytest.MonkeyPatch, at: int, behave: int | str
) -> None:
    if not takes_direct_writes(root.path):
        pytest.skip("no direct I/O here")
    image = image_of(3 * BLOCK_BYTES)
    path = root.open_save(SAVE) / "__0_0.distcp"
    writes = Writes(at, behave)
    monkeypatch.setattr(os, "pwrite", writes)
    counts: list[int] = []
    root.write_image(path, image, on_block=counts.append)
    assert [True] * (at + 1) == writes.direct[: at + 1]
    assert {False} == set(writes.direct[at + 1 :])
    assert len(image) == sum(counts)
    assert image == path.read_bytes()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EIO, "io-error"),
        (errno.ENOSPC, "no-space"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "file-too-large"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
    ],
)
def test_a_write_that_fails_half_way_leaves_no_file_and_says_why(
    root: Root, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    monkeypatch.setattr(blocks, "_set_direct", lambda file, direct: False)
    monkeypatch.setattr(os, "pwrite", Writes(1, number))
    directory = root.open_save(SAVE)
    with pytest.raises(StorageError) as caught:
        root.write_image(directory / "__0_0.distcp", image_of(2 * BLOCK_BYTES))
    assert (code, number) == (caught.value.code, caught.value.errno)
    assert str(directory / "__0_0.distcp") in caught.value.message
    assert os.strerror(number).lower() in caught.value.message
    assert f"{2 * BLOCK_BYTES} bytes wanted" in caught.value.message
    assert caught.value.hint
    assert [] == names(directory)


def test_an_io_error_of_a_direct_write_is_not_written_again(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(0, errno.EIO)
    monkeypatch.setattr(os, "pwrite", writes)
    directory = root.open_save(SAVE)
    with pytest.raises(StorageError) as caught:
        root.write_image(directory / "__0_0.distcp", image_of(BLOCK_BYTES))
    assert "io-error" == caught.value.code
    assert 1 == len(writes.direct)
    assert [] == names(directory)


def test_a_sync_that_fails_is_not_tried_again_and_leaves_no_file(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def refuse(file: int) -> None:
        calls.append(file)
        raise OSError(errno.EIO, "injected")

    directory = root.open_save(SAVE)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="input/output error"):
        root.write_image(directory / "__0_0.distcp", image_of(4096))
    assert 1 == len(calls)
    assert [] == names(directory)


def test_what_the_progress_callback_raises_ends_the_write_and_leaves_no_file(root: Root) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    directory = root.open_save(SAVE)
    with pytest.raises(KeyboardInterrupt):
        root.write_image(directory / "__0_0.distcp", image_of(4096), on_block=stop)
    assert [] == names(directory)


def test_a_broken_write_is_cleaned_up_even_after_its_directory_was_given_up(root: Root) -> None:
    def stop(count: int) -> None:
        root.give_up(SAVE)
        raise OSError(errno.EIO, "injected")

    with pytest.raises(StorageError):
        root.write_image(root.open_save(SAVE) / "__0_0.distcp", image_of(4096), on_block=stop)
    assert [[]] == [names(each) for each in root.partials()]


def test_a_written_image_does_not_stay_in_the_page_cache(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root.open_save(SAVE)
    if os.statvfs(directory).f_fsid == os.statvfs("/dev/shm").f_fsid:
        pytest.skip("a memory file system is its own page cache")
    image = image_of(4 * PAGE_BYTES)
    libc = ctypes.CDLL(None)
    root.write_image(directory / "direct", image)
    monkeypatch.setattr(blocks, "_set_direct", lambda file, direct: False)
    root.write_image(directory / "buffered", image)
    (directory / "plain").write_bytes(image)

    def is_cached(name: str) -> bool:
        # Not by a read that must not wait: it starts one, which may have ended when it looks.
        with (directory / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            anchor = ctypes.c_char.from_buffer(mapped)
            pages = (ctypes.c_ubyte * 4)()
            assert 0 == libc.mincore(
                ctypes.c_void_p(ctypes.addressof(anchor)), mapped.size(), pages
            )
            del anchor
            return any(page & 1 for page in pages)

    assert is_cached("plain")
    assert [False, False] == [is_cached("direct"), is_cached("buffered")]


LIMITED = """
import resource, signal, sys
from milepost.errors import StorageError
from milepost.wire.messages import SaveRef
from milepost.storage.root import Root
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root = Root(sys.argv[1])
directory = root.open_save(SaveRef("j", "1-1", 1, "step_1"))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from milepost.storage import blocks
if sys.argv[2] == "late":
    blocks.reserve = lambda file, length: None
import mmap
try:
    root.write_image(directory / "f", memoryview(mmap.mmap(-1, 409_600)))
except StorageError as error:
    print(error.code, error.errno)
    print(error.message)
root.write_image(directory / "small", memoryview(mmap.mmap(-1, 40_960)))
"""


@pytest.mark.parametrize("found", ["early", "late"])
def test_a_file_size_limit_is_named_as_such_with_path_and_bytes(root: Root, found: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(root.path), found],
        capture_output=True,
        text=True,
        check=True,
    )
    code, message = run.stdout.splitlines()
    directory = root.path / ".partial" / "step_1.1-1"
    assert f"file-too-large {errno.EFBIG}" == code
    assert f"write {directory / 'f'}: file too large (409600 bytes wanted)" == message
    assert ["small"] == names(directory)
