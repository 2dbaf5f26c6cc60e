"""`.metadata`: built from offers, the same in meaning as stock torch's, and read with distrust."""

from __future__ import annotations

import gc
import io
import os
import pickle
import pickletools
import struct
import subprocess
import sys
import zlib
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor import metadata as before_2_3
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.checkpoint.storage import WriteResult

from milepost.dcp_format.container import dtype_name, serialise, template
from milepost.dcp_format.index import (
    IndexDraft,
    build_metadata,
    pickle_metadata,
    read_metadata,
    to_global_metadata,
)
from milepost.errors import CorruptCheckpoint, LoadFailed, MilepostError, SaveFailed, UsageError
from milepost.format.layout import place
from milepost.format.manifest import METADATA_NAME
from milepost.wire.offers import Kind, Offer, decode_offer, encode_offer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KINDS = {
    WriteItemType.TENSOR: Kind.TENSOR,
    WriteItemType.SHARD: Kind.SHARD,
    WriteItemType.BYTE_IO: Kind.OBJECT,
}


class Piece:
    """One box of a tensor on one rank, by the protocol through which torch asks a DTensor."""

    def __init__(self, size: Sequence[int], offsets: Sequence[int], data: torch.Tensor) -> None:
        self.size, self.offsets, self.data = torch.Size(size), torch.Size(offsets), data

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(self.offsets, self.data.shape),
                    properties=TensorProperties.create_from_tensor(self.data),
                    size=self.size,
                ),
            )
        ]


def local_plan(state: dict[str, Any]) -> SavePlan:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner.create_local_plan()


def offer_of(plan: SavePlan) -> Offer:
    """The offer a rank would make for these items, as it arrives at the planner."""
    columns: list[tuple[Any, ...]] = []
    for item in plan.items:
        data = item.tensor_data
        if data is None:
            columns.append(("", (), (), (), 0, 0, 0))
            continue
        assert data.chunk is not None
        properties, sizes = data.properties, tuple(data.chunk.sizes)
        columns.append((
            dtype_name(properties.dtype), tuple(data.size), tuple(data.chunk.offsets), sizes,
            template(sizes, properties.dtype).total_bytes, properties.requires_grad,
            properties.pin_memory,
        ))  # fmt: skip
    dtypes, globals_, offsets, sizes_, lengths, grads, pins = (
        zip(*columns, strict=True) if columns else [()] * 7
    )
    offer = Offer(
        keys=tuple(item.index.fqn for item in plan.items),
        kinds=bytes(KINDS[item.type] for item in plan.items),
        dtypes=dtypes, global_sizes=globals_, offsets=offsets, sizes=sizes_,
        container_bytes=lengths, requires_grad=bytes(grads), pinned=bytes(pins),
        digests=(-1,) * len(plan.items),
        paths=tuple(plan.planner_data[item.index.fqn] for item in plan.items),
    )  # fmt: skip
    return decode_offer(encode_offer(offer))


OBJECT_BYTES = 1000


class Case(NamedTuple):
    """What the ranks offered, what each was assigned, and what stock torch makes of the same."""

    offers: dict[int, Offer]
    assigned: dict[int, list[int]]
    files: dict[int, str]
    objects: dict[int, dict[int, tuple[int, int]]]
    stock: Metadata

    def build(self) -> Metadata:
        return build_metadata(
            self.offers, self.assigned, self.files, self.objects, "save-7", "root/step_7"
        )


def case_of(states: Sequence[dict[str, Any]], folder: Path) -> Case:
    """Plan these ranks' states with stock torch, and let its own writer finish the index.

    The assignment is stock's, so that the two indexes must be equal. Only the places are ours,
    worked out here from the layout's definition.
    """
    local_plans = [local_plan(state) for state in states]
    planner = DefaultSavePlanner()
    final_plans, metadata = planner.create_global_plan(local_plans)
    offers = {rank: offer_of(plan) for rank, plan in enumerate(local_plans)}
    assigned: dict[int, list[int]] = {}
    objects: dict[int, dict[int, tuple[int, int]]] = {}
    results: list[list[WriteResult]] = []
    for rank, (local, final) in enumerate(zip(local_plans, final_plans, strict=True)):
        kept = {item.index: item for item in final.items}
        mine = [i for i, item in enumerate(local.items) if item.index in kept]
        tensors = [i for i in mine if local.items[i].type != WriteItemType.BYTE_IO]
        offsets, end = place([offers[rank].container_bytes[i] for i in tensors])
        assigned[rank], objects[rank], written = mine, {}, []
        for i in mine:
            if i in tensors:
                spot = (offsets[tensors.index(i)], offers[rank].container_bytes[i])
            else:
                spot = objects[rank][i] = (end, OBJECT_BYTES)
                end += 1024
            index = kept[local.items[i].index].index
            info = _StorageInfo(f"__{rank}_0.distcp", *spot)
            written.append(WriteResult(index=index, size_in_bytes=spot[1], storage_data=info))
        results.append(written)
    writer = FileSystemWriter(folder, sync_files=False)
    writer.finish(metadata, results)
    stock = pickle.loads((folder / METADATA_NAME).read_bytes())
    files = {rank: f"__{rank}_0.distcp" for rank in offers}
    return Case(offers, assigned, files, objects, stock)


def places(metadata: Metadata) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """storage_data with the hints, which MetadataIndex leaves out when it compares."""
    return {
        (index.fqn, index.offset, index.index): (vars(index), vars(info))
        for index, info in metadata.storage_data.items()
    }


def assert_same(stock: Metadata, ours: Metadata) -> None:
    """Both as whoever unpickles them sees them, down to which attributes there are."""
    stock, ours = (pickle.loads(pickle_metadata(metadata)) for metadata in (stock, ours))
    assert list(stock.state_dict_metadata) == list(ours.state_dict_metadata)
    assert stock.state_dict_metadata == ours.state_dict_metadata
    assert stock.planner_data == ours.planner_data
    assert list(stock.planner_data) == list(ours.planner_data)
    assert places(stock) == places(ours)
    assert stock.version == ours.version
    assert ours.storage_meta == StorageMeta(checkpoint_id="root/step_7", save_id="save-7")


def rows(count: int, *rest: int, first: int = 0) -> torch.Tensor:
    size = (count, *rest)
    return torch.arange(first, first + torch.Size(size).numel(), dtype=torch.float32).view(size)


def ranks(name: str) -> list[dict[str, Any]]:
    """States to compare with stock, by name."""
    whole = rows(5, 3)
    worlds: dict[str, list[dict[str, Any]]] = {
        "flat": [{"w": whole, "b": torch.ones(3, dtype=torch.bfloat16)}],
        "nested": [{"model": {"a.b": {"w": whole}}, "optimizer": {0: {"step": torch.tensor(3)}}}],
        "lists": [{"l": [torch.ones(2), 1, {"x": torch.ones(1)}], "t": (torch.zeros(1), "s")}],
        "objects": [{"epoch": 3, "name": "x", "none": None, "empty": {}, "emptier": []}],
        "no tensor dimension": [{"step": torch.tensor(1.5), "flag": torch.tensor(True)}],
        "no element": [{"a": torch.empty(0), "b": torch.empty(2, 0, 3, dtype=torch.int8)}],
        "nothing": [{}],
        "properties": [{"p": torch.nn.Parameter(whole), "q": whole.half()}],
        "replicas": [{"w": whole, "b": torch.ones(7), "o": {"lr": 0.1}} for _ in range(3)],
        "own keys": [{"w": whole, f"dl.{rank}": torch.ones(rank + 1)} for rank in range(3)],
        "shards": [
            {"w": Piece((5, 3), (2 * rank, 0), whole[2 * rank : 2 * rank + 2]), "n": rank}
            for rank in range(3)
        ],
        "two shards a rank": [
            {"x": {"w": Piece((4, 3), (rank, 0), whole[:1]), "v": Piece((2,), (rank,), rows(1))}}
            for rank in range(4)
        ][:2]
        + [
            {"x": {"w": Piece((4, 3), (rank, 0), whole[:1]), "u": torch.ones(rank)}}
            for rank in range(2, 4)
        ],
        "empty shards": [
            {"w": Piece((2,), (min(rank, 2),), rows(1 if rank < 2 else 0))} for rank in range(4)
        ],
        "replicated shards": [
            {"w": Piece((4, 2), (2 * (rank % 2), 0), rows(2, 2)), "b": torch.ones(2)}
            for rank in range(4)
        ],
        "two paths to one key": [{"a.b": rows(1), "c": 1}, {"d": 2, "a": {"b": rows(1)}}],
        "a rank with nothing": [{"w": whole}, {}, {"w": whole}],
    }
    return worlds[name]


NAMES = (
    "flat", "nested", "lists", "objects", "no tensor dimension", "no element", "nothing",
    "properties", "replicas", "own keys", "shards", "two shards a rank", "empty shards",
    "replicated shards", "two paths to one key", "a rank with nothing",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_index_is_stock_torchs(name: str, tmp_path: Path) -> None:
    case = case_of(ranks(name), tmp_path)
    assert_same(case.stock, case.build())


@st.composite
def worlds(draw: st.DrawFn) -> list[dict[str, Any]]:
    """States of up to 4 ranks: replicas, uneven shards along dimension 0, objects, own keys."""
    world = draw(st.integers(1, 4))
    states: list[dict[str, Any]] = [{} for _ in range(world)]
    for number in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["replica", "shard", "object", "own"]))
        group, key = draw(st.sampled_from(["model", "optimizer"])), f"k.{number}"
        width = draw(st.integers(0, 3))
        counts = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
        for rank, state in enumerate(states):
            if kind == "shard":
                start = sum(counts[:rank])
                value: Any = Piece(
                    (sum(counts), width), (start, 0), torch.zeros(counts[rank], width)
                )
            elif kind == "own" and rank != number % world:
                continue
            else:
                value = f"object {number}" if kind == "object" else torch.zeros(2, width)
            state.setdefault(group, {})[key] = value
    return states


@settings(max_examples=40, deadline=None)
@given(states=worlds())
def test_the_index_of_any_world_is_stock_torchs(
    states: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Without empty shards: stock may keep one in place of a full one that begins there too."""
    for state in states:
        for group in state.values():
            for key in [k for k, v in group.items() if isinstance(v, Piece) and not v.data.numel()]:
                group.pop(key)
    case = case_of(states, tmp_path_factory.mktemp("stock"))
    assert_same(case.stock, case.build())


def test_equal_boxes_and_properties_are_shared_so_that_the_pickle_stays_small(
    tmp_path: Path,
) -> None:
    """PEERS.md measured about 180 bytes a chunk for stock torch."""
    world, tensors = 16, 40
    states = [
        {f"w{i}": Piece((world, 8), (rank, 0), torch.zeros(1, 8)) for i in range(tensors)}
        for rank in range(world)
    ]
    case = case_of(states, tmp_path)
    ours = case.build()
    assert len(pickle_metadata(ours)) / (world * tensors) < 110
    entries = [e for e in ours.state_dict_metadata.values() if isinstance(e, TensorStorageMetadata)]
    assert len({id(entry.properties) for entry in entries}) == 1
    assert len({id(chunk.offsets) for entry in entries for chunk in entry.chunks}) == world


# --- what contradicts itself ------------------------------------------------------------------


def test_a_replica_assigned_to_two_ranks_counts_once_from_the_lower(tmp_path: Path) -> None:
    case = case_of(ranks("replicated shards"), tmp_path)
    everything = {rank: list(range(len(offer.keys))) for rank, offer in case.offers.items()}
    ours = case._replace(assigned=everything).build()
    assert case.stock.state_dict_metadata == ours.state_dict_metadata
    assert {"__0_0.distcp", "__1_0.distcp"} == {i.relative_path for i in ours.storage_data.values()}


@pytest.mark.parametrize("counts", [(0, 2, 1), (2, 0, 1), (0, 0, 3), (2, 1, 0)])
def test_an_empty_shard_never_takes_the_place_of_a_full_one(counts: tuple[int, ...]) -> None:
    """Each rank's box begins where the boxes of the lower ranks end."""
    starts = [sum(counts[:rank]) for rank in range(3)]
    pieces = [Piece((3,), (s,), torch.zeros(c)) for s, c in zip(starts, counts, strict=True)]
    offers = {rank: offer_of(local_plan({"w": piece})) for rank, piece in enumerate(pieces)}
    everything, files = {rank: [0] for rank in range(3)}, {rank: f"f{rank}" for rank in range(3)}
    metadata = build_metadata(offers, everything, files, {}, "s", "c")
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    full = {
        (start, c, f"f{i}") for i, (start, c) in enumerate(zip(starts, counts, strict=True)) if c
    }
    found = set()
    for index, info in metadata.storage_data.items():
        chunk = entry.chunks[index.index]
        assert index.offset == chunk.offsets
        found.add((*chunk.offsets, *chunk.sizes, info.relative_path))
    assert full == {place for place in found if place[1]}
    assert len(entry.chunks) == len(metadata.storage_data)


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [
        ({"k": torch.ones(1)}, {"k": 1}, "key-conflict"),
        ({"k": 1}, {"k": torch.ones(1)}, "key-conflict"),
        ({"k": torch.ones(1)}, {"k": torch.ones(2)}, "key-conflict"),
        (
            {"k": Piece((4,), (0,), torch.ones(2))},
            {"k": Piece((4,), (0,), torch.ones(4))},
            "coverage-overlap",
        ),
    ],
)
def test_ranks_that_contradict_one_another_are_refused_by_key(
    first: dict[str, Any], second: dict[str, Any], code: str
) -> None:
    offers = {0: offer_of(local_plan(first)), 1: offer_of(local_plan(second))}
    objects = {0: {0: (64, 5)}, 1: {0: (64, 5)}}
    with pytest.raises(SaveFailed, match=r"'k'.*rank 1") as caught:
        build_metadata(offers, {0: [0], 1: [0]}, {0: "a", 1: "b"}, objects, "s", "c")
    assert code == caught.value.code


def test_an_object_without_a_place_and_a_rank_without_a_file_are_named(tmp_path: Path) -> None:
    case = case_of([{"w": torch.ones(1), "epoch": 3}], tmp_path)
    with pytest.raises(SaveFailed, match="rank 0 reported no place for the object 'epoch'"):
        case._replace(objects={}).build()
    with pytest.raises(SaveFailed, match="rank 0 was assigned 2 items and reported no file"):
        case._replace(files={0: ""}).build()


# --- a user's planner -------------------------------------------------------------------------


def with_final(case: Case) -> Case:
    """The same save as if rank 0's own planner had decided it."""
    described = to_global_metadata(case.stock)
    offers = dict(case.offers)
    offers[0] = msgspec.structs.replace(offers[0], final=True, metadata=described)
    arrived = {rank: decode_offer(encode_offer(offer)) for rank, offer in offers.items()}
    return case._replace(offers=arrived)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_users_planner_described_is_taken_as_it_is(name: str, tmp_path: Path) -> None:
    case = with_final(case_of(ranks(name), tmp_path))
    assert_same(case.stock, case.build())


def test_planner_data_of_any_plain_kind_survives(tmp_path: Path) -> None:
    case = case_of(ranks("flat"), tmp_path)
    wanted = {"k": ("a", 0, [1, (2.5, None)], {"b": b"\0"}), 3: True}
    case.stock.planner_data = wanted
    assert wanted == with_final(case).build().planner_data
    case.stock.planner_data = None
    assert with_final(case).build().planner_data is None


@pytest.mark.parametrize(
    "planner_data", [object(), {"a": OrderedDict()}, {"a": {1, 2}}, [2**70], torch.ones(1)]
)
def test_planner_data_that_is_not_plain_is_a_usage_error(planner_data: Any) -> None:
    with pytest.raises(UsageError, match="planner_data") as caught:
        to_global_metadata(Metadata({}, planner_data=planner_data))
    assert caught.value.code == "usage"


def test_a_description_by_another_class_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'w' by a dict"):
        to_global_metadata(Metadata({"w": {}}))  # type: ignore[dict-item]


def test_a_final_item_that_was_not_described_is_named(tmp_path: Path) -> None:
    case = case_of(ranks("flat"), tmp_path)
    del case.stock.state_dict_metadata["b"]
    with pytest.raises(SaveFailed, match="rank 0 write 'b'"):
        with_final(case).build()


# --- on disk ----------------------------------------------------------------------------------


def data_file(offer: Offer, items: Sequence[int], values: Mapping[str, Any]) -> Any:
    """One rank's data file, put together as trainer and writer do, and where its objects lie."""
    tensors = [i for i in items if offer.kinds[i] != Kind.OBJECT]
    offsets, end = place([offer.container_bytes[i] for i in tensors])
    image = bytearray(end)
    for item, at in zip(tensors, offsets, strict=True):
        value = values[offer.keys[item]]
        tensor = value.data if isinstance(value, Piece) else value.detach().contiguous()
        payload = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        made = template(tuple(tensor.shape), tensor.dtype)
        image[at : at + made.total_bytes] = made.prefix + payload + made.suffix
        for crc_at in (made.crc_at, made.central_crc_at):
            struct.pack_into("<I", image, at + crc_at, zlib.crc32(payload))
    objects = {}
    for item in items:
        if offer.kinds[item] == Kind.OBJECT:
            blob = serialise(offer.keys[item], values[offer.keys[item]])
            objects[item] = (len(image), len(blob))
            image += blob + bytes(-len(blob) % 64)
    return bytes(image), objects


LOAD = """
import sys, torch, torch.distributed.checkpoint as dcp
expected = torch.load(sys.argv[2], weights_only=True)
found = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None
         for k, v in expected.items()}
dcp.load(found, checkpoint_id=sys.argv[1], no_dist=True)
for key, value in expected.items():
    if isinstance(value, torch.Tensor):
        assert value.dtype == found[key].dtype and torch.equal(value, found[key]), key
    else:
        assert value == found[key], key
assert "milepost" not in sys.modules
print(len(expected), "equal")
"""


def test_a_checkpoint_put_together_by_hand_loads_with_stock_torch(tmp_path: Path) -> None:
    """In a process of its own that does not import milepost, on fewer ranks than wrote it."""
    whole, frozen = rows(5, 3), torch.tensor([1, 0, 1], dtype=torch.bool)
    values: list[dict[str, Any]] = [
        {"w": Piece((5, 3), (0, 0), whole[:2]), "step": torch.tensor(7), "f": frozen, "epoch": 3},
        {"w": Piece((5, 3), (2, 0), whole[2:]), "step": torch.tensor(7), "none": torch.ones(0, 2)},
    ]
    checkpoint = tmp_path / "step_7"
    checkpoint.mkdir()
    case = case_of(values, tmp_path)
    objects = {}
    for rank, offer in case.offers.items():
        image, objects[rank] = data_file(offer, case.assigned[rank], values[rank])
        (checkpoint / case.files[rank]).write_bytes(image)
    metadata = case._replace(objects=objects).build()
    (checkpoint / METADATA_NAME).write_bytes(pickle_metadata(metadata))
    expected = {"w": whole, "step": torch.tensor(7), "f": frozen, "none": torch.ones(0, 2)}
    torch.save(expected | {"epoch": 3}, tmp_path / "expected.pt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD, checkpoint, tmp_path / "expected.pt"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "5 equal\n"), done.stderr


def test_the_pickle_names_nothing_of_ours(tmp_path: Path) -> None:
    data = pickle_metadata(case_of(ranks("shards"), tmp_path).build())
    operations = list(pickletools.genops(data))
    strings = [argument for _, argument, _ in operations if isinstance(argument, str)]
    assert "torch.distributed.checkpoint.metadata" in strings
    assert not [text for text in strings if "milepost" in text]
    assert (operations[0][0].name, operations[0][1]) == ("PROTO", 4)


# --- filled in, save after save -----------------------------------------------------------------


@pytest.mark.parametrize("is_final", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_filled_in_is_the_index_built_anew(
    name: str, is_final: bool, tmp_path: Path
) -> None:
    case = case_of(ranks(name), tmp_path)
    case = with_final(case) if is_final else case
    draft = IndexDraft(case.offers, case.assigned, case.files)
    far = {
        rank: {item: (at + (1 << 40), length % 7) for item, (at, length) in objects.items()}
        for rank, objects in case.objects.items()
    }
    for objects in (case.objects, far, case.objects):
        expected = case._replace(objects=objects).build()
        filled = draft.fill(objects, "save-7", "root/step_7")
        # torch's unpickler, one that is strict about frames, and ours.
        assert_same(expected, pickle.loads(filled))
        assert_same(expected, pickle._loads(filled))  # type: ignore[attr-defined]
        assert_same(expected, read_metadata(write(tmp_path, filled)))


@pytest.mark.parametrize("name", ["", "größe", "x" * 300, "storage_meta"])
def test_a_draft_takes_a_checkpoint_of_any_name(name: str, tmp_path: Path) -> None:
    case = case_of(ranks("objects"), tmp_path)
    filled = IndexDraft(case.offers, case.assigned, case.files).fill(case.objects, name, name)
    assert StorageMeta(checkpoint_id=name, save_id=name) == pickle.loads(filled).storage_meta


def test_an_object_without_a_place_is_named_by_a_draft_as_well(tmp_path: Path) -> None:
    case = case_of(ranks("objects"), tmp_path)
    draft = IndexDraft(case.offers, case.assigned, case.files)
    said = "rank 0 reported no place for the object 'epoch'"
    with pytest.raises(SaveFailed, match=said) as caught:
        draft.fill({}, "save-7", "root/step_7")
    assert caught.value.code == "plan-failed"


# --- reading ----------------------------------------------------------------------------------


def write(folder: Path, data: bytes) -> Path:
    (folder / METADATA_NAME).write_bytes(data)
    return folder


def test_an_index_that_we_wrote_reads_back_equal(tmp_path: Path) -> None:
    ours = case_of(ranks("replicated shards"), tmp_path).build()
    write(tmp_path, pickle_metadata(ours))
    assert_same(ours, read_metadata(tmp_path))
    assert_same(ours, read_metadata(tmp_path / METADATA_NAME))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_index_that_stock_torch_wrote_reads_as_torch_reads_it(tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2, dtype=torch.float8_e4m3fn),
        "n": {"l": [torch.nn.Parameter(torch.ones(1)), "x"]},
    }
    stock_save(state, checkpoint_id=tmp_path, no_dist=True)
    stock = pickle.loads((tmp_path / METADATA_NAME).read_bytes())
    ours = read_metadata(tmp_path)
    assert stock.state_dict_metadata == ours.state_dict_metadata
    assert stock.planner_data == ours.planner_data
    assert places(stock) == places(ours)
    assert ours.storage_meta is not None
    assert PurePosixPath(tmp_path) == ours.storage_meta.checkpoint_id


def one_tensor(properties: Any, file: str = "__0_0.distcp") -> Metadata:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    entry = TensorStorageMetadata(properties, torch.Size([2]), [chunk])
    index = MetadataIndex("w", [0], 0)
    return Metadata({"w": entry}, storage_data={index: _StorageInfo(file, 0, 100)})


def test_an_index_of_torch_before_2_3_reads(tmp_path: Path) -> None:
    """It took TensorProperties from ShardedTensor, and had no storage_meta and no version."""
    old = one_tensor(before_2_3.TensorProperties(dtype=torch.bfloat16))
    del old.__dict__["storage_meta"], old.__dict__["version"]
    read = read_metadata(write(tmp_path, pickle.dumps(old)))
    entry = read.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert torch.bfloat16 == entry.properties.dtype
    assert read.storage_meta is None
    assert read.version is None


class PicklerByName(pickle.Pickler):
    """Pickles members of an Enum by getattr, as Python 3.11.0 did."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _MEM_FORMAT_ENCODING | before_2_3.MEM_FORMAT_ENCODING):
            return getattr, (type(obj), obj.name)
        return NotImplemented


@pytest.mark.parametrize("properties", [TensorProperties, before_2_3.TensorProperties])
def test_an_enum_pickled_by_name_reads(properties: Any, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    PicklerByName(buffer).dump(one_tensor(properties(memory_format=torch.channels_last)))
    assert b"getattr" in buffer.getvalue()
    entry = read_metadata(write(tmp_path, buffer.getvalue())).state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert torch.channels_last == entry.properties.memory_format


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (Calls(os.mkdir, "pwned"), "posix.mkdir"),
        (Calls(eval, "1"), "builtins.eval"),
        (Calls(getattr, MetadataIndex, "__init__"), "builtins.getattr"),
        (Calls(torch.load, "x"), "torch.serialization.load"),
        (Calls(torch.Tensor), "torch.Tensor"),
        (Calls(subprocess.Popen, "true"), "subprocess.Popen"),
        (Calls(OrderedDict), "collections.OrderedDict"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_pickle_is_refused_by_the_name_it_asks_for(
    call: Calls, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hostile = one_tensor(TensorProperties())
    hostile.planner_data = call
    with pytest.raises(CorruptCheckpoint, match=f"names {named}") as caught:
        read_metadata(write(tmp_path, pickle.dumps(hostile)))
    assert caught.value.code == "corrupt"
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "a/../../b"])
def test_an_index_that_points_outside_the_checkpoint_is_refused(file: str, tmp_path: Path) -> None:
    data = pickle.dumps(one_tensor(TensorProperties(), file))
    with pytest.raises(CorruptCheckpoint, match=f"'{file}', outside the checkpoint"):
        read_metadata(write(tmp_path, data))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"w": 1}, "holds a dict"),
        (Metadata({}), "lacks state_dict_metadata or storage_data"),
        (Metadata({"w": 1}, storage_data={}), "describes 'w' by a int"),  # type: ignore[dict-item]
        (Metadata({}, storage_data={"w": 1}), "has a int as the place of a str"),
    ],
)
def test_a_pickle_that_is_no_index_is_refused(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=said):
        read_metadata(write(tmp_path, pickle.dumps(content)))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_index_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = pickle_metadata(one_tensor(TensorProperties()))
    kept = data.draw(st.integers(0, len(whole) - 1))
    folder = write(tmp_path_factory.mktemp("cut"), whole[:kept])
    with pytest.raises(CorruptCheckpoint, match=rf"\({kept} bytes\) is not a whole index"):
        read_metadata(folder)


def test_a_missing_or_unreadable_index_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match=r"has no \.metadata") as missing:
        read_metadata(tmp_path / "step_3")
    assert missing.value.code == "not-found"
    (tmp_path / METADATA_NAME).mkdir()
    with pytest.raises(LoadFailed, match="cannot be read") as unreadable:
        read_metadata(tmp_path)
    assert unreadable.value.code == "io-error"


def test_reading_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    gc.disable()
    try:
        with pytest.raises(MilepostError):
            read_metadata(tmp_path)
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(MilepostError):
        read_metadata(tmp_path)
    assert gc.isenabled()
