"""Files of other formats as sources: what torch.save wrote, safetensors, sharded directories."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.unit.exchange.checkpoints import flip
from torch.serialization import set_crc32_options

from milepost.errors import CorruptCheckpoint, LoadFailed, UsageError
from milepost.exchange.files import StateSource, measure, open_file
from milepost.exchange.hugging_face import write_file, write_folder

if TYPE_CHECKING:
    from pathlib import Path

    from milepost.exchange.source import Source

STATE: dict[str, Any] = {
    "model": OrderedDict(
        w=torch.arange(3000.0).reshape(30, 100), t=torch.arange(12.0).reshape(3, 4).t()
    ),
    "half": torch.arange(9.0).bfloat16(),
    "empty": torch.zeros(0, 2),
    "epoch": 3,
}


def opened(path: Path, *, allow_pickle: bool = False) -> Source:
    return open_file(path, allow_pickle=allow_pickle, on_checked=lambda _: None)


def content(source: Source, block_bytes: int = 1 << 20) -> dict[str, torch.Tensor]:
    """Read all tensors of a source."""
    found = {}
    for key, form in source.tensors.items():
        data = bytearray(b"".join(map(bytes, source.blocks(key, block_bytes))))
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
        found[key] = flat.view(form.dtype).view(form.size)
    return found


def assert_is_state(source: Source) -> None:
    found = content(source, 64)
    assert torch.equal(STATE["model"]["w"], found.pop("model.w"))
    assert torch.equal(STATE["model"]["t"], found.pop("model.t"))
    assert torch.equal(STATE["half"], found.pop("half"))
    assert (0, 2) == tuple(found.pop("empty").size())
    assert {} == found
    assert (["epoch"], 3) == (source.objects, source.value("epoch"))
    assert ("model", "w") == source.paths["model.w"]


# --- torch.save


def test_a_torch_file_is_a_source(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "m.pt")
    source = opened(tmp_path / "m.pt")
    assert_is_state(source)
    assert [] == source.unchecked
    source.close()


def test_a_torch_file_of_long_ago_is_one_too_and_has_no_checksums(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    source = opened(tmp_path / "m.pt")
    assert_is_state(source)
    assert "model.w" in source.unchecked
    source.close()


def test_a_torch_file_without_checksums_is_named_as_unchecked(tmp_path: Path) -> None:
    set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "m.pt")
    finally:
        set_crc32_options(True)
    source = opened(tmp_path / "m.pt")
    assert_is_state(source)
    assert "model.w" in source.unchecked
    source.close()


def test_tensors_that_share_a_storage_come_whole_each(tmp_path: Path) -> None:
    # Memory is given back while the first is read, and has to be there for the second.
    base = torch.arange(100_000.0)
    torch.save({"a": base[:60_000], "b": base[40_000:], "c": base}, tmp_path / "m.pt")
    source = opened(tmp_path / "m.pt")
    found = content(source, 4096)
    assert torch.equal(base[:60_000], found["a"])
    assert torch.equal(base[40_000:], found["b"])
    assert torch.equal(base, found["c"])
    source.close()


def test_a_flipped_bit_of_a_torch_file_is_refused_by_record_and_tensor(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    at = data.index(STATE["model"]["w"].numpy().tobytes())
    flip(tmp_path / "m.pt", at + 5000)
    with pytest.raises(CorruptCheckpoint, match=r"m\.pt: .*/data/0 \('model\.w'\)"):
        opened(tmp_path / "m.pt")


def test_a_flipped_bit_of_its_pickle_is_refused_before_it_is_unpickled(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "m.pt")
    flip(tmp_path / "m.pt", (tmp_path / "m.pt").read_bytes().index(b"_rebuild_tensor_v2"))
    with pytest.raises(CorruptCheckpoint, match=r"record m/data\.pkl does not match"):
        opened(tmp_path / "m.pt", allow_pickle=True)


@pytest.mark.parametrize("length", [100, 5000])
def test_a_truncated_torch_file_is_refused(tmp_path: Path, length: int) -> None:
    torch.save(STATE, tmp_path / "m.pt")
    os.truncate(tmp_path / "m.pt", length)
    with pytest.raises(CorruptCheckpoint, match="is not a whole torch"):
        opened(tmp_path / "m.pt")


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_poisoned_torch_file_runs_nothing(tmp_path: Path, zipped: bool) -> None:
    trap = tmp_path / "sprung"
    torch.save({"o": Trap(trap)}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        LoadFailed, match=r"names a class or function that is not allowed: posix\.mkdir"
    ) as caught:
        opened(tmp_path / "m.pt")
    assert not trap.exists()
    assert "--allow-pickle" in caught.value.hint
    opened(tmp_path / "m.pt", allow_pickle=True).close()
    assert trap.exists()


def test_a_poisoned_pickle_under_another_name_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    (tmp_path / "m.bin").write_bytes(pickle.dumps({"o": Trap(trap)}))
    with pytest.raises(LoadFailed):
        opened(tmp_path / "m.bin")
    assert not trap.exists()


@pytest.mark.parametrize("value", [torch.ones(2), [torch.ones(2)], 3])
def test_a_torch_file_that_holds_no_dict_says_what_it_holds(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "m.pt")
    with pytest.raises(UsageError, match=f"holds a {type(value).__name__}, not a dict"):
        opened(tmp_path / "m.pt")


def test_a_whole_model_is_refused_with_what_to_save_instead(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "m.pt")
    with pytest.raises(LoadFailed, match=r"torch\.nn\.modules\.linear\.Linear"):
        opened(tmp_path / "m.pt")
    with pytest.raises(UsageError, match="holds a Linear, not a dict") as caught:
        opened(tmp_path / "m.pt", allow_pickle=True)
    assert "state_dict()" in caught.value.hint


def test_sparse_tensors_of_a_torch_file_are_named(tmp_path: Path) -> None:
    torch.save({"s": torch.eye(3).to_sparse(), "w": torch.ones(2)}, tmp_path / "m.pt")
    source = opened(tmp_path / "m.pt")
    assert ["s"] == list(source.unreadable)
    assert "sparse" in source.unreadable["s"]
    source.close()


def test_conjugated_and_negated_views_come_as_what_they_mean(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    torch.save({"c": value.conj(), "i": value.clone().conj().imag}, tmp_path / "m.pt")
    source = opened(tmp_path / "m.pt")
    found = content(source)
    assert torch.equal(value.conj().resolve_conj(), found["c"])
    assert torch.equal(torch.tensor([-2.0, 4.0]), found["i"])
    source.close()


# --- safetensors


def hugging_face(folder: Path, *, shards: int = 2) -> dict[str, torch.Tensor]:
    """Write a sharded directory; return its tensors."""
    state = {f"layers.{n}.weight": torch.full((4, 3), float(n)) for n in range(4)}
    source = StateSource(state)
    names = {key: key for key in state}
    keys = list(state)
    folder.mkdir()
    each = len(keys) // shards
    split = [keys[at : at + each] for at in range(0, len(keys), each)]
    write_folder(folder, source, split, names, {}, lambda _: None)
    return state


def assert_equal(state: dict[str, torch.Tensor], source: Source) -> None:
    found = content(source)
    assert state.keys() == found.keys()
    assert all(torch.equal(value, found[key]) for key, value in state.items())


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_directory_of_safetensors_is_a_source(tmp_path: Path, shards: int) -> None:
    state = hugging_face(tmp_path / "d", shards=shards)
    source = opened(tmp_path / "d")
    assert_equal(state, source)
    assert set(state) == set(source.unchecked)
    source.close()


def test_a_directory_without_the_usual_names_needs_a_single_file(tmp_path: Path) -> None:
    hugging_face(tmp_path / "d", shards=1)
    (tmp_path / "d/model.safetensors").rename(tmp_path / "d/adapter.safetensors")
    opened(tmp_path / "d").close()
    (tmp_path / "d/other.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="and 2 other safetensors files"):
        opened(tmp_path / "d")


def test_an_alias_is_the_tensor_that_it_names(tmp_path: Path) -> None:
    source = StateSource({"wte.weight": torch.ones(2, 2), "format": torch.zeros(1)})
    names = {"wte.weight": "wte.weight", "format": "format", "head": "lm_head.weight"}
    path = tmp_path / "m.safetensors"
    write_file(path, source, list(source.tensors), names, {"head": "wte.weight"}, lambda _: None)
    found = opened(path)
    assert torch.equal(torch.ones(2, 2), content(found)["lm_head.weight"])
    found.close()


def test_a_file_of_another_suffix_is_told_by_its_content(tmp_path: Path) -> None:
    state = hugging_face(tmp_path / "d", shards=1)
    (tmp_path / "d/model.safetensors").rename(tmp_path / "weights")
    source = opened(tmp_path / "weights")
    assert_equal(state, source)
    source.close()


def test_a_safetensors_file_that_shrinks_while_it_is_read_is_damage(tmp_path: Path) -> None:
    hugging_face(tmp_path / "d", shards=1)
    source = opened(tmp_path / "d")
    os.truncate(tmp_path / "d/model.safetensors", 200)
    with pytest.raises(CorruptCheckpoint, match="the file ends at"):
        content(source)
    source.close()


# --- an index


def change_index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda index: index.pop("weight_map"), UsageError, "has no weight_map"),
        (lambda index: index["weight_map"].update(x="absent.safetensors"), CorruptCheckpoint,
         r"not there: absent\.safetensors"),
        (lambda index: index["weight_map"].update(x="../../etc/passwd"), CorruptCheckpoint,
         "outside its own"),
        (lambda index: index["weight_map"].update(x="/etc/passwd"), CorruptCheckpoint,
         "outside its own"),
        (lambda index: index["weight_map"].update(x=3), CorruptCheckpoint, "outside its own"),
        (lambda index: index["weight_map"].update(x="model-00001-of-00002.safetensors"),
         CorruptCheckpoint, "do not hold: 'x'"),
    ],
)  # fmt: skip
def test_an_index_that_is_wrong_is_refused_and_says_how(
    tmp_path: Path, change: Any, error: type[Exception], text: str
) -> None:
    hugging_face(tmp_path / "d")
    change_index(tmp_path / "d", change)
    with pytest.raises(error, match=text):
        opened(tmp_path / "d")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path / "d")
    first, second = sorted((tmp_path / "d").glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CorruptCheckpoint, match=r"two of its files hold 'layers\.0\.weight'"):
        opened(tmp_path / "d")


def test_a_sharded_directory_of_torch_files_is_a_source(tmp_path: Path) -> None:
    for n in (1, 2):
        torch.save({f"w{n}": torch.full((2,), float(n))}, tmp_path / f"pytorch_model-{n}.bin")
    weight_map = {f"w{n}": f"pytorch_model-{n}.bin" for n in (1, 2)}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    source = opened(tmp_path)
    assert_equal({"w1": torch.full((2,), 1.0), "w2": torch.full((2,), 2.0)}, source)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) == measure(tmp_path)
    source.close()


# --- what is neither


@pytest.mark.parametrize("data", [b"", b"hello, world, this is text", b"\x89PNG\r\n\x1a\n" * 4])
def test_what_is_of_neither_format_is_a_usage_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(UsageError, match="is neither a torch"):
        opened(tmp_path / "m")


def test_what_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        opened(tmp_path / "m")
    with pytest.raises(UsageError, match="holds none of"):
        opened(tmp_path)
