"""`milepost.dcp.Reader` under stock torch: what torch's own reader does, checked and safe."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.dcp.states import blank, failure, filled, flip, loaded_by_stock, saved, told
from tests.unit.fetching.checkpoints import Chunk, write_checkpoint
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.testing._internal.distributed.checkpoint_utils import (
    Rot13Example,
    get_test_extension_registry,
)

from milepost.dcp import Reader
from milepost.errors import CorruptCheckpoint, LoadFailed

# Stock torch warns that it saves for one process, which is what is wanted.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is:UserWarning", "ignore:TypedStorage is deprecated:UserWarning"
)


def load(path: Path, state: dict[str, Any], planner: Any = None, **options: Any) -> dict[str, Any]:
    """Load by stock torch, through our reader."""
    reader = Reader(path, **options)
    stock.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


@pytest.mark.parametrize("is_ours", [False, True])
def test_stock_load_brings_back_what_it_does_with_its_own_reader(
    tmp_path: Path, is_ours: bool
) -> None:
    path = saved(tmp_path / "c", is_ours=is_ours)
    expected = told(loaded_by_stock(path, blank()))
    assert expected == told(load(path, blank()))
    assert expected == told(filled()) | {"stateful": expected["stateful"]}


def test_elements_of_another_dtype_are_converted_as_by_torch(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"w": torch.tensor([1.25, -3.75])})
    for dtype in (torch.float64, torch.float16, torch.int32):
        expected = loaded_by_stock(path, {"w": torch.zeros(2, dtype=dtype)})
        assert torch.equal(expected["w"], load(path, {"w": torch.zeros(2, dtype=dtype)})["w"])


def test_keys_and_an_empty_state_are_loaded_by_torch_s_own_helpers(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"a": {"x": torch.ones(2), "y": 3}, "b": 4}, is_ours=True)
    found = _load_state_dict_from_keys("a", storage_reader=Reader(path))
    assert ["a"] == list(found)
    assert (3, [1.0, 1.0]) == (found["a"]["y"], found["a"]["x"].tolist())
    assert {"a", "b"} == set(_load_state_dict_from_keys(storage_reader=Reader(path)))


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_flipped_byte_is_refused_by_file_and_tensor(tmp_path: Path, is_ours: bool) -> None:
    path = saved(tmp_path / "c", {"w": torch.ones(1000, 100)}, is_ours=is_ours)
    file = flip(path)
    with pytest.raises(CheckpointException) as caught:
        load(path, {"w": torch.zeros(1000, 100)})
    found = failure(caught.value)
    assert isinstance(found, CorruptCheckpoint)
    assert file.name in found.message
    assert "w" in found.message
    state = load(path, {"w": torch.zeros(1000, 100)}, verify=False)
    assert 1 == (state["w"] != 1).sum()


class Recorded:
    """Runs something when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def test_an_object_that_would_run_code_is_refused_by_class_and_key(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    path = saved(tmp_path / "c", {"w": torch.ones(2), "bad": Recorded(str(mark)), "n": 1})
    state: dict[str, Any] = {"w": torch.zeros(2), "bad": None, "n": 0}
    with pytest.raises(CheckpointException) as caught:
        load(path, state)
    found = failure(caught.value)
    assert isinstance(found, LoadFailed)
    assert "unsafe-object" == found.code
    assert "'bad' of posix.mkdir" in found.message
    assert "milepost.dcp.Reader(path, allow_pickle=True)" in found.hint
    assert not mark.exists()
    assert {"w": [0.0, 0.0], "bad": None, "n": 0} == state | {"w": state["w"].tolist()}
    load(path, state, allow_pickle=True)
    assert mark.exists()


class Odd:
    """A class that is nobody's."""

    def __init__(self) -> None:
        self.value = 7


def test_a_class_that_torch_was_told_to_allow_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"odd": Odd()})
    with torch.serialization.safe_globals([Odd]):
        assert 7 == load(path, {"odd": None})["odd"].value


def test_an_index_that_would_run_code_runs_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"n": 1})
    mark = tmp_path / "ran"
    (path / ".metadata").write_bytes(pickle.dumps(Recorded(str(mark))))
    with pytest.raises(CheckpointException, match=r"posix\.mkdir"):
        load(path, {"n": 0})
    assert not mark.exists()


def test_what_is_missing_is_the_error_that_torch_s_reader_raises(tmp_path: Path) -> None:
    for reader in (FileSystemReader(tmp_path / "no"), Reader(tmp_path / "no")):
        with pytest.raises(FileNotFoundError, match=r"no/\.metadata"):
            reader.read_metadata()
    path = saved(tmp_path / "c", {"w": torch.ones(2)})
    with pytest.raises(CheckpointException, match="Size mismatch between saved"):
        load(path, {"w": torch.zeros(3)})


# --- planners -------------------------------------------------------------------------------------


class Halving(DefaultLoadPlanner):
    """Loads under other names, and half of each value, through one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(4)
        self.told = list[str]()

    def create_local_plan(self) -> LoadPlan:
        self.state_dict = {f"old.{key}": value for key, value in self.state_dict.items()}
        self.mappings = {f"old.{key}": path for key, path in self.mappings.items()}
        return super().create_local_plan()

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.buffer

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.told.append(read_item.dest_index.fqn)
        self.lookup_tensor(read_item.dest_index).copy_(tensor / 2)


def test_a_planner_may_rename_and_change_what_is_read_through_a_buffer_of_its_own(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path / "c", {"old": {"a": torch.full((4,), 6.0), "b": torch.full((4,), 8.0)}})
    planner = Halving()
    state = load(path, {"a": torch.zeros(4), "b": torch.zeros(4)}, planner)
    assert (3.0, 4.0) == (state["a"][0].item(), state["b"][0].item())
    assert ["old.a", "old.b"] == sorted(planner.told)


class Pickling(DefaultLoadPlanner):
    """Reads objects in its own way."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        found = torch.load(value, weights_only=False)
        self.original_state_dict[read_item.dest_index.fqn] = ("mine", found)


def test_a_planner_that_unpickles_itself_gets_only_what_is_safe(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"n": {1, 2}, "bad": Recorded(str(tmp_path / "ran"))})
    assert ("mine", {1, 2}) == load(path, {"n": 0}, Pickling())["n"]
    with pytest.raises(CheckpointException, match=r"posix\.mkdir"):
        load(path, {"bad": 0}, Pickling())
    assert not (tmp_path / "ran").exists()


def test_memory_that_two_keys_share_gets_the_last_of_them_as_in_torch(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", {"a": torch.ones(5), "b": torch.full((5,), 2.0)})

    def tied() -> dict[str, Any]:
        memory = torch.zeros(5)
        return {"a": memory, "b": memory}

    assert told(loaded_by_stock(path, tied())) == told(load(path, tied()))


class Boxes(DefaultLoadPlanner):
    """Loads one box of a tensor."""

    def __init__(self, at: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.box = ChunkStorageMetadata(torch.Size(at), torch.Size(sizes))
        self.memory = torch.zeros(sizes)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        described: Any = self.metadata.state_dict_metadata["w"]
        return LoadPlan(create_read_items_for_chunk_list("w", described, [self.box]))

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.memory


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[tuple[int, int]]]:
    """Sizes of a tensor, where each dimension is cut, and a box of it."""
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    cuts = [sorted({0, *draw(st.sets(st.integers(1, 6))), size} & {*range(size + 1)})
            for size in sizes]  # fmt: skip
    box = []
    for size in sizes:
        at = draw(st.integers(0, size - 1))
        box.append((at, draw(st.integers(1, size - at))))
    return sizes, cuts, box


@given(layouts(), st.integers(1, 3), st.sampled_from(["nothing", "blobs", "stretches"]))
def test_both_readers_agree_on_every_layout(
    tmp_path_factory: pytest.TempPathFactory,
    layout: tuple[list[int], list[list[int]], list[tuple[int, int]]],
    files: int,
    known: Any,
) -> None:
    sizes, cuts, box = layout
    whole = torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)
    chunks: list[list[Chunk]] = [[] for _ in range(files)]
    corners = torch.cartesian_prod(*(torch.tensor(cut[:-1]) for cut in cuts)).reshape(
        -1, len(sizes)
    )
    for number, corner in enumerate(corners.tolist()):
        ends = [cut[cut.index(at) + 1] for at, cut in zip(corner, cuts, strict=True)]
        part = whole[tuple(slice(at, end) for at, end in zip(corner, ends, strict=True))]
        chunk = Chunk("w", tuple(sizes), tuple(corner), part.clone())
        chunks[number % files].append(chunk)
    path = tmp_path_factory.mktemp("layout")
    write_checkpoint(path / "c", chunks, known=known)
    at, lengths = tuple(at for at, _ in box), tuple(length for _, length in box)
    ours, theirs = Boxes(at, lengths), Boxes(at, lengths)
    load(path / "c", {}, ours)
    loaded_by_stock(path / "c", {}, planner=theirs)
    assert torch.equal(theirs.memory, ours.memory)


# --- other ways to save ---------------------------------------------------------------------------


def test_what_was_written_through_extensions_is_read_by_torch_and_as_safe(tmp_path: Path) -> None:
    path = tmp_path / "c"
    writer = FileSystemWriter(path, _extensions=[Rot13Example()])
    mark = tmp_path / "ran"
    state = {"w": torch.ones(3), "n": "text", "bad": Recorded(str(mark))}
    stock.save(state, storage_writer=writer, no_dist=True)
    registry = get_test_extension_registry()
    found = load(path, {"w": torch.zeros(3), "n": ""}, _extension_registry=registry)
    assert ([1.0] * 3, "text") == (found["w"].tolist(), found["n"])
    with pytest.raises(CheckpointException, match=r"posix\.mkdir"):
        load(path, {"bad": None}, _extension_registry=registry)
    assert not mark.exists()


def test_what_each_rank_saved_for_itself_is_found(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    stock.save({"w": torch.ones(3)}, storage_writer=writer, no_dist=True, use_collectives=False)
    assert not (tmp_path / ".metadata").exists()
    assert [1.0] * 3 == load(tmp_path, {"w": torch.zeros(3)})["w"].tolist()


def test_one_reader_reads_one_checkpoint_after_another_and_keeps_to_what_a_link_named(
    tmp_path: Path,
) -> None:
    for number in (1, 2):
        saved(tmp_path / f"step_{number}", {"w": torch.full((3,), float(number))}, is_ours=True)
    link = tmp_path / "latest"
    link.symlink_to("step_1")
    reader = Reader(link)
    state = {"w": torch.zeros(3)}
    stock.load(state, storage_reader=reader, no_dist=True)
    assert 1.0 == state["w"][0]
    planner = DefaultLoadPlanner()
    metadata = reader.read_metadata()
    link.unlink()
    link.symlink_to("step_2")
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    assert 1.0 == state["w"][0]
    stock.load(state, checkpoint_id=tmp_path / "step_2", storage_reader=reader, no_dist=True)
    assert 2.0 == state["w"][0]
    assert tmp_path / "step_2" == reader.checkpoint_id


def test_a_planner_for_an_empty_state_gets_an_index_it_can_take_apart(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", is_ours=True)
    metadata = Reader(path).read_metadata()
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    state: dict[str, Any] = {}
    planner.set_up_planner(state, metadata, True)
    assert {*filled()} == {*state}
    assert pickle.loads(pickle.dumps(metadata)).state_dict_metadata
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.load_id
