"""What lands where in a load: keys of every type, empty places, what does not fit."""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from tests.unit.reading.checkpoints import WAIT_S, adopt, load, on_ranks, stock_save
from torch import nn
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint import state_dict_saver as stock
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from milepost.dcp_format.index import read_metadata
from milepost.errors import CorruptCheckpoint, LoadFailed, UsageError
from milepost.format.nesting import pack_nesting
from milepost.link.rendezvous import Group
from milepost.reading.restore import LoadReport
from milepost.state.flattening import flatten, with_per_rank

# Stock torch warns that it saves for one process, which is what is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Color(enum.Enum):
    RED = "red"


KEYS = [7, -1, 2**70, (1, 2), ("a", (3, None)), torch.float16, True, None, 2.5, Color.RED, b"\xff"]


def zeroed(value: Any) -> Any:
    """Return a template of the same structure and keys, of other values."""
    if isinstance(value, Mapping):
        return {key: zeroed(each) for key, each in value.items()}
    if isinstance(value, list):
        return [zeroed(each) for each in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "another value"


def assert_equal(left: Any, right: Any, *, in_order: bool = True) -> None:
    """Compare nested states, types of keys included, and their order unless told otherwise."""
    assert type(left) is type(right)
    if isinstance(left, Mapping):
        names = [[(str(type(key)), str(key)) for key in each] for each in (left, right)]
        assert names[0] == names[1] if in_order else sorted(names[0]) == sorted(names[1])
        for key in left:
            assert_equal(left[key], right[key], in_order=in_order)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other, in_order=in_order)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert left == right


# --- keys -----------------------------------------------------------------------------------------


def test_values_land_under_the_templates_own_keys_whatever_their_type(tmp_path: Path) -> None:
    state = {
        **{key: torch.full((2,), float(at)) for at, key in enumerate(KEYS)},
        "objects": {key: f"value of {key!r}" for key in KEYS},
        "deep": {key: {key: [torch.ones(1), {key: 3}]} for key in KEYS},
    }
    path = stock_save(tmp_path / "stock", state)
    back = zeroed(state)
    report = load(path, back)
    assert_equal(state, back)
    assert () == (*report.unexpected, *report.missing, *report.untouched, *report.added)
    flatten(back)  # no two keys of it are the same text: it can be saved again


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer after some steps, and a scheduler."""
    torch.manual_seed(3)
    model: nn.Module = nn.Linear(3, 2)
    optimizer: torch.optim.Optimizer
    parameters = list(model.parameters())
    if kind == "sparse":
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
    elif kind == "lbfgs":
        optimizer = torch.optim.LBFGS(parameters, max_iter=3)
    elif kind == "sgd":
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    elif kind == "adam":
        optimizer = torch.optim.Adam(parameters, lr=0.1)
    else:
        empty: dict[str, Any] = {"params": [], "lr": 0.5}
        optimizer = torch.optim.AdamW([{"params": parameters}, empty], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 12, 13], gamma=0.5)
    return model, optimizer, schedule


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, steps: int) -> None:
    batch = torch.tensor([1, 3]) if isinstance(model, nn.Embedding) else torch.eye(3)
    for _ in range(steps):

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            out: torch.Tensor = model(batch).square().sum()
            torch.autograd.backward(out)
            return out

        optimizer.step(loss)  # type: ignore[arg-type]
        schedule.step()


OPTIMIZERS = ["sparse", "lbfgs", "sgd", "adam", "adamw with an empty group"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("form", ["stateful", "bare", "nested"])
@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "stepped"])
def test_optimizers_and_schedules_go_on_as_if_nothing_had_been(
    tmp_path: Path, kind: str, form: str, is_fresh: bool
) -> None:
    def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> Any:
        if form == "stateful":
            return {"model": model, "optimizer": optimizer, "schedule": schedule}
        nested = {"model": model.state_dict(), "schedule": schedule.state_dict()}
        if form == "bare":
            return {**nested, **optimizer.state_dict()}
        return {"app": {**nested, "optimizer": optimizer.state_dict()}}

    parts = trained(kind)
    train(*parts, 10)
    path = stock_save(tmp_path / "stock", state_of(*parts))
    train(*parts, 10)

    model, optimizer, schedule = again = trained(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if not is_fresh:
        train(*again, 1)
    state = state_of(*again)
    report = load(path, state)
    assert () == report.unexpected
    flatten(state)  # no two keys of it are the same text: it can be saved again
    if form != "stateful":
        inner = state if form == "bare" else state["app"]
        model.load_state_dict(inner["model"])
        optimizer.load_state_dict(inner if form == "bare" else inner["optimizer"])
        schedule.load_state_dict(inner["schedule"])
    train(*again, 10)
    assert_equal(parts[0].state_dict(), model.state_dict())
    assert_equal(parts[1].state_dict(), optimizer.state_dict())
    assert_equal(parts[2].state_dict(), schedule.state_dict())


def test_parameters_without_state_stay_so_and_others_get_theirs(tmp_path: Path) -> None:
    def make(*, is_thawed: bool) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        parameters = nn.ParameterList([torch.ones(2), torch.ones(2), torch.ones(2)])
        parameters[1].requires_grad_(is_thawed)
        return parameters, torch.optim.AdamW(parameters.parameters(), lr=0.1)

    def step(parameters: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        loss = sum(each.square().sum() for each in parameters[:2] if each.requires_grad)
        torch.autograd.backward(loss)
        optimizer.step()

    # The second is thawed, the third gets no gradient.
    saved_by = make(is_thawed=True)
    step(*saved_by)
    path = stock_save(tmp_path / "stock", {"optimizer": saved_by[1]})
    fresh, stepped = make(is_thawed=True), make(is_thawed=False)
    step(*stepped)
    for parameters, optimizer in (fresh, stepped):
        assert () == load(path, {"optimizer": optimizer}).unexpected
        state = optimizer.state_dict()["state"]
        assert_equal(saved_by[1].state_dict()["state"], state)
        assert [0, 1] == list(state)
        step(parameters, optimizer)


def test_a_group_option_that_an_old_checkpoint_lacks_is_named_and_partial_keeps_it(
    tmp_path: Path,
) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=0.5)
    old = optimizer.state_dict()
    del old["param_groups"][0]["amsgrad"]
    path = stock_save(tmp_path / "stock", {"optimizer": old})
    fresh = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=0.1, amsgrad=True)
    with pytest.raises(LoadFailed, match=r"'optimizer\.param_groups\.0\.amsgrad'"):
        load(path, {"optimizer": fresh})
    report = load(path, {"optimizer": fresh}, partial=True)
    assert ("optimizer.param_groups.0.amsgrad",) == report.untouched
    group = fresh.param_groups[0]
    assert (0.5, True) == (group["lr"], group["amsgrad"])


# --- empty places -------------------------------------------------------------------------------


def test_an_empty_place_takes_what_the_checkpoint_holds_there(tmp_path: Path) -> None:
    state = {
        "dict": {"a": torch.ones(1), "b": {"c": 1}},
        "list": [torch.ones(2), {"x": 5}],
        "none": {"deep": [torch.ones(3)]},
        "tensor": torch.ones(4),
        "grown": [torch.ones(1), torch.ones(2), {"y": torch.ones(3)}],
        "shrunk": [],
    }
    path = stock_save(tmp_path / "stock", state)
    back: dict[str, Any] = {
        "dict": {}, "list": [], "none": None, "tensor": None, "grown": [torch.zeros(1)],
        "shrunk": [torch.zeros(9)],
    }  # fmt: skip
    report = load(path, back)
    assert_equal(state, back)
    assert (
        "dict.a", "dict.b.c", "list.0", "list.1.x", "none.deep.0", "grown.1", "grown.2.y"
    ) == report.added  # fmt: skip
    assert () == report.unexpected


def test_what_is_not_asked_for_is_reported_and_left(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"a": {"x": torch.ones(1), "y": 2}, "b": 3})
    back = {"a": {"x": torch.zeros(1)}}
    report = load(path, back)
    assert ("a.y", "b") == report.unexpected
    assert_equal({"a": {"x": torch.ones(1)}}, back)


def test_a_list_in_the_place_of_a_dict_is_refused_by_name(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"a": {"x": torch.ones(1)}})
    with pytest.raises(LoadFailed, match=r"'a\.x', which has no place"):
        load(path, {"a": []})


def test_without_a_template_everything_comes_back_as_it_was_nested(tmp_path: Path) -> None:
    model, optimizer, schedule = trained("adam")
    train(model, optimizer, schedule, 2)
    state = {
        "optimizer": optimizer.state_dict(),
        "list": [torch.ones(1), {"x": [torch.zeros(2)]}, 5],
        "tuple": (torch.ones(1), {"a": 1}),
        "none": None,
        "a.b": {"c": 1},
    }
    path = stock_save(tmp_path / "stock", state)
    report = load(path, None)
    assert_equal(state, report.state)
    assert set(flatten(state)[0]) == set(report.added)


def test_checkpoints_of_torch_before_2_4_load_where_a_dict_has_no_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, schedule = trained("adam")
    train(model, optimizer, schedule, 3)
    fresh = torch.optim.SGD(nn.Linear(1, 1).parameters())
    state: dict[str, Any] = {
        "optimizer": optimizer.state_dict(),
        "schedule": schedule,
        "fresh": fresh,
        "config": {"rate": 0.5, "names": {7: "a", "b": [1, 2]}, "nothing": {}},
        "mixed": {"w": torch.ones(1), "inner": {"x": 1}},
    }
    # How torch flattened then; today's reads such checkpoints by the same switch.
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    path = tmp_path / "old"
    # Looking for nested ShardedTensors would lose empty dicts, as it did not then.
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    stock.save(state, checkpoint_id=path, planner=planner, no_dist=True)
    monkeypatch.undo()
    held = read_metadata(path).state_dict_metadata
    assert {"config", "schedule", "fresh", "mixed.inner", "optimizer.param_groups"} <= held.keys()

    other = trained("adam")
    train(*other, 1)
    back = {
        "optimizer": other[1].state_dict(),
        "schedule": other[2],
        "fresh": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.7),
        "config": {"rate": 1.0, "names": {"c": 1}, "nothing": {}},
        "mixed": {"w": torch.zeros(1), "inner": {"x": 2, "y": 3}},
    }
    report = load(path, back)
    assert () == (*report.missing, *report.unexpected)
    for key in ("optimizer", "config", "mixed"):
        assert_equal(state[key], back[key])
    for key in ("schedule", "fresh"):
        assert_equal(state[key].state_dict(), back[key].state_dict())
    report = load(path, None)
    assert_equal(state["config"], report.state["config"])
    assert_equal(state["optimizer"], report.state["optimizer"])


NESTED = {
    **{key: torch.full((2,), float(at)) for at, key in enumerate(KEYS)},
    "objects": {key: f"value of {key!r}" for key in KEYS},
    "deep": {key: {key: [torch.ones(1), {key: 3, "e": {}}]} for key in KEYS},
    "empty": {"a": {}, 5: {}, "list": [torch.ones(1), {}]},
    "nothing": {},
}


def saved(tmp_path: Path, state: Any, per_rank: Any = None) -> Path:
    """Save as milepost does: stock's files, and a manifest with what they do not say."""
    whole = with_per_rank(state, per_rank, 0)
    path = stock_save(tmp_path / "ours", whole)
    adopt(path, 7, nesting=pack_nesting(flatten(whole)[1].nesting()))
    return path


def test_what_milepost_saved_comes_back_with_its_keys_and_empty_dicts(tmp_path: Path) -> None:
    own = {7: torch.ones(1), "a": {None: {}, 3: [torch.ones(2)]}, (1, 2): {}}
    report = load(saved(tmp_path, NESTED, own), None)
    assert_equal(NESTED, report.state, in_order=False)
    assert_equal(own, report.per_rank, in_order=False)


def test_empty_places_get_keys_and_empty_dicts_as_they_were_saved(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": NESTED, "b": {"c": {}}, "d": {}, 7: {8: {9: torch.ones(1)}}})
    back: dict[Any, Any] = {"a": None, "b": {}, "d": None, 7: {}}
    report = load(path, back)
    assert () == (*report.missing, *report.unexpected)
    expected = {"a": NESTED, "b": {"c": {}}, "d": {}, 7: {8: {9: torch.ones(1)}}}
    assert_equal(expected, back, in_order=False)


def test_a_fresh_optimizer_saved_by_milepost_is_whole_without_a_template(tmp_path: Path) -> None:
    fresh = torch.optim.AdamW(nn.Linear(1, 1).parameters())
    report = load(saved(tmp_path, {"optimizer": fresh}), None)
    assert_equal(fresh.state_dict(), report.state["optimizer"], in_order=False)


# --- what does not fit ----------------------------------------------------------------------------


def test_all_shapes_that_differ_are_told_at_once(tmp_path: Path) -> None:
    state = {f"w{n:02}": torch.zeros(3, n) for n in range(20)}
    path = stock_save(tmp_path / "stock", state)
    back = {key: torch.ones(2, 5) for key in state}
    with pytest.raises(LoadFailed) as caught:
        load(path, back)
    assert "shape-mismatch" == caught.value.code
    assert (
        "20 tensors of other shapes than the state: 'w00' is [3, 0], wanted [2, 5]; "
        in caught.value.message
    )
    assert "'w07' is [3, 7], wanted [2, 5] and 12 more" in caught.value.message
    assert "damage" not in str(caught.value)
    assert all((value == 1).all() for value in back.values())


def test_shapes_dtypes_and_missing_keys_are_told_together(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"a": torch.ones(2), "b": torch.ones(2)})
    with pytest.raises(LoadFailed) as caught:
        load(path, {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int32), "c": 1})
    for text in ("1 of the keys", "'c'", "'a' is [2], wanted [3]", "'b' is float32, wanted int32"):
        assert text in caught.value.message


def test_a_dtype_that_differs_is_refused_unless_it_is_to_be_cast(tmp_path: Path) -> None:
    state = {"w": torch.tensor([1.5, 2.5]), "n": torch.tensor(3, dtype=torch.int64)}
    path = stock_save(tmp_path / "stock", state)
    back = {"w": torch.zeros(2, dtype=torch.bfloat16), "n": torch.zeros((), dtype=torch.int32)}
    with pytest.raises(LoadFailed, match=r"'w' is float32, wanted bfloat16") as caught:
        load(path, back)
    assert "dtype-mismatch" == caught.value.code
    assert "cast=True" in caught.value.hint
    assert_equal([0.0, 0.0], back["w"].tolist())
    load(path, back, cast=True)
    assert_equal({"w": state["w"].to(torch.bfloat16), "n": state["n"].to(torch.int32)}, back)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (torch.tensor(3_000_000_019), torch.int32),
        (torch.tensor([16_777_217]), torch.float32),
        (torch.tensor([-1], dtype=torch.int8), torch.uint64),
        (torch.tensor([70_000], dtype=torch.int32), torch.uint16),
        (torch.tensor([2]), torch.bool),
        (torch.tensor([1.5]), torch.int64),
        (torch.tensor([float("nan")]), torch.int64),
        (torch.tensor([1 + 1j]), torch.float32),
    ],
    ids=str,
)
def test_a_cast_that_changes_what_is_counted_is_refused(
    tmp_path: Path, value: torch.Tensor, wanted: torch.dtype
) -> None:
    path = stock_save(tmp_path / "stock", {"n": value, "w": torch.ones(1)})
    back = {"n": torch.zeros(value.shape, dtype=wanted), "w": torch.zeros(1)}
    with pytest.raises(LoadFailed, match="'n'") as caught:
        load(path, back, cast=True)
    assert "dtype-mismatch" == caught.value.code
    assert 0 == back["w"], "nothing was overwritten"


@pytest.mark.parametrize("wanted", [torch.int32, torch.uint16, torch.uint64, torch.float32])
def test_a_cast_that_keeps_every_integer_is_made(tmp_path: Path, wanted: torch.dtype) -> None:
    value = torch.tensor([0, 3, 65_535])
    path = stock_save(tmp_path / "stock", {"n": value})
    back = {"n": torch.zeros(3, dtype=wanted)}
    load(path, back, cast=True)
    assert_equal({"n": value.to(wanted)}, back)


def test_an_object_in_a_mapping_that_cannot_be_changed_is_refused_before_anything_is_read(
    tmp_path: Path,
) -> None:
    path = stock_save(tmp_path / "stock", {"m": {"a": 1}, "w": torch.ones(1)})
    back: dict[str, Any] = {"m": MappingProxyType({"a": 2}), "w": torch.zeros(1)}
    with pytest.raises(LoadFailed, match=r"'m\.a': a mappingproxy cannot be set"):
        load(path, back)
    assert 0 == back["w"].item()


@pytest.mark.parametrize("state", [[1], 3, MappingProxyType({})])
def test_what_is_no_state_is_a_usage_error(tmp_path: Path, state: Any) -> None:
    path = stock_save(tmp_path / "stock", {"w": torch.ones(1)})
    with pytest.raises(UsageError):
        load(path, state)


def test_a_lazy_parameter_without_a_shape_is_refused_by_name(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"m": nn.Linear(2, 2)})
    with pytest.raises(LoadFailed, match=r"'m\.weight': a UninitializedParameter has no shape"):
        load(path, {"m": nn.LazyLinear(2)})


def test_a_state_dict_that_raises_is_named(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"w": torch.ones(1)})
    with pytest.raises(LoadFailed, match=r"the state_dict\(\) of 'bad' raised KeyError: 'gone'"):
        load(path, {"bad": Failing(), "w": torch.zeros(1)})


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("gone")

    def load_state_dict(self, state: Any) -> None: ...


# --- partial, and wrappers ------------------------------------------------------------------------


def test_partial_leaves_what_is_not_there_and_reports_it(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"a": torch.ones(1), "b": torch.ones(1)})
    back = {"a": torch.zeros(1), "c": torch.zeros(1), "d": 5}
    report = load(path, back, partial=True)
    assert ("c", "d") == report.missing == report.untouched
    assert ("b",) == report.unexpected
    assert_equal({"a": torch.ones(1), "c": torch.zeros(1), "d": 5}, back)


def test_partial_that_matches_nothing_is_an_error(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"a": torch.ones(1)})
    with pytest.raises(LoadFailed, match="holds none of the 2 keys") as caught:
        load(path, {"x": torch.zeros(1), "y": 3}, partial=True)
    assert "it holds 'a'" in caught.value.hint
    assert () == load(path, {}, partial=True).missing, "nothing was asked for"


class Wrapped(nn.Module):
    def __init__(self, word: str) -> None:
        super().__init__()
        setattr(self, word, nn.Linear(2, 2))


@pytest.mark.parametrize("word", ["module", "_orig_mod"])
@pytest.mark.parametrize("partial", [False, True])
def test_a_wrappers_word_in_the_keys_is_named_whichever_side_has_it(
    tmp_path: Path, word: str, partial: bool
) -> None:
    plain, wrapped = {"model": nn.Linear(2, 2)}, {"model": Wrapped(word)}
    with pytest.raises(LoadFailed) as caught:
        load(stock_save(tmp_path / "wrapped", wrapped), {**plain}, partial=partial)
    assert f"the checkpoint's keys have '{word}.'" in caught.value.hint
    with pytest.raises(LoadFailed) as caught:
        load(stock_save(tmp_path / "plain", plain), {**wrapped}, partial=partial)
    assert f"the state's keys have '{word}.'" in caught.value.hint


def test_what_the_hint_for_a_wrapper_proposes_loads_the_model_in_place(tmp_path: Path) -> None:
    wrapped, model = Wrapped("_orig_mod"), nn.Linear(2, 2)
    path = stock_save(tmp_path / "wrapped", {"model": wrapped})
    named = {"_orig_mod." + key: value for key, value in model.state_dict().items()}
    load(path, {"model": named})
    assert torch.equal(wrapped._orig_mod.weight, model.weight)  # type: ignore[union-attr,arg-type]


def test_partial_names_a_wrapper_also_if_other_keys_match(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"model": Wrapped("_orig_mod"), "step": 3})
    with pytest.raises(LoadFailed, match="2 keys of the state under other names"):
        load(path, {"model": nn.Linear(2, 2), "step": 0}, partial=True)


# --- stateful objects, meta tensors, per-rank state ----------------------------------------------


class Recorder:
    """Remembers what it was handed."""

    def __init__(self, state: dict[Any, Any]) -> None:
        self.state = state
        self.handed: list[Any] = []

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.handed.append(state)


def test_stateful_objects_are_handed_what_was_loaded_once(tmp_path: Path) -> None:
    state = {3: torch.ones(2), "history": [1, 2], "late": {"x": 1}}
    path = stock_save(tmp_path / "stock", {"it": Recorder(state)})
    recorder = Recorder({3: torch.zeros(2), "history": [], "late": {}})
    load(path, {"it": recorder})
    assert 1 == len(recorder.handed)
    assert_equal(state, recorder.handed[0])


def test_a_model_on_the_meta_device_gets_memory_and_values(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    path = stock_save(tmp_path / "stock", {"model": model})
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    state = {"model": dict(empty.state_dict())}
    load(path, state)
    assert_equal(dict(model.state_dict()), state["model"])


def test_each_rank_gets_its_own_state_and_hears_of_the_others(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(1),
        **{f"per_rank/{rank}/rng": torch.tensor(rank) for rank in (0, 2, 11)},
        "per_rank/0/loader": {"at": [torch.ones(1), 5]},
    }
    path = stock_save(tmp_path / "stock", state)
    reports = on_ranks(3, lambda group: load(path, {"w": torch.zeros(1)}, group))
    assert_equal({"rng": torch.tensor(0), "loader": {"at": [torch.ones(1), 5]}}, own(reports[0]))
    assert {} == own(reports[1])
    assert_equal({"rng": torch.tensor(2)}, own(reports[2]))
    for report in reports:
        assert isinstance(report, LoadReport)
        assert ((11,), (1,)) == (report.unused_ranks, report.absent_ranks)
        assert () == report.unexpected
    asked = {"per_rank/11/rng": None}
    load(path, asked)
    assert_equal({"per_rank/11/rng": torch.tensor(11)}, asked)


def own(report: Any) -> Any:
    assert isinstance(report, LoadReport)
    return report.per_rank


# --- several ranks -------------------------------------------------------------------------------


def test_what_one_rank_refuses_no_rank_begins(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"w": torch.ones(2), "n": 1})

    def refused(states: list[dict[str, Any]]) -> list[Any]:
        return on_ranks(3, lambda group: load(path, states[group.rank], group))

    reasons: dict[str, dict[str, Any]] = {
        "lacks 1 of the keys that the state asks for: 'gone'": {"gone": 1},
        "is [2], wanted [3]": {"w": torch.zeros(3)},
        "the state_dict() of 'bad' raised KeyError: 'gone'": {"bad": Failing()},
    }
    for text, bad in reasons.items():
        for at in range(3):
            states: list[dict[str, Any]] = [{"w": torch.zeros(2)} for _ in range(3)]
            states[at] |= bad
            started_s = time.monotonic()
            told = refused(states)
            assert time.monotonic() - started_s < WAIT_S
            for error in told:
                assert isinstance(error, LoadFailed)
                assert f"rank {at}: " in error.message
                assert text in error.message
            assert not any(state["w"].any() for state in states)


def test_what_all_ranks_refuse_alike_is_said_once(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"w": torch.ones(2)})
    for error in on_ranks(2, lambda group: load(path, {"gone": 1}, group)):
        assert isinstance(error, LoadFailed)
        assert f"{path} lacks 1 of the keys" in error.message
        assert "rank " not in error.message


def test_damage_that_shows_while_reading_is_told_on_all_ranks(tmp_path: Path) -> None:
    path = stock_save(tmp_path / "stock", {"w": torch.ones(2000), "v": torch.ones(3)})
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:4000])

    def act(group: Group) -> Any:
        state = {"v": torch.zeros(3)} if group.rank else {"w": torch.zeros(2000)}
        return load(path, state, group, verify=False)

    for error in on_ranks(2, act):
        assert isinstance(error, CorruptCheckpoint)
        assert "rank 0: " in error.message
