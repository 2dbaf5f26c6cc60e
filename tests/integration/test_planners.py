"""A user's SavePlanner decides what is saved, on two nodes as in stock torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from tests.integration import planners, states
from tests.integration.cluster import Rank, judge, nodes, run_ranks

VERSIONS = 3
"""How many saves to make with each planner. Each saves other values."""


class Run(NamedTuple):
    root: Path
    ranks: list[dict[str, Any]]
    ours: dict[str, states.Reading]
    stock: dict[str, states.Reading]


def save_with_planners(rank: Rank) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    from milepost import Checkpointer

    for name, planner in planners.PATTERNS.items():
        with Checkpointer(rank.root / name, planner=planner()) as ck:
            for at in range(VERSIONS):
                # Do not wait: the next plan is made while this save is written.
                ck.save(at, planners.state(name, at))
        last = planners.state(name, VERSIONS - 1)
        dcp.save(last, checkpoint_id=rank.root.parent / "stock" / name, planner=planner())
    return {"failures": _fail_and_go_on(rank)}


def _fail_and_go_on(rank: Rank) -> dict[str, Any]:
    """Let the planner raise on one rank, in each of its methods; save in between."""
    from milepost import Checkpointer, MilepostError

    told: dict[str, Any] = {}
    planner = planners.FailingPlanner()
    with Checkpointer(rank.root / "failing", planner=planner, deadline_s=30.0) as ck:
        for at, method in enumerate(planners.METHODS):
            culprit = 0 if method == "create_global_plan" else 1
            # A structure not seen before, since a known plan is not made again.
            state = {**planners.state("failing", at), f"new_{at}": at}
            planner.fails_in = method if rank.rank == culprit else ""
            code = text = ""
            try:
                ck.save(2 * at, state).wait(60)
            except MilepostError as error:
                code, text = error.code, str(error)
            planner.fails_in = ""
            dist.barrier()
            save = ck.save(2 * at + 1, state)
            save.wait(60)
            told[method] = (code, text, save.phase)
    return told


@pytest.fixture(scope="module")
def run(module_folder: Path) -> Run:
    root = module_folder / "checkpoints"
    with nodes(module_folder, 2, root) as (first, second):
        ranks = run_ranks(save_with_planners, root, [first, second])
    ours = {
        f"{name} {at}": str(root / name / f"step_{at}")
        for name in planners.PATTERNS
        for at in range(VERSIONS)
    }
    odd = {f"failing {at}": str(root / "failing" / f"step_{at}") for at in (1, 9)}
    stock = {name: str(module_folder / "stock" / name) for name in planners.PATTERNS}
    (our_readings,) = judge(states.read_all, 1, ours | odd)
    (stock_readings,) = judge(states.read_all, 1, stock)
    return Run(root, ranks, our_readings, stock_readings)


@pytest.mark.parametrize("name", planners.PATTERNS)
def test_a_checkpoint_is_what_stock_torch_makes_with_the_same_planner(run: Run, name: str) -> None:
    last = run.ours[f"{name} {VERSIONS - 1}"]
    assert run.stock[name].values == last.values
    assert run.stock[name].meaning == last.meaning


@pytest.mark.parametrize("name", planners.PATTERNS)
def test_every_save_with_a_planner_has_values_of_its_own(run: Run, name: str) -> None:
    steps = [run.ours[f"{name} {at}"].values for at in range(VERSIONS)]
    key = "foo_step" if name == "rename" else "step"
    weight = "foo_weights.w0" if name == "rename" else "weights.w0"
    assert [states.describe(at) for at in range(VERSIONS)] == [step[key] for step in steps]
    assert VERSIONS == len({step[weight] for step in steps})


def test_both_ranks_write_what_a_planner_dealt_out(run: Run) -> None:
    files = sorted(each.name for each in (run.root / "dealing" / "step_2").glob("*.distcp"))
    assert ["__0_0.distcp", "__1_0.distcp"] == files


@pytest.mark.parametrize("method", planners.METHODS)
def test_a_planner_that_raises_on_one_rank_fails_the_save_on_both(run: Run, method: str) -> None:
    culprit = 0 if method == "create_global_plan" else 1
    for rank in run.ranks:
        code, text, next_phase = rank["failures"][method]
        assert "planner-failed" == code, text
        assert f"no luck in {method}" in text
        assert f"rank {culprit}" in text
        assert "committed" == next_phase


def test_nothing_is_left_of_saves_whose_planner_raised(run: Run) -> None:
    steps = sorted(each.name for each in (run.root / "failing").glob("step_*"))
    assert [f"step_{at}" for at in (1, 3, 5, 7, 9)] == steps
    assert [] == list((run.root / "failing" / ".partial").iterdir())
    for at in (1, 9):
        assert states.describe(at // 2) == run.ours[f"failing {at}"].values["step"]
