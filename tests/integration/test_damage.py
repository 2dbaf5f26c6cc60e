"""A flipped byte: every rank's load refuses by name, and the step before still loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.cluster import Rank, nodes, run_ranks


def load_damaged(rank: Rank) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from milepost import Checkpointer, CorruptCheckpoint, UsageError

    told: dict[str, Any] = {}
    with Checkpointer(rank.root) as ck:
        for step in (1, 2):
            state = {"whole": torch.full((1000,), float(step)), f"own{rank.rank}": torch.ones(9)}
            ck.save(step, state).wait(60)
        if rank.rank == 0:
            for path in (rank.root / "step_2").glob("*.distcp"):
                data = bytearray(path.read_bytes())
                at = data.find(torch.full((8,), 2.0).numpy().tobytes())
                if at >= 0:
                    data[at] ^= 1
                    path.write_bytes(data)
        dist.barrier()
        target = {"whole": torch.zeros(1000)}
        try:
            ck.load(target)
        except CorruptCheckpoint as error:
            told["error"] = error.message
        told["untouched"] = bool((target["whole"] == 0).all())
        ck.load(target, step=1)
        told["before"] = bool((target["whole"] == 1).all())
        ck.load(target, step=2, verify=False)
        told["anyway"] = int((target["whole"] != 2).sum())
        try:
            ck.save(9, {"w": torch.ones(1)}, per_rank=[1])  # type: ignore[arg-type]
        except UsageError as error:
            told["per_rank"] = error.message
    return told


def test_a_flipped_byte_is_refused_on_all_ranks_by_file_and_tensor(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        for told in run_ranks(load_damaged, root, [node, node]):
            assert "whole" in told["error"]
            assert ".distcp" in told["error"]
            assert told["untouched"]
            assert told["before"]
            assert 1 == told["anyway"]
            assert "per_rank is a list" in told["per_rank"]
