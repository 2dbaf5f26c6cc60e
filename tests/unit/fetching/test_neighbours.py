"""What ranks of one host tell one another of what they read, and what becomes of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.fetching.checkpoints import (
    Chunk,
    fetch_into,
    make_cold,
    whole,
    write_checkpoint,
)
from torch.distributed import HashStore

from milepost.fetching import neighbours
from milepost.fetching.files import DataFile
from milepost.fetching.neighbours import GRAIN_BYTES, Neighbours, page_cache_of
from milepost.fetching.requests import Blob, ObjectRead, TensorRead
from milepost.link.rendezvous import Group

MIB = 1 << 20


def blob(file: str, offset: int, length: int) -> ObjectRead:
    return ObjectRead("k", Blob(file, offset, length))


def rows(offset: int, sizes: tuple[int, int], at: int, count: int, around: int = 0) -> TensorRead:
    """Rows of a matrix of bytes."""
    length = sizes[0] * sizes[1] + around
    memory = torch.empty(count, sizes[1], dtype=torch.uint8)
    box = (count, sizes[1])
    return TensorRead("k", Blob("a", offset, length), torch.uint8, sizes, (at, 0), box, memory)


def told(folder: Path, *reads: list[TensorRead | ObjectRead] | None) -> list[Neighbours]:
    """Ranks that have told their reads, and listened; None: one that says nothing."""
    store = HashStore()
    made = [Neighbours(Group(n, len(reads), store), "load/1", folder) for n in range(len(reads))]
    for each, of_rank in zip(made, reads, strict=True):
        if of_rank is not None:
            each.tell(of_rank)
    for each, of_rank in zip(made, reads, strict=True):
        if of_rank is not None:
            each.listen()
    return made


def shared(neighbour: Neighbours, file: str, *ranges: tuple[int, int]) -> list[bool]:
    return [neighbour.is_shared(file, begin * MIB, end * MIB) for begin, end in ranges]


def test_what_another_rank_wants_too_is_shared_and_nothing_else(tmp_path: Path) -> None:
    first, second, third = told(
        tmp_path,
        [blob("a", 0, 10 * MIB), blob("b", 0, MIB)],
        [blob("a", 4 * MIB, 2 * MIB), blob("a", 8 * MIB + 5, 1)],
        [blob("c", 0, 1)],
    )
    ranges = (0, 4), (3, 5), (4, 6), (6, 8), (8, 9), (9, 10), (0, 10)
    assert [False, True, True, False, True, False, True] == shared(first, "a", *ranges)
    assert [True] * 7 == shared(second, "a", *ranges)
    assert [True] * 7 == shared(third, "a", *ranges)
    assert [[False], [True], [True]] == [
        shared(each, "b", (0, 1)) for each in (first, second, third)
    ]
    assert [False] == shared(third, "c", (0, 1))


def test_of_a_large_tensor_its_rows_are_told_with_what_is_around_them(tmp_path: Path) -> None:
    first, second = told(
        tmp_path,
        [rows(0, (64, MIB), 0, 16, around=100)],
        [rows(0, (64, MIB), 16, 48, around=100)],
    )
    assert [True, True, True, False] == shared(second, "a", (0, 1), (15, 16), (16, 17), (17, 64))
    assert [False, True, True, False] == shared(first, "a", (0, 16), (16, 17), (63, 65), (65, 70))


def test_of_what_is_checked_as_a_whole_all_is_told(tmp_path: Path) -> None:
    store = HashStore()
    one, other = (Neighbours(Group(n, 2, store), "load/1", tmp_path) for n in range(2))
    one.tell([rows(0, (64, MIB), 0, 16)], lambda file: file != "a")
    other.tell([])
    other.listen()
    assert [True, True, False] == shared(other, "a", (0, 16), (63, 64), (64, 65))


def test_one_that_says_nothing_and_one_that_has_left_are_no_neighbours(tmp_path: Path) -> None:
    store = HashStore()
    one, other = (Neighbours(Group(n, 3, store), "load/1", tmp_path) for n in range(2))
    one.tell([blob("a", 0, MIB)])
    other.tell([blob("a", 0, MIB)])
    # A rank that was killed between its number and what it wants.
    store.add(f"load/1/reads/{page_cache_of(tmp_path)}", 1)
    one.close()
    other.listen()
    assert [False] == shared(other, "a", (0, 1))


def test_ranks_that_see_other_files_are_no_neighbours(tmp_path: Path) -> None:
    store = HashStore()
    made = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        made.append(Neighbours(Group(number, 2, store), "load/1", folder))
        made[-1].tell([blob("a", 0, MIB)])
    made[0].listen()
    assert [False] == shared(made[0], "a", (0, 1))
    assert page_cache_of(tmp_path / "0") == page_cache_of(tmp_path / "1" / ".." / "0")


def test_what_falls_into_many_runs_is_told_coarsely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "RUNS_MAX", 10)
    scattered = [blob("a", at * MIB, 1) for at in [*range(0, 100, 3), 200]]
    _, other = told(tmp_path, [*scattered, blob("b", 0, 1)], [blob("a", 0, 1)])
    assert [True, True, False] == shared(other, "a", (0, 1), (1, 2), (250, 251))
    assert all(other.is_shared("a", each.blob.offset, each.blob.offset + 1) for each in scattered)
    assert all(shared(other, "b", (0, 1)))


def test_more_files_than_runs_are_all_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "RUNS_MAX", 3)
    files = [f"f{number}" for number in range(8)]
    _, other = told(tmp_path, [blob(file, 0, 1) for file in files], [])
    assert all(other.is_shared(file, 0, 1) for file in files)


def test_nothing_stays_in_the_store(tmp_path: Path) -> None:
    store = HashStore()
    made = [Neighbours(Group(number, 3, store), "load/1", tmp_path) for number in range(3)]
    for each in made:
        each.tell([blob("a", 0, 1)])
    assert 4 == store.num_keys()
    for each in made:
        each.listen()
    for each in made:
        each.close()
    assert 0 == store.num_keys()


def test_a_rank_alone_tells_nobody(tmp_path: Path) -> None:
    with Neighbours(Group(0, 1, None), "load/1", tmp_path) as alone:
        assert not alone.are_possible
        alone.tell([blob("a", 0, 1)])
        alone.listen()
        assert not alone.is_shared("a", 0, 1)


class Broken(HashStore):
    """A store that answers nothing from some operation on."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "__dict__").get("operation"):
            raise RuntimeError("connection lost")
        return super().__getattribute__(name)


@pytest.mark.parametrize("operation", ["add", "set"])
def test_a_store_that_fails_leaves_each_rank_to_itself_and_is_told_once(
    operation: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    alone = Neighbours(Group(0, 2, Broken(operation)), "load/1", tmp_path)
    alone.tell([blob("a", 0, 1)])
    alone.listen()
    assert not alone.is_shared("a", 0, 1)
    alone.close()
    assert 1 == caplog.text.count("what several of them want: connection lost")


def test_a_store_that_is_lost_later_leaves_the_rank_to_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = Broken("nothing")
    first, second = (Neighbours(Group(n, 2, store), "load/1", tmp_path) for n in range(2))
    first.tell([blob("a", 0, 1)])
    second.tell([blob("a", 0, 1)])
    store.operation = "check"
    second.listen()
    assert not second.is_shared("a", 0, 1)
    assert 1 == caplog.text.count("what several of them want: connection lost")


def test_a_fetch_reads_what_is_shared_through_the_page_cache_and_gives_it_back(
    tmp_path: Path,
) -> None:
    numbers = torch.arange(24 * MIB // 4)
    folder = write_checkpoint(
        tmp_path / "c", [[Chunk("t", tuple(numbers.shape), (0,), numbers)]], stretch_bytes=MIB
    )
    make_cold(folder)
    with DataFile(folder / "__0_0.distcp") as file:
        if file.is_cached(0, file.size):
            pytest.skip("a memory file system")
        store = HashStore()
        other = Neighbours(Group(1, 2, store), "load/1", folder)
        other.tell([blob("__0_0.distcp", 0, GRAIN_BYTES)])
        with Neighbours(Group(0, 2, store), "load/1", folder) as own:
            own.tell([])
            own.listen()
            memory = torch.zeros_like(numbers)
            assert [] == fetch_into(folder, whole({"t": memory}), neighbours=own).damages
            assert torch.equal(numbers, memory)
            assert file.is_cached(0, 8 * MIB)
            assert not file.is_cached(8 * MIB, file.size)
        assert not file.is_cached(0, 8 * MIB)
