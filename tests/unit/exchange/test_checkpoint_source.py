"""A checkpoint as streams of bytes: any sharding, every byte compared with its checksum."""

from __future__ import annotations

import os
import pickle
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.exchange.checkpoints import flip, whole, write_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.serialization import set_crc32_options

from milepost.dcp_format.container import template
from milepost.errors import CorruptCheckpoint, LoadFailed, UsageError
from milepost.exchange import blobs
from milepost.exchange.checkpoint import CheckpointSource
from milepost.exchange.source import BLOCK_BYTES

if TYPE_CHECKING:
    from milepost.wire.offers import Box

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

BOTH = pytest.mark.parametrize("with_manifest", [True, False])


def read(folder: Path, key: str, block_bytes: int = BLOCK_BYTES) -> bytes:
    source = CheckpointSource(folder)
    try:
        return b"".join(map(bytes, source.blocks(key, block_bytes)))
    finally:
        source.close()


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return bytes(flat.tolist())


def cut(size: Box, draw: random.Random) -> list[tuple[Box, Box]]:
    """Cut a tensor into boxes at random, not always as a grid."""
    boxes = [((0,) * len(size), size)]
    for _ in range(draw.randint(0, 6)):
        at = draw.randrange(len(boxes))
        offsets, sizes = boxes[at]
        dims = [dim for dim, length in enumerate(sizes) if length > 1]
        if not dims:
            continue
        dim = draw.choice(dims)
        low = draw.randint(1, sizes[dim] - 1)
        first = (*sizes[:dim], low, *sizes[dim + 1 :])
        rest = (*sizes[:dim], sizes[dim] - low, *sizes[dim + 1 :])
        moved = (*offsets[:dim], offsets[dim] + low, *offsets[dim + 1 :])
        boxes[at : at + 1] = [(offsets, first), (moved, rest)]
    draw.shuffle(boxes)
    return boxes


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.booleans())
def test_bytes_do_not_depend_on_the_shards(
    tmp_path_factory: pytest.TempPathFactory, draw: random.Random, with_manifest: bool
) -> None:
    size = tuple(draw.randint(1, 7) for _ in range(draw.randint(0, 4)))
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
    tensor = torch.randint(0, 2, size).to(dtype)
    folder = tmp_path_factory.mktemp("drawn") / "c"
    write_checkpoint(folder, {"w": (tensor, cut(size, draw))}, with_manifest=with_manifest)
    held = draw.choice([0, blobs.HELD_BYTES])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blobs, "HELD_BYTES", held)
        assert bits(tensor) == read(folder, "w", draw.choice([1, 64, 1 << 20]) * dtype.itemsize)


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@BOTH
def test_every_dtype_comes_bit_by_bit(
    tmp_path: Path, dtype: torch.dtype, with_manifest: bool
) -> None:
    most = 2 if dtype is torch.bool else 256
    tensor = torch.randint(0, most, (6, 4 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    boxes = [((0, 0), (3, 4)), ((3, 0), (3, 2)), ((3, 2), (3, 2))]
    write_checkpoint(tmp_path / "c", {"w": (tensor, boxes)}, with_manifest=with_manifest)
    assert bits(tensor) == read(tmp_path / "c", "w")


@BOTH
@pytest.mark.parametrize("held", [0, blobs.HELD_BYTES])
def test_a_tensor_that_is_stored_transposed_comes_in_its_own_order(
    tmp_path: Path, with_manifest: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "HELD_BYTES", held)
    tensor = torch.arange(24.0).reshape(4, 6).t()
    folder = write_checkpoint(tmp_path / "c", {"w": whole(tensor)}, with_manifest=with_manifest)
    assert bits(tensor) == read(folder, "w")


def test_scalars_and_empty_tensors_come(tmp_path: Path) -> None:
    tensors = {"scalar": whole(torch.tensor(7.5)), "empty": whole(torch.zeros(3, 0))}
    folder = write_checkpoint(tmp_path / "c", tensors)
    assert (bits(torch.tensor(7.5)), b"") == (read(folder, "scalar"), read(folder, "empty"))


def test_what_stock_torch_wrote_comes_with_its_paths_and_objects(tmp_path: Path) -> None:
    state = {"a": {"w": torch.arange(6.0).reshape(2, 3)}, "l": [torch.ones(2), {"n": 3}]}
    stock_save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    source = CheckpointSource(tmp_path / "c")
    assert {"a.w": ("a", "w"), "l.0": ("l", 0), "l.1.n": ("l", 1, "n")} == source.paths
    assert (["l.1.n"], 3) == (source.objects, source.value("l.1.n"))
    assert [] == source.unchecked
    source.close()


def test_a_container_of_another_torch_is_read_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an earlier torch put before the payload is not known to this one.
    monkeypatch.setattr(blobs, "HELD_BYTES", 0)
    tensor = torch.arange(5000.0)
    folder = write_checkpoint(tmp_path / "c", {"w": whole(tensor)}, with_manifest=False)

    def other(size: Box, dtype: torch.dtype) -> Any:
        known = template(size, dtype)
        return known._replace(prefix=b"?" + known.prefix)

    monkeypatch.setattr(blobs, "template", other)
    monkeypatch.setattr(blobs, "open_object", None)  # The elements stream all the same.
    assert bits(tensor) == read(folder, "w")
    flip(folder / "__0_0.distcp", 5000)
    with pytest.raises(CorruptCheckpoint, match="'w': the blob at 0: CRC-32"):
        read(folder, "w")


@BOTH
@pytest.mark.parametrize("held", [0, blobs.HELD_BYTES])
def test_a_flipped_bit_of_a_tensor_is_refused_by_file_and_key(
    tmp_path: Path, with_manifest: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "HELD_BYTES", held)
    folder = write_checkpoint(
        tmp_path / "c", {"w": whole(torch.zeros(1000))}, with_manifest=with_manifest
    )
    flip(folder / "__0_0.distcp", 2000)
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp: 'w': the blob at 0: CRC-32"):
        read(folder, "w")


@BOTH
def test_a_flipped_bit_of_an_object_is_refused_by_file_and_key(
    tmp_path: Path, with_manifest: bool
) -> None:
    folder = write_checkpoint(tmp_path / "c", {}, {"o": "x" * 400}, with_manifest=with_manifest)
    flip(folder / "__0_0.distcp", 200)
    source = CheckpointSource(folder)
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp: 'o': the blob at 0"):
        source.value("o")
    source.close()


def test_with_a_manifest_every_byte_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "HELD_BYTES", 0)
    folder = write_checkpoint(tmp_path / "c", {"w": whole(torch.zeros(100))}, files=1)
    data = (folder / "__0_0.distcp").read_bytes()
    for at in range(0, len(data), 7):
        flip(folder / "__0_0.distcp", at)
        with pytest.raises((CorruptCheckpoint, UsageError), match="'w'"):
            read(folder, "w")
        (folder / "__0_0.distcp").write_bytes(data)


@BOTH
@pytest.mark.parametrize("held", [0, blobs.HELD_BYTES])
def test_a_truncated_or_missing_file_is_refused_by_name(
    tmp_path: Path, with_manifest: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "HELD_BYTES", held)
    folder = write_checkpoint(
        tmp_path / "c", {"w": whole(torch.zeros(1000))}, with_manifest=with_manifest
    )
    os.truncate(folder / "__0_0.distcp", 3000)
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp: 'w': bytes 0 to"):
        read(folder, "w")
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"__0_0\.distcp: the file is missing"):
        read(folder, "w")


def test_an_index_that_is_not_the_manifests_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", {"w": whole(torch.zeros(4))})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=2))
    with pytest.raises(CorruptCheckpoint, match=r"\.metadata: its checksum is"):
        CheckpointSource(folder)


def test_a_tensor_with_a_gap_is_refused_by_key(tmp_path: Path) -> None:
    boxes: list[tuple[Box, Box]] = [((0, 0), (2, 3))]
    folder = write_checkpoint(tmp_path / "c", {"w": (torch.zeros(4, 3), boxes)})
    with pytest.raises(CorruptCheckpoint, match=r"'w': no shard holds \[2:4, 0:3\]"):
        read(folder, "w")


def test_a_size_that_its_blob_cannot_hold_is_refused_before_it_is_believed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", {"w": whole(torch.zeros(4, 3))}, with_manifest=False)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 40, 1 << 20])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    source = CheckpointSource(folder)
    with pytest.raises(CorruptCheckpoint, match=r"'w': a shard of it takes 4611686018427387904"):
        source.require_readable(["w"])
    source.close()


def test_an_index_with_anything_in_its_fields_is_malformed(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", {"w": whole(torch.zeros(4, 3))}, with_manifest=False)
    whole_index = (folder / ".metadata").read_bytes()
    for change in (
        lambda m: m.state_dict_metadata.update({3: m.state_dict_metadata["w"]}),
        lambda m: setattr(next(iter(m.storage_data.values())), "offset", "0"),
        lambda m: setattr(m.state_dict_metadata["w"], "size", 3),
        lambda m: setattr(m.state_dict_metadata["w"], "chunks", None),
    ):
        metadata = pickle.loads(whole_index)
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CorruptCheckpoint):
            CheckpointSource(folder)


def test_a_blob_that_holds_another_tensor_than_the_index_says_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", {"w": whole(torch.zeros(4, 3))}, with_manifest=False)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    entry.size = entry.chunks[0].sizes = torch.Size([3, 4])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpoint, match=r"'w': the container at 0 holds a tensor of size"):
        read(folder, "w")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_sparse_and_quantised_tensors_are_named(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.quint8)
    tensors = {"q": whole(quantised), "s": whole(torch.eye(3))}
    folder = write_checkpoint(tmp_path / "c", tensors, with_manifest=False)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["s"].properties.layout = torch.sparse_coo
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    source = CheckpointSource(folder)
    assert {"q", "s"} == source.unreadable.keys()
    for key, text in (("s", "'s': its layout is sparse_coo"), ("q", "'q': its dtype is .*quint8")):
        with pytest.raises(UsageError, match=text):
            source.require_readable([key])
    source.close()


def test_a_tensor_of_another_layout_than_the_index_says_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", {"o": whole(torch.zeros(3, 3))}, with_manifest=False)
    other = write_checkpoint(tmp_path / "d", {}, {"o": torch.eye(3).to_sparse()}, files=1)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = pickle.loads((other / ".metadata").read_bytes())
    (info,) = index.storage_data.values()
    metadata.storage_data = dict.fromkeys(metadata.storage_data, info)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes())
    with pytest.raises(UsageError, match="'o' is stored as a Tensor of layout sparse_coo"):
        read(folder, "o")


def test_what_carries_no_checksums_is_named_as_unchecked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_crc32_options(False)
    try:
        tensors = {"w": whole(torch.ones(64)), "v": whole(torch.ones(9000))}
        folder = write_checkpoint(tmp_path / "c", tensors, {"o": 3}, with_manifest=False)
    finally:
        set_crc32_options(True)
    source = CheckpointSource(folder)
    for key in ("w", "v"):
        assert bits(tensors[key][0]) == b"".join(map(bytes, source.blocks(key)))
    assert 3 == source.value("o")
    assert ["w", "v", "o"] == source.unchecked
    source.close()


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_poisoned_object_runs_nothing_and_its_class_and_key_are_named(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    folder = write_checkpoint(tmp_path / "c", {}, {"o": Trap(trap)})
    source = CheckpointSource(folder)
    with pytest.raises(
        LoadFailed, match=r"'o' names a class or function that is not allowed: posix\.mkdir"
    ) as caught:
        source.value("o")
    assert "--allow-pickle" in caught.value.hint
    assert not trap.exists()
    source.close()
    trusting = CheckpointSource(folder, allow_pickle=True)
    trusting.value("o")
    trusting.close()
    assert trap.exists()


def test_a_checkpoint_of_thousands_of_files_keeps_few_of_them_open(tmp_path: Path) -> None:
    rows = blobs.FILES_MAX * 2
    tensor = torch.arange(float(rows * 3)).reshape(rows, 3)
    boxes = [((row, 0), (1, 3)) for row in range(rows)]
    write_checkpoint(tmp_path / "c", {"w": (tensor, boxes)}, files=rows)
    source = CheckpointSource(tmp_path / "c")
    assert bits(tensor) == b"".join(map(bytes, source.blocks("w")))
    links = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    open_files = [link.readlink().parent for link in links if link.is_symlink()]
    assert blobs.FILES_MAX == open_files.count(tmp_path / "c")
    source.close()
