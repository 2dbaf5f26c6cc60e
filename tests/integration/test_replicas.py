"""Replicas that differ are found, reported by key and ranks, and refused on request."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.integration import sharded_states as cut
from tests.integration.cluster import Rank, nodes, run_ranks
from tests.integration.stagings import STAGINGS, opened
from tests.integration.test_refusals import Records

MIB = 1 << 20


def ramp(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes // 4, dtype=torch.float32)


def changed(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a tensor that differs on rank 1 in a thirtieth of it, somewhere in the middle."""
    if rank == 1:
        third, part = tensor.numel() // 3, tensor.numel() // 30
        tensor[third : third + part] += 1
    return tensor


def equal(rank: int) -> dict[str, Any]:
    """Return a state that is equal on all ranks, although some of it pickles differently."""
    names = [f"name {i}" for i in range(20)]
    turned = names if rank % 2 else names[::-1]
    return {
        "equal 16 KiB": ramp(16 << 10),
        "equal 256 KiB": ramp(256 << 10),
        "equal 64 MiB": ramp(64 * MIB),
        "equal turned": ramp(MIB).view(512, -1).t(),
        "equal nan": torch.full((3,), torch.nan),
        "equal object": {"set": set(turned), "dict": (dict.fromkeys(turned, 1.5), None)},
    }


def grid(rank: int) -> dict[str, Any]:
    """Return a state on a 2 x 2 mesh: each shard is held by two ranks, and one differs on rank
    3.
    """
    same, other = (
        DTensor.from_local(ramp(MIB), cut.grid(), [cut.R, cut.S0], run_check=False)
        for _ in range(2)
    )
    other.to_local()[100_000:110_000] += rank == 3
    return {"equal shard": same, "shard": other}


DRIFTING = ("t0", "t33", "t69", "large")
SAVES_MAX = 3
"""As many saves as compare all of `drift`: half a MiB, a quarter of one in each, an odd number."""


def drift(rank: int) -> dict[str, Any]:
    """Return many tensors, an object, and state that differs by rank."""
    state: dict[str, Any] = {f"t{i}": ramp(1024) for i in range(70)}
    return state | {"large": ramp(MIB).view(16, -1), "object": {"seed": 0}, f"own {rank}": ramp(64)}


PLANNED: dict[str, Callable[[int], dict[str, Any]]] = {
    "equal": equal,
    "16 KiB": lambda rank: {"t": changed(ramp(16 << 10), rank)},
    "256 KiB": lambda rank: {"t": changed(ramp(256 << 10), rank)},
    "64 MiB": lambda rank: {"t": changed(ramp(64 * MIB), rank)},
    "turned": lambda rank: {"t": changed(ramp(MIB), rank).view(512, -1).t()},
    "zero": lambda rank: {"t": torch.tensor([-0.0 if rank == 1 else 0.0])},
    "object": lambda rank: {"t": ["seed", rank == 1]},
}
"""States that are compared when they are planned. But for "equal" their "t" differs on rank 1."""


class Seen(NamedTuple):
    """What one rank saw of its saves."""

    warnings: dict[str, list[str]]
    """By name of the save, those of replicas that differ."""
    outcomes: dict[str, str]
    """The code of a failure; "": committed."""
    left: list[str]
    """What stands in the root of the saves that are to fail."""
    kept: list[str]
    """What stands in the root where replicas have drifted apart for a while."""


def compare(rank: Rank) -> Seen:
    from milepost import MilepostError

    records = Records()
    logging.getLogger("milepost").addHandler(records)
    number = rank.rank
    states = dict(PLANNED)
    if rank.world == cut.WORLD:
        states["grid"] = grid
    warnings, outcomes = {}, {}

    def save(ck: Any, step: int, name: str, state: dict[str, Any]) -> None:
        try:
            ck.save(step, state, checkpoint_id=name.replace(" ", "_")).wait(60)
        except MilepostError as error:
            outcomes[name] = error.code
        else:
            outcomes[name] = ""
        warnings[name] = [text for text in records.said if "replicas-differ" in text]
        records.said = []

    with opened(rank) as ck:
        for step, (name, make) in enumerate(states.items()):
            # Keys of its own for each, since a key is told once.
            save(ck, step, name, {name: make(number)})
        save(ck, 50, "once more", {"more": 1, "object": PLANNED["object"](number)})
    with opened(rank, "drift", deadline_s=60.0) as ck:
        drifting = drift(number)
        for step in range(4):
            save(ck, step, f"drift {step}", drifting)
        for key in DRIFTING:
            if number == 1:
                drifting[key][1:3] += 1
        drifting["object"] = {"seed": number == 1}
        for step in range(4, 4 + SAVES_MAX):
            save(ck, step, f"drift {step}", drifting)
    with opened(rank, "drift_raise", check_replicas="raise") as ck:
        drifting = {"t": ramp(MIB), "u": ramp(16)}
        save(ck, 1, "before", drifting)
        drifting["t"][:] += number == 1
        save(ck, 2, "found", drifting)
        save(ck, 3, "found again", drifting)
        drifting["t"][:] = 3
        save(ck, 4, "mended", drifting)
        dist.barrier()
        kept = sorted(each for each in os.listdir(ck.root) if not each.startswith("."))
        dist.barrier()
    with opened(rank, "raise", check_replicas="raise") as ck:
        save(ck, 1, "refused", {"w": torch.ones(3), "rng": number})
        save(ck, 2, "refused again", {"w": torch.ones(3), "rng": number})
        dist.barrier()
        left = sorted(each for each in os.listdir(ck.root) if not each.startswith("."))
        dist.barrier()
        save(ck, 3, "allowed", {"w": torch.ones(3), "rng": 3})
    with opened(rank, "off", check_replicas="off") as ck:
        save(ck, 1, "off", {"rng": number})
    logging.getLogger("milepost").removeHandler(records)
    return Seen(warnings, outcomes, left, kept)


class Run(NamedTuple):
    world: int
    ranks: list[Seen]


@pytest.fixture(
    scope="module",
    params=[(2, STAGINGS[0]), (4, STAGINGS[1])],
    ids=lambda param: f"{param[0]} ranks, {param[1]}",
)
def run(request: pytest.FixtureRequest, module_folder: Path) -> Run:
    world, staging = request.param
    folder = module_folder / staging
    root = folder / "checkpoints"
    with nodes(folder, 2, root) as (first, second):
        places = [first] * (world // 2) + [second] * (world // 2)
        return Run(world, run_ranks(compare, root, places, staging=staging))


def _ranks(run: Run, *odd: int) -> str:
    others = [rank for rank in range(run.world) if rank not in odd]
    groups = [odd, others] if 0 in odd else [others, odd]
    names = ["rank " + str(g[0]) if len(g) == 1 else "ranks " + _runs(g) for g in groups]
    return " from ".join(names)


def _runs(ranks: Any) -> str:
    return {(0, 2, 3): "0, 2-3"}.get(tuple(ranks), f"{ranks[0]}-{ranks[-1]}")


def test_equal_replicas_are_never_reported(run: Run) -> None:
    said = run.ranks[0].warnings
    assert [] == said["equal"]
    assert [] == [text for texts in said.values() for text in texts if "'equal" in text]


@pytest.mark.parametrize("name", [name for name in PLANNED if name != "equal"])
def test_replicas_that_differ_are_reported_once_by_key_and_ranks(run: Run, name: str) -> None:
    (warning,) = run.ranks[0].warnings[name]
    key = f"{name}.t" if name != "object" else "object.t"
    assert f"key '{key}" in warning
    assert f"differs by rank, {_ranks(run, 1)};" in warning
    assert "[replicas-differ]" in warning
    assert "per_rank={...}" in warning
    assert "" == run.ranks[0].outcomes[name]


def test_a_shard_that_two_ranks_hold_is_compared(run: Run) -> None:
    if run.world == cut.WORLD:
        (warning,) = run.ranks[0].warnings["grid"]
        assert "key 'grid.shard' differs by rank, rank 1 from rank 3;" in warning


def test_a_key_is_reported_once_even_in_another_structure(run: Run) -> None:
    assert [] == run.ranks[0].warnings["once more"]


def test_only_the_first_rank_reports_differences(run: Run) -> None:
    for rank in run.ranks[1:]:
        assert [] == [text for texts in rank.warnings.values() for text in texts
                      if "differs" in text and "failed" not in text]  # fmt: skip


def test_a_save_whose_replicas_must_not_differ_fails_on_every_rank_and_leaves_nothing(
    run: Run,
) -> None:
    for rank in run.ranks:
        assert "replicas-differ" == rank.outcomes["refused"]
        assert "replicas-differ" == rank.outcomes["refused again"]
        assert [] == rank.left
        assert "" == rank.outcomes["allowed"]
        assert [] == rank.warnings["allowed"]


def test_replicas_that_drift_apart_are_reported_once_within_a_few_saves(run: Run) -> None:
    said = run.ranks[0].warnings
    assert [] == [text for step in range(4) for text in said[f"drift {step}"]]
    after = [text for step in range(4, 4 + SAVES_MAX) for text in said[f"drift {step}"]]
    assert len(DRIFTING) + 1 == len(after)
    for key in (*DRIFTING, "object.seed"):
        (warning,) = [text for text in after if f"key '{key}' " in text]
        assert f"differs by rank, {_ranks(run, 1)};" in warning
        assert "per_rank={...}" in warning
    assert {""} == {run.ranks[0].outcomes[f"drift {step}"] for step in range(4 + SAVES_MAX)}


def test_no_save_is_published_while_replicas_differ_that_must_not(run: Run) -> None:
    for rank in run.ranks:
        names = ("before", "found", "found again", "mended")
        codes = ["", "replicas-differ", "replicas-differ", ""]
        assert codes == [rank.outcomes[name] for name in names]
        assert ["before", "latest", "mended"] == rank.kept


def test_nothing_is_compared_if_that_is_off(run: Run) -> None:
    assert [] == run.ranks[0].warnings["off"]
    assert "" == run.ranks[0].outcomes["off"]
