"""The writer: right checksums in the right places, and nothing written that was not staged."""

from __future__ import annotations

import contextlib
import os
import random
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.arena import Arena, SlotRecord, record_bytes
from milepost.errors import Rejected, SaveFailed, StorageError
from milepost.format.layout import PAGE_BYTES, TableRow, align, pack_table, place
from milepost.format.manifest import FragmentFile, decode_fragment
from milepost.protocol import SaveRef
from milepost.storage import Root
from milepostd.writer import OpenArenas, write_fragment, write_rank

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


def test_kept_arenas_are_mapped_once_and_let_go_when_their_file_is_gone(tmp_path: Path) -> None:
    arenas = OpenArenas()
    stage = Stage(tmp_path / "one", [500], [])
    before = descriptors(stage.path)
    stage.write(arenas=arenas)
    first = arenas.get(stage.path)
    stage.write(arenas=arenas)
    assert first is arenas.get(stage.path)
    assert before + 1 == descriptors(stage.path)

    stage.arena.unlink()
    with pytest.raises(Rejected):
        stage.write(arenas=arenas)
    assert before == descriptors(stage.path)


def test_a_new_arena_under_an_old_name_is_mapped_anew(tmp_path: Path) -> None:
    arenas = OpenArenas()
    one = Stage(tmp_path / "one", [500], [])
    two = Stage(tmp_path / "two", [700], [])
    first = arenas.get(one.path)
    Path(two.path).replace(one.path)
    assert first is not arenas.get(one.path)
    assert arenas.get(one.path).table == two.arena.table
    arenas.forget(one.path)
    arenas.close()


def test_a_node_without_a_file_of_its_own_still_tells_so(tmp_path: Path) -> None:
    """Replicas that other nodes write leave a node with nothing but its fragment."""
    root = Root(tmp_path)
    root.prepare()
    save = SaveRef(job="j", save_id="1-1", step=1, name="step_1")
    name = write_fragment(root, save, "node-b", [])
    assert (root.save_dir(save) / name).exists()
