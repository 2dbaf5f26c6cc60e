"""From a state to items: torch's own flattening and planning are the judges."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from milepost.errors import UsageError
from milepost.state.boxes import BOXES_MAX, local_boxes
from milepost.state.flattening import call_stateful, flatten, with_per_rank
from milepost.state.items import (
    Fingerprints,
    Items,
    collect,
    fingerprint,
    make_offer,
    serialise_objects,
)
from milepost.wire.offers import Kind, decode_offer, encode_offer

U4: torch.dtype = vars(torch)["uint4"]


def items_of(state: dict[Any, Any]) -> Items:
    return collect(*flatten(state))


def refusal(state: dict[Any, Any]) -> str:
    with pytest.raises(UsageError) as caught:
        items_of(state)
    assert caught.value.code == "unsupported-tensor"
    return caught.value.message


remembering = Fingerprints()


def fingerprint_of(state: dict[Any, Any], *extra: Any) -> str:
    items = items_of(state)
    found = fingerprint(items, extra)
    # Whatever it was asked before, and once more.
    assert [remembering.take(items, extra) for _ in range(2)] == [found, found]
    return found


# --- flattening ---------------------------------------------------------------------------------

LEAVES = st.sampled_from(
    [torch.zeros(2), None, 1, "text", b"bytes", (torch.zeros(1), {"in": "tuple"}), {1, 2}, 2.5]
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "a.b", 0, 1]), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2).map(OrderedDict)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["m", "o", "m.a", 0, "0"]), NESTED, max_size=4))
def test_flattening_gives_the_keys_paths_and_values_that_torch_gives(state: dict[Any, Any]) -> None:
    try:
        expected, expected_paths = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(UsageError, match="key-collision"):
            flatten(state)
        return
    flat, paths = flatten(state)
    assert list(expected_paths.items()) == list(paths.items())
    assert [(key, id(value)) for key, value in expected.items()] == [
        (key, id(value)) for key, value in flat.items()
    ]


@pytest.mark.parametrize(
    ("state", "first", "second"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "'a.b'", "'a' / 'b'"),
        ({"x": [torch.zeros(1)], "x.0": 1}, "'x' / 0", "'x.0'"),
        ({0: 1, "0": 2}, "0", "'0'"),
    ],
)
def test_two_entries_under_one_key_are_refused_with_both_paths(
    state: dict[Any, Any], first: str, second: str
) -> None:
    with pytest.raises(UsageError) as caught:
        flatten(state)
    assert caught.value.code == "key-collision"
    assert f"the entries {first} and {second} of the state" in caught.value.message


def test_odd_keys_are_kept_as_they_are() -> None:
    keys = ["", " ", "a/b", "new\nline", "größe", "雪", "k" * 4000]
    assert keys == list(flatten(dict.fromkeys(keys, 1))[0])


def test_mappings_that_are_no_dicts_are_taken_apart() -> None:
    assert list(flatten({"m": MappingProxyType({"a": 1})})[0]) == ["m.a"]


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(UsageError, match="contains itself"):
        flatten(state)


def test_a_state_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(UsageError, match="the state is a Linear"):
        flatten(nn.Linear(1, 1))  # type: ignore[arg-type]


class Inner:
    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_only_stateful_entries_of_the_top_level_are_called_as_in_torch() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    nested = Inner({"deep": 1})
    state: dict[Any, Any] = {
        "m": model,
        "o": optimizer,
        "own": Inner({"i": nested}),
        "dict": {"n": nested},
        3: 4,
    }
    expected = flatten_state_dict(_stateful_to_state_dict(state))[0]
    flat = flatten(state)[0]
    assert list(expected) == list(flat)
    assert nested is flat["own.i"]
    assert nested is flat["dict.n"]
    assert 3 in call_stateful(state)


def test_flattening_leaves_no_reference_to_the_state_behind() -> None:
    tensor = torch.zeros(2)
    gone = weakref.ref(tensor)
    gc.disable()
    try:
        items = items_of({"a": {"b": [tensor]}})
        assert len(items) == 1
        del tensor, items
        assert gone() is None
    finally:
        gc.enable()


def test_state_of_one_rank_goes_under_one_top_level_name() -> None:
    state = with_per_rank({"a": 1}, {"rng": {"cpu": [torch.zeros(1)]}, "n": 2}, 3)
    _, paths = flatten(state)
    assert paths == {
        "a": ("a",),
        "per_rank/3/rng.cpu.0": ("per_rank/3/rng", "cpu", 0),
        "per_rank/3/n": ("per_rank/3/n",),
    }


@pytest.mark.parametrize(("state", "own"), [({"per_rank/0/n": 1}, {"n": 2}), ({}, {0: 1, "0": 2})])
def test_state_of_one_rank_never_replaces_another_entry(
    state: dict[Any, Any], own: dict[Any, Any]
) -> None:
    with pytest.raises(UsageError, match="key-collision"):
        with_per_rank(state, own, 0)


# --- boxes --------------------------------------------------------------------------------------

PLACEMENTS: list[Placement] = [
    Replicate(),
    Shard(0),
    Shard(1),
    _StridedShard(0, split_factor=2),
    _StridedShard(0, split_factor=3),
    _StridedShard(1, split_factor=2),
]


def torch_shard(
    whole: torch.Tensor, mesh: tuple[int, ...], place: tuple[int, ...], cuts: tuple[Placement, ...]
) -> torch.Tensor:
    """Return a rank's part as distribute_tensor makes it: split by each mesh dimension in turn."""
    for parts, index, cut in zip(mesh, place, cuts, strict=True):
        if isinstance(cut, Shard | _StridedShard):
            shards, _ = cut._split_tensor(whole, parts, with_padding=False)
            whole = shards[index]
    return whole


@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (5, 7), (6, 4), (8, 8), (0, 3)])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (4, 1), (3,), (2, 2, 2)])
def test_boxes_of_every_rank_hold_what_torch_gave_it(
    shape: tuple[int, int], mesh: tuple[int, ...]
) -> None:
    """All placements over small meshes: each local element lies where its box says."""
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    options = PLACEMENTS if len(mesh) < 3 else PLACEMENTS[1:4]
    for cuts in itertools.product(options, repeat=len(mesh)):
        for place in itertools.product(*map(range, mesh)):
            local = torch_shard(whole, mesh, place, cuts)
            splits: dict[int, list[tuple[int, int, int]]] = {}
            for parts, index, cut in zip(mesh, place, cuts, strict=True):
                if isinstance(cut, Shard | _StridedShard):
                    factor = getattr(cut, "split_factor", 1)
                    splits.setdefault(cut.dim, []).append((parts, index, factor))
            seen = torch.zeros_like(local)
            for box in local_boxes(shape, splits):
                there = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                here = tuple(
                    slice(o, o + n) for o, n in zip(box.local_offsets, box.sizes, strict=True)
                )
                assert whole[there].equal(local[here]), (cuts, place, box)
                assert box.sizes == tuple(local[here].shape)
                seen[here] += 1
            assert bool((seen == 1).all()), (cuts, place)


@pytest.mark.parametrize("size", [1, 3, 6, 7])
def test_plain_shards_are_the_box_that_torch_reports_empty_ones_too(size: int) -> None:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for place in itertools.product(range(2), range(3)):
        cuts = (Shard(0), Shard(1))
        sizes, offsets = _compute_local_shape_and_global_offset(
            (size, size), (2, 3), list(place), cuts
        )
        (box,) = local_boxes((size, size), {0: [(2, place[0], 1)], 1: [(3, place[1], 1)]})
        assert (offsets, sizes) == (box.offsets, box.sizes)


def test_a_shard_in_too_many_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="separate boxes"):
        local_boxes((4 * BOXES_MAX,), {0: [(2, 0, 2 * BOXES_MAX)]})


# --- items --------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A 2 x 2 mesh seen from rank 1, without any other process."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2, 2))
    finally:
        dist.destroy_process_group()


def distribute(tensor: torch.Tensor, mesh: DeviceMesh, cuts: list[Placement]) -> DTensor:
    return distribute_tensor(tensor, mesh, cuts, src_data_rank=None)


def assert_as_torch_plans(state: dict[str, Any]) -> None:
    """Compare with stock's local plan: same keys, kinds, boxes, dtypes and data."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, True)
    kinds = {
        WriteItemType.TENSOR: Kind.TENSOR,
        WriteItemType.SHARD: Kind.SHARD,
        WriteItemType.BYTE_IO: Kind.OBJECT,
    }
    expected = planner.create_local_plan().items
    items = items_of(state)
    assert [(each.index.fqn, kinds[each.type]) for each in expected] == [
        (item.key, item.kind) for item in items
    ]
    for planned, item in zip(expected, items, strict=True):
        assert planner.mappings[item.key] == item.path
        if planned.tensor_data is not None:
            data = planned.tensor_data
            assert tuple(data.chunk.offsets) == item.offsets
            assert tuple(data.chunk.sizes) == item.sizes == tuple(item.source.shape)
            assert tuple(data.size) == item.global_size
            assert data.properties.dtype == item.dtype == item.source.dtype
            assert data.properties.requires_grad == item.requires_grad
            assert data.properties.pin_memory == item.pinned
            resolved = planner.resolve_data(planned)
            assert isinstance(resolved, torch.Tensor)
            assert resolved.equal(item.source)


def test_plain_tensors_and_objects_are_the_items_of_torchs_planner() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}
    assert_as_torch_plans(
        {**state, "p": model.weight, "empty": torch.zeros(0, 3), "t": torch.rand(4, 5).t()}
    )


@pytest.mark.parametrize("shape", [(4, 4), (5, 7), (1, 3), (3, 3), (0, 2), (7, 1)])
def test_dtensors_are_the_items_of_torchs_planner(mesh: DeviceMesh, shape: tuple[int, int]) -> None:
    tensor = torch.rand(shape)
    plans: list[list[Placement]] = [
        [Shard(0), Shard(1)],
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
        [Shard(0), Shard(0)],
    ]
    state = {str(at): distribute(tensor, mesh, plan) for at, plan in enumerate(plans)}
    assert_as_torch_plans({**state, "p": nn.Parameter(distribute(tensor, mesh, plans[0]))})


def test_ranks_outside_a_tensors_mesh_have_no_item_of_it(mesh: DeviceMesh) -> None:
    elsewhere = DeviceMesh("cpu", [2, 3], _init_backend=False)
    tensor = DTensor.from_local(torch.rand(0), elsewhere, [Shard(0)], run_check=False)
    assert items_of({"there": tensor, "here": torch.zeros(1)}).keys == ["here"]


@pytest.mark.parametrize("cuts", [[Shard(0), _StridedShard(0, split_factor=2)]])
@pytest.mark.parametrize("shape", [(8, 3), (7, 2)])
def test_a_strided_shard_becomes_boxes_that_hold_the_right_rows(
    mesh: DeviceMesh, shape: tuple[int, int], cuts: list[Placement]
) -> None:
    """Torch's own helper gives one box for it, and a wrong one."""
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    local = torch_shard(whole, (2, 2), (0, 1), tuple(cuts))
    tensor = DTensor.from_local(
        local, mesh, cuts, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    items = items_of({"w": tensor})
    assert len(items) > 1
    assert local.numel() == sum(source.numel() for source in items.sources)
    for at in range(len(items)):
        item = items[at]
        there = tuple(slice(o, o + n) for o, n in zip(item.offsets, item.sizes, strict=True))
        assert whole[there].equal(item.source)
        assert item.source.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def test_every_local_shard_of_a_sharded_tensor_is_an_item() -> None:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        shards = [
            LocalShard(
                torch.rand(2, 3),
                ShardMetadata(shard_offsets=[at, 0], shard_sizes=[2, 3], placement="rank:0/cpu"),
            )
            for at in (0, 2)
        ]
        metadata = ShardedTensorMetadata(
            [shard.metadata for shard in shards], torch.Size((4, 3)), TensorProperties()
        )
        tensor = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)
        assert_as_torch_plans({"s": tensor})
    finally:
        dist.destroy_process_group()


def test_a_tensor_that_declares_its_shards_is_believed(mesh: DeviceMesh) -> None:
    parts = [torch.rand(2, 3), torch.rand(2, 1)]
    tensor = distribute(torch.zeros(4, 4), mesh, [Replicate(), Replicate()])
    tensor._local_tensor = LocalShardsWrapper(parts, [(2, 0), (2, 3)])
    items = items_of({"w": tensor})
    assert [(items[at].offsets, items[at].sizes) for at in range(len(items))] == [
        ((2, 0), (2, 3)),
        ((2, 3), (2, 1)),
    ]
    assert all(a is b for a, b in zip(parts, items.sources, strict=True))


class WithoutDispatch(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such operation here")


def test_a_subclass_with_storage_of_its_own_is_read_as_its_plain_tensor() -> None:
    tensor = torch.rand(3).as_subclass(WithoutDispatch)
    (source,) = items_of({"t": tensor}).sources
    assert torch.Tensor is type(source)
    assert torch.Tensor.data_ptr(source) == source.data_ptr()


class Wrapper(torch.Tensor):
    """A subclass without storage: inner data and a scale, as low-bit formats have."""

    payload: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape)
        made.payload = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(f"{func} is not implemented")


def test_a_wrapper_subclass_is_refused_by_key_and_class() -> None:
    message = refusal({"deep": {"w": Wrapper(torch.zeros(3, dtype=torch.int8))}})
    assert "'deep.w': it is a Wrapper" in message


def test_a_wrapper_subclass_inside_a_dtensor_is_refused(mesh: DeviceMesh) -> None:
    tensor = distribute(torch.zeros(2, 2), mesh, [Replicate(), Replicate()])
    tensor._local_tensor = Wrapper(torch.zeros(2, 2))
    assert "'d': it is a Wrapper" in refusal({"d": tensor})


def freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(3, device="meta"), "meta device"),
        (lambda: torch.eye(3).to_sparse(), "layout is torch.sparse_coo"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout is torch.sparse_csr"),
        (lambda: torch.nested.nested_tensor([torch.zeros(1)], layout=torch.jagged), "NestedTensor"),
        (nn.UninitializedParameter, "UninitializedParameter; run the model once"),
        (nn.UninitializedBuffer, "UninitializedBuffer; run the model once"),
        (freed, "storage was freed"),
        (lambda: torch.zeros(2, dtype=torch.int8).view(U4), "uint4"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_plain_values_are_refused_by_key(make: Any, why: str) -> None:
    message = refusal({"good": torch.zeros(1), "bad": make()})
    assert message.startswith("1 entry of the state cannot be stored exactly: 'bad': ")
    assert why in message


def test_sums_not_yet_reduced_are_refused(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.zeros(2), mesh, [Partial(), Replicate()], run_check=False)
    message = refusal({"grad": tensor})
    assert "'grad': it is placed as Partial(sum), values not yet reduced" in message


def test_a_local_part_of_another_shape_than_placed_is_refused(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(
        torch.zeros(3, 2),
        mesh,
        [Shard(0), Replicate()],
        run_check=False,
        shape=torch.Size((4, 2)),
        stride=(2, 1),
    )
    assert "has the shape (3, 2) where its placement says (2, 2)" in refusal({"d": tensor})


def test_all_faults_are_listed_up_to_ten() -> None:
    message = refusal({f"bad{at:02}": torch.zeros(1, device="meta") for at in range(12)})
    assert message.startswith("12 entries of the state cannot be stored exactly: 'bad00': ")
    assert "'bad09'" in message
    assert "'bad10'" not in message
    assert message.endswith("; and 2 more")


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensors_go_as_objects_without_the_storage_around_them() -> None:
    whole = torch.quantize_per_tensor(torch.rand(100_000), 0.1, 3, torch.quint8)
    items = items_of({"q": whole[5:15]})
    assert items.kinds[0] == Kind.OBJECT
    data = serialise_objects(items)[0]
    assert len(data) < 4096


# --- fingerprint --------------------------------------------------------------------------------


def test_a_fingerprint_ignores_values_and_objects_but_no_part_of_the_structure() -> None:
    base = {"a": torch.zeros(2, 3), "o": 1}
    same = fingerprint_of({"a": torch.ones(3, 2).t(), "o": "another object"})
    assert fingerprint_of(base) == same
    others = [
        fingerprint_of({"b": torch.zeros(2, 3), "o": 1}),
        fingerprint_of({"a": torch.zeros(3, 2), "o": 1}),
        fingerprint_of({"a": torch.zeros(2, 3, dtype=torch.float64), "o": 1}),
        fingerprint_of({"o": 1, "a": torch.zeros(2, 3)}),
        fingerprint_of({"a": 1, "o": 1}),
        fingerprint_of({"a": torch.zeros(2, 3)}),
        fingerprint_of(base, 2),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_a_fingerprint_tells_placements_and_coordinates_with_equal_boxes_apart(
    mesh: DeviceMesh,
) -> None:
    whole = torch.zeros(1, 2)
    plans: list[list[Placement]] = [
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
    ]
    prints = [fingerprint_of({"w": distribute(whole, mesh, plan)}) for plan in plans]
    boxes = [items_of({"w": distribute(whole, mesh, plan)})[0].sizes for plan in plans]
    assert boxes[0] == boxes[1]
    assert prints[0] != prints[1]
    assert fingerprint_of({"w": whole}) not in prints


def test_an_interrupt_gives_no_structure_the_name_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = items_of({"a": torch.zeros(2)}), items_of({"b": torch.zeros(2)})
    prints = Fingerprints()
    prints.take(one, ())

    def interrupted(structure: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("milepost.state.items._hashed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prints.take(two, ())
    assert fingerprint(one) == prints.take(one, ())
    assert fingerprint(two) == prints.take(two, ())


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    script = (
        "import torch; from milepost.state.items import *;"
        "from milepost.state.flattening import flatten;"
        "print(fingerprint(collect(*flatten({'a': torch.zeros(2), 'b': {'c': 1}})), (4, 'x')))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert other == fingerprint_of({"a": torch.zeros(2), "b": {"c": 1}}, 4, "x")


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        fingerprint_of({"\ud800": torch.zeros(1)})


# --- offer --------------------------------------------------------------------------------------


def test_an_offer_describes_every_item_and_survives_the_wire(mesh: DeviceMesh) -> None:
    state = {
        "w": nn.Parameter(torch.rand(2, 3)),
        "s": distribute(torch.rand(4, 4), mesh, [Shard(0), Shard(1)]),
        "o": {"deep": "object"},
    }
    items = items_of(state)
    offer = make_offer(items, serialise_objects(items))
    assert offer == decode_offer(encode_offer(offer))
    assert offer.keys == ("w", "s", "o.deep")
    assert offer.dtypes == ("float32", "float32", "")
    assert offer.global_sizes == ((2, 3), (4, 4), ())
    assert offer.offsets == ((0, 0), (0, 2), ())
    assert offer.sizes == ((2, 3), (2, 2), ())
    assert bytes([1, 0, 0]) == offer.requires_grad
    assert offer.paths == (("w",), ("s",), ("o", "deep"))
    assert offer.container_bytes[0] > 24
    assert offer.container_bytes[2] == 0
    assert offer.digests[1] == -1


def test_digests_are_equal_exactly_for_replicas_with_equal_content() -> None:
    def digests(state: dict[str, Any]) -> tuple[int, ...]:
        items = items_of(state)
        return make_offer(items, serialise_objects(items)).digests

    values = torch.arange(6.0).view(2, 3)
    base = digests({"t": values, "o": [1], "big": torch.zeros(20_000)})
    assert base == digests({"t": values.t().contiguous().t(), "o": [1], "big": torch.ones(20_000)})
    assert base[2] == -1
    other = digests({"t": values + 1, "o": [2], "big": torch.zeros(20_000)})
    assert base[0] != other[0]
    assert base[1] != other[1]
    assert {-1} == set(make_offer(items_of({"t": values}), {}, with_digests=False).digests)
