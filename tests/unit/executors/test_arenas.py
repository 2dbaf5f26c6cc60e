"""Arenas on the daemon's side: mapped once, searched after a death, removed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.executors.test_writer import Stage, descriptors

from milepost.errors import Rejected
from milepost.memory.arena import Arena, SlotRecord, arena_path, record_bytes
from milepostd.core.commands import RemoveArenas, SweepArenas
from milepostd.executors.arenas import ArenaRemoval, OpenArenas, arenas_of, find_staged

JOB = "job"


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(tmp_path))
    return tmp_path


def arena(rank: int, *, attempt: int = 2, staged: tuple[str, ...] = (), of: str = JOB) -> Path:
    """Make a rank's arena with two slots, and stage these saves in it."""
    path = arena_path(JOB, attempt, rank, 0)
    made = Arena.create(
        path,
        layout_id="l-1",
        table=b"",
        slots=2,
        image_bytes=100,
        record_bytes=record_bytes(0),
    )
    for slot, save_id in zip(made.slots, staged, strict=False):
        step = int(save_id.partition("-")[2])
        record = SlotRecord(
            job=of,
            save_id=save_id,
            step=step,
            name=f"step_{step}",
            rank=rank,
            layout_id="l-1",
            image_bytes=100,
        )
        slot.seal(record)
    made.close()
    return path


def saves(*ranks: int, attempt: int = 2) -> list[tuple[int, str]]:
    return [(rank, word.save.save_id) for rank, word in find_staged(JOB, attempt, ranks)]


def test_what_was_staged_is_found_in_the_order_of_the_saves() -> None:
    path = arena(0, staged=("2-9", "2-10"))
    arena(1, staged=("2-9",))
    assert [(0, "2-9"), (1, "2-9"), (0, "2-10")] == saves(0, 1)
    ((_, word), *_) = find_staged(JOB, 2, [0])
    assert (str(path), 0, "l-1", 100) == (
        word.arena, word.slot, word.layout_id, word.image_bytes
    )  # fmt: skip
    assert ("step_9", 9) == (word.save.name, word.save.step)


def test_other_ranks_attempts_and_jobs_and_what_is_damaged_are_left_out() -> None:
    arena(0, staged=("2-1",))
    arena(1, attempt=1, staged=("1-1",))
    arena(2, staged=("2-1",), of="another job")
    arena(3, staged=("2-1",)).write_bytes(b"torn")
    arena(4)
    assert [(0, "2-1")] == saves(0, 1, 2, 3, 4)
    assert [] == saves(1, 2, 3, 4)


def test_all_arenas_of_the_ranks_are_named_whatever_they_hold() -> None:
    empty, torn = arena(0), arena(1, staged=("2-1",))
    torn.write_bytes(b"torn")
    arena(2)
    assert ((0, str(empty)), (1, str(torn))) == arenas_of(JOB, 2, [0, 1])


def removal() -> ArenaRemoval:
    async def in_files(work: Callable[[], Any]) -> Any:
        return work()

    return ArenaRemoval(OpenArenas(), in_files)


def test_a_sweep_removes_what_earlier_attempts_of_these_ranks_have_left(shm: Path) -> None:
    for attempt in (1, 2, 3):
        arena(0, attempt=attempt)
        arena(1, attempt=attempt)
    asyncio.run(removal().sweep(SweepArenas(job=JOB, below_attempt=3, ranks=(0,))))
    expected = {arena_path(JOB, 3, 0, 0), *(arena_path(JOB, each, 1, 0) for each in (1, 2, 3))}
    assert expected == {*shm.iterdir()}


def test_an_arena_that_cannot_be_removed_does_not_keep_the_next(shm: Path) -> None:
    folder = shm / "in-the-way"
    folder.mkdir()
    path = arena(0)
    asyncio.run(removal().remove(RemoveArenas(paths=(str(folder), str(path)))))
    assert not path.exists()
    assert folder.exists()


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
