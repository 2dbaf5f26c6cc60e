"""One shard above 4 GiB, where lengths and offsets no longer fit 32 bits (zip64)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.integration.cluster import Rank, judge, nodes, run_ranks

LARGE_BYTES = (4 << 30) + (3 << 20)

PIECE = 1 << 25
"""Elements of 8 bytes that are compared at once."""

pytestmark = pytest.mark.timeout(300)


def save_large(rank: Rank) -> str:
    from milepost import Checkpointer

    # Every 8 bytes are different, so that nothing can end up in the wrong place unnoticed.
    numbers = torch.arange(LARGE_BYTES // 8)
    state = {"large": numbers.view(torch.uint8), "after": torch.arange(5), "object": "behind it"}
    with Checkpointer(rank.root) as ck:
        checkpoint = ck.save(1, state).wait(200)
    return str(checkpoint.path)


def read_large(_rank: int, _world: int, path: str) -> tuple[int, list[int], str]:
    """Return the index of the first wrong element; -1 if there is none."""
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {
        "large": torch.empty(LARGE_BYTES, dtype=torch.uint8),
        "after": torch.zeros(5, dtype=torch.int64),
        "object": "",
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    numbers = state["large"].view(torch.int64)
    wrong = -1
    for begin in range(0, len(numbers), PIECE):
        piece = numbers[begin : begin + PIECE]
        if not torch.equal(piece, torch.arange(begin, begin + len(piece))):
            wrong = begin
            break
    return wrong, state["after"].tolist(), state["object"]


def _missing(folder: Path) -> str:
    """Return what this machine lacks for the test; "" if nothing."""
    wanted = {
        "shared memory": (shutil.disk_usage("/dev/shm").free, 2 * LARGE_BYTES + (64 << 20)),
        "disk space": (shutil.disk_usage(folder).free, LARGE_BYTES + (256 << 20)),
        "memory": (psutil.virtual_memory().available, 3 * LARGE_BYTES + (1 << 30)),
    }
    return "; ".join(
        f"{what}: {free >> 20} of {needed >> 20} MiB"
        for what, (free, needed) in wanted.items()
        if free < needed
    )


def test_a_shard_above_four_gib_comes_back_exactly(folder: Path) -> None:
    if missing := _missing(folder):
        pytest.skip(f"the machine lacks {missing}")
    root = folder / "checkpoints"
    with nodes(folder, 1, root) as (node,):
        (path,) = run_ranks(save_large, root, [node], timeout_s=240)
    (file,) = Path(path).glob("*.distcp")
    assert LARGE_BYTES < file.stat().st_size < LARGE_BYTES + (1 << 20)
    assert [(-1, [0, 1, 2, 3, 4], "behind it")] == judge(read_large, 1, path)
    verified = subprocess.run(
        [sys.executable, "-m", "milepost", "verify", path], capture_output=True, check=False
    )
    assert 0 == verified.returncode, verified.stderr.decode()
