"""A checkpoint holds the state as it was when `save()` was called, whatever changes afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor

from tests.integration import states
from tests.integration.cluster import Rank, judge, nodes, run_ranks
from tests.integration.sharded_states import S0, line
from tests.integration.stagings import STAGINGS, opened

HOLD = "after-staged:sleep:0.15"
"""Keeps the daemon from reading an image until long after the state has been changed."""

LOOPS = 20


class Run(NamedTuple):
    root: Path
    expected: dict[str, dict[str, Any]]
    """For each directory, what the state held when it was saved."""
    told: dict[str, Any]
    values: dict[str, states.Reading]


class Changeable:
    """A state with every kind of value that can change in place."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.randn(300, 40))
        self.base = torch.randn(100, 10)
        self.shared = torch.randn(50).share_memory_()  # type: ignore[no-untyped-call]
        self.step = torch.tensor(0.0)
        self.array = np.arange(50.0)
        self.state: states.State = {
            "parameter": self.parameter,
            "view": self.base[3:70:2, 1:4],
            "shared": self.shared,
            "step": self.step,
            "from_numpy": torch.from_numpy(self.array),
            "list": [1, 2, {"deep": [3]}],
            "list_of_tensors": [torch.arange(4), {"deep": torch.ones(2)}],
            "dict": {"number": 1, "text": "a", "gone": 1},
            "array": np.arange(6),
            "bytearray": bytearray(b"abc"),
            "set": {1, 2},
            "setting": states.Setting(0.5, torch.arange(3), ["a"]),
            "counter": states.Counter(3),
        }

    def change(self) -> None:
        """Change everything in place, and the containers' shapes too."""
        with torch.no_grad():
            self.parameter.add_(1)
            self.base.mul_(-1)
            self.shared.fill_(7)
            self.step.add_(1)
        self.array += 1
        state = self.state
        state["list"][2]["deep"].append(4)
        state["list"].append(5)
        state["list_of_tensors"][0].zero_()
        state["list_of_tensors"][1]["deep"].zero_()
        state["dict"]["number"] += 1
        state["dict"]["text"] += "b"
        state["array"] += 1
        state["bytearray"][0] = 0
        state["bytearray"] += b"d"
        state["set"].add(len(state["set"]) + 5)
        state["setting"].rate += 1
        state["setting"].table.add_(1)
        state["setting"].names.append("b")
        state["counter"].count += 1
        state["counter"].history.add_(1)


def change_after_saving(rank: Rank) -> dict[str, Any]:
    expected: dict[str, dict[str, Any]] = {}
    told: dict[str, Any] = {}
    with opened(rank, is_guarded=True) as ck:
        changeable = Changeable()
        saves = []
        for at in range(LOOPS):
            expected[f"loop_{at}"] = states.expected(changeable.state)
            saves.append(ck.save(at, changeable.state, checkpoint_id=f"loop_{at}"))
            changeable.change()
            told.setdefault("phases", []).append(saves[-1].phase)
        for save in saves:
            save.wait(60)
        told["shared"] = {
            key: value.is_shared()  # type: ignore[no-untyped-call]
            for key, value in changeable.state.items()
            if isinstance(value, torch.Tensor)
        }
        _step_and_save(ck, expected)
        _replace_and_save(ck, expected)
        _fill_both_slots(ck, expected, told)
    return {"expected": expected, "told": told}


def _step_and_save(ck: Any, expected: dict[str, dict[str, Any]]) -> None:
    """Save before the optimizer has any state and after each of its steps, without waiting."""
    torch.manual_seed(2)
    model = states.Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    for at in range(4):
        expected[f"steps_{at}"] = states.expected(state)
        ck.save(100 + at, state, checkpoint_id=f"steps_{at}")
        states.one_step(model, optimizer)


def _replace_and_save(ck: Any, expected: dict[str, dict[str, Any]]) -> None:
    """Give tensors new storages between saves, as offloading does, then change those in place."""
    model, optimizer = states.trained("adamw")
    grows = torch.ones(3)
    state = {"model": model, "optimizer": optimizer, "grows": grows}

    def save(name: str, step: int) -> None:
        expected[name] = states.expected(state)
        ck.save(step, state, checkpoint_id=name)

    save("replace_0", 110)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone().add_(1)
    for moments in optimizer.state.values():
        for key, value in list(moments.items()):
            moments[key] = value.clone().add_(2)
    save("replace_1", 111)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(10)
    save("replace_2", 112)
    model.load_state_dict(states.trained("adamw", 5)[0].state_dict())
    save("replace_3", 113)
    grows.resize_(5).fill_(4)
    save("replace_4", 114)
    storage = model.first.weight.untyped_storage()
    kept = model.first.weight.detach().clone()
    length = storage.nbytes()
    storage.resize_(0)
    storage.resize_(length)
    with torch.no_grad():
        model.first.weight.copy_(kept).mul_(3)
    save("replace_5", 115)


def _fill_both_slots(ck: Any, expected: dict[str, dict[str, Any]], told: dict[str, Any]) -> None:
    """Keep two saves under way at once, and a third that has to wait for a slot."""
    ck.wait()
    tensor = torch.zeros(200_000)
    saves = []
    for at in range(3):
        tensor.fill_(at)
        state = {"tensor": tensor, "at": [at] * (1 + at * 1000)}
        expected[f"slots_{at}"] = states.expected(state)
        saves.append(ck.save(120 + at, state, checkpoint_id=f"slots_{at}"))
        if at == 1:
            told["both in flight"] = [save.done() for save in saves]
    tensor.fill_(-1)


STRUCTURES: dict[str, dict[str, Any]] = {
    "base": {"w": torch.ones(4), "extra": {"note": "x"}},
    "key added": {"w": torch.ones(4) * 2, "extra": {"note": "x", "more": torch.ones(2)}},
    "key removed": {"w": torch.ones(4) * 3},
    "dtype changed": {"w": torch.ones(4, dtype=torch.float64)},
    "shape changed": {"w": torch.ones(2, 2) * 5},
    "renamed": {"v": torch.ones(2, 2) * 6},
    "tensor became object": {"v": [6, 7]},
    "object became tensor": {"v": torch.ones(1)},
    "order changed": {"extra": {"note": "x"}, "w": torch.ones(4) * 8},
    "base again": {"w": torch.ones(4) * 9, "extra": {"note": "y"}},
    "longer object": {"w": torch.ones(4) * 10, "extra": {"note": "y" * 300_000}},
    "shorter object": {"w": torch.ones(4) * 11, "extra": {"note": ""}},
    "alternating a": {"w": torch.ones(3)},
    "alternating b": {"w": torch.ones(3) * 2, "moments": torch.ones(3)},
    "alternating a2": {"w": torch.ones(3) * 3},
    "alternating b2": {"w": torch.ones(3) * 4, "moments": torch.ones(3) * 2},
    "nothing": {},
}
"""A series of states; each has another structure than the one before."""

ON_ONE_RANK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "same": ({"w": torch.ones(3), "of_0": 1}, {"w": torch.ones(3), "of_1": 2}),
    "key added on one": (
        {"w": torch.ones(3) * 2, "of_0": 1},
        {"w": torch.ones(3) * 2, "of_1": 2, "new": torch.ones(2)},
    ),
    "key added on the first": (
        {"w": torch.ones(3) * 3, "of_0": 1, "newer": torch.ones(2)},
        {"w": torch.ones(3) * 3, "of_1": 2, "new": torch.ones(2)},
    ),
    "key removed on one": (
        {"w": torch.ones(3) * 4, "of_0": 1, "newer": torch.ones(2)},
        {"w": torch.ones(3) * 4, "of_1": 2},
    ),
    "replica dropped on one": ({"of_0": 1}, {"w": torch.ones(3) * 5, "of_1": 2}),
    "replica dropped on the other": ({"w": torch.ones(3) * 6, "of_0": 1}, {"of_1": 2}),
    "own shape changed on one": (
        {"w": torch.ones(3) * 7, "of_0": 1},
        {"w": torch.ones(3) * 7, "of_1": torch.ones(5)},
    ),
}
"""Pairs of states of two ranks, before and after a change; only one of the ranks changes."""


def change_structure(rank: Rank) -> dict[str, Any]:
    from milepost import SaveFailed

    expected, failures = {}, {}
    with opened(rank, deadline_s=30.0) as ck:
        for at, (name, state) in enumerate(STRUCTURES.items()):
            both = {**state, "rows": _rows(at), f"own_{rank.rank}": at}
            ck.save(at, both, checkpoint_id=name).wait(60)
            expected[name] = states.expected({**state, "rows": torch.full((5, 2), float(at))})
            expected[name] |= {f"own_{number}": states.describe(at) for number in range(2)}
        for at, (name, pair) in enumerate(ON_ONE_RANK.items(), start=100):
            merged = {**pair[0], **pair[1]}
            for step, suffix in ((2 * at, ""), (2 * at + 1, " again")):
                try:
                    ck.save(step, pair[rank.rank], checkpoint_id=name + suffix).wait(60)
                except SaveFailed as error:
                    failures[name + suffix] = error.code
                expected[name + suffix] = states.expected(merged)
                dist.barrier()
        for at, (name, state) in enumerate(STRUCTURES.items(), start=500):
            # Do not wait: so a save and the next one, with another structure, are under way
            # together.
            ck.save(at, {**state, "at": at}, checkpoint_id=f"{name} unwaited")
            expected[f"{name} unwaited"] = states.expected({**state, "at": at})
    return {"expected": expected, "failures": failures}


def _rows(at: int) -> torch.Tensor:
    return distribute_tensor(torch.full((5, 2), float(at)), line(), [S0])


@pytest.fixture(scope="module", params=STAGINGS)
def run(request: pytest.FixtureRequest, module_folder: Path) -> Run:
    staging = request.param
    root = module_folder / staging / "checkpoints"
    with nodes(module_folder / staging, 1, root, ["--allow-faults"], MILEPOSTD_FAULTS=HOLD) as (
        node,
    ):
        (told,) = run_ranks(change_after_saving, root, [node], staging=staging)
    (values,) = judge(states.read_all, 1, {name: str(root / name) for name in told["expected"]})
    return Run(root, told["expected"], told["told"], values)


@pytest.mark.parametrize(
    "name",
    [
        *(f"loop_{at}" for at in range(LOOPS)),
        *(f"steps_{at}" for at in range(4)),
        *(f"replace_{at}" for at in range(6)),
        *(f"slots_{at}" for at in range(3)),
    ],
)
def test_a_checkpoint_holds_the_state_at_the_moment_of_the_call(run: Run, name: str) -> None:
    assert run.expected[name] == run.values[name].values


def test_the_state_was_changed_before_it_was_written(run: Run) -> None:
    assert "committed" not in run.told["phases"]
    assert [False, False] == run.told["both in flight"]
    assert LOOPS == len({repr(run.expected[f"loop_{at}"]) for at in range(LOOPS)})


def test_saving_does_not_move_a_tensor_to_shared_memory(run: Run) -> None:
    shared = {"parameter": False, "view": False, "shared": True, "step": False}
    assert {**shared, "from_numpy": False} == run.told["shared"]


class Changed(NamedTuple):
    failures: list[dict[str, str]]
    """By rank and directory, the codes of saves that failed."""
    expected: dict[str, dict[str, Any]]
    values: dict[str, states.Reading]


@pytest.fixture(scope="module", params=STAGINGS)
def changed(request: pytest.FixtureRequest, module_folder: Path) -> Changed:
    staging = request.param
    root = module_folder / staging / "structures"
    with nodes(module_folder / staging / "two", 2, root) as (first, second):
        ranks = run_ranks(change_structure, root, [first, second], staging=staging)
    failed = ranks[0]["failures"]
    names = [name for name in ranks[0]["expected"] if name not in failed]
    (values,) = judge(states.read_all, 1, {name: str(root / name) for name in names})
    return Changed([rank["failures"] for rank in ranks], ranks[0]["expected"], values)


@pytest.mark.parametrize("suffix", ["", " unwaited"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_each_checkpoint_has_the_structure_of_its_own_save(
    changed: Changed, name: str, suffix: str
) -> None:
    assert changed.expected[name + suffix] == changed.values[name + suffix].values


@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_a_change_on_one_rank_commits_or_fails_as_such_and_the_next_save_commits(
    changed: Changed, name: str
) -> None:
    outcomes = [failures.get(name) for failures in changed.failures]
    assert outcomes in ([None, None], ["structure-changed"] * 2)
    if outcomes[0] is None:
        assert changed.expected[name] == changed.values[name].values
    assert changed.expected[f"{name} again"] == changed.values[f"{name} again"].values
