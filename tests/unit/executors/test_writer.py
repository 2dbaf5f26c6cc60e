"""The writer: right checksums in the right places, and nothing written that was not staged."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import zlib
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import Rejected, SaveFailed, StorageError
from milepost.format.layout import PAGE_BYTES, TableRow, align, pack_table, place
from milepost.format.manifest import STRETCH_BYTES, FragmentFile, decode_fragment, pack_crcs
from milepost.memory.arena import Arena, SlotRecord, record_bytes
from milepost.storage import blocks
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef
from milepostd.executors.throttle import MB, BandwidthLimit, Pace
from milepostd.executors.writer import write_fragment, write_rank

SAVE = SaveRef("run-7", "1-3", 30, "step_30")


class Stage:
    """A root, and one arena in which containers of random bytes with given payload lengths are
    staged.
    """

    def __init__(self, path: Path, payloads: list[int], objects: list[bytes]) -> None:
        path.mkdir(exist_ok=True)
        self.root = Root(path / "root")
        self.root.prepare()
        self.path = str(path / "arena")
        placement = place([100 + length for length in payloads])
        # 40 bytes of head, the payload, 60 bytes of tail with the CRC at 8 and again at 30.
        self.rows = [
            TableRow(item, at, 100 + n, at + 40, n, at + 40 + n + 8, at + 40 + n + 30)
            for item, (at, n) in enumerate(zip(placement.offsets, payloads, strict=True))
        ]
        end = placement.objects_at
        if payloads and not objects:
            end = self.rows[-1].blob_at + self.rows[-1].blob_bytes
        self.objects: list[tuple[int, int, int]] = []
        for number, data in enumerate(objects):
            at = align(end, 64)
            self.objects.append((len(payloads) + number, at, len(data)))
            end = at + len(data)
        self.arena = Arena.create(
            Path(self.path),
            layout_id="l-1",
            table=pack_table(self.rows),
            slots=2,
            image_bytes=end,
            record_bytes=record_bytes(len(objects)),
        )
        self.image = self.arena.slots[1].image
        self.image[:] = random.Random(5).randbytes(len(self.image))
        for (_, at, length), data in zip(self.objects, objects, strict=True):
            self.image[at : at + length] = data
        self.record = SlotRecord(
            job=SAVE.job,
            save_id=SAVE.save_id,
            step=SAVE.step,
            name=SAVE.name,
            rank=3,
            layout_id="l-1",
            image_bytes=end,
            objects=tuple(self.objects),
            digests=b"\1\2",
        )
        self.arena.slots[1].seal(self.record)

    def write(self, **changes: object) -> FragmentFile:
        arguments: dict[str, object] = {
            "save": SAVE,
            "slot": 1,
            "layout_id": "l-1",
            "on_bytes": lambda count: None,
        }
        arguments |= changes
        return write_rank(self.root, arena_path=self.path, **arguments)  # type: ignore[arg-type]

    def files(self) -> list[str]:
        directory = self.root.save_dir(SAVE)
        return sorted(each.name for each in directory.iterdir()) if directory.exists() else []


@given(
    payloads=st.lists(st.sampled_from([0, 1, 63, 5000, 1 << 20]), max_size=4),
    objects=st.lists(st.binary(max_size=200), max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_the_file_is_the_image_with_true_checksums(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[int], objects: list[bytes]
) -> None:
    stage = Stage(tmp_path_factory.mktemp("stage"), payloads, objects)
    expected = bytearray(stage.image)
    for row in stage.rows:
        payload = expected[row.payload_at : row.payload_at + row.payload_bytes]
        crc = zlib.crc32(payload).to_bytes(4, "little")
        expected[row.crc_at : row.crc_at + 4] = crc
        expected[row.central_crc_at : row.central_crc_at + 4] = crc
    size = stage.record.image_bytes
    expected[size:] = bytes(len(expected) - size)

    counts: list[int] = []
    fragment = stage.write(on_bytes=counts.append)
    assert len(expected) == fragment.file_bytes == sum(counts)
    assert b"\1\2" == fragment.digests
    if not size:
        assert ("", 0) == (fragment.file, fragment.file_bytes)
        assert [] == stage.files()
        return
    assert "__3_0.distcp" == fragment.file
    assert expected == (stage.root.save_dir(SAVE) / fragment.file).read_bytes()
    assert fragment.crcs == tuple(
        zlib.crc32(expected[row.blob_at : row.blob_at + row.blob_bytes]) for row in stage.rows
    )
    assert fragment.objects == tuple(
        (*where, zlib.crc32(data)) for where, data in zip(stage.objects, objects, strict=True)
    )
    assert fragment.stretches == pack_crcs(
        [
            zlib.crc32(expected[at : at + STRETCH_BYTES])
            for at in range(0, len(expected), STRETCH_BYTES)
        ]
    )


def test_a_save_of_the_same_image_under_another_number_gives_the_same_bytes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [5000, 70_000], [b"state"])
    first, second = stage.write(), stage.write()
    assert ("__3_0.distcp", "__3_1.distcp") == (first.file, second.file)
    directory = stage.root.save_dir(SAVE)
    assert (directory / first.file).read_bytes() == (directory / second.file).read_bytes()
    assert first.crcs == second.crcs


@pytest.mark.parametrize(
    "changes",
    [
        {"slot": 0},
        {"slot": 2},
        {"slot": -1},
        {"layout_id": "l-2"},
        {"save": SaveRef("run-8", "1-3", 30, "step_30")},
        {"save": SaveRef("run-7", "1-4", 30, "step_30")},
        {"save": SaveRef("run-7", "1-3", 31, "step_30")},
        {"save": SaveRef("run-7", "1-3", 30, "step_31")},
    ],
)
def test_a_slot_that_holds_something_else_is_not_written(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    stage = Stage(tmp_path, [500], [])
    with pytest.raises(Rejected) as caught:
        stage.write(**changes)
    assert "arena-invalid" == caught.value.code
    assert [] == stage.root.partials()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("blob_bytes", 1 << 40),
        ("payload_at", 0),
        ("payload_bytes", 5000),
        ("crc_at", 100),
        ("central_crc_at", 1 << 40),
        ("blob_at", 1 << 40),
    ],
)
def test_a_layout_that_points_outside_its_image_changes_nothing(
    tmp_path: Path, field: str, value: int
) -> None:
    stage = Stage(tmp_path, [64, 500], [])
    bad = pack_table([stage.rows[0], stage.rows[1]._replace(**{field: value})])
    path = tmp_path / "bad"
    arena = Arena.create(
        path, layout_id="l-1", table=bad, slots=2, image_bytes=1000, record_bytes=1
    )
    arena.slots[1].image[:] = bytes(PAGE_BYTES)
    arena.slots[1].seal(stage.record)
    with pytest.raises(Rejected, match="outside"):
        write_rank(stage.root, SAVE, str(path), 1, "l-1", lambda count: None)
    assert bytes(PAGE_BYTES) == bytes(arena.slots[1].image)


def test_a_slot_staged_anew_while_it_is_written_is_an_error(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [500], [])
    with pytest.raises(Rejected, match="arena"):
        stage.write(on_bytes=lambda count: stage.arena.slots[1].begin())


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def fail(count: int) -> None:
        raise OSError(28, "injected")

    stage = Stage(tmp_path, [500], [])
    with pytest.raises(StorageError) as caught:
        stage.write(on_bytes=fail)
    assert "no-space" == caught.value.code
    assert [] == stage.files()
    assert "__3_0.distcp" == stage.write().file


def test_a_name_that_a_hung_writer_may_still_hold_is_passed_over(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [500], [])
    directory = stage.root.open_save(SAVE)
    for name in ("__3_0.distcp", "__3_1.distcp", "__30_2.distcp"):
        (directory / name).write_bytes(b"another writer's")
    assert "__3_2.distcp" == stage.write().file
    assert b"another writer's" == (directory / "__3_1.distcp").read_bytes()


def test_the_directory_of_a_save_is_not_listed_for_each_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(tmp_path, [500], [])

    def refuse(*_: object) -> None:
        raise AssertionError("it may hold the files of thousands of ranks")

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    assert "__3_0.distcp" == stage.write().file


class Turns:
    """Notes what a write asks its pace for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def take(self, count: int, left: int) -> None:
        self.asked.append((count, left))


@pytest.mark.parametrize("direct", [True, False])
def test_a_limited_write_asks_before_each_of_its_smaller_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(blocks, "_set_direct", lambda file, direct: False)
    stage, turns, counts = Stage(tmp_path, [1 << 20], []), Turns(), list[int]()
    pace = Pace(BandwidthLimit(1 * MB))
    monkeypatch.setattr(pace, "await_turn", turns.take)

    def count_block(count: int) -> None:
        counts.append(count)
        assert sum(counts) <= sum(asked for asked, _ in turns.asked), "written before its turn"

    total = stage.write(pace=pace, on_bytes=count_block).file_bytes
    assert total == sum(asked for asked, _ in turns.asked) == sum(counts)
    assert [total - sum(counts[:block]) for block in range(len(counts))] == [
        left for _, left in turns.asked
    ]
    assert max(counts) == pace.block_bytes < total / 4


@pytest.mark.parametrize("behave", ["refused", "short"])
def test_what_a_failed_or_short_write_has_left_is_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: str
) -> None:
    stage, turns, calls = Stage(tmp_path, [1 << 20], []), Turns(), count(0)
    pace, real = Pace(BandwidthLimit(1 * MB)), os.pwrite
    monkeypatch.setattr(pace, "await_turn", turns.take)

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        if next(calls) != 1:
            return real(file, data, offset)
        if behave == "refused":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, data[:PAGE_BYTES], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    total = stage.write(pace=pace).file_bytes
    assert total == sum(asked for asked, _ in turns.asked)


def test_where_writes_are_buffered_a_limit_keeps_the_kernel_from_collecting_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_set_direct", lambda file, direct: False)
    synced, real = list[int](), os.fdatasync

    def fdatasync(file: int) -> None:
        synced.append(os.fstat(file).st_size)
        real(file)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    stage, pace = Stage(tmp_path, [10 << 20], []), Pace(BandwidthLimit(1 * MB))
    monkeypatch.setattr(pace, "await_turn", Turns().take)
    stage.write(pace=pace)
    assert 2 == len(synced)


def test_a_write_that_was_stopped_ends_at_its_next_block_and_leaves_no_file(
    tmp_path: Path,
) -> None:
    stage, pace = Stage(tmp_path, [40 << 20], []), Pace()

    def stop(count: int) -> None:
        pace.stop()

    with pytest.raises(SaveFailed) as caught:
        stage.write(pace=pace, on_bytes=stop)
    assert "aborted" == caught.value.code
    assert [] == stage.files()


def test_a_write_that_was_stopped_before_it_began_touches_nothing(tmp_path: Path) -> None:
    stage, pace = Stage(tmp_path, [500], []), Pace()
    before = bytes(stage.image)
    pace.stop()
    with pytest.raises(SaveFailed):
        stage.write(pace=pace)
    assert before == bytes(stage.image)
    assert [] == stage.root.partials()


def test_a_save_that_was_given_up_is_not_written_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [500], [])
    stage.write()
    assert "aborted" == stage.root.give_up(SAVE)
    with pytest.raises(SaveFailed) as caught:
        stage.write()
    assert "aborted" == caught.value.code


def test_the_fragment_says_what_the_node_wrote(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [500], [b"x"])
    files = [stage.write()]
    name = write_fragment(stage.root, SAVE, "node-a", files)
    assert ".fragment-node-a" == name
    fragment = decode_fragment((stage.root.save_dir(SAVE) / name).read_bytes())
    assert ("node-a", "1-3", tuple(files)) == (fragment.node_id, fragment.save_id, fragment.files)


def descriptors(path: str) -> int:
    """How many descriptors of this process refer to the file, removed or not."""
    targets = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{each}"))
    return len([target for target in targets if target.removesuffix(" (deleted)") == path])


def test_without_a_keeper_nothing_stays_mapped(tmp_path: Path) -> None:
    stage = Stage(tmp_path, [500], [b"x"])
    before = descriptors(stage.path)
    stage.write()
    with pytest.raises(Rejected):
        stage.write(slot=0)
    assert before == descriptors(stage.path)


def test_a_node_without_a_file_of_its_own_still_tells_so(tmp_path: Path) -> None:
    """Replicas that other nodes write leave a node with nothing but its fragment."""
    root = Root(tmp_path)
    root.prepare()
    save = SaveRef(job="j", save_id="1-1", step=1, name="step_1")
    name = write_fragment(root, save, "node-b", [])
    assert (root.save_dir(save) / name).exists()
