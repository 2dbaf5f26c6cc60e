"""Images as torch.load reads them, and the life of arenas and pinned ranges."""

from __future__ import annotations

import io
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from milepost.dcp_format import container
from milepost.dcp_format.index import build_metadata, pickle_metadata
from milepost.errors import Rejected, SaveFailed, UsageError
from milepost.format.layout import PAGE_BYTES, SMALL_ALIGN_BYTES, align, unpack_table
from milepost.memory.arena import Arena, SlotState
from milepost.staging.pinning import NoPinner, default_pinner
from milepost.staging.stager import StagedImage, Stager
from milepost.state.collecting import collect
from milepost.state.flattening import flatten
from milepost.state.items import Items
from milepost.state.offering import make_offer, serialise_objects
from milepost.wire.messages import SaveRef

SAVE = SaveRef(job="job", save_id="1-1", step=7, name="step_7")

MakeStager = Callable[..., Stager]


class CountingPinner:
    """Stands for the driver's table of pinned ranges; refuses what the driver refuses."""

    def __init__(self, problem: str = "") -> None:
        self.ranges: dict[int, int] = {}
        self.registered = 0
        self.unregistered = 0
        self.problem = problem

    def register(self, address: int, nbytes: int) -> str:
        if self.problem:
            return self.problem
        assert nbytes > 0
        assert all(
            address + nbytes <= start or start + length <= address
            for start, length in self.ranges.items()
        )
        self.registered += 1
        self.ranges[address] = nbytes
        return ""

    def unregister(self, address: int) -> None:
        # Still mapped: after munmap the kernel would not list it.
        maps = Path("/proc/self/maps").read_text().splitlines()
        spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
        assert any(start <= address < end for start, end in spans)
        del self.ranges[address]
        self.unregistered += 1


@pytest.fixture
def stager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStager]:
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(tmp_path))
    made: list[Stager] = []

    def make(**options: Any) -> Stager:
        options.setdefault("pinner", NoPinner())
        made.append(Stager("job", 1, 3, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert list(tmp_path.iterdir()) == []


def items_of(state: dict[str, Any]) -> Items:
    return collect(*flatten(state))


def lay_out(stager: Stager, items: Items, layout_id: str = "layout") -> None:
    stager.lay_out(items, range(len(items)), layout_id)


def saved(stager: Stager, state: dict[str, Any], layout_id: str = "layout") -> StagedImage:
    """Stage a state, all of it, into the first free slot."""
    items = items_of(state)
    lay_out(stager, items, layout_id)
    return stager.stage(stager.free_slots()[0], SAVE, items)


def content(staged: StagedImage, items: Items) -> dict[str, Any]:
    """Read an image as another process would: the arena's file, its table, and torch.load."""
    arena = Arena.open(staged.arena)
    try:
        slot = arena.slots[staged.slot.index]
        record = slot.record()
        image = bytes(slot.image)
        found = {}
        for row in unpack_table(arena.table):
            blob = image[row.blob_at : row.blob_at + row.blob_bytes]
            found[items.keys[row.item]] = torch.load(io.BytesIO(blob), weights_only=True)
            assert row.payload_at % SMALL_ALIGN_BYTES == 0
            assert row.blob_at + row.blob_bytes <= record.image_bytes
        for item, at, length in record.objects:
            assert at % SMALL_ALIGN_BYTES == 0
            blob = image[at : at + length]
            found[items.keys[item]] = torch.load(io.BytesIO(blob), weights_only=False)
        return found
    finally:
        arena.close()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def bits(tensor: torch.Tensor) -> bytes:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten()
        return bytes(plain.view(torch.uint8).tolist()) if plain.numel() else b""

    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).view(4, 6)
    complex_base = torch.complex(base, -base)
    nans = torch.tensor([0x7FA00001, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32)
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "transposed": base.t(),
        "strided": torch.arange(30.0)[::3],
        "expanded": torch.ones(3, 1).expand(3, 5),
        "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": complex_base.conj(),
        "neg": complex_base.conj().imag,
        "real": complex_base.real,
        "bytes_of_float": base.view(torch.uint8),
        "small_view": torch.rand(1_000_000)[500:510],
        "nan_bits": nans,
        "parameter": nn.Parameter(torch.rand(3, 2)),
        "many_dims": torch.rand([1] * 10 + [2]),
    }


@pytest.mark.parametrize("gathered_on", [(), ("cpu",)], ids=["single", "gathered"])
def test_views_and_odd_tensors_are_read_back_bit_for_bit(
    stager: MakeStager, gathered_on: tuple[str, ...]
) -> None:
    state = odd_tensors()
    items = items_of(state)
    found = content(saved(stager(gathered_on=gathered_on), state), items)
    assert sorted(state) == sorted(found)
    for key, tensor in state.items():
        assert same_bits(tensor, found[key]), key
        assert found[key].untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_every_storable_dtype_is_read_back_bit_for_bit(stager: MakeStager) -> None:
    state = {}
    for dtype in {value for value in vars(torch).values() if isinstance(value, torch.dtype)}:
        try:
            name = container.dtype_name(dtype)
        except UsageError:
            continue
        pattern = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (
            2 if name == "bool" else 251
        )
        state[name] = pattern.view(dtype).view(3, 2).t()
    assert len(state) >= 20
    items = items_of(state)
    found = content(saved(stager(), state), items)
    for name, tensor in state.items():
        assert same_bits(tensor, found[name]), name


def test_objects_are_read_back_and_only_assigned_items_are_in_the_image(
    stager: MakeStager,
) -> None:
    state = {"a": torch.ones(2), "o": {"x": 1, "y": "two"}, "b": torch.zeros(3), "p": [1, 2]}
    items = items_of(state)
    one = stager()
    one.lay_out(items, [1, 3, 4], "layout")
    staged = one.stage(one.free_slots()[0], SAVE, items)
    found = content(staged, items)
    assert sorted(found) == ["b", "o.x", "p"]
    assert found["o.x"] == 1
    assert found["p"] == [1, 2]
    record = staged.record
    assert (
        record.job,
        record.save_id,
        record.step,
        record.name,
        record.rank,
        record.layout_id,
    ) == ("job", "1-1", 7, "step_7", 3, "layout")
    assert SlotState.STAGED is staged.slot.state


def test_a_rank_with_nothing_to_write_stages_an_empty_image(stager: MakeStager) -> None:
    one = stager()
    items = items_of({"a": torch.ones(2)})
    one.lay_out(items, [], "layout")
    one.fault_in()
    staged = one.stage(one.free_slots()[0], SAVE, items)
    assert staged.record.image_bytes == 0


def test_changes_after_staging_do_not_reach_the_image(stager: MakeStager) -> None:
    tensors = {
        "parameter": nn.Parameter(torch.ones(3)),
        "shared": torch.ones(3).share_memory_(),  # type: ignore[no-untyped-call]
        "step": torch.tensor(1.0),
    }
    items = items_of(tensors)
    staged = saved(stager(), dict(tensors))
    assert not tensors["step"].is_shared()
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(1)
    assert all(bool((tensor == 1).all()) for tensor in content(staged, items).values())


def test_replaced_storages_are_seen_by_the_next_save(stager: MakeStager) -> None:
    parameter = nn.Parameter(torch.zeros(4))
    one = stager(slots=3)
    values = []
    for value in range(3):
        if value == 1:
            parameter.data = parameter.data.clone().add_(1)
        elif value == 2:
            with torch.no_grad():
                parameter.add_(1)
        staged = saved(one, {"p": parameter})
        values.append(content(staged, items_of({"p": parameter}))["p"][0].item())
    assert values == [0.0, 1.0, 2.0]
    assert len(one.arenas) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.zeros(1), "o": 1},
        {"a": torch.zeros(2, dtype=torch.float64), "o": 1},
        {"a": "text", "o": 1},
        {"a": torch.zeros(2), "o": torch.zeros(1)},
        {"a": torch.zeros(2)},
    ],
)
def test_a_state_of_another_structure_is_never_broadcast_into_a_layout(
    stager: MakeStager, changed: dict[str, Any]
) -> None:
    one = stager()
    lay_out(one, items_of({"a": torch.zeros(2), "o": 1}))
    slot = one.free_slots()[0]
    with pytest.raises(SaveFailed) as caught:
        one.stage(slot, SAVE, items_of(changed))
    assert caught.value.code == "structure-changed"
    assert SlotState.FREE is slot.state


def test_an_object_that_cannot_be_pickled_leaves_the_slot_free(stager: MakeStager) -> None:
    one = stager()
    lay_out(one, items_of({"o": 1}))
    slot = one.free_slots()[0]
    with pytest.raises(UsageError, match="'o'") as caught:
        one.stage(slot, SAVE, items_of({"o": threading.Lock()}))
    assert caught.value.code == "unpicklable"
    assert SlotState.FREE is slot.state


def test_objects_serialised_before_are_staged_as_they_are(stager: MakeStager) -> None:
    changing = [1]
    items = items_of({"o": changing})
    objects = serialise_objects(items)
    changing.append(2)
    one = stager()
    one.lay_out(items, [0], "layout", objects=objects)
    staged = one.stage(one.free_slots()[0], SAVE, items, objects=objects)
    assert content(staged, items)["o"] == [1]


def test_growing_objects_get_a_larger_arena_and_the_old_one_goes(
    stager: MakeStager, tmp_path: Path
) -> None:
    one = stager()
    first = saved(one, {"a": torch.ones(2), "o": "short"})
    grown = {"a": torch.ones(2), "o": "x" * (1 << 20)}
    second = saved(one, grown)
    assert grown["o"] == content(second, items_of(grown))["o"]
    assert bool((content(second, items_of(grown))["a"] == 1).all())
    # What the daemon still has to write stays readable under its name until its slot is free.
    assert content(first, items_of(grown))["o"] == "short"
    assert len(list(tmp_path.iterdir())) == 2
    first.slot.release()
    assert len(one.free_slots()) == 1
    assert [second.arena] == list(tmp_path.iterdir())


def test_the_memory_of_an_arena_that_is_no_longer_needed_is_free_though_the_daemon_maps_it(
    stager: MakeStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where arenas lie in earnest: other file systems need not give single pages back.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        monkeypatch.setenv("MILEPOST_SHM_DIR", memory)
        one = stager()
        first = saved(one, {"a": torch.ones(1 << 20)}, "first")
        daemon = Arena.open(first.arena)
        with first.arena.open("rb") as file:
            saved(one, {"a": torch.ones(1 << 19)}, "second").slot.release()
            # Its slot is in use: what the daemon has to write is there.
            assert os.fstat(file.fileno()).st_blocks * 512 > 2 << 22
            assert bytes(daemon.slots[first.slot.index].image) == bytes(first.slot.image)
            first.slot.release()
            one.free_slots()
            assert os.fstat(file.fileno()).st_blocks == 0
        with pytest.raises(Rejected):
            daemon.slots[first.slot.index].record()
        daemon.close()
        one.close()


def test_leftovers_of_a_longer_image_are_not_written(stager: MakeStager) -> None:
    one = stager(slots=1)
    saved(one, {"o": "secret" * 1000, "p": 1}).slot.release()
    staged = saved(one, {"o": "short", "p": 1})
    end = staged.record.image_bytes
    assert sum(staged.slot.image[end : align(end, PAGE_BYTES)]) == 0
    assert b"secret" not in bytes(staged.slot.image[: align(end, PAGE_BYTES)])


def test_a_new_layout_is_a_new_generation_and_an_old_one_is_never_made_twice(
    stager: MakeStager,
) -> None:
    one = stager()
    lay_out(one, items_of({"a": torch.ones(2)}), "first")
    (path,) = one.arenas
    lay_out(one, items_of({"a": torch.ones(2)}), "first")
    assert (path,) == one.arenas
    lay_out(one, items_of({"a": torch.ones(3)}), "second")
    assert path not in one.arenas
    assert one.layout_id == "second"


def test_shared_memory_too_small_leaves_the_layout_in_force_that_is_used(
    stager: MakeStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stager()
    staged = saved(one, {"a": torch.ones(2)}, "first")
    monkeypatch.setattr("milepost.memory.pages._free_bytes", lambda _: 4096)
    with pytest.raises(Rejected, match="shm-too-small"):
        lay_out(one, items_of({"a": torch.ones(100)}), "second")
    assert one.layout_id == "first"
    assert (staged.arena,) == one.arenas


def test_an_arena_in_which_nothing_is_needed_makes_room_for_the_next(
    stager: MakeStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stager()
    first = saved(one, {"a": torch.ones(2)}, "first")
    first.slot.release()
    monkeypatch.setattr(
        "milepost.memory.pages._free_bytes", lambda _: 4096 if first.arena.exists() else 1 << 30
    )
    saved(one, {"a": torch.ones(100)}, "second")
    assert one.layout_id == "second"
    assert first.arena not in one.arenas


def test_after_shared_memory_was_too_small_for_a_new_layout_the_old_one_can_be_made_again(
    stager: MakeStager, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = stager()
    saved(one, {"a": torch.ones(2)}, "first").slot.release()
    with monkeypatch.context() as patched:
        patched.setattr("milepost.memory.pages._free_bytes", lambda _: 4096)
        with pytest.raises(Rejected, match="shm-too-small"):
            lay_out(one, items_of({"a": torch.ones(100)}), "second")
    items = items_of({"a": torch.ones(2)})
    assert same_bits(torch.ones(2), content(saved(one, {"a": torch.ones(2)}, "first"), items)["a"])


def test_a_copy_in_parts_is_the_same_image(stager: MakeStager) -> None:
    state = {"a": torch.ones(2), "b": torch.zeros(3), "o": 1}
    items = items_of(state)
    one = stager()
    lay_out(one, items)
    slot, placed = one.begin(one.free_slots()[0], items)
    assert SlotState.STAGING is slot.state
    one.copy(slot, items, [1])
    one.copy(slot, items, [0])
    found = content(one.seal(slot, SAVE, placed), items)
    assert bool((found["a"] == 1).all())
    assert bool((found["b"] == 0).all())


def test_descriptors_and_maps_do_not_grow_with_saves_and_layouts(stager: MakeStager) -> None:
    one = stager()
    counts = []
    for round_ in range(4):
        saved(one, {"a": torch.ones(2 + round_)}, f"layout{round_}").slot.release()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts[1:])) == 1
    one.close()
    one.close()
    assert "milepost-" not in Path("/proc/self/maps").read_text()


# --- stock torch as the judge -------------------------------------------------------------------


def stock_load(folder: Path, ranks: list[Items], template: dict[str, Any]) -> dict[str, Any]:
    """Put the images of these ranks where a checkpoint has its files, and load with stock torch."""
    offers, assigned, files, objects = {}, {}, {}, {}
    for rank, items in enumerate(ranks):
        offers[rank] = make_offer(items, serialise_objects(items))
        assigned[rank] = list(range(len(items)))
        stager = Stager("judged", 1, rank, pinner=NoPinner())
        try:
            stager.lay_out(items, assigned[rank], "layout")
            staged = stager.stage(stager.slots[0], SAVE, items)
            files[rank] = f"__{rank}_0.distcp"
            objects[rank] = {item: (at, length) for item, at, length in staged.record.objects}
            image = bytes(staged.slot.image)[: staged.record.image_bytes]
            (folder / files[rank]).write_bytes(image)
        finally:
            stager.close()
    metadata = build_metadata(offers, assigned, files, objects, "1-1", str(folder))
    (folder / ".metadata").write_bytes(pickle_metadata(metadata))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(template, checkpoint_id=folder, no_dist=True)
    return template


@pytest.mark.filterwarnings("ignore:torch.quantize_per")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_stock_torch_loads_every_kind_of_entry_bit_for_bit(
    stager: MakeStager, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors = odd_tensors()
    quantised = torch.quantize_per_channel(
        torch.rand(3, 4), torch.tensor([0.1, 0.2, 0.3]), torch.tensor([1, 2, 3]), 0, torch.qint8
    )
    state = {"t": tensors, "q": {"q": quantised}, "l": [1, [2]], "n": None, "x": [{"y": 1}]}
    template = {
        "t": {key: torch.zeros_like(tensor).contiguous() for key, tensor in tensors.items()},
        "q": {"q": torch.zeros(3, 4)},
        "l": [],
        "n": 0,
        "x": [{"y": 0}],
    }
    stager()
    found = stock_load(tmp_path_factory.mktemp("checkpoint"), [items_of(state)], template)
    for key, tensor in tensors.items():
        assert same_bits(tensor, found["t"][key]), key
    loaded = found["q"]["q"]
    assert loaded.int_repr().equal(quantised.int_repr())
    assert loaded.q_per_channel_scales().equal(quantised.q_per_channel_scales())
    assert loaded.q_per_channel_zero_points().equal(quantised.q_per_channel_zero_points())
    assert ([1, [2]], None, 1) == (found["l"], found["n"], found["x"][0]["y"])


@pytest.mark.parametrize("shape", [(8, 3), (7, 5), (3, 3)])
@pytest.mark.parametrize(
    "cuts",
    [
        [Shard(0), _StridedShard(0, split_factor=2)],
        [_StridedShard(0, split_factor=2), Shard(0)],
        [_StridedShard(1, split_factor=2), Shard(0)],
        [Shard(0), Shard(1)],
    ],
)
def test_stock_torch_puts_strided_and_uneven_shards_together(
    stager: MakeStager,
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int],
    cuts: list[Placement],
) -> None:
    """A 2 x 2 mesh, each rank in turn seen from a process group without any other process."""
    whole = torch.rand(shape)
    ranks = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 2))
            local = whole
            for parts, index, cut in zip((2, 2), divmod(rank, 2), cuts, strict=True):
                assert isinstance(cut, Shard | _StridedShard)
                local = cut._split_tensor(local, parts, with_padding=False)[0][index]
            tensor = DTensor.from_local(
                local, mesh, cuts, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            ranks.append(items_of({"w": tensor}))
        finally:
            dist.destroy_process_group()
    stager()
    folder = tmp_path_factory.mktemp("checkpoint")
    assert whole.equal(stock_load(folder, ranks, {"w": torch.zeros(shape)})["w"])


# --- pinning ------------------------------------------------------------------------------------


def test_every_arena_is_pinned_once_and_unpinned_once_before_it_is_unmapped(
    stager: MakeStager,
) -> None:
    """Ten saves of tensors that grow, shrink and vanish, with growing objects in between."""
    pinner = CountingPinner()
    one = stager(pinner=pinner)
    for round_, length in enumerate([1, 1, 5, 5, 2, 2, 0, 0, 9000, 3]):
        state = {"t": torch.ones(length), "o": "x" * (200_000 if round_ == 5 else 1)}
        items = items_of(state)
        lay_out(one, items, f"layout-{length}")
        one.fault_in()
        one.fault_in()
        staged = one.stage(one.free_slots()[0], SAVE, items)
        one.fault_in()
        staged.slot.release()
    assert pinner.registered == 7
    one.close()
    assert pinner.ranges == {}
    assert pinner.unregistered == 7


def test_an_arena_without_images_is_not_pinned(stager: MakeStager) -> None:
    pinner = CountingPinner()
    one = stager(pinner=pinner)
    one.lay_out(items_of({"a": torch.ones(2)}), [], "layout")
    one.fault_in()
    assert pinner.registered == 0


def test_a_refused_pin_means_unpinned_saves_and_one_warning(
    stager: MakeStager, caplog: pytest.LogCaptureFixture
) -> None:
    one = stager(pinner=CountingPinner("out of memory"))
    for length in (1, 2):
        items = items_of({"a": torch.ones(length)})
        lay_out(one, items, f"layout-{length}")
        with caplog.at_level(logging.WARNING):
            one.fault_in()
        staged = one.stage(one.free_slots()[0], SAVE, items)
        assert bool((content(staged, items)["a"] == 1).all())
    assert [record.message for record in caplog.records] == ["arena.unpinned"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to pin for")
def test_without_a_device_nothing_is_pinned() -> None:
    assert isinstance(default_pinner(), NoPinner)
