"""Memory, shared memory and descriptors do not grow from save to save."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from tests.integration.cluster import Rank, nodes, run_ranks, until
from tests.integration.stagings import STAGINGS, opened

SAVES = 20
SLOTS = 2
TENSOR_BYTES = 1 << 20
TENSORS = 48


class Held(NamedTuple):
    """Resources of a process or a folder: its own bytes, and open descriptors."""

    nbytes: int
    descriptors: int


def _held(pid: int) -> Held:
    """Return the resources of a process and its children, without pages of files and shared
    memory.
    """
    nbytes = descriptors = 0
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        with open(f"/proc/{each.pid}/status") as status:
            (line,) = (line for line in status if line.startswith("RssAnon"))
        nbytes += int(line.split()[1]) << 10
        descriptors += each.num_fds()
    return Held(nbytes, descriptors)


def _shared_bytes(folder: str) -> int:
    return sum(entry.stat().st_blocks * 512 for entry in os.scandir(folder))


def save_without_collector(rank: Rank) -> list[dict[str, Any]]:
    import gc

    gc.disable()
    torch.manual_seed(rank.rank)
    # A name for each rank, so that each stages all of its own.
    state = {
        f"t{rank.rank}_{number}": torch.rand(TENSOR_BYTES // 4) for number in range(TENSORS)
    } | {f"o{rank.rank}": {"list": [1, 2, {"x": 1.5}]}}
    seen = []
    with opened(rank, is_guarded=True) as ck:
        ck.prepare(state)
        daemon = ck.status()["node"]["pid"]
        for step in range(SAVES):
            ck.save(step, state).wait(60)
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.add_(1)
            # What is cleaned up after a commit opens files for a moment.
            until(lambda: not ck.status()["saves"], "the daemon has done what comes after")
            until(lambda: not os.listdir(rank.root / ".partial"), "and has cleaned up")
            looks = []
            for _ in range(5):
                looks.append((_held(os.getpid()), _held(daemon)))
                time.sleep(0.02)
            trainer, served = looks[0]
            seen.append(
                {
                    "trainer": trainer.nbytes,
                    "daemon": served.nbytes,
                    "shared": _shared_bytes(os.environ["MILEPOST_SHM_DIR"]),
                    "descriptors": (
                        min(mine.descriptors for mine, _ in looks),
                        min(its.descriptors for _, its in looks),
                    ),
                }
            )
    return seen


@pytest.mark.parametrize("staging", STAGINGS)
def test_saves_without_the_garbage_collector_hold_no_more_than_the_first_ones(
    staging: str, folder: Path
) -> None:
    root, shm = folder / "root", Path(f"/dev/shm/footprint-{os.getpid()}")
    shm.mkdir()
    places = {"MILEPOST_SHM_DIR": str(shm)}
    try:
        with nodes(folder, 1, root, **places) as (node,):
            (seen,) = run_ranks(
                save_without_collector, root, [node], environment=places, staging=staging
            )
    finally:
        left = [entry.name for entry in os.scandir(shm)]
        for name in left:
            (shm / name).unlink()
        shm.rmdir()
    assert [] == left
    totals = [each["trainer"] + each["daemon"] + each["shared"] for each in seen]
    assert max(totals[2:]) <= 1.1 * totals[1], seen
    # Every page of both slots is there after `prepare()`, and no more.
    assert {each["shared"] for each in seen} == {seen[0]["shared"]}
    assert seen[0]["shared"] <= 1.1 * SLOTS * TENSORS * TENSOR_BYTES
    assert seen[1]["descriptors"] == seen[SAVES - 1]["descriptors"], seen
