"""`milepost.dcp.load`: torch's semantics, and what is left to torch."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from tests.unit.dcp.states import (
    Counter,
    blank,
    failure,
    filled,
    flip,
    loaded_by_stock,
    saved,
    told,
)
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import LoadPlan

import milepost.dcp as dcp
from milepost.errors import CorruptCheckpoint, LoadFailed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def load(path: Path, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=path, **more)
    return state


def told_by(act: Any) -> list[str]:
    """Return what each rank's failure says."""
    with pytest.raises(CheckpointException) as caught:
        act()
    return [f"{rank}: {type(error).__name__}: {error}"
            for rank, (error, _) in caught.value.failures.items()]  # fmt: skip


def test_the_signature_is_torch_s() -> None:
    ours, theirs = inspect.signature(dcp.load), inspect.signature(stock.load)
    assert list(theirs.parameters) == list(ours.parameters)
    for name, parameter in theirs.parameters.items():
        assert (parameter.kind, parameter.default) == (
            ours.parameters[name].kind,
            ours.parameters[name].default,
        )


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_state_is_loaded_in_place_as_torch_does(tmp_path: Path, is_ours: bool) -> None:
    path = saved(tmp_path / "c", is_ours=is_ours)
    state = blank()
    held = state["w"], state["nested"]["list"][0], state["stateful"]
    load(path, state)
    assert told(loaded_by_stock(path, blank())) == told(state)
    assert all(a is b for a, b in zip(
        held, (state["w"], state["nested"]["list"][0], state["stateful"]), strict=True
    ))  # fmt: skip
    assert 1 == state["stateful"].loads


def test_a_path_as_text_a_reader_and_the_positional_form_are_taken(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"n": 3})
    for more in (
        {"checkpoint_id": str(path)},
        {"storage_reader": FileSystemReader(path)},
        {"storage_reader": dcp.Reader(path)},
        {"checkpoint_id": path, "storage_reader": dcp.Reader(tmp_path / "other")},
    ):
        state = {"n": 0}
        assert dcp.load(state, **more) is None
        assert 3 == state["n"]
    state = {"n": 0}
    with pytest.warns(UserWarning, match="argument order of load has been changed"):
        dcp.load(state, dcp.Reader(path))
    assert 3 == state["n"]
    with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        dcp.load({})


def test_one_process_is_told_that_it_loads_alone_where_it_called(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"n": 3})
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single") as caught:
        dcp.load({"n": 0}, checkpoint_id=path)
    assert __file__ == caught[0].filename


@pytest.mark.parametrize(
    "bad", [{"gone": 1}, {"w": torch.zeros(2)}, {"w": torch.zeros(30, 100), "gone": torch.ones(1)}]
)
def test_what_does_not_fit_is_told_in_torch_s_words(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = saved(tmp_path / "c")
    assert told_by(lambda: loaded_by_stock(path, dict(bad))) == told_by(
        lambda: load(path, dict(bad))
    )


def test_a_path_without_a_checkpoint_is_told_in_torch_s_words(tmp_path: Path) -> None:
    for name in ("empty", "nowhere"):
        path = tmp_path / name
        (tmp_path / "empty").mkdir(exist_ok=True)
        expected = told_by(lambda path=path: loaded_by_stock(path, {"n": 1}))
        assert expected == told_by(lambda path=path: load(path, {"n": 1}))


def test_damage_and_unsafe_objects_are_ours_to_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"w": torch.ones(1000, 100)}, is_ours=True)
    flip(path)
    with pytest.raises(CheckpointException) as caught:
        load(path, {"w": torch.zeros(1000, 100)})
    assert isinstance(failure(caught.value), CorruptCheckpoint)
    path = saved(tmp_path / "d", {"odd": Counter(1.0).load_state_dict})
    with pytest.raises(CheckpointException) as caught:
        load(path, {"odd": None})
    assert isinstance(failure(caught.value), LoadFailed)
    path = saved(tmp_path / "e", {"n": 1}, is_ours=True)
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes() + b"x")
    with pytest.raises(CheckpointException, match="is damaged"):
        load(path, {"n": 0})


def test_what_a_state_itself_raises_is_raised_as_it_is(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"s": {"weight": torch.ones(3), "value": 1.0}})

    class Failing(Counter):
        def state_dict(self) -> dict[str, Any]:
            if self.weight[0] == 0:
                raise KeyError("saying")
            return super().state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("loading")

    for value, text in ((0.0, "saying"), (1.0, "loading")):
        with pytest.raises(KeyError, match=text):
            load(path, {"s": Failing(value)})


# --- planners -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"flatten_state_dict": False},
        {"flatten_sharded_tensors": False},
        {"allow_partial_load": True},
    ],
)
def test_options_of_the_default_planner_do_what_they_do_in_torch(
    tmp_path: Path, options: dict[str, bool]
) -> None:
    path = saved(tmp_path / "c", {"w": torch.ones(3), "n": 4})

    def state() -> dict[str, Any]:
        more = {"gone": 5} if "allow_partial_load" in options else {}
        return {"w": torch.zeros(3), "n": 0, **more}

    expected = loaded_by_stock(path, state(), planner=DefaultLoadPlanner(**options))
    found = load(path, state(), planner=DefaultLoadPlanner(**options))
    assert told(expected) == told(found)


def test_a_checkpoint_of_torch_2_3_which_flattened_less_is_loaded(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import _version

    state = {"o": {"groups": [{"lr": 0.1}, {"lr": 0.2}], "w": torch.ones(2)}}
    _version._derived_version = "2_3"
    try:
        path = saved(tmp_path / "c", state)
    finally:
        _version._derived_version = None
    assert "o.groups" in dcp.Reader(path).read_metadata().state_dict_metadata
    found = load(path, {"o": {"groups": [{"lr": 0.0}, {"lr": 0.0}], "w": torch.zeros(2)}})
    assert [{"lr": 0.1}, {"lr": 0.2}] == found["o"]["groups"]
    assert [1.0, 1.0] == found["o"]["w"].tolist()


def test_an_empty_state_is_filled_by_the_planner_that_makes_one(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", is_ours=True)
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    found = load(path, {}, planner=planner)
    assert {*filled()} == {*found}
    assert torch.equal(filled()["w"], found["w"])
    assert planner.metadata is not None
    planner = _EmptyStateDictLoadPlanner(keys={"nested"})  # type: ignore[no-untyped-call]
    only = load(path, {}, planner=planner)
    assert ["nested"] == list(only)


class Reversing(DefaultLoadPlanner):
    """Tells what it was called with, and turns the plan round."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[str]()

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("set_up")
        super().set_up_planner(*args, **kwargs)

    def create_local_plan(self) -> LoadPlan:
        self.calls.append("local")
        return super().create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        self.calls.append("global")
        return [LoadPlan(plan.items[::-1], planner_data="mine") for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.calls.append(f"finish {new_plan.planner_data}")
        return new_plan


def test_a_planner_takes_all_its_steps(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"w": torch.ones(3), "n": 4})
    planner = Reversing()
    found = load(path, {"w": torch.zeros(3), "n": 0}, planner=planner)
    assert ["set_up", "local", "global", "finish mine"] == planner.calls
    assert ([1.0] * 3, 4) == (found["w"].tolist(), found["n"])
    assert planner.metadata is not None
    assert {"w", "n"} == {*planner.metadata.state_dict_metadata}
    assert planner.is_coordinator


def test_fine_tuning_loads_what_the_checkpoint_has_into_a_larger_state(tmp_path: Path) -> None:
    body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    path = saved(tmp_path / "c", {"model": {f"body.{k}": v for k, v in body.state_dict().items()}})
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(4, 4), "head": head})
    before = head.weight.detach().clone()
    load(path, {"model": model}, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(body.weight, model.state_dict()["body.weight"])
    assert torch.equal(before, head.weight)


# --- what is left to torch ------------------------------------------------------------------------


class Elsewhere(FileSystemReader):
    """A reader of the user's."""


def test_readers_that_are_not_ours_and_urls_are_left_to_torch_with_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "c", {"n": 3})
    state = {"n": 0}
    with caplog.at_level(logging.INFO, "milepost"):
        dcp.load(state, storage_reader=Elsewhere(path))
        assert 3 == state["n"]
        with pytest.raises(RuntimeError, match="Cannot detect"):
            dcp.load(state, checkpoint_id="abc://abc.abc")
        load(path, state)
    lines = [record.getMessage() for record in caplog.records if "leaves" in record.getMessage()]
    assert ["the reader is a Elsewhere", "abc://abc.abc is a URL"] == [
        line.partition("torch.distributed.checkpoint: ")[2] for line in lines
    ]


def test_what_is_not_ours_is_torch_s() -> None:
    for name in (
        "FileSystemReader",
        "DefaultLoadPlanner",
        "CheckpointException",
        "state_dict_loader",
    ):
        assert getattr(stock, name) is getattr(dcp, name)
        assert name in dir(dcp)
    for name in ("_extension", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(dcp, name)
