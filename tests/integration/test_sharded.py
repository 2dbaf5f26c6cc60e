"""Tensors sharded over ranks of two nodes: stock torch loads them on any number of ranks."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import distribute_tensor

from tests.integration import sharded_states as cut
from tests.integration import states
from tests.integration.cluster import Rank, judge, nodes, run_ranks
from tests.integration.stagings import STAGINGS, opened

LOAD_WORLDS = (1, 2, 3, 8)

WITHOUT_STOCK = frozenset({"apart"})
"""Stock torch refuses what a rank holds in several pieces: it takes them for overlapping boxes."""

REPLICATED_BYTES = 4 * sum(8192 * at for at in range(1, 41))
"""Of `_replicated`, as one copy: 26 MB."""


class Run(NamedTuple):
    """The results of this module's runs."""

    root: Path
    ranks: list[dict[str, Any]]
    """What each of the four ranks returned."""
    pair: list[dict[str, Any]]
    """What each of two ranks returned, which saved before the four."""
    alone: dict[str, Any]
    """What one rank returned, which loaded after the four."""
    read: dict[int, dict[str, dict[str, Any]]]
    """What stock torch loaded, by number of loading ranks and by state."""
    ours: dict[str, states.Reading]
    stock: dict[str, states.Reading]


def _own(rank: int, world: int) -> dict[str, Any]:
    """Return state that differs by rank in every part."""
    return {
        "rng": torch.full((3,), 10 * world + rank),
        "name": f"rank {rank} of {world}",
        "loader": {"at": rank, "buffer": [torch.arange(rank), {"shuffled": rank % 2 == 0}]},
    }


def _replicated() -> dict[str, Any]:
    return {f"weight_{at}": torch.full((8192 * at,), float(at)) for at in range(1, 41)}


def save_as_pair(rank: Rank) -> dict[str, Any]:
    """On two ranks: a table of 12 rows, and state of each rank."""
    table = distribute_tensor(cut.whole("table", (12, 4)), cut.line(), [cut.S0])
    with opened(rank) as ck:
        save = ck.save(1, {"table": table}, _own(rank.rank, 2), checkpoint_id="pair")
        save.wait(60)
        back = {"table": torch.distributed.tensor.zeros(12, 4, device_mesh=cut.line())}
        report = ck.load(back, step=1)
    return {
        "own": states.describe(report.per_rank),
        "table": states.describe(back["table"].full_tensor()),
    }


def save_as_four(rank: Rank) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner

    whole, errors = {}, {}
    stock = rank.root.parent / "stock"
    with opened(rank) as ck:
        pairs = ck.load({}, step=1).per_rank
        for at, name in enumerate(cut.NAMES):
            state = cut.make(name, rank.rank)
            whole[name] = cut.whole_values(name, state)
            try:
                ck.save(10 + at, state, checkpoint_id=name).wait(60)
            except Exception:
                errors[name] = traceback.format_exc()
            if name not in WITHOUT_STOCK:
                dcp.save(state, checkpoint_id=stock / name)
        ck.save(50, _replicated(), checkpoint_id="replicated").wait(60)
        hybrid = {"weight": distribute_tensor(torch.ones(2048, 256), cut.grid(), [cut.R, cut.S0])}
        ck.save(51, hybrid, checkpoint_id="hybrid").wait(60)
        ck.save(52, {"a": torch.ones(2)}, _own(rank.rank, 4), checkpoint_id="own").wait(60)
        report = ck.load({"a": torch.zeros(2)}, step=52)
    lowest = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    with opened(rank, "lowest", planner=lowest) as ck:
        ck.save(1, _replicated()).wait(60)
    return {
        "whole": whole,
        "errors": errors,
        "own": states.describe(report.per_rank),
        "own of pair": states.describe(pairs),
        "groups": _save_in_groups(rank),
        "next step": cut.after_step(*cut.mlp("fsdp")),
    }


def _save_in_groups(rank: Rank) -> dict[str, Any]:
    """Save by some of the ranks: one shard group of a hybrid model, and one rank of each node."""
    told: dict[str, Any] = {}
    model, optimizer = cut.mlp("hsdp")
    state = {"model": model.state_dict(), "optimizer": get_state_dict(model, optimizer)[1]}
    told["hybrid"] = cut.whole_values("hsdp", state)
    if cut.grid().get_coordinate()[0] == 0:  # type: ignore[index]
        group = cut.grid().get_group("inner")
        with opened(rank, "hybrid_group", process_group=group) as ck:
            told["hybrid ids"] = (ck.rank, ck.world, ck.save(1, state).wait(60).path.name)
    odd = dist.new_group([1, 3])
    table = distribute_tensor(cut.whole("table", (12, 4)), cut.part(1, 3), [cut.S0])
    if rank.rank in (1, 3):
        with opened(rank, "odd_group", process_group=odd) as ck:
            own = _own(rank.rank, 2)
            ck.save(1, {"table": table}, per_rank=own).wait(60)
            back = distribute_tensor(torch.zeros(12, 4), cut.part(1, 3), [cut.S0])
            report = ck.load({"table": back}, step=1)
            told["odd"] = (ck.rank, ck.world, states.describe(report.per_rank))
            told["odd local"] = torch.equal(table.to_local(), back.to_local())
    dist.barrier()
    return told


def load_alone(rank: Rank) -> dict[str, Any]:
    """Load on one rank what four ranks have saved."""
    from milepost import Checkpointer

    with Checkpointer(rank.root) as ck:
        state = {key: torch.zeros(size) for key, (size, _) in cut.GRID.items()}
        ck.load(state, step=10 + cut.NAMES.index("grid"))
        report = ck.load({"a": torch.zeros(2)}, step=52)
    return {"grid": states.expected(state), "own": states.describe(report.per_rank)}


@pytest.fixture(scope="module", params=STAGINGS)
def run(request: pytest.FixtureRequest, module_folder: Path) -> Run:
    staging = request.param
    root = module_folder / staging / "checkpoints"
    with nodes(module_folder / staging, 2, root) as (first, second):
        pair = run_ranks(save_as_pair, root, [first, second], staging=staging)
        ranks = run_ranks(save_as_four, root, [first, first, second, second], staging=staging)
        (alone,) = run_ranks(load_alone, root, [second])
    saved = [name for name in cut.NAMES if name not in ranks[0]["errors"]]
    paths = {name: str(root / name) for name in saved}
    groups = {name: str(root / name / "step_1") for name in ("hybrid_group", "odd_group")}
    extra = {name: str(root / name) for name in ("pair", "own", "replicated", "hybrid")} | groups
    read = {
        world: judge(cut.read_cut, world, paths | {"pair": str(root / "pair")})[0]
        for world in LOAD_WORLDS
    }
    read[4] = judge(cut.read_cut, 4, {"grid": paths["grid"]}, 1)[0]
    (ours,) = judge(states.read_all, 1, paths | extra)
    stock_paths = {
        name: str(root.parent / "stock" / name) for name in saved if name not in WITHOUT_STOCK
    }
    (stock,) = judge(states.read_all, 1, stock_paths)
    return Run(root, ranks, pair, alone, read, ours, stock)


@pytest.mark.parametrize("name", cut.NAMES)
def test_stock_torch_puts_every_tensor_together_on_other_numbers_of_ranks(
    run: Run, name: str
) -> None:
    assert [{}] * 4 == [{k: v for k, v in r["errors"].items() if k == name} for r in run.ranks]
    for world in LOAD_WORLDS:
        assert run.ranks[0]["whole"][name] == run.read[world][name]


@pytest.mark.parametrize("name", [name for name in cut.NAMES if name not in WITHOUT_STOCK])
def test_the_index_means_the_same_as_stocks_from_the_same_ranks(run: Run, name: str) -> None:
    assert run.stock[name].meaning == run.ours[name].meaning
    assert run.stock[name].values == run.ours[name].values


def test_a_table_saved_on_two_ranks_loads_on_three(run: Run) -> None:
    table = states.describe(cut.whole("table", (12, 4)))
    assert table == run.read[3]["pair"]["table"]
    assert [table, table] == [told["table"] for told in run.pair]


def test_a_weight_saved_on_a_grid_loads_as_four_strips(run: Run) -> None:
    weight = states.describe(cut.whole("both", (8, 8)))
    assert weight == run.read[4]["grid"]["both"]


def test_a_sharded_model_goes_on_alike_after_stock_torch_resumed_it_on_three_ranks(
    run: Run,
) -> None:
    (first, *_) = judge(cut.resume, 3, str(run.root / "fsdp"))
    assert run.ranks[0]["next step"] == first


def test_what_a_grid_saved_loads_through_milepost_on_one_rank(run: Run) -> None:
    assert run.ranks[0]["whole"]["grid"] == run.alone["grid"]


def test_state_of_each_rank_comes_back_to_its_rank(run: Run) -> None:
    assert [states.describe(_own(rank, 2)) for rank in range(2)] == [r["own"] for r in run.pair]
    assert [states.describe(_own(rank, 4)) for rank in range(4)] == [r["own"] for r in run.ranks]


def test_state_of_each_rank_comes_back_on_more_and_on_fewer_ranks(run: Run) -> None:
    nothing = states.describe({})
    two = [states.describe(_own(0, 2)), states.describe(_own(1, 2)), nothing, nothing]
    assert two == [told["own of pair"] for told in run.ranks]
    assert states.describe(_own(0, 4)) == run.alone["own"]


def test_stock_torch_reads_the_state_of_each_rank(run: Run) -> None:
    held = {
        key: value
        for rank in range(4)
        for key, value in states.expected(
            {f"per_rank/{rank}/{name}": value for name, value in _own(rank, 4).items()}
        ).items()
    }
    assert {"a": states.describe(torch.ones(2)), **held} == run.ours["own"].values


def test_replicas_are_written_once_and_evenly_by_all_ranks(run: Run) -> None:
    sizes = _file_bytes(run.root / "replicated")
    assert [0, 1, 2, 3] == sorted(sizes)
    fair = REPLICATED_BYTES / 4
    assert all(0.8 * fair < each < 1.2 * fair for each in sizes.values()), sizes


def test_shards_of_a_hybrid_model_are_written_once_and_evenly(run: Run) -> None:
    sizes = _file_bytes(run.root / "hybrid")
    assert sum(sizes.values()) < 1.02 * 4 * 2048 * 256
    # Two shards and four ranks: two of them have nothing to write.
    assert 2 == len(sizes)
    assert max(sizes.values()) == min(sizes.values())


def test_a_default_planner_for_the_lowest_rank_is_honoured(run: Run) -> None:
    sizes = _file_bytes(run.root / "lowest" / "step_1")
    assert [0] == list(sizes)
    assert sizes[0] > REPLICATED_BYTES


def test_one_shard_group_of_a_hybrid_model_can_save_alone(run: Run) -> None:
    told = [rank["groups"] for rank in run.ranks]
    assert [(0, 2, "step_1"), (1, 2, "step_1")] == [each["hybrid ids"] for each in told[:2]]
    assert told[0]["hybrid"] == run.ours["hybrid_group"].values
    assert [0, 1] == sorted(_file_bytes(run.root / "hybrid_group" / "step_1"))


def test_a_group_without_the_first_rank_can_save_and_load_alone(run: Run) -> None:
    told = [run.ranks[rank]["groups"] for rank in (1, 3)]
    own = [states.describe(_own(rank, 2)) for rank in (1, 3)]
    assert [(0, 2, own[0]), (1, 2, own[1])] == [each["odd"] for each in told]
    assert [True, True] == [each["odd local"] for each in told]
    table = states.describe(cut.whole("table", (12, 4)))
    assert table == run.ours["odd_group"].values["table"]


def _file_bytes(checkpoint: Path) -> dict[int, int]:
    """Return the size of each rank's file."""
    return {
        int(each.name.split("_")[2]): each.stat().st_size for each in checkpoint.glob("*.distcp")
    }
