"""Images are sealed ahead of who writes them: never too late, never far ahead, never for nobody."""

from __future__ import annotations

import errno
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.executors.test_writer import SAVE, Stage

from milepost.errors import StorageError
from milepost.format.layout import TableRow, pack_table
from milepostd.executors import sealing, throttle
from milepostd.executors.sealing import Containers, ImageChecksums, Sealing

SOON_S = 0.05
"""Long enough for what must not happen to happen."""

END_S = 20.0


class Slow(Containers):
    """Seals as far as it is let."""

    def __init__(self, *stretches: int) -> None:
        self.stretches = stretches
        self.taken: list[int] = []
        self.may_go_on = threading.Semaphore(0)

    def seal(self, image: memoryview, sums: ImageChecksums) -> Iterator[int]:
        sums.containers[:] = [7]
        for stretch in self.stretches:
            assert self.may_go_on.acquire(timeout=END_S)
            self.taken.append(stretch)
            yield stretch


def is_soon(is_so: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + END_S
    while not is_so() and time.monotonic() < until_s:
        time.sleep(0.001)
    return is_so()


def sealers() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "milepostd-sealer"]


def test_who_writes_waits_until_what_it_writes_is_sealed() -> None:
    slow = Slow(100, 200, 300)
    with Sealing(slow, memoryview(bytes(300))) as under_test:
        passed: list[int] = []

        def write() -> None:
            for end in (100, 150, 300):
                under_test.await_sealed(end)
                passed.append(end)

        writer = threading.Thread(target=write)
        writer.start()
        for sealed, allowed in ((0, []), (100, [100]), (200, [100, 150]), (300, [100, 150, 300])):
            assert is_soon(lambda allowed=allowed: allowed == passed)  # type: ignore[misc]
            time.sleep(SOON_S)
            assert allowed == passed, f"sealed up to {sealed}"
            slow.may_go_on.release()
        writer.join(END_S)
        assert [7] == under_test.checksums().containers
    assert [] == sealers()


def test_sealing_stays_near_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "AHEAD_BYTES", 150)
    slow = Slow(*range(100, 1100, 100))
    for _ in range(10):
        slow.may_go_on.release()
    with Sealing(slow, memoryview(bytes(1000))) as under_test:
        assert is_soon(lambda: slow.taken == [100, 200])
        time.sleep(SOON_S)
        assert [100, 200] == slow.taken
        under_test.await_sealed(300)
        assert is_soon(lambda: slow.taken[-1] == 500)
        time.sleep(SOON_S)
        assert 500 == slow.taken[-1]
    assert [] == sealers()


def test_what_cannot_be_sealed_fails_the_write_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Containers, image: memoryview, sums: ImageChecksums) -> Iterator[int]:
        yield 4096
        raise ValueError("no checksum today")

    monkeypatch.setattr(Containers, "seal", broken)
    stage = Stage(tmp_path, [70_000], [])
    with pytest.raises(ValueError, match="no checksum today"):
        stage.write()
    assert [] == stage.files()
    assert [] == sealers()


def test_a_write_that_fails_ends_its_sealing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "AHEAD_BYTES", 1)
    monkeypatch.setattr(sealing, "STEP_BYTES", 4096)

    def refuse(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    stage = Stage(tmp_path, [70_000], [])
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", refuse)
        with pytest.raises(StorageError):
            stage.write()
    assert [] == sealers()
    assert stage.write().crcs


@given(
    payloads=st.lists(st.sampled_from([0, 1, 63, 5000, 9000, 40_000]), min_size=1, max_size=6),
    order=st.randoms(use_true_random=False),
    stretch_bytes=st.sampled_from([4096, 16384, 1 << 20]),
)
@settings(max_examples=25, deadline=None)
def test_every_block_holds_its_checksums_in_whatever_order_the_table_names_them(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[int], order: Any, stretch_bytes: int
) -> None:
    stage = Stage(tmp_path_factory.mktemp("stage"), payloads, [])
    rows = [*stage.rows]
    order.shuffle(rows)
    table = cast("Any", type("Table", (), {"path": "arena", "table": pack_table(rows)}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sealing, "STEP_BYTES", 4096)
        patched.setattr(sealing, "STRETCH_BYTES", stretch_bytes)
        patched.setattr(sealing, "AHEAD_BYTES", 1)
        image = stage.image
        seen = bytearray()
        with Sealing(Containers(table), image) as under_test:
            # What a writer would take, block by block, at the first moment it may.
            for end in [*range(4096, len(image), 4096), len(image)]:
                under_test.await_sealed(end)
                seen += image[len(seen) : end]
            sums = under_test.checksums()
    for row, crc in zip(rows, sums.containers, strict=True):
        _check(row, crc, seen)
    assert sums.stretches == [
        zlib.crc32(seen[at : at + stretch_bytes]) for at in range(0, len(seen), stretch_bytes)
    ]


def _check(row: TableRow, crc: int, file: bytearray) -> None:
    payload = zlib.crc32(file[row.payload_at : row.payload_at + row.payload_bytes])
    for at in (row.crc_at, row.central_crc_at):
        assert payload == int.from_bytes(file[at : at + 4], "little")
    assert crc == zlib.crc32(file[row.blob_at : row.blob_at + row.blob_bytes])


def test_the_writer_asks_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "BLOCK_BYTES", 4096)
    asked: list[int] = []
    wait = Sealing.await_sealed

    def note(self: Sealing, end: int) -> None:
        asked.append(end)
        wait(self, end)

    monkeypatch.setattr(Sealing, "await_sealed", note)
    stage = Stage(tmp_path, [10_000], [])
    written: list[int] = []

    def on_bytes(count: int) -> None:
        written.append(count)
        assert sum(written) <= asked[-1]

    fragment = stage.write(save=SAVE, on_bytes=on_bytes)
    size = fragment.file_bytes
    assert [*range(4096, size, 4096), size, size] == asked
