"""Bytes that several ranks of a node want are read from storage once, even if one of the ranks
dies.

The kernel counts the bytes that each process reads from storage, but not those from the page cache.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from tests.integration.cluster import Rank, run_ranks

ROWS: Final = 4096
FILE_BYTES: Final = ROWS * 2048 * 4
"""32 MiB of one tensor."""

SLACK_BYTES: Final = 3 << 20
"""Index and objects, whole stretches at the ends of what is wanted, and code that is run first."""

Part = Literal["all", "rows", "columns"]
"""What each rank wants of the tensor."""


def storage_bytes() -> int:
    """Return how many bytes this process has read from storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def is_counted(folder: Path) -> bool:
    """Whether the kernel counts reads of files there."""
    path = folder / "probe"
    path.write_bytes(bytes(1 << 20))
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            before = storage_bytes()
            file.read()
            return storage_bytes() - before >= 1 << 20
        except OSError:
            return False


def write(folder: Path, kind: str) -> Path:
    """Write a checkpoint of one tensor and one object, as we do or as stock torch does."""
    import torch

    from tests.unit.fetching.checkpoints import Chunk, write_checkpoint

    table = torch.arange(ROWS * 2048, dtype=torch.int32).view(ROWS, 2048)
    chunks = [[Chunk("table", tuple(table.shape), (0, 0), table)]]
    return write_checkpoint(
        folder / "checkpoint",
        chunks,
        {"n": 7},
        known="stretches" if kind == "ours" else "nothing",
        stretch_bytes=1 << 20,
    )


def is_cached(checkpoint: Path) -> bool:
    from milepost.fetching.files import DataFile

    with DataFile(checkpoint / "__0_0.distcp") as file:
        return file.is_cached(0, FILE_BYTES)


def load(rank: Rank) -> dict[str, Any]:
    """Load this rank's part; return its cost and its log lines."""
    import torch
    import torch.distributed as dist

    import milepost
    import milepost.dcp
    from milepost.fetching import neighbours
    from milepost.fetching.files import DataFile
    from tests.unit.fetching.checkpoints import make_cold

    checkpoint = rank.root
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("milepost").addHandler(handler)
    logging.getLogger("milepost").setLevel(logging.INFO)
    memory, expected = part_of(rank)
    state = {"table": memory, "n": 0}
    # What is imported at the first load is read from storage, too.
    milepost.load(checkpoint, {"n": 0}, partial=True, no_dist=True)
    dist.barrier()
    if rank.rank == 0:
        make_cold(checkpoint)
    dist.barrier()
    if rank.arguments.get("apart"):
        neighbours.page_cache_of = lambda _: f"host {rank.rank}"  # type: ignore[assignment]
    if rank.arguments.get("mute"):

        def refuse(*_: Any) -> int:
            raise RuntimeError("no such operation")

        dist.PrefixStore.add = refuse  # type: ignore[assignment,method-assign]
    if rank.rank == rank.arguments.get("dies"):
        real, calls = DataFile.is_cached, []

        def die(file: DataFile, begin: int, end: int) -> bool:
            calls.append(begin)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(file, begin, end)

        DataFile.is_cached = die  # type: ignore[assignment,method-assign]
    before, started_s, error = storage_bytes(), time.monotonic(), None
    try:
        if rank.arguments.get("by") == "dcp":
            milepost.dcp.load(state, checkpoint_id=checkpoint)
        else:
            milepost.load(checkpoint, state, timeout_s=rank.arguments.get("wait_s", 60.0))
    except milepost.MilepostError as raised:
        error = (type(raised).__name__, raised.code, raised.message)
    return {
        "bytes": storage_bytes() - before,
        "took_s": time.monotonic() - started_s,
        "is_right": torch.equal(expected, getattr(memory, "_local_tensor", memory)),
        "error": error,
        "lines": [line for line in lines if "host" in line],
        "is_cached": is_cached(checkpoint),
    }


def part_of(rank: Rank) -> tuple[Any, Any]:
    """Return memory for the part that a rank wants, and the expected values."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    table = torch.arange(ROWS * 2048, dtype=torch.int32).view(ROWS, 2048)
    part: Part = rank.arguments["part"]
    if part == "all":
        return torch.zeros_like(table), table
    dim = ("rows", "columns").index(part)
    expected = table.chunk(rank.world, dim)[rank.rank].contiguous()
    mesh = init_device_mesh("cpu", (rank.world,))
    memory = DTensor.from_local(
        torch.zeros_like(expected), mesh, [Shard(dim)], shape=table.shape, stride=table.stride()
    )
    return memory, expected


@pytest.fixture
def counted(folder: Path) -> Path:
    """A folder where the kernel counts what is read."""
    if not is_counted(folder):
        pytest.skip(
            "the kernel does not count here what is read from storage: a memory file system?"
        )
    return folder


@pytest.mark.parametrize("kind", ["ours", "stock"])
@pytest.mark.parametrize("part", ["all", "columns"])
def test_bytes_that_four_ranks_want_are_read_once(kind: str, part: Part, counted: Path) -> None:
    told = run_ranks(load, write(counted, kind), [None] * 4, part=part)
    assert [None] * 4 == [each["error"] for each in told]
    assert all(each["is_right"] for each in told)
    assert FILE_BYTES <= sum(each["bytes"] for each in told) <= FILE_BYTES + SLACK_BYTES
    assert not any(each["is_cached"] for each in told), "memory is training's"


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_each_rank_reads_its_own_part_of_a_sharded_state(kind: str, counted: Path) -> None:
    told = run_ranks(load, write(counted, kind), [None] * 4, part="rows")
    assert all(each["is_right"] for each in told)
    assert sum(each["bytes"] for each in told) <= FILE_BYTES + 2 * SLACK_BYTES
    if kind == "ours":
        # Of stock's, the only checksum is that of the whole tensor.
        assert all(abs(each["bytes"] - FILE_BYTES // 4) <= SLACK_BYTES for each in told)


@pytest.mark.parametrize("part", ["all", "columns"])
def test_what_four_ranks_load_in_torchs_words_is_read_once(part: Part, counted: Path) -> None:
    told = run_ranks(load, write(counted, "ours"), [None] * 4, part=part, by="dcp")
    assert all(each["is_right"] for each in told)
    assert FILE_BYTES <= sum(each["bytes"] for each in told) <= FILE_BYTES + SLACK_BYTES
    assert not any(each["is_cached"] for each in told)


def test_ranks_of_several_hosts_read_for_themselves(counted: Path) -> None:
    told = run_ranks(load, write(counted, "ours"), [None] * 3, part="all", apart=True)
    assert all(each["is_right"] for each in told)
    assert all(FILE_BYTES <= each["bytes"] <= FILE_BYTES + SLACK_BYTES for each in told)


def test_without_a_way_to_tell_the_others_each_reads_for_itself_and_says_so(counted: Path) -> None:
    told = run_ranks(load, write(counted, "ours"), [None] * 3, part="all", mute=True)
    assert all(each["is_right"] for each in told)
    assert all(FILE_BYTES <= each["bytes"] <= FILE_BYTES + SLACK_BYTES for each in told)
    for each in told:
        assert 1 == sum("what several of them want: no such operation" in x for x in each["lines"])


@pytest.mark.parametrize("by", ["milepost", "dcp"])
@pytest.mark.parametrize("dies", [0, 2])
def test_ranks_go_on_reading_after_one_is_killed_and_name_it(
    dies: int, by: str, counted: Path
) -> None:
    told = run_ranks(
        load,
        write(counted, "ours"),
        [None] * 4,
        expect_death=[dies],
        part="all",
        dies=dies,
        by=by,
        wait_s=3600.0,
    )
    living = [each for each in told if each is not None]
    assert 3 == len(living)
    for each in living:
        assert each["is_right"], "each has read what it wanted"
        kind, code, message = each["error"]
        assert ("Unavailable", "rank-missing") == (kind, code)
        assert f"rank {dies} ended while others waited" in message
        assert each["took_s"] < 60
    # What the dead one has brought stays there; who gives up first lets go what others may need.
    assert sum(each["bytes"] for each in living) < 2 * FILE_BYTES


def test_damage_in_what_is_shared_is_refused_on_every_rank_by_name(counted: Path) -> None:
    checkpoint = write(counted, "ours")
    with (checkpoint / "__0_0.distcp").open("r+b") as file:
        file.seek(FILE_BYTES // 2)
        file.write(b"\x00damage\x00")
    for each in run_ranks(load, checkpoint, [None] * 4, part="all"):
        kind, code, message = each["error"]
        assert ("CorruptCheckpoint", "corrupt") == (kind, code)
        assert "__0_0.distcp: table: CRC-32 of bytes" in message
