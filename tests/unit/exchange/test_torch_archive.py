"""A torch.save file that is put together from streams is the one that torch.save writes."""

from __future__ import annotations

import io
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from milepost.errors import UsageError
from milepost.exchange.comparison import equal
from milepost.exchange.files import StateSource
from milepost.exchange.torch_archive import write_archive

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STATE: dict[str, Any] = {
    "model": {
        "w": torch.arange(12.0).reshape(3, 4),
        "t": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "half": torch.arange(5.0).bfloat16(),
        "f8": torch.arange(5.0).to(torch.float8_e5m2),
        "b": torch.tensor([True, False]),
        "u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "c": torch.tensor([1 + 2j], dtype=torch.complex128),
    },
    "optim": {"state": {"0": {"exp": torch.ones(2)}}, "groups": [{"lr": 0.1}, {"lr": 0.2}]},
    "tuple": (torch.full((3,), 7.0), "x"),
    "epoch": 3,
}


def write(path: Path, state: dict[str, Any]) -> None:
    source = StateSource(state)
    objects = {key: source.value(key) for key in source.objects}
    counted: list[int] = []

    def nest(tensors: Mapping[str, Any]) -> Any:
        values = {key: tensors[key] if key in tensors else objects[key] for key in source.paths}
        return unflatten_state_dict(values, dict(source.paths))

    write_archive(path, source, source.tensors, nest, counted.append)
    # Tensors within an object are written like any other.
    assert sum(form.bytes for form in source.tensors.values()) <= sum(counted)


def test_torch_reads_it_and_finds_the_same(tmp_path: Path) -> None:
    write(tmp_path / "m.pt", STATE)
    assert equal(STATE, torch.load(tmp_path / "m.pt", weights_only=True))
    assert equal(STATE, torch.load(tmp_path / "m.pt", weights_only=True, mmap=True))


def test_its_checksums_are_right(tmp_path: Path) -> None:
    write(tmp_path / "m.pt", STATE)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        assert None is archive.testzip()
        assert all(e.CRC for e in archive.infolist() if "/data/" in e.filename and e.file_size)


def test_it_is_as_long_as_torchs_own(tmp_path: Path) -> None:
    state = {"a": torch.arange(1000.0), "b": torch.ones(7, dtype=torch.int8)}
    write(tmp_path / "m.pt", state)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    ours, theirs = (tmp_path / "m.pt").read_bytes(), buffer.getvalue()
    assert len(ours) == len(theirs)
    # The one record that torch never checks tells of the checksums, which came later here.
    assert ours[: ours.index(b"/version")] == theirs[: theirs.index(b"/version")]


def test_many_tensors_of_different_dtypes_are_told_apart(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.int64, torch.uint8]
    state = {f"k{n}": torch.full((n % 5 + 1,), n % 100, dtype=dtypes[n % 3]) for n in range(500)}
    write(tmp_path / "m.pt", state)
    assert equal(state, torch.load(tmp_path / "m.pt", weights_only=True))


def test_an_object_that_cannot_be_pickled_is_a_usage_error(tmp_path: Path) -> None:
    source = StateSource({"f": lambda: 0})
    with pytest.raises(UsageError, match="cannot be pickled"):
        write_archive(tmp_path / "m", source, {}, lambda _: source.value("f"), lambda _: None)
