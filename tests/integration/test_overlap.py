"""Overlapped saves hold the values of one step, and a torn save fails on every rank."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.integration import states
from tests.integration.cluster import Node, Rank, judge, run_ranks

SAVES = 15
ROWS = 64
COLUMNS = 4096


class Lockstep(torch.optim.Optimizer):
    """Adds 1 to every parameter and to every tensor of its state, in each step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for parameter in parameters:
            self.state[parameter] = {"moment": torch.zeros_like(parameter), "step": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter, state in self.state.items():
            for tensor in (parameter, *state.values()):
                tensor.add_(1)


def _gate(ck: Any) -> threading.Event:
    """Put a gate before the copy's work in host memory; return the gate, which is open."""
    from milepost.staging.streams import HostStreams

    opened = threading.Event()
    opened.set()

    class Gated(HostStreams):
        def give(self, work: Callable[[], None]) -> None:
            assert opened.wait(60)
            work()

    ck._staging.division._streams[torch.device("cpu")] = Gated()
    return opened


def _lockstep_state(
    rank: int, count: int = 6
) -> tuple[list[nn.Parameter], Lockstep, dict[str, Any]]:
    parameters = [nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(count)]
    optimizer = Lockstep(parameters)
    state = {
        # A name for each rank, so that each stages all of its own.
        f"model{rank}": {f"p{number}": each for number, each in enumerate(parameters)},
        f"optimizer{rank}": optimizer.state_dict()["state"],
        f"buffer{rank}": torch.zeros(ROWS),
        "replica": torch.zeros(ROWS, COLUMNS),
        f"count{rank}": [0],
    }
    return parameters, optimizer, state


def _change_all_else(rank: int, state: dict[str, Any]) -> None:
    state[f"buffer{rank}"].add_(1)
    state["replica"].add_(1)
    state[f"count{rank}"][0] += 1


def save_in_lockstep(rank: Rank) -> dict[str, Any]:

    from milepost import Checkpointer

    gc.disable()
    _, optimizer, state = _lockstep_state(rank.rank)
    saves = []
    with Checkpointer(rank.root, staging="overlap", optimizer=optimizer) as ck:
        # Call it at once, without the guard.
        for step in range(SAVES):
            saves.append(ck.save(step, state))
            _change_all_else(rank.rank, state)
            optimizer.step()
        ck.guard()
        saves[-1].wait_staged(30)
    return {
        "ends": [(save.phase, save.done() and save.wait().step) for save in saves],
        "guard_s": [save.guard_s for save in saves],
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def read_generations(_rank: int, _world: int, paths: list[str]) -> list[list[Any]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found: list[list[Any]] = []
    for path in paths:
        known = states.metadata(path).state_dict_metadata
        state: dict[str, Any] = {
            key: torch.full(each.size, -1.0, dtype=each.properties.dtype)
            if isinstance(each, TensorStorageMetadata)
            else None
            for key, each in known.items()
        }
        dcp.load(state, checkpoint_id=path, no_dist=True)
        values: set[float] = set()
        for value in state.values():
            if isinstance(value, torch.Tensor):
                values |= {float(end) for end in torch.aminmax(value)}
            else:
                values |= set(map(float, value))
        found.append([len(state), sorted(values)])
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_checkpoint_holds_one_generation_under_a_mutator_that_obeys(
    pair: list[Node], root: Path
) -> None:
    first, second = pair
    results = run_ranks(save_in_lockstep, root, [first, second])
    for result in results:
        assert [("committed", step) for step in range(SAVES)] == result["ends"]
    paths = [str(root / f"step_{step}") for step in range(SAVES)]
    (found,) = judge(read_generations, 1, paths)
    # Two ranks with 6 parameters, 12 tensors of state, a buffer and a count each; and the replica.
    assert [[2 * (6 + 12 + 1 + 1) + 1, [float(step)]] for step in range(SAVES)] == found


def save_torn(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer, SaveFailed

    parameters, optimizer, state = _lockstep_state(rank.rank)
    told: dict[str, Any] = {}
    with Checkpointer(rank.root, staging="overlap", optimizer=optimizer) as ck:
        gate = _gate(ck)
        ck.save(0, state).wait(60)
        if rank.rank == 1:
            gate.clear()
        torn = ck.save(1, state)
        if rank.rank == 1:
            with torch.no_grad():
                parameters[2].add_(1)  # not by its optimizer, and not after the guard
            gate.set()
        ck.guard()
        try:
            torn.wait(60)
        except SaveFailed as error:
            told["torn"] = (error.code, error.message)
        if rank.rank == 1:
            with torch.no_grad():
                parameters[2].sub_(1)
        optimizer.step()
        _change_all_else(rank.rank, state)
        told["step"] = ck.save(2, state).wait(60).step
        told["free"] = len(ck._saves.slots.stager.free_slots())
        told["steps"] = ck.steps()
    return told


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_torn_copy_fails_its_save_on_every_rank_and_the_next_commits(
    pair: list[Node], root: Path
) -> None:
    first, second = pair
    results = run_ranks(save_torn, root, [first, second])
    for result in results:
        code, message = result["torn"]
        assert code == "torn-snapshot"
        assert "'model1.p2'" in message
        assert result["step"] == 2
        assert result["free"] == 2
        assert result["steps"] == [0, 2]
    (found,) = judge(read_generations, 1, [str(root / "step_2")])
    assert found[0][1] == [1.0]


def train_sharded(rank: Rank) -> dict[str, Any]:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from milepost import Checkpointer
    from milepost.staging.behind import BehindStaging

    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(65, 129), nn.BatchNorm1d(129), nn.ReLU(), nn.Linear(129, 7), nn.Linear(7, 1)
    )
    mesh = init_device_mesh("cpu", (rank.world,))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    first = list(model[0].parameters())
    rest = [each for layer in list(model)[1:] for each in layer.parameters()]
    optimizers = [
        torch.optim.AdamW(first, lr=0.1, foreach=True),
        torch.optim.SGD(rest, lr=0.1, momentum=0.9),
    ]
    whole: dict[str, Any] = {}
    guarded = []
    with Checkpointer(rank.root, staging="overlap", optimizer=optimizers) as ck:
        for step in range(4):
            for _ in range(2):  # two batches a step
                model(torch.randn(8, 65)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            weights, moments = get_state_dict(model, optimizers)
            state = {"model": weights, "optimizer": moments, "step": step}
            whole[f"step_{step}"] = {
                key: states.describe(value.full_tensor() if isinstance(value, DTensor) else value)
                for key, value in flatten_state_dict(state)[0].items()
            }
            ck.save(step, state)
            assert isinstance(ck._staging, BehindStaging)
            copy = ck._staging._copy
            assert copy is not None
            guarded.append(sum(len(part.keys) for part in copy._parts))
    return {"whole": whole, "guarded": guarded}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_models_with_several_optimizers_are_saved_as_they_were(
    pair: list[Node], root: Path
) -> None:
    first, second = pair
    results = run_ranks(train_sharded, root, [first, second])
    assert all(count >= 8 for result in results for count in result["guarded"])
    paths = {f"step_{step}": str(root / f"step_{step}") for step in range(4)}
    (read,) = judge(states.read_all, 1, paths)
    for name in paths:
        assert results[0]["whole"][name] == read[name].values


def die_while_copying(rank: Rank) -> None:
    from milepost import Checkpointer

    _, optimizer, state = _lockstep_state(rank.rank)
    ck = Checkpointer(rank.root, staging="overlap", optimizer=optimizer)
    ck.save(0, state).wait(60)
    optimizer.step()
    _gate(ck).clear()
    ck.save(1, state)
    os._exit(9)


def go_on_after(rank: Rank) -> list[int]:
    from milepost import Checkpointer

    _, optimizer, state = _lockstep_state(rank.rank)
    with Checkpointer(rank.root, staging="overlap", optimizer=optimizer) as ck:
        found = ck.steps()
        gate = _gate(ck)
        gate.clear()
        save = ck.save(5, state)
        opener = threading.Timer(0.2, gate.set)
        opener.start()
        state["replica"].add_(1)
        ck.load(state, partial=True)  # waits for the copy, and for the commit
        assert save.phase == "committed"
        opener.join()
    return [*found, *ck.steps()]


def test_a_trainer_that_dies_while_copying_commits_nothing_and_the_next_goes_on(
    pair: list[Node], root: Path
) -> None:
    node, _ = pair
    assert [None] == run_ranks(die_while_copying, root, [node], expect_death=[0])
    assert [[0, 0, 5]] == run_ranks(go_on_after, root, [node])


def _kept(ck: Any) -> Any:
    """Return the objects that copies share from save to save."""
    return ck._staging.division._kept.get(torch.device("cpu"))


def refuse(rank: Rank) -> list[str]:
    from torch.distributed.checkpoint import DefaultSavePlanner

    from milepost import Checkpointer, UsageError

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            return super().create_local_plan()

    parameters, optimizer, state = _lockstep_state(0)
    texts = []
    for arguments in (
        {"staging": "overlap"},
        {"staging": "overlap", "optimizer": optimizer, "planner": Planner()},
        {"staging": "blocking", "optimizer": optimizer},
    ):
        try:
            Checkpointer(rank.root, **arguments)
        except UsageError as error:
            texts.append(str(error))
    del state["model0"]["p3"]
    with Checkpointer(rank.root, staging="overlap", optimizer=optimizer) as ck:
        for call in (ck.prepare, lambda state: ck.save(0, state)):
            try:
                call(state)
            except UsageError as error:
                texts.append(str(error))
        state["model0"]["p3"] = parameters[3]
        collections: list[int] = []

        def note(phase: str, info: dict[str, int]) -> None:
            collections.append(info["generation"])

        gc.callbacks.append(note)
        ck.prepare(state)
        gc.callbacks.remove(note)
        assert 2 in collections, "what it made would be walked within the first save"
        made = _kept(ck)
        step = ck.save(0, state).wait(60).step
        texts.append(f"{step} {'anew' if made is None or made is not _kept(ck) else 'prepared'}")
    with Checkpointer(rank.root) as ck:
        ck.guard()
    return texts


def test_what_cannot_be_guarded_is_refused_by_name(pair: list[Node], root: Path) -> None:
    node, _ = pair
    ((without, planner, blocking, unprepared, missing, step),) = run_ranks(refuse, root, [node])
    assert "staging='overlap' needs optimizer=" in without
    assert "staging='overlap' does not work with a Planner" in planner
    assert "no effect with staging='blocking'" in blocking
    assert "parameter 3 of Lockstep, of shape (64, 4096), is not in the state" in missing
    assert unprepared == missing
    assert step == "0 prepared"
