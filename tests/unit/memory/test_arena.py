"""The arena: what is sealed is read back by anybody later, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import Rejected
from milepost.format.layout import PAGE_BYTES, TableRow, pack_table, unpack_table
from milepost.link import embedded
from milepost.memory import arena as arena_module
from milepost.memory import pages
from milepost.memory.arena import (
    Arena,
    Slot,
    SlotRecord,
    SlotState,
    arena_path,
    find_arenas,
    record_bytes,
)
from milepost.wire.replicas import DIGESTS_BYTES_MAX

TABLE = pack_table([TableRow(0, 0, 1000, 100, 500, 700, 900)])


def create(path: Path, *, table: bytes = TABLE, slots: int = 2, image_bytes: int = 10_000) -> Arena:
    return Arena.create(
        path,
        layout_id="layout-1",
        table=table,
        slots=slots,
        image_bytes=image_bytes,
        record_bytes=record_bytes(3),
    )


def record(**changes: object) -> SlotRecord:
    fields: dict[str, object] = {
        "job": "run-7",
        "save_id": "1-3",
        "step": 30,
        "name": "step_30",
        "rank": 2,
        "layout_id": "layout-1",
        "image_bytes": 5000,
        "objects": ((4, 4000, 700),),
    }
    return SlotRecord(**{**fields, **changes})  # type: ignore[arg-type]


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def descriptors(path: Path) -> int:
    """How many descriptors of this process refer to the file, removed or not."""
    targets = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.append(os.readlink(f"/proc/self/fd/{each}"))
    return len([target for target in targets if target.removesuffix(" (deleted)") == str(path)])


def rejected(path: Path) -> str:
    with pytest.raises(Rejected) as caught:
        Arena.open(path)
    assert "arena-invalid" == caught.value.code
    return caught.value.message


def test_what_one_side_seals_the_other_side_reads(tmp_path: Path) -> None:
    ours = create(tmp_path / "a")
    theirs = Arena.open(tmp_path / "a")
    assert (theirs.layout_id, theirs.table, len(theirs.slots)) == ("layout-1", TABLE, 2)
    assert theirs.image_bytes == ours.image_bytes == len(theirs.slots[1].image) == 3 * PAGE_BYTES

    ours.slots[1].begin()
    assert theirs.slots[1].state is SlotState.STAGING
    ours.slots[1].image[:5] = b"hello"
    ours.slots[1].seal(record())
    assert (SlotState.FREE, SlotState.STAGED) == (theirs.slots[0].state, theirs.slots[1].state)
    assert theirs.slots[1].record() == record()
    assert b"hello" == bytes(theirs.slots[1].image[:5])

    theirs.slots[1].release()
    assert ours.slots[1].state is SlotState.FREE
    ours.close()
    theirs.close()


def test_images_are_page_aligned_and_do_not_overlap(tmp_path: Path) -> None:
    arena = create(tmp_path / "a", slots=3, table=pack_table([TableRow(*range(7))] * 100))
    for number, slot in enumerate(arena.slots, start=1):
        assert 0 == address(slot.image) % PAGE_BYTES
        slot.image[:] = bytes([number]) * len(slot.image)
        slot.seal(record(rank=number))
    for number, slot in enumerate(arena.slots, start=1):
        assert bytes(slot.image) == bytes([number]) * len(slot.image)
        assert slot.record().rank == number
    arena.close()
    assert 5600 == len(Arena.open(tmp_path / "a").table)


def test_a_rank_with_nothing_to_write_has_an_arena_all_the_same(tmp_path: Path) -> None:
    arena = create(tmp_path / "a", table=b"", image_bytes=0)
    arena.slots[0].seal(record(image_bytes=0, objects=()))
    arena.close()
    assert 0 == Arena.open(tmp_path / "a").slots[0].record().image_bytes


text = st.text(max_size=40)
number = st.integers(0, 2**63 - 1)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_every_record_survives_the_round_trip(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 5000))
    objects = data.draw(
        st.lists(
            st.integers(0, size).flatmap(
                lambda at: st.tuples(number, st.just(at), st.integers(0, size - at))
            ),
            max_size=20,
        )
    )
    written = SlotRecord(
        job=data.draw(text),
        save_id=data.draw(text),
        step=data.draw(number),
        name=data.draw(text),
        rank=data.draw(number),
        layout_id=data.draw(text),
        image_bytes=size,
        objects=tuple(objects),
        digests=data.draw(st.binary(max_size=DIGESTS_BYTES_MAX)),
    )
    control = memoryview(bytearray(record_bytes(len(objects))))
    slot = Slot(Path("a"), 0, control, memoryview(bytearray(5000)))
    slot.seal(written)
    assert written == slot.record()


@given(st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 7).map(lambda row: TableRow(*row))))
@settings(max_examples=30, deadline=None)
def test_every_table_survives_the_round_trip(rows: list[TableRow]) -> None:
    assert rows == unpack_table(pack_table(rows))


@given(at=st.integers(8, 150), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_no_damage_to_a_record_goes_unseen(at: int, bit: int) -> None:
    control = memoryview(bytearray(record_bytes(1)))
    slot = Slot(Path("a"), 0, control, memoryview(bytearray(5000)))
    slot.seal(record())
    used = 16 + int.from_bytes(control[8:12], "little")
    control[at % (used - 8) + 8] ^= 1 << bit
    with pytest.raises(Rejected) as caught:
        slot.record()
    assert "arena-invalid" == caught.value.code


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.STAGING, 77])
def test_a_slot_that_is_not_staged_has_no_record(state: int) -> None:
    control = memoryview(bytearray(record_bytes(1)))
    slot = Slot(Path("a"), 0, control, memoryview(bytearray(5000)))
    slot.seal(record())
    control[0] = state
    with pytest.raises(Rejected):
        slot.record()


@pytest.mark.parametrize(
    "changes",
    [
        {"objects": ((0, 4000, 1001),)},
        {"objects": ((0, -1, 1),)},
        {"objects": ((0, 10, -1),)},
        {"image_bytes": -1, "objects": ()},
    ],
)
def test_a_record_that_points_outside_its_image_is_refused(changes: dict[str, object]) -> None:
    slot = Slot(Path("a"), 0, memoryview(bytearray(PAGE_BYTES)), memoryview(bytearray(5000)))
    slot.seal(record(**changes))
    with pytest.raises(Rejected):
        slot.record()


def test_a_record_too_long_for_its_area_is_refused_and_the_slot_not_staged() -> None:
    slot = Slot(Path("a"), 0, memoryview(bytearray(100)), memoryview(bytearray(5000)))
    slot.begin()
    with pytest.raises(Rejected):
        slot.seal(record(name="n" * 100))
    assert slot.state is SlotState.STAGING


def test_any_damaged_byte_of_header_or_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    create(path).close()
    for at in [*range(112), *range(PAGE_BYTES, PAGE_BYTES + len(TABLE))]:
        with path.open("r+b") as file:
            before = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([before[0] ^ 0x10]), at)
            rejected(path)
            os.pwrite(file.fileno(), before, at)
    Arena.open(path).close()


def test_a_file_whose_creator_died_before_the_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    create(path).close()
    with path.open("r+b") as file:
        file.write(bytes(PAGE_BYTES))
    assert "no arena header" in rejected(path)


@pytest.mark.parametrize("change", [-1, 1, -PAGE_BYTES])
def test_a_file_of_the_wrong_length_is_refused(tmp_path: Path, change: int) -> None:
    path = tmp_path / "a"
    create(path).close()
    os.truncate(path, path.stat().st_size + change)
    assert "bytes long" in rejected(path)


def test_another_version_is_refused_with_both_versions_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "a").close()
    monkeypatch.setattr(arena_module, "ARENA_VERSION", 2)
    assert "version 1, this side speaks 2" in rejected(tmp_path / "a")


def test_only_a_regular_file_under_its_own_name_is_opened(tmp_path: Path) -> None:
    create(tmp_path / "a").close()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    for name in ("link", "pipe", "empty", "missing", "."):
        rejected(tmp_path / name)


def test_the_arena_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(tmp_path / "a").close()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert "belongs to user" in rejected(tmp_path / "a")


def test_an_existing_file_is_never_taken_over(tmp_path: Path) -> None:
    create(tmp_path / "a").close()
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(Rejected) as caught:
        create(tmp_path / "a")
    assert "arena-invalid" == caught.value.code
    assert before == (tmp_path / "a").read_bytes()


def test_a_missing_directory_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("gone", "file"):
        with pytest.raises(Rejected, match=f"there is no directory {tmp_path / name}") as caught:
            create(tmp_path / name / "a")
        assert "shm-too-small" == caught.value.code
        assert "MILEPOST_SHM_DIR" in caught.value.hint


def test_a_file_system_too_small_is_an_error_with_the_numbers_before_anything_is_made(
    tmp_path: Path,
) -> None:
    with pytest.raises(Rejected) as caught:
        create(tmp_path / "a", image_bytes=1 << 60, slots=1)
    assert "shm-too-small" == caught.value.code
    assert str(tmp_path) in caught.value.message
    assert str((1 << 60) + 7 * PAGE_BYTES) in caught.value.message
    assert "MILEPOST_SHM_DIR" in caught.value.hint
    assert [] == list(tmp_path.iterdir())


def test_memory_too_small_is_an_error_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "memory_free", lambda: 12_345)
    with pytest.raises(Rejected, match="12345 bytes of memory are free"):
        create(tmp_path / "a")
    assert [] == list(tmp_path.iterdir())


def test_all_of_the_file_is_reserved(tmp_path: Path) -> None:
    arena = create(tmp_path / "a", image_bytes=1 << 20)
    status = (tmp_path / "a").stat()
    assert arena.nbytes == status.st_size <= status.st_blocks * 512
    assert 0o600 == stat.S_IMODE(status.st_mode)
    arena.close()


def test_an_arena_holds_one_descriptor_until_it_is_closed(tmp_path: Path) -> None:
    arena = create(tmp_path / "a", slots=4)
    assert 1 == descriptors(tmp_path / "a")
    arena.close()
    assert 0 == descriptors(tmp_path / "a")


def test_views_in_use_outlive_close_and_then_let_go(tmp_path: Path) -> None:
    arena = create(tmp_path / "a")
    arena.slots[0].image[:3] = b"abc"
    held = (ctypes.c_char * 3).from_buffer(arena.slots[0].image)
    sliced = arena.slots[1].image[:3]
    arena.close()
    arena.unlink()
    assert b"abc" == held.raw
    sliced[:] = b"xyz"
    assert 1 == descriptors(tmp_path / "a")
    del held, sliced, arena
    assert 0 == descriptors(tmp_path / "a")


def resident_bytes(path: Path) -> int:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(str(path)):
            inside = True
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"{path} is not mapped")


@pytest.mark.parametrize("threads", [None, 1, 3])
@pytest.mark.parametrize("kernel", ["this", "old"])
def test_fault_in_maps_every_page_and_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, threads: int | None
) -> None:
    class OldLibc:
        def madvise(self, *_: object) -> int:
            ctypes.set_errno(22)
            return -1

    if kernel == "old":
        monkeypatch.setattr(pages, "_LIBC", OldLibc())
    monkeypatch.setattr(pages, "_FAULT_PIECE_BYTES", 5 * PAGE_BYTES)
    arena = create(tmp_path / "a", image_bytes=200_000)
    arena.slots[1].image[:] = b"x" * len(arena.slots[1].image)
    arena.fault_in(threads)
    assert arena.nbytes == resident_bytes(tmp_path / "a")
    assert bytes(len(arena.slots[0].image)) == bytes(arena.slots[0].image)
    assert b"x" * len(arena.slots[1].image) == bytes(arena.slots[1].image)
    arena.close()


def test_the_pages_are_shared_out_among_threads_and_each_is_mapped_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=20)
    asked: list[tuple[str, int, int]] = []

    class Libc:
        def madvise(self, start: ctypes.c_void_p, length: ctypes.c_size_t, _: int) -> int:
            assert start.value is not None
            asked.append((threading.current_thread().name, start.value, length.value))
            if len(asked) <= 2:
                both.wait()  # passed only if two threads are here
            return 0

    arena = create(tmp_path / "a", image_bytes=200_000)
    monkeypatch.setattr(pages, "_LIBC", Libc())
    monkeypatch.setattr(pages, "_FAULT_PIECE_BYTES", 5 * PAGE_BYTES)
    arena.fault_in(2)
    assert 2 == len({name for name, _, _ in asked})
    spans = sorted((start, start + length) for _, start, length in asked)
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    assert arena.nbytes == spans[-1][1] - spans[0][0]
    arena.close()


def test_a_forked_child_does_not_keep_the_memory(tmp_path: Path) -> None:
    arena = create(tmp_path / "a")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"kept" if str(tmp_path) in Path("/proc/self/maps").read_text() else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert b"no" == os.read(reader, 16)
    for end in (reader, writer):
        os.close(end)
    arena.close()


def test_unlinking_twice_is_fine_and_leaves_the_mapping(tmp_path: Path) -> None:
    arena = create(tmp_path / "a")
    arena.unlink()
    arena.unlink()
    arena.slots[0].image[0] = 1
    arena.close()


CREATOR = """
import sys, time
from pathlib import Path
from milepost.memory.arena import Arena, SlotRecord
arena = Arena.create(Path(sys.argv[1]), layout_id="l", table=b"", slots=2, image_bytes=70_000,
                     record_bytes=4096)
arena.slots[0].image[:] = bytes(range(256)) * (len(arena.slots[0].image) // 256)
arena.slots[0].seal(SlotRecord(job="j", save_id="1-1", step=1, name="step_1", rank=0,
                               layout_id="l", image_bytes=70_000))
arena.slots[1].begin()
print("sealed", flush=True)
time.sleep(60)
"""


def test_a_killed_trainer_loses_nothing_that_was_sealed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    command = [sys.executable, "-c", CREATOR, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert "sealed\n" == child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    for _ in range(2):  # A daemon that attaches, goes and comes back takes nothing away either.
        arena = Arena.open(path)
        assert 70_000 == arena.slots[0].record().image_bytes
        assert bytes(range(256)) * 288 == bytes(arena.slots[0].image)
        assert arena.slots[1].state is SlotState.STAGING
        arena.close()


def test_the_directory_of_arenas_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILEPOST_SHM_DIR", "memory")
    # The daemon is told the path, and runs elsewhere; so is one that the trainer starts.
    assert tmp_path / "memory" == arena_path("mine", 1, 0, 0).parent
    assert str(tmp_path / "memory") == embedded._environment()["MILEPOST_SHM_DIR"]


def test_arenas_are_found_by_job_oldest_first_and_no_other_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(tmp_path))
    for attempt, rank, generation in [(10, 0, 0), (2, 1, 1), (2, 1, 0)]:
        arena_path("mine", attempt, rank, generation).touch()
    arena_path("other", 1, 0, 0).touch()
    (tmp_path / "milepost-notes").touch()
    assert [(2, 1, 0), (2, 1, 1), (10, 0, 0)] == [each[1:] for each in find_arenas("mine")]
    assert arena_path("mine", 2, 1, 0) == find_arenas("mine")[0].path
