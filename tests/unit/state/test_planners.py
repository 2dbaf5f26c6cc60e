"""The patterns of torch's SavePlanner documentation, over two ranks that are threads."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import HashStore
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from milepost.dcp_format.index import build_metadata, pickle_metadata
from milepost.errors import SaveFailed, UsageError
from milepost.link.rendezvous import Group
from milepost.staging.pinning import NoPinner
from milepost.staging.stager import Stager
from milepost.state.content import ContentReader
from milepost.state.fingerprint import fingerprint
from milepost.state.flattening import call_stateful
from milepost.state.planners import (
    FinalPlan,
    PlannerExchange,
    Resolved,
    is_default,
    make_final_offer,
    resolve,
    storage_meta_of,
    wants_lowest_rank,
)
from milepost.wire.messages import SaveRef
from milepost.wire.offers import Kind, Offer, decode_offer, encode_offer

State = dict[str, Any]
T = TypeVar("T")


class RenamePlanner(DefaultSavePlanner):
    def set_up_planner(self, state_dict: State, *rest: Any, **more: Any) -> None:
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, *rest, **more)


class Fp16Planner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        item = super().resolve_data(write_item)
        if write_item.type == WriteItemType.BYTE_IO:
            return item
        assert isinstance(item, torch.Tensor)
        return item.to(torch.float16)


class DDPLoadBalancingPlanner(DefaultSavePlanner):
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        iters = [iter(all_plans[0].items)] * len(all_plans)
        items_per_rank = [
            [item for item in items if item is not None]
            for items in zip(*zip_longest(*iters), strict=True)
        ]
        all_plans = [
            replace(plan, items=items)
            for plan, items in zip(all_plans, items_per_rank, strict=True)
        ]
        return super().create_global_plan(all_plans)


class SaveExtraDataPlanner(DefaultSavePlanner):
    extra = "per-rank-data"

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.own_mappings = plan.planner_data
        return replace(plan, planner_data={"extra": (self.extra,)})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        parts, metadata = super().create_global_plan(all_plans)
        merged = [p.planner_data["extra"][0] for p in parts]
        return parts, replace(metadata, planner_data={"merged": merged, "paths": self.mappings})


class NotingPlanner(DefaultSavePlanner):
    """Notes what it is told of the storage."""

    def set_up_planner(
        self,
        state_dict: State,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.noted = storage_meta
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class OldFormPlanner(DefaultSavePlanner):
    """Written before torch had `storage_meta`."""

    def set_up_planner(self, state_dict: State, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_planner(state_dict, None, is_coordinator)


def on_ranks(act: Callable[[int], T], world: int = 2) -> list[T | BaseException]:
    """Run `act` for each rank at the same time; return what each returned or raised."""

    def run(rank: int) -> T | BaseException:
        try:
            return act(rank)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


class Ranks:
    """Two ranks with a planner each, over one store."""

    def __init__(
        self, make: Callable[[int], SavePlanner], world: int = 2, timeout_s: float = 10.0
    ) -> None:
        self.store = HashStore()
        self.planners = [make(rank) for rank in range(world)]
        self.exchanges = [
            PlannerExchange(planner, rank=rank, world=world, store=self.store, timeout_s=timeout_s)
            for rank, planner in enumerate(self.planners)
        ]

    def plan(self, states: list[State], exchange_id: str) -> list[Any]:
        return on_ranks(
            lambda rank: self.exchanges[rank].plan(states[rank], exchange_id), len(states)
        )

    def save(self, states: list[State], exchange_id: str) -> list[tuple[FinalPlan, Resolved]]:
        finals = self.plan(states, exchange_id)
        for final in finals:
            if isinstance(final, BaseException):
                raise final
        return [
            (final, resolve(final.plan, planner))
            for final, planner in zip(finals, self.planners, strict=True)
        ]


def written(
    saved: list[tuple[FinalPlan, Resolved]],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, dict[int, Offer]]:
    """Stage what each rank resolved and put the images where a checkpoint has its files."""
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(folder))
    offers, assigned, files, objects = {}, {}, {}, {}
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    save = SaveRef(job="job", save_id="1-1", step=1, name="step_1")
    for rank, (final, resolved) in enumerate(saved):
        offers[rank] = make_final_offer(final, resolved)
        assert decode_offer(encode_offer(offers[rank])) == offers[rank]
        items = resolved.items
        assigned[rank] = list(range(len(items)))
        stager = Stager("job", 1, rank, pinner=NoPinner())
        stager.lay_out(items, assigned[rank], "layout", objects=resolved.objects)
        staged = stager.stage(stager.slots[0], save, items, objects=resolved.objects)
        files[rank] = f"__{rank}_0.distcp"
        objects[rank] = {item: (at, length) for item, at, length in staged.record.objects}
        image = staged.slot.image[: staged.record.image_bytes]
        (checkpoint / files[rank]).write_bytes(image)
        image.release()
        stager.close()
    metadata = build_metadata(offers, assigned, files, objects, "1-1", str(checkpoint))
    (checkpoint / ".metadata").write_bytes(pickle_metadata(metadata))
    return checkpoint, offers


def loaded(checkpoint: Path, template: State) -> State:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(template, checkpoint_id=checkpoint, no_dist=True)
    return template


def plain_state(value: float = 1.0) -> State:
    return {
        "model": {"a": torch.full((3, 2), value), "b": torch.full((4,), value + 1)},
        "c": torch.full((5,), value + 2),
        "step": 7,
    }


def test_keys_renamed_in_set_up_planner_are_what_stock_torch_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Ranks(lambda _: RenamePlanner()).save([plain_state()] * 2, "1")
    checkpoint, _ = written(saved, tmp_path, monkeypatch)
    template: State = {
        "foo_model": {"a": torch.zeros(3, 2)},
        "foo_step": 0,
        "foo_c": torch.zeros(5),
    }
    found = loaded(checkpoint, template)
    assert found["foo_model"]["a"].equal(torch.full((3, 2), 1.0))
    assert found["foo_c"].equal(torch.full((5,), 3.0))
    assert found["foo_step"] == 7


def test_a_cast_in_local_plan_and_resolve_is_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Ranks(lambda _: Fp16Planner()).save([plain_state()] * 2, "1")
    checkpoint, offers = written(saved, tmp_path, monkeypatch)
    assert {"float16", ""} == {dtype for offer in offers.values() for dtype in offer.dtypes}
    tensors = [item.source for _, r in saved for item in r.items if item.kind != Kind.OBJECT]
    assert sum(tensor.nbytes for tensor in tensors) == 2 * (6 + 4 + 5)
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    described = metadata.state_dict_metadata["c"]
    assert isinstance(described, TensorStorageMetadata)
    assert described.properties.dtype == torch.float16
    template = {"c": torch.zeros(5, dtype=torch.float16)}
    assert loaded(checkpoint, template)["c"].equal(torch.full((5,), 3.0, dtype=torch.float16))


def test_a_balance_made_in_create_global_plan_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Ranks(lambda _: DDPLoadBalancingPlanner()).save([plain_state()] * 2, "1")
    assert [["model.a", "c"], ["model.b", "step"]] == [r.items.keys for _, r in saved]
    checkpoint, offers = written(saved, tmp_path, monkeypatch)
    assert offers[0].final
    assert offers[0].metadata is not None
    assert offers[1].metadata is None
    template: State = {"model": {"a": torch.zeros(3, 2), "b": torch.zeros(4)}, "step": 0}
    found = loaded(checkpoint, template)
    assert found["model"]["b"].equal(torch.full((4,), 2.0))
    assert found["step"] == 7


def test_data_of_all_ranks_merged_by_the_planner_are_in_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Planner(SaveExtraDataPlanner):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.extra = f"of rank {rank}"

    saved = Ranks(Planner).save([plain_state()] * 2, "1")
    checkpoint, _ = written(saved, tmp_path, monkeypatch)
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    assert metadata.planner_data["merged"] == ["of rank 0", "of rank 1"]
    assert metadata.planner_data["paths"]["model.a"] == ("model", "a")


class CountingPlanner(DefaultSavePlanner):
    """Counts its global plans; resolves through the state of the last set-up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.global_plans = 0

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.global_plans += 1
        return super().create_global_plan(all_plans)


def values(saved: list[tuple[FinalPlan, Resolved]]) -> dict[str, float]:
    return {
        item.key: item.source.flatten()[0].item()
        for _, resolved in saved
        for item in resolved.items
        if item.kind != Kind.OBJECT
    }


def test_an_unchanged_plan_is_kept_and_resolves_current_tensors() -> None:
    ranks = Ranks(lambda _: CountingPlanner())
    prints = set()
    for round_ in range(3):
        saved = ranks.save([plain_state(float(round_))] * 2, f"save-{round_}")
        assert values(saved) == {"model.a": round_, "model.b": round_ + 1, "c": round_ + 2}
        prints.add(tuple(fingerprint(r.items, (f.plan_id,)) for f, r in saved))
        assert saved[0][0].metadata is not None
    assert 1 == ranks.planners[0].global_plans  # type: ignore[attr-defined]
    assert 1 == len(prints)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"a": torch.zeros(4, 2)}},
        {"model": {"a": torch.zeros(3, 2, dtype=torch.bfloat16)}},
        {"model": {"a": torch.zeros(3, 2)}, "extra": 1},
    ],
)
def test_a_change_on_one_rank_makes_all_ranks_plan_again(changed: State) -> None:
    """Rank-unique keys, so that any mixture is a valid plan."""
    ranks = Ranks(lambda _: CountingPlanner())
    state = {"model": {"a": torch.zeros(3, 2)}}
    ranks.save([{"r0": state}, {"r1": state}], "save-1")
    saved = ranks.save([{"r0": state}, {"r1": changed}], "save-2")
    assert 2 == ranks.planners[0].global_plans  # type: ignore[attr-defined]
    assert {"save-2"} == {final.plan_id for final, _ in saved}
    metadata = saved[0][0].metadata
    assert metadata is not None
    assert tuple(changed["model"]["a"].shape) == tuple(
        metadata.state_dict_metadata["r1.model.a"].size  # type: ignore[union-attr]
    )


def test_torchs_own_plan_cache_works_through_the_exchange() -> None:
    class Cached(CountingPlanner):
        pass

    ranks = Ranks(lambda _: Cached(enable_plan_caching=True), world=1)
    for round_ in range(3):
        saved = ranks.save([plain_state(float(round_))], f"save-{round_}")
        assert values(saved) == {"model.a": round_, "model.b": round_ + 1, "c": round_ + 2}
    (final,) = ranks.plan([{"other": torch.ones(1)}], "save-3")
    assert ["other"] == [item.index.fqn for item in final.plan.items]


class Failing(DefaultSavePlanner):
    """Raises in one step on one rank."""

    def __init__(self, step: str) -> None:
        super().__init__()
        if step:
            setattr(self, step, self.fail)

    def fail(self, *_: Any) -> Any:
        raise KeyError("broken planner")


@pytest.mark.parametrize(
    ("rank", "step"),
    [
        (1, "set_up_planner"),
        (1, "create_local_plan"),
        (0, "create_local_plan"),
        (0, "create_global_plan"),
        (1, "finish_plan"),
    ],
)
def test_an_exception_on_one_rank_fails_the_save_on_all_by_name(rank: int, step: str) -> None:
    ranks = Ranks(lambda r: Failing(step if r == rank else ""))
    results = ranks.plan([plain_state()] * 2, "1")
    for error in results:
        assert isinstance(error, SaveFailed)
        assert "planner-failed" == error.code
        assert f"rank {rank}, " in error.message
        assert "KeyError: 'broken planner'" in error.message
    for planner in ranks.planners:
        with suppress(AttributeError):
            delattr(planner, step)
    saved = ranks.save([plain_state()] * 2, "2")
    assert {"model.a", "model.b", "c"} == set(values(saved))


def test_a_local_plan_that_cannot_travel_fails_the_save_on_all() -> None:
    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            return replace(super().create_local_plan(), planner_data=lambda: None)

    for error in Ranks(lambda _: Planner()).plan([plain_state()] * 2, "1"):
        assert isinstance(error, SaveFailed)
        assert "rank 1, sending its local plan, raised" in error.message


def test_a_missing_rank_is_named_on_all_that_came() -> None:
    ranks = Ranks(lambda _: DefaultSavePlanner(), world=3, timeout_s=0.05)
    for error in on_ranks(lambda r: ranks.exchanges[r].plan(plain_state(), "1"), world=2):
        assert isinstance(error, SaveFailed)
        assert "rank-missing" == error.code
        assert "nothing came from rank 2 within" in error.message


def test_a_rank_that_refuses_fails_the_save_on_the_others_by_name() -> None:
    ranks = Ranks(lambda _: DefaultSavePlanner())

    def act(rank: int) -> None:
        if rank:
            ranks.exchanges[rank].refuse("1", "its state is no dict")
        else:
            ranks.exchanges[rank].plan(plain_state(), "1")

    error, nothing = on_ranks(act)
    assert isinstance(error, SaveFailed)
    assert "rank 1, its state is no dict" in error.message
    assert nothing is None


def test_a_missing_rank_0_is_named() -> None:
    ranks = Ranks(lambda _: DefaultSavePlanner(), timeout_s=0.02)
    with pytest.raises(SaveFailed, match="nothing came from rank 0 within") as caught:
        ranks.exchanges[1].plan(plain_state(), "1")
    assert "rank-missing" == caught.value.code


def test_the_store_does_not_grow_with_saves() -> None:
    ranks = Ranks(lambda _: DefaultSavePlanner())
    counts = []
    for round_ in range(4):
        state = {"a": torch.zeros(1 + round_ // 2)}
        ranks.save([state] * 2, f"save-{round_}")
        counts.append(ranks.store.num_keys())
    assert [1] * 4 == counts


def test_a_wrong_result_of_resolve_data_is_refused_by_key() -> None:
    class Planner(DefaultSavePlanner):
        answer: Any = None

        def resolve_data(self, write_item: WriteItem) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    planner = Planner()
    final = PlannerExchange(planner, rank=0, world=1).plan({"a": torch.zeros(1)}, "1")
    for planner.answer in ("text", io.BytesIO(), ValueError("no")):
        with pytest.raises(SaveFailed, match="'a'") as caught:
            resolve(final.plan, planner)
        assert "planner-failed" == caught.value.code
    planner.answer = torch.zeros(1, device="meta")
    with pytest.raises(UsageError, match="unsupported-tensor"):
        resolve(final.plan, planner)


def test_planner_data_that_is_not_plain_is_refused() -> None:
    class Planner(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            plans, metadata = super().create_global_plan(all_plans)
            return plans, replace(metadata, planner_data={1, 2})

    planner = Planner()
    final = PlannerExchange(planner, rank=0, world=1).plan({"a": torch.zeros(1)}, "1")
    with pytest.raises(UsageError, match="planner_data"):
        make_final_offer(final, resolve(final.plan, planner))


def test_only_an_unmodified_default_planner_is_left_out() -> None:
    assert is_default(None)
    assert is_default(DefaultSavePlanner())
    assert is_default(DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    assert not is_default(DefaultSavePlanner(flatten_state_dict=False))
    assert not is_default(DefaultSavePlanner(flatten_sharded_tensors=False))
    assert not is_default(RenamePlanner())
    assert wants_lowest_rank(DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    assert not wants_lowest_rank(DefaultSavePlanner())
    assert not wants_lowest_rank(None)


def test_planners_get_the_state_with_stateful_entries_called() -> None:
    model = nn.Linear(2, 1)
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    state = call_stateful({"model": model})
    final = PlannerExchange(planner, rank=0, world=1).plan(state, "1")
    resolved = resolve(final.plan, planner)
    assert ["model.weight", "model.bias"] == resolved.items.keys
    assert resolved.items.sources[0].data_ptr() == model.weight.data_ptr()


def test_a_planner_is_told_where_the_save_goes_as_stock_s_is(tmp_path: Path) -> None:
    planner = NotingPlanner()
    reader = ContentReader(planner, Group(0, 1, None), 9.0)
    for count in (1, 2):
        meta = storage_meta_of(f"/root/step_{count}", f"1-{count}")
        reader.read(f"1-{count}", {"w": torch.ones(2)}, None, lambda: None, meta)
        assert StorageMeta(f"/root/step_{count}", f"1-{count}") == planner.noted
    stock = NotingPlanner()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns of what `no_dist` asks for.
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=stock, no_dist=True)
    assert stock.noted is not None
    assert planner.noted is not None
    # Fields that only a load fills are as empty there.
    assert {name for name, value in vars(stock.noted).items() if value is not None} == {
        name for name, value in vars(planner.noted).items() if value is not None
    }


def test_a_planner_of_the_older_form_is_called_without_it() -> None:
    reader = ContentReader(OldFormPlanner(), Group(0, 1, None), 9.0)
    content = reader.read("1-1", {"w": torch.ones(2)}, None, lambda: None)
    assert content.final is not None
    assert ["w"] == [item.index.fqn for item in content.final.plan.items]
