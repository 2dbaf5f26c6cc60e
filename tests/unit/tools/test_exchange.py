"""`milepost export`, `import`, `diff`: what they write, print and refuse, and what they leave."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.unit.exchange.checkpoints import flip, whole, write_checkpoint
from tests.unit.tools.commands import Commands
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

from milepost.errors import UsageError
from milepost.exchange import checkpoint as checkpoint_module
from milepost.exchange.comparison import equal
from milepost.exchange.safetensors import read_header
from milepost.tools.export import size_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

EMBEDDING = torch.arange(80.0).reshape(20, 4)
STATE: dict[str, Any] = {
    "model": {
        "wte.weight": EMBEDDING,
        "h.0.weight": torch.arange(12.0).reshape(3, 4),
        "h.0.bias": torch.zeros(3),
        "h.1.bias": torch.zeros(3),
        "half": torch.arange(3.0).bfloat16(),
        "lm_head.weight": EMBEDDING,
    },
    "optim": {"state": {"0": {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 0.1}]},
    "epoch": 3,
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that stock torch wrote; only to be read."""
    path = tmp_path_factory.mktemp("stock") / "step_7"
    stock_save(STATE, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(capsys, monkeypatch)


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file by its description alone."""
    data = bytearray(path.read_bytes())
    found = {}
    for key, stored in read_header(path)[0].items():
        part = data[stored.begin : stored.begin + stored.form.bytes]
        found[key] = torch.frombuffer(part, dtype=stored.form.dtype).view(stored.form.size)
    return found


# --- export to torch


def test_a_torch_export_is_what_torchs_own_tool_writes(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    assert 0 == run("export", stock, tmp_path / "m.pt", "--to", "torch")
    assert f"{tmp_path / 'm.pt'}\n" == run.out
    assert "7 tensors" in run.err
    dcp_to_torch_save(stock, tmp_path / "theirs.pt")
    ours, theirs = (torch.load(tmp_path / n, weights_only=True) for n in ("m.pt", "theirs.pt"))
    assert equal(theirs, ours)


@pytest.mark.parametrize("prefix", ["model", "model."])
def test_a_prefix_takes_a_part_and_is_taken_off(
    stock: Path, tmp_path: Path, run: Commands, prefix: str
) -> None:
    assert 0 == run("export", stock, tmp_path / "m.pt", "--to", "torch", "--prefix", prefix)
    assert equal(STATE["model"], torch.load(tmp_path / "m.pt", weights_only=True))


def test_a_prefix_may_end_within_a_name_and_lead_into_a_list(tmp_path: Path, run: Commands) -> None:
    state = {"a.b": {"c": torch.ones(1), "l": [torch.zeros(1)]}, "x": 1}
    stock_save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert 0 == run("export", tmp_path / "c", tmp_path / "m", "--to", "torch", "--prefix", "a")
    assert equal(
        {"b": {"c": torch.ones(1), "l": [torch.zeros(1)]}},
        torch.load(tmp_path / "m", weights_only=True),
    )


def test_objects_can_be_left_out_of_a_torch_export(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    code, found = run.json("export", stock, tmp_path / "m", "--to", "torch", "--tensors-only")
    assert (0, ["optim.param_groups.0.lr", "epoch"]) == (code, found["left_out"])
    assert "epoch" not in torch.load(tmp_path / "m", weights_only=True)


def test_keys_and_empty_dicts_come_back_as_what_they_were(tmp_path: Path, run: Commands) -> None:
    state = {
        "numbers": {0: torch.ones(1), -3: 1, None: 2, True: 3, 2.5: 4, (1, "x"): 5, b"b": 6},
        "types": {torch.float32: torch.ones(1)},
        "empty": {},
        "list": [torch.ones(1), {}, {"deep": {7: {}}}],
    }
    torch.save(state, tmp_path / "m.pt")
    assert 0 == run("import", tmp_path / "m.pt", tmp_path / "c", "--prefix", "x.y")
    assert 0 == run("export", tmp_path / "c", tmp_path / "e", "--to", "torch")
    assert equal({"x": {"y": state}}, torch.load(tmp_path / "e", weights_only=True))
    assert 0 == run("export", tmp_path / "c", tmp_path / "f", "--to", "torch", "--prefix", "x.y")
    assert equal(state, torch.load(tmp_path / "f", weights_only=True))


def test_an_optimizer_that_stock_torch_saved_loads_what_was_exported(
    tmp_path: Path, run: Commands
) -> None:
    def made() -> torch.optim.Optimizer:
        return torch.optim.Adam(torch.nn.Linear(3, 2).parameters())

    optimizer = made()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stock_save({"optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert 0 == run("export", tmp_path / "c", tmp_path / "e", "--to", "torch", "--prefix", "optim")
    other = made()
    other.load_state_dict(torch.load(tmp_path / "e", weights_only=True))
    assert equal(optimizer.state_dict(), other.state_dict())


# --- export to safetensors


def test_a_model_that_fits_is_one_file_with_tied_weights_once(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    code, found = run.json(
        "export", stock, tmp_path / "hf", "--to", "safetensors", "--prefix", "model."
    )
    assert (0, [str(tmp_path / "hf/model.safetensors")]) == (code, found["files"])
    assert {"lm_head.weight": "wte.weight"} == found["tied"]
    assert "lm_head.weight is tied to wte.weight" in run.err
    path = tmp_path / "hf/model.safetensors"
    assert {"format": "pt", "lm_head.weight": "wte.weight"} == read_header(path)[1]
    expected = {key: value for key, value in STATE["model"].items() if key != "lm_head.weight"}
    assert equal(expected, tensors_in(path))
    assert sum(value.nbytes for value in expected.values()) == found["bytes"]


def test_tied_weights_are_written_under_each_name_on_request(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    arguments = ("--to", "safetensors", "--prefix", "model", "--tied-copies")
    assert 0 == run("export", stock, tmp_path / "m.safetensors", *arguments)
    assert equal(STATE["model"], tensors_in(tmp_path / "m.safetensors"))


def test_a_larger_model_is_sharded_with_an_index(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    arguments = ("--to", "safetensors", "--prefix", "model.", "--max-shard-size", "60B")
    assert 0 == run("export", stock, tmp_path / "hf", *arguments)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [*names, "model.safetensors.index.json"] == sorted(os.listdir(tmp_path / "hf"))
    assert [str(tmp_path / "hf" / name) for name in names] == run.out.splitlines()[:3]
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert {"total_size": 320 + 48 + 12 + 12 + 6} == index["metadata"]
    found: dict[str, torch.Tensor] = {}
    for name in names:
        part = tensors_in(tmp_path / "hf" / name)
        assert set(part) == {key for key, file in index["weight_map"].items() if file == name}
        found |= part
    expected = {key: value for key, value in STATE["model"].items() if key != "lm_head.weight"}
    assert equal(expected, {key: found[key] for key in expected})
    assert expected.keys() == found.keys()


def test_objects_have_no_place_in_safetensors_unless_left_out(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    assert 2 == run("export", stock, tmp_path / "hf", "--to", "safetensors")
    assert "2 entries are objects: optim.param_groups.0.lr, epoch" in run.err
    assert [] == os.listdir(tmp_path)
    assert 0 == run("export", stock, tmp_path / "hf", "--to", "safetensors", "--tensors-only")
    assert "left out: 2 objects: optim.param_groups.0.lr, epoch" in run.err
    assert "optim.state.0.exp_avg" in tensors_in(tmp_path / "hf/model.safetensors")


def test_one_file_that_would_be_too_large_is_refused(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    arguments = ("--to", "safetensors", "--prefix", "model", "--max-shard-size", "60B")
    assert 2 == run("export", stock, tmp_path / "m.safetensors", *arguments)
    assert [] == os.listdir(tmp_path)


def test_an_export_joins_a_directory_that_has_a_configuration(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = ("export", stock, tmp_path, "--to", "safetensors", "--prefix", "model")
    assert 0 == run(*arguments)
    assert ["config.json", "model.safetensors"] == sorted(os.listdir(tmp_path))
    assert 2 == run(*arguments)
    assert "holds model.safetensors already" in run.err
    assert 0 == run(*arguments, "--overwrite", "--max-shard-size", "60")
    assert "model.safetensors" not in os.listdir(tmp_path)
    assert 5 == len(os.listdir(tmp_path))


def test_a_dtype_without_a_place_is_refused_by_name(tmp_path: Path, run: Commands) -> None:
    tensor = torch.zeros(2, dtype=torch.complex128)
    checkpoint = write_checkpoint(tmp_path / "c", {"w": whole(tensor)})
    assert 2 == run("export", checkpoint, tmp_path / "hf", "--to", "safetensors")
    assert "'w' is complex128, and safetensors has no such dtype" in run.err
    assert ["c"] == os.listdir(tmp_path)


def test_odd_names_and_shapes_survive_both_ways(tmp_path: Path, run: Commands) -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(2, 0, 3),
        "bool": torch.tensor([True, False, True]),
        'a "quoted" \\ name': torch.ones(2),
        "ключ/…\n\t": torch.ones(3).to(torch.float8_e4m3fn),
        "with space.и.dots": torch.ones(1, dtype=torch.uint16),
        "": torch.ones(1, dtype=torch.complex64),
    }
    checkpoint = write_checkpoint(tmp_path / "c", {key: whole(t) for key, t in tensors.items()})
    for to, name in (("torch", "m.pt"), ("safetensors", "m.safetensors")):
        assert 0 == run("export", checkpoint, tmp_path / name, "--to", to)
        assert 0 == run("import", tmp_path / name, tmp_path / f"from-{to}")
        assert 0 == run("verify", tmp_path / f"from-{to}")
        assert 0 == run("diff", checkpoint, tmp_path / f"from-{to}")
        assert "equal: 7 keys the same\n" == run.out


# --- refusals and what is left behind


@pytest.mark.parametrize("to", ["torch", "safetensors"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_damage_is_refused_by_name_and_nothing_is_left(
    tmp_path: Path, run: Commands, to: str, with_manifest: bool
) -> None:
    tensors = {f"w{n}": whole(torch.full((900,), float(n))) for n in range(4)}
    checkpoint = write_checkpoint(tmp_path / "c", tensors, with_manifest=with_manifest, files=1)
    data = checkpoint / "__0_0.distcp"
    flip(data, data.read_bytes().index(tensors["w3"][0].numpy().tobytes()) + 100)
    assert 1 == run("export", checkpoint, tmp_path / "out", "--to", to)
    assert "__0_0.distcp: 'w3': the blob at " in run.err
    assert "" == run.out
    assert ["c"] == os.listdir(tmp_path)


def test_a_file_that_is_there_is_replaced_only_with_overwrite(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    (tmp_path / "m.pt").write_text("mine")
    assert 2 == run("export", stock, tmp_path / "m.pt", "--to", "torch")
    assert "mine" == (tmp_path / "m.pt").read_text()
    assert 0 == run("export", stock, tmp_path / "m.pt", "--to", "torch", "--overwrite")
    assert 3 == torch.load(tmp_path / "m.pt", weights_only=True)["epoch"]


def test_an_export_that_fails_keeps_what_it_was_to_replace(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", {"w": whole(torch.zeros(900))}, files=1)
    flip(checkpoint / "__0_0.distcp", 2000)
    (tmp_path / "m.pt").write_text("mine")
    assert 1 == run("export", checkpoint, tmp_path / "m.pt", "--to", "torch", "--overwrite")
    assert ["c", "m.pt"] == sorted(os.listdir(tmp_path))
    assert "mine" == (tmp_path / "m.pt").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(
    stock: Path, tmp_path: Path, run: Commands, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def blocks(*_: object) -> Any:
        assert [] != os.listdir(tmp_path)
        signal.raise_signal(number)
        yield memoryview(b"")

    monkeypatch.setattr(checkpoint_module.CheckpointSource, "blocks", blocks)
    assert 128 + number == run("export", stock, tmp_path / "m.pt", "--to", "torch")
    assert [] == os.listdir(tmp_path)


def test_a_closed_terminal_ends_nothing_that_was_told_not_to_hear_of_it(
    stock: Path, tmp_path: Path, run: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_blocks = checkpoint_module.CheckpointSource.blocks

    def blocks(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGHUP)
        return whole_blocks(*arguments)

    monkeypatch.setattr(checkpoint_module.CheckpointSource, "blocks", blocks)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert 0 == run("export", stock, tmp_path / "m.pt", "--to", "torch")
        assert signal.SIG_IGN == signal.getsignal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_no_checkpoint_is_a_usage_error(tmp_path: Path, run: Commands) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert 2 == run("export", path, tmp_path / "m", "--to", "torch")
        assert run.err.startswith("error: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--to", "onnx"), "cannot export to 'onnx'"),
        (("--to", "torch", "--prefix", "nothing."), "no key of"),
        (("--to", "safetensors", "--max-shard-size", "many"), "'many' is not a size"),
    ],
)
def test_wrong_options_are_usage_errors(
    stock: Path, tmp_path: Path, run: Commands, arguments: tuple[str, ...], text: str
) -> None:
    assert 2 == run("export", stock, tmp_path / "m", *arguments)
    assert text in run.err
    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500MB", 5 * 10**8), ("1.5KiB", 1536), ("2 GiB", 2 << 30), ("7", 7),
     ("9b", 9), ("1tb", 10**12)],
)  # fmt: skip
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    assert size == size_of(text)


@pytest.mark.parametrize("text", ["", "GB", "-1", "0", "5XB", "1e3"])
def test_what_is_no_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        size_of(text)


# --- import


def test_an_imported_torch_file_is_what_torchs_own_tool_makes_of_it(
    tmp_path: Path, run: Commands
) -> None:
    torch.save(STATE, tmp_path / "m.pt")
    assert 0 == run("import", tmp_path / "m.pt", tmp_path / "c")
    assert f"{tmp_path / 'c'}\n" == run.out
    torch_save_to_dcp(tmp_path / "m.pt", tmp_path / "theirs")
    assert 0 == run("diff", tmp_path / "c", tmp_path / "theirs")
    assert 0 == run("verify", tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "again.pt")
    assert equal(STATE, torch.load(tmp_path / "again.pt", weights_only=True))


def test_a_prefix_is_put_before_what_is_imported(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    arguments = ("--to", "safetensors", "--prefix", "model.", "--max-shard-size", "60")
    assert 0 == run("export", stock, tmp_path / "hf", *arguments)
    assert 0 == run("import", tmp_path / "hf", tmp_path / "c", "--prefix", "model.")
    assert 0 == run("export", tmp_path / "c", tmp_path / "m.pt", "--to", "torch")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert equal(dict(sorted(STATE["model"].items())), dict(sorted(found.pop("model").items())))
    assert {} == found


def test_a_tied_weight_gets_the_names_that_its_file_left_out(tmp_path: Path, run: Commands) -> None:
    torch.save({"wte.weight": EMBEDDING, "n": 1}, tmp_path / "m.pt")
    arguments = ("import", tmp_path / "m.pt", tmp_path / "c", "--prefix", "model")
    assert 0 == run(*arguments, "--tied", "lm_head.weight=wte.weight")
    assert "2 tensors, 1 object" in run.err
    assert 0 == run("export", tmp_path / "c", tmp_path / "e", "--to", "torch", "--prefix", "model")
    expected = {"wte.weight": EMBEDDING, "n": 1, "lm_head.weight": EMBEDDING}
    assert equal(expected, torch.load(tmp_path / "e", weights_only=True))
    assert list(expected) == list(torch.load(tmp_path / "e", weights_only=True))


@pytest.mark.parametrize("tied", ["x", "=wte.weight", "x=absent", "x=n", "n=wte.weight"])
def test_what_cannot_be_tied_is_a_usage_error(tmp_path: Path, run: Commands, tied: str) -> None:
    torch.save({"wte.weight": EMBEDDING, "n": 1}, tmp_path / "m.pt")
    assert 2 == run("import", tmp_path / "m.pt", tmp_path / "c", "--tied", tied)
    assert ["m.pt"] == os.listdir(tmp_path)


def test_an_import_says_what_carried_no_checksum(tmp_path: Path, run: Commands) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", {"w": whole(torch.ones(2))})
    assert 0 == run("export", checkpoint, tmp_path / "m.safetensors", "--to", "safetensors")
    code, found = run.json("import", tmp_path / "m.safetensors", tmp_path / "d")
    assert (0, 1, 0, ["w"]) == (code, found["tensors"], found["objects"], found["unchecked"])
    assert "without a checksum: 1 key, such as w" in run.err


def test_an_import_replaces_only_a_checkpoint_and_only_with_overwrite(
    tmp_path: Path, run: Commands
) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", {"w": whole(torch.ones(2))})
    torch.save({"w": torch.zeros(2)}, tmp_path / "m.pt")
    assert 2 == run("import", tmp_path / "m.pt", checkpoint)
    assert 0 == run("import", tmp_path / "m.pt", checkpoint, "--overwrite")
    assert 0 == run("diff", checkpoint, tmp_path / "m.pt")
    (checkpoint / "notes").write_text("mine")
    assert 2 == run("import", tmp_path / "m.pt", checkpoint, "--overwrite")
    assert "holds notes" in run.err


def test_a_damaged_torch_file_is_refused_and_nothing_is_left(tmp_path: Path, run: Commands) -> None:
    torch.save({"w": torch.arange(3000.0)}, tmp_path / "m.pt")
    flip(tmp_path / "m.pt", 6000)
    assert 1 == run("import", tmp_path / "m.pt", tmp_path / "c")
    assert "('w') does not match" in run.err
    assert ["m.pt"] == os.listdir(tmp_path)


def test_a_checkpoint_is_not_imported(stock: Path, tmp_path: Path, run: Commands) -> None:
    assert 2 == run("import", stock, tmp_path / "c")
    assert "is a checkpoint already" in run.err


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_poison_runs_nothing_in_any_command(tmp_path: Path, run: Commands) -> None:
    trap = tmp_path / "sprung"
    torch.save({"o": Trap(trap)}, tmp_path / "m.pt")
    checkpoint = write_checkpoint(tmp_path / "c", {}, {"o": Trap(trap)})
    other = write_checkpoint(tmp_path / "d", {}, {"o": 3})
    assert 1 == run("import", tmp_path / "m.pt", tmp_path / "i")
    assert "posix.mkdir" in run.err
    assert 1 == run("export", checkpoint, tmp_path / "e", "--to", "torch")
    assert "'o' names a class or function that is not allowed: posix.mkdir" in run.err
    assert 1 == run("diff", checkpoint, other)
    assert ["c", "d", "m.pt"] == sorted(os.listdir(tmp_path))
    assert 0 == run("export", checkpoint, tmp_path / "e", "--to", "torch", "--allow-pickle")
    assert trap.exists()


# --- diff


def test_equal_checkpoints_are_equal_however_they_are_sharded(
    tmp_path: Path, run: Commands
) -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    columns = [((0, 0), (4, 1)), ((0, 1), (4, 5))]
    a = write_checkpoint(tmp_path / "a", {"w": whole(tensor)}, {"o": [1, 2]})
    b = write_checkpoint(tmp_path / "b", {"w": (tensor, columns)}, {"o": [1, 2]}, files=3)
    code, found = run.json("diff", a, b)
    assert (0, True, 2, 0) == (code, found["equal"], found["same"], found["unread"])


def test_every_kind_of_difference_is_named(tmp_path: Path, run: Commands) -> None:
    a = {
        "mine": torch.ones(2), "shape": torch.ones(2), "dtype": torch.ones(2),
        "values": torch.zeros(5), "kind": torch.ones(1), "same": torch.ones(3),
    }  # fmt: skip
    b = {
        "yours": torch.ones(2, 2), "shape": torch.ones(3), "dtype": torch.ones(2).double(),
        "values": torch.tensor([0, 0, 0.25, 0, -1]), "same": torch.ones(3),
    }  # fmt: skip
    first = write_checkpoint(tmp_path / "a", {k: whole(t) for k, t in a.items()}, {"o": 1})
    second = write_checkpoint(
        tmp_path / "b", {k: whole(t) for k, t in b.items()}, {"o": 2, "kind": 3}
    )
    assert 1 == run("diff", first, second)
    lines = run.out.splitlines()
    assert lines[:5] == [
        "only in A: mine, float32 [2]",
        "only in B: yours, float32 [2, 2]",
        "shape: float32 [2] in A, float32 [3] in B",
        "dtype: float32 [2] in A, float64 [2] in B",
        "kind: float32 [1] in A, an object in B",
    ]
    assert lines[5].startswith("values: 2 of 5 elements differ, by at most 1 (CRC-32 ")
    assert lines[6:] == ["o: another object", "different: 1 key the same"]
    code, found = run.json("diff", first, second)
    assert (1, False) == (code, found["equal"])
    assert ["values", "o"] == [each["key"] for each in found["values"]]
    assert found["values"][0]["crc_a"] != found["values"][0]["crc_b"]


def test_one_element_that_differs_is_told_in_the_singular(tmp_path: Path, run: Commands) -> None:
    a, b = (
        write_checkpoint(tmp_path / name, {"w": whole(torch.tensor([1.0, 2.0, last]))})
        for name, last in (("a", 3.0), ("b", 3.5))
    )
    assert 1 == run("diff", a, b)
    assert run.out.startswith("w: 1 of 3 elements differs, by at most 0.5 (")


def test_quick_believes_manifests_and_the_usual_way_reads(tmp_path: Path, run: Commands) -> None:
    a, b = (
        write_checkpoint(tmp_path / name, {"w": whole(torch.zeros(900))}, files=1) for name in "ab"
    )
    flip(b / "__0_0.distcp", 2000)
    code, found = run.json("diff", a, b, "--quick")
    assert (0, 1) == (code, found["unread"])
    assert 1 == run("diff", a, b)
    assert "'w': the blob at 0: CRC-32" in run.err


def test_a_checkpoint_is_compared_with_what_was_exported_of_it(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    assert 0 == run("export", stock, tmp_path / "m.pt", "--to", "torch")
    assert 0 == run("diff", stock, tmp_path / "m.pt")


def test_what_cannot_be_compared_is_a_usage_error(
    stock: Path, tmp_path: Path, run: Commands
) -> None:
    assert 2 == run("diff", stock, tmp_path)
    assert "is not a checkpoint: it has no .metadata" in run.err
    assert 2 == run("diff", stock, tmp_path / "absent")


@pytest.mark.parametrize("command", ["export", "import", "diff"])
def test_every_command_has_an_example_in_its_help(run: Commands, command: str) -> None:
    assert 0 == run(command, "--help")
    assert f"Example: milepost {command} " in " ".join(run.out.split())
