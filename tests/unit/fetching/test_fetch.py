"""Fetching: what lands is what was saved, whatever the layout, and damage is named."""

from __future__ import annotations

import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.fetching.checkpoints import (
    Chunk,
    Known,
    Writer,
    add_manifest,
    fetch_into,
    make_cold,
    whole,
    write_checkpoint,
)

from milepost.fetching import blocks, copying, fetch, filling, planning, tasks
from milepost.fetching.checksums import KnownChecksums
from milepost.fetching.files import DataFile
from milepost.fetching.index import Destination, read_index
from milepost.wire.offers import Box

DTYPES = (
    torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8,
    torch.float8_e4m3fn,
)  # fmt: skip
SIZES: tuple[Box, ...] = (
    (), (0,), (7,), (3, 5), (40, 33), (6, 5, 70), (3000,), (0, 4), (5, 1200),
)  # fmt: skip
KNOWN: tuple[Known, ...] = ("nothing", "blobs", "stretches")


@pytest.fixture
def is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits a thousandth of what they are, so that kilobytes fall apart as gigabytes do."""
    shrink(monkeypatch)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(fetch, "BLOCK_BYTES", 8192)
    for module in (blocks, tasks, planning):
        monkeypatch.setattr(module, "GAP_BYTES", 100)
    monkeypatch.setattr(planning, "SMALL_BYTES", 4000)
    monkeypatch.setattr(filling, "STRAIGHT_BYTES", 500)
    monkeypatch.setattr(filling, "STEP_BYTES", 4096)
    monkeypatch.setattr(copying, "SLAB_ELEMENTS", 50)
    monkeypatch.setattr(copying, "GIL_BYTES", 300)


def values(size: Box, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Elements of any bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, size, generator=generator).bool()
    raw = torch.randint(0, 256, (*size, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(size)


def bits(tensor: torch.Tensor) -> bytes:
    # A tensor of one element counts as contiguous whatever its strides are, and keeps them.
    own = torch.empty(tensor.numel(), dtype=tensor.dtype)
    own.view(tensor.shape).copy_(tensor)
    return own.view(torch.uint8).numpy().tobytes()


def stored_as(data: torch.Tensor, how: str) -> torch.Tensor:
    """The same values over memory of another form."""
    match how:
        case "transposed" if data.dim() > 1:
            return data.transpose(0, -1).contiguous().transpose(0, -1)
        case "spread" if data.dim() and data.numel():
            wide = torch.stack([data, data], -1)[..., 0]
            return wide
        case "part" if data.dim() == 1:
            return torch.cat([data, data])[len(data) :]
        case _:
            return data


@st.composite
def tilings(draw: st.DrawFn, size: Box) -> list[tuple[Box, Box]]:
    boxes: list[tuple[Box, Box]] = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 3)) if size else 0):
        at, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(size) - 1))
        cut = draw(st.integers(0, sizes[dim]))
        boxes.append((at, (*sizes[:dim], cut, *sizes[dim + 1 :])))
        moved = (*at[:dim], at[dim] + cut, *at[dim + 1 :])
        boxes.append((moved, (*sizes[:dim], sizes[dim] - cut, *sizes[dim + 1 :])))
    # An index has one place for an offset: that of the box that is not empty, if there is one.
    by_offset: dict[Box, Box] = {}
    for at, sizes in boxes:
        if at not in by_offset or 0 in by_offset[at]:
            by_offset[at] = sizes
    return draw(st.permutations(list(by_offset.items())))


def part_of(tensor: torch.Tensor, at: Box, sizes: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))]


@st.composite
def wishes(draw: st.DrawFn, key: str, tensor: torch.Tensor) -> Destination:
    """A box of a tensor, and memory of some form for it."""
    at = tuple(draw(st.integers(0, n)) if draw(st.booleans()) else 0 for n in tensor.shape)
    sizes = tuple(
        draw(st.integers(0, n - a)) if draw(st.booleans()) else n - a
        for n, a in zip(tensor.shape, at, strict=True)
    )
    dtype = tensor.dtype
    if dtype in (torch.float32, torch.int64) and draw(st.integers(0, 3)) == 0:
        dtype = torch.float64
    memory = values(sizes, dtype, seed=7)
    form = draw(st.sampled_from(["as it is", "as it is", "transposed", "spread", "part"]))
    return Destination(key, at, stored_as(memory, form))


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_what_lands_is_what_was_saved(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    files: list[list[Chunk]] = [[] for _ in range(data.draw(st.integers(1, 3)))]
    for number in range(data.draw(st.integers(1, 5))):
        size = data.draw(
            st.sampled_from(
                [(), (0,), (7,), (3, 5), (40, 33), (6, 5, 70), (3000,), (0, 4), (5, 1200)]
            )
        )
        dtype = data.draw(st.sampled_from(DTYPES))
        key = f"t{number}"
        tensors[key] = values(size, dtype, number)
        form = data.draw(st.sampled_from(["as it is", "as it is", "transposed", "spread", "part"]))
        for at, sizes in data.draw(tilings(size)):
            chunk = stored_as(part_of(tensors[key], at, sizes).clone(), form)
            files[data.draw(st.integers(0, len(files) - 1))].append(Chunk(key, size, at, chunk))
    folder = write_checkpoint(
        tmp_path_factory.mktemp("checkpoint"),
        files,
        {"o": {"a": 1}, "p": list(range(2000))},
        writer=data.draw(st.sampled_from(["torch", "torch", "old torch", "odd"])),
        known=data.draw(st.sampled_from(KNOWN)),
        align=data.draw(st.sampled_from([1, 64, 512])),
        with_columns=data.draw(st.booleans()),
    )
    wanted = [data.draw(wishes(key, tensors[key])) for key in data.draw(
        st.lists(st.sampled_from(sorted(tensors)), max_size=6))]  # fmt: skip
    cached = data.draw(st.sampled_from([None, True, False]))
    with pytest.MonkeyPatch.context() as patched:
        shrink(patched)
        if cached is not None:
            patched.setattr(DataFile, "is_cached", lambda *_: cached)
        done = fetch_into(
            folder,
            wanted,
            ["p", "o"],
            threads=data.draw(st.integers(1, 3)),
            is_checked=data.draw(st.booleans()),
        )
    assert [] == done.damages
    assert [] == done.unchecked
    for key, at, memory in wanted:
        expected = part_of(tensors[key], at, tuple(memory.shape)).to(memory.dtype)
        assert bits(expected) == bits(memory), (key, at)
    found = [torch.load(io.BytesIO(each)) for each in done.objects]
    assert [list(range(2000)), {"a": 1}] == found
    assert 0 == sum(each.name.startswith("milepost") for each in threading.enumerate())


# --- how much is read ---------------------------------------------------------------------------


def test_a_table_on_other_ranks_is_read_in_four_parts(tmp_path: Path) -> None:
    table = torch.arange(48.0).view(12, 4)
    halves = [[Chunk("t", (12, 4), (at, 0), table[at : at + 6].clone())] for at in (0, 6)]
    folder = write_checkpoint(tmp_path / "c", halves)
    reads = []
    for rank in range(3):
        memory = torch.zeros(4, 4)
        wanted = [Destination("t", (4 * rank, 0), memory)]
        reads.append([read.blob.file for read in read_index(folder).tensor_reads(wanted)])
        done = fetch_into(folder, wanted)
        assert torch.equal(table[4 * rank : 4 * rank + 4], memory)
        sizes = {file: (folder / file).stat().st_size for file in set(reads[-1])}
        assert sum(sizes.values()) == done.read_bytes
    first, second = "__0_0.distcp", "__1_0.distcp"
    assert [[first], [first, second], [second]] == reads


def test_a_weight_in_quarters_is_read_into_strips_in_exactly_eight_reads(tmp_path: Path) -> None:
    weight = torch.arange(64.0).view(8, 8)
    quarters = [
        [Chunk("w", (8, 8), (row, column), weight[row : row + 4, column : column + 4].clone())]
        for row in (0, 4)
        for column in (0, 4)
    ]
    folder = write_checkpoint(tmp_path / "c", quarters)
    count = 0
    for rank in range(4):
        memory = torch.zeros(8, 2)
        wanted = [Destination("w", (0, 2 * rank), memory)]
        reads = read_index(folder).tensor_reads(wanted)
        count += len(reads)
        assert {(4, 2)} == {read.sizes for read in reads}
        fetch_into(folder, wanted)
        assert torch.equal(weight[:, 2 * rank : 2 * rank + 2], memory)
    assert 8 == count


@pytest.mark.parametrize("known", KNOWN)
def test_each_byte_of_a_checkpoint_is_read_once(known: Known, tmp_path: Path) -> None:
    tensors = {f"t{n}": values((n * 40_000 + 10,), torch.float32, n) for n in range(12)}
    chunks = [Chunk(key, tuple(t.shape), (0,), t) for key, t in tensors.items()]
    folder = write_checkpoint(
        tmp_path / "c", [chunks[:6], chunks[6:]], known=known, stretch_bytes=1 << 20
    )
    file_bytes = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    for is_cold in (True, False):
        if is_cold:
            make_cold(folder)
        memory = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        done = fetch_into(folder, whole(memory))
        assert not done.damages
        assert all(bits(tensors[key]) == bits(memory[key]) for key in tensors)
        # The ends of large containers without a manifest are looked at before.
        ahead = 20_000 if known == "nothing" else 0
        assert file_bytes <= done.read_bytes <= file_bytes + ahead


def test_of_a_large_tensor_the_stretches_around_a_part_are_read(tmp_path: Path) -> None:
    large = values((1 << 20,), torch.float32)
    folder = write_checkpoint(
        tmp_path / "c",
        [[Chunk("t", (1 << 20,), (0,), large)]],
        stretch_bytes=1 << 16,
    )
    memory = torch.zeros(1000)
    done = fetch_into(folder, [Destination("t", (500_000,), memory)])
    assert bits(large[500_000:501_000]) == bits(memory)
    assert done.read_bytes <= 3 << 16
    rows = large.view(1024, 1024)
    folder = write_checkpoint(
        tmp_path / "d", [[Chunk("t", (1024, 1024), (0, 0), rows)]], known="nothing"
    )
    column = torch.zeros(4, 1)
    done = fetch_into(folder, [Destination("t", (100, 5), column)], is_checked=False)
    assert bits(rows[100:104, 5:6]) == bits(column)
    assert done.read_bytes <= 4 * 4096 + 10_000


# --- damage -------------------------------------------------------------------------------------


def states() -> dict[str, torch.Tensor]:
    return {
        "small": values((300,), torch.float32, 1),
        "large": values((5000,), torch.float32, 2),
        "last": values((20, 3), torch.float32, 3),
    }


def place_of(folder: Path, key: str) -> tuple[Path, int, int]:
    (read,) = (
        read_index(folder).object_reads([key])
        if key == "o"
        else read_index(folder).tensor_reads(whole({key: torch.zeros_like(states()[key])}))
    )
    return folder / read.blob.file, read.blob.offset, read.blob.length


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(4)
        file.seek(at)
        file.write(bytes(byte ^ 0x55 for byte in old))


@pytest.mark.usefixtures("is_small")
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("writer", ["torch", "old torch"])
@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("key", ["small", "large", "last", "o"])
def test_four_flipped_bytes_are_refused_by_file_and_key(
    key: str, known: Known, writer: Writer, cached: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(DataFile, "is_cached", lambda *_: cached)
    chunks = [Chunk(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in states().items()]
    folder = write_checkpoint(
        tmp_path / "c", [chunks], {"o": {"a": list(range(50))}}, writer=writer, known=known
    )
    path, offset, length = place_of(folder, key)
    blob = path.read_bytes()[offset : offset + length]
    payload = bits(states()[key]) if key in states() else b"K\x07K\x08K\x09"
    # In the middle, in what is small and in what falls apart.
    flip(path, offset + blob.index(payload) + (len(payload) // 2 & ~3 if key in states() else 0))
    memory = {name: torch.zeros_like(tensor) for name, tensor in states().items()}
    done = fetch_into(folder, whole(memory), ["o"])
    assert [(path.name, key)] == [damage[:2] for damage in done.damages]
    assert "CRC-32" in done.damages[0].text
    right = [name for name in memory if name != key]
    assert all(bits(states()[name]) == bits(memory[name]) for name in right)
    if key == "small":
        assert 0 == torch.count_nonzero(memory[key]), "small and damaged, it does not land"
        assert list(memory).index(key) not in done.touched
    # Without the arithmetic it is loaded as it is.
    if key != "o":
        done = fetch_into(folder, whole(memory), is_checked=False)
        assert [] == done.damages
        differ = states()[key].view(torch.int32) != memory[key].view(torch.int32)
        assert 0 < int(differ.sum()) <= 2
        assert [0, 1, 2] == done.touched


@pytest.mark.usefixtures("is_small")
@pytest.mark.parametrize("known", ["blobs", "stretches"])
def test_two_files_swapped_are_refused(known: Known, tmp_path: Path) -> None:
    one, other = values((5000,), torch.float32, 1), values((5000,), torch.float32, 2)
    files = [[Chunk("a", (5000,), (0,), one)], [Chunk("b", (5000,), (0,), other)]]
    folder = write_checkpoint(tmp_path / "c", files, known=known)
    first, second = sorted(folder.glob("*.distcp"))
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    done = fetch_into(folder, whole({"a": torch.zeros(5000), "b": torch.zeros(5000)}))
    assert {("__0_0.distcp", "a"), ("__1_0.distcp", "b")} == {each[:2] for each in done.damages}


@pytest.mark.parametrize("known", KNOWN)
def test_a_file_cut_short_is_refused_before_anything_is_written(
    known: Known, tmp_path: Path
) -> None:
    chunks = [Chunk(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in states().items()]
    folder = write_checkpoint(tmp_path / "c", [chunks], known=known)
    path = folder / "__0_0.distcp"
    os.truncate(path, path.stat().st_size - 500)
    memory = {name: torch.zeros_like(tensor) for name, tensor in states().items()}
    done = fetch_into(folder, whole(memory))
    ((file, key, text),) = done.damages
    assert path.name == file
    if known == "nothing":
        assert "last" == key
        assert "beyond its end" in text
    else:
        assert "were written" in text
    assert [] == done.touched
    assert not any(torch.count_nonzero(each) for each in memory.values())


def test_a_missing_file_names_all_that_it_held(tmp_path: Path) -> None:
    chunks = [Chunk(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in states().items()]
    folder = write_checkpoint(tmp_path / "c", [chunks[:2], chunks[2:]])
    (folder / "__0_0.distcp").unlink()
    done = fetch_into(folder, whole({key: torch.zeros_like(t) for key, t in states().items()}))
    assert [
        ("__0_0.distcp", "small", "the file is missing"),
        ("__0_0.distcp", "large", "the file is missing"),
    ] == done.damages


@pytest.mark.usefixtures("is_small")
def test_a_file_that_cannot_be_read_names_what_it_held_and_ends_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = values((50_000,), torch.float32, 1), values((500,), torch.float32, 2)
    files = [[Chunk("a", (50_000,), (0,), one)], [Chunk("b", (500,), (0,), other)]]
    folder = write_checkpoint(tmp_path / "c", files)
    read, calls = os.preadv, 0

    def broken(descriptor: int, *rest: Any) -> int:
        nonlocal calls
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("__0_0.distcp"):
            calls += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, *rest)

    monkeypatch.setattr(os, "preadv", broken)
    memory = {"a": torch.zeros(50_000), "b": torch.zeros(500)}
    done = fetch_into(folder, whole(memory), threads=1)
    ((file, key, text),) = done.damages
    assert ("__0_0.distcp", "a") == (file, key)
    assert "cannot be read: input/output error" in text
    assert 1 == calls
    assert bits(other) == bits(memory["b"])
    assert [1] == done.touched


@pytest.mark.parametrize("known", KNOWN)
def test_a_tensor_of_another_size_than_the_index_says_is_damage(
    known: Known, tmp_path: Path
) -> None:
    data = values((6, 4), torch.float32)
    folder = write_checkpoint(tmp_path / "c", [[Chunk("t", (6, 4), (0, 0), data)]], known="nothing")
    other = write_checkpoint(
        tmp_path / "d", [[Chunk("t", (4, 6), (0, 0), data.view(4, 6))]], known="nothing"
    )
    (other / "__0_0.distcp").replace(folder / "__0_0.distcp")
    if known != "nothing":
        add_manifest(folder, known)
    memory = torch.zeros(6, 4)
    done = fetch_into(folder, whole({"t": memory}))
    assert [("__0_0.distcp", "t")] == [damage[:2] for damage in done.damages]
    assert "holds a tensor of size [4, 6], the index asks for [6, 4]" in done.damages[0].text
    assert 0 == torch.count_nonzero(memory)


def test_what_carries_no_checksum_is_told(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = {"a": values((10,), torch.float32), "b": values((600_000,), torch.float32)}
        chunks = [Chunk(key, tuple(t.shape), (0,), t) for key, t in data.items()]
        folder = write_checkpoint(
            tmp_path / "c", [chunks], {"o": {"x": 1}, "raw": b"of a planner"}, known="nothing"
        )
    finally:
        torch.serialization.set_crc32_options(True)
    memory = {key: torch.zeros_like(tensor) for key, tensor in data.items()}
    done = fetch_into(folder, whole(memory), ["o", "raw"])
    assert [] == done.damages
    assert {"a", "b", "o", "raw"} == set(done.unchecked)
    assert b"of a planner" == done.objects[1]
    assert all(bits(data[key]) == bits(memory[key]) for key in data)


def test_quantised_and_sparse_tensors_come_as_torch_loads_them(tmp_path: Path) -> None:
    sparse = torch.eye(30).to_sparse()
    chunk = Chunk("s", (30, 30), (0, 0), sparse)
    folder = write_checkpoint(tmp_path / "c", [[chunk]], known="nothing")
    with pytest.raises(RuntimeError):
        fetch_into(folder, whole({"s": torch.zeros(30, 30)}))


def test_memory_of_another_size_than_the_box_is_the_callers_mistake(tmp_path: Path) -> None:
    data = values((6, 4), torch.float32)
    folder = write_checkpoint(tmp_path / "c", [[Chunk("t", (6, 4), (0, 0), data)]])
    index = read_index(folder)
    (read,) = index.tensor_reads(whole({"t": torch.zeros(6, 4)}))
    wrong = read._replace(memory=torch.zeros(4))
    with pytest.raises(ValueError, match=r"\[6, 4\] of 't' do not fill \[4\]"):
        fetch.fetch(folder, [wrong], [], KnownChecksums(index.manifest))


def test_autograd_knows_what_was_written(tmp_path: Path) -> None:
    data = values((6, 4), torch.float32)
    folder = write_checkpoint(tmp_path / "c", [[Chunk("t", (6, 4), (0, 0), data)]])
    memory = torch.zeros(6, 4, requires_grad=True)
    before = memory._version
    fetch_into(folder, whole({"t": memory}))
    assert memory._version > before
    assert bits(data) == bits(memory.detach())


def test_files_are_closed_again(tmp_path: Path) -> None:
    files = [[Chunk(f"t{n}", (10,), (0,), values((10,), torch.int64, n))] for n in range(40)]
    folder = write_checkpoint(tmp_path / "c", files)
    before = len(os.listdir("/proc/self/fd"))
    most = 0
    opened = os.open

    def note(*arguments: Any) -> int:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        return opened(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "open", note)
        fetch_into(folder, whole({f"t{n}": torch.zeros(10, dtype=torch.int64) for n in range(40)}))
    assert before == len(os.listdir("/proc/self/fd"))
    assert most <= before + 2 * 16 + 10
