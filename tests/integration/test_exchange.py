"""Export, import and diff, tested with other programs: safetensors, transformers and torch's own
converters; with checkpoints of several ranks, with bounded memory, and on a full disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

from milepost import cli
from tests.integration.cluster import Node, Rank, nodes, run_ranks
from tests.integration.test_small_shm import in_own_file_system
from tests.unit.exchange.checkpoints import whole, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def run(*arguments: object, expected: int = 0) -> str:
    """Run a command in this process, which has imported torch; return what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as caught,
    ):
        patch.setattr(sys, "argv", ["milepost", *map(str, arguments)])
        cli.main()
    assert expected == caught.value.code, err.getvalue()
    return out.getvalue()


def assert_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert (value.dtype, value.shape) == (found[key].dtype, found[key].shape), key
        assert torch.equal(value.view(torch.uint8), found[key].view(torch.uint8)), key


# --- the safetensors package

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.float16, torch.bfloat16,
    torch.uint32, torch.int32, torch.float32, torch.uint64, torch.int64, torch.float64,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip

TENSORS = {
    f"{str(dtype)[6:]} {size}": torch.arange(8).reshape(size).to(dtype)
    for dtype in DTYPES
    for size in ((8,), (2, 4), (2, 2, 2))
} | {'odd "key"\n': torch.ones(1, 1), "empty": torch.zeros(1, 0)}


def test_the_package_reads_what_is_exported(tmp_path: Path) -> None:
    tensors = {key: whole(value) for key, value in TENSORS.items()}
    checkpoint = write_checkpoint(tmp_path / "c", tensors | {"scalar": whole(torch.tensor(2.5))})
    run("export", checkpoint, tmp_path / "m.safetensors", "--to", "safetensors")
    found = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert 2.5 == found.pop("scalar").item()
    assert_equal(TENSORS, found)


def test_what_the_package_writes_is_imported(tmp_path: Path) -> None:
    safetensors.torch.save_file(TENSORS, tmp_path / "m.safetensors", {"format": "pt"})
    run("import", tmp_path / "m.safetensors", tmp_path / "c")
    state = {key: torch.zeros_like(value) for key, value in TENSORS.items()}
    stock_load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_equal(TENSORS, state)


class Tied(torch.nn.Module):
    """A model that uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(20, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 20, bias=False)
        self.head.weight = self.wte.weight


def test_the_package_loads_tied_weights_into_a_model_and_back(tmp_path: Path) -> None:
    model, other, third = Tied(), Tied(), Tied()
    checkpoint = write_checkpoint(
        tmp_path / "c", {key: whole(value) for key, value in model.state_dict().items()}
    )
    run("export", checkpoint, tmp_path / "m.safetensors", "--to", "safetensors")
    # Strict: a name too many is an error as one too few is.
    assert (set(), []) == safetensors.torch.load_model(other, str(tmp_path / "m.safetensors"))
    assert_equal(model.state_dict(), other.state_dict())
    safetensors.torch.save_model(other, str(tmp_path / "theirs.safetensors"))
    run("import", tmp_path / "theirs.safetensors", tmp_path / "d")
    state = third.state_dict()
    stock_load(state, checkpoint_id=tmp_path / "d", no_dist=True)
    assert_equal(model.state_dict(), state)


# --- transformers

CONFIGS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32,
            bos_token_id=0, eos_token_id=0,
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            vocab_size=100, tie_word_embeddings=False,
        )
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2, vocab_size=100,
            decoder_start_token_id=0,
        )
    ),
}  # fmt: skip

TIED = {
    "gpt2": {"lm_head.weight": "transformer.wte.weight"},
    "llama": {},
    "t5": dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
        "shared.weight",
    ),
}


def save_models(rank: Rank) -> dict[str, list[float]]:
    """Save all models in one checkpoint; return the output of each."""
    from milepost import Checkpointer

    torch.manual_seed(0)
    models = {name: make().eval() for name, make in CONFIGS.items()}
    with Checkpointer(rank.root) as ck:
        ck.save(1, {**models, "step": 1}).wait(60)
    return {name: answer(model) for name, model in models.items()}


def answer(model: Any) -> list[float]:
    tokens = torch.arange(10).reshape(2, 5)
    more = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=tokens, **more).logits
    return logits.flatten().tolist()


@pytest.fixture(scope="module")
def models(module_folder: Path) -> tuple[Path, dict[str, list[float]]]:
    """A checkpoint of ours with three models, and their outputs."""
    root = module_folder / "root"
    with nodes(module_folder, 1, root) as (node,):
        (answers,) = run_ranks(save_models, root, [node])
    return root / "step_1", answers


@pytest.mark.parametrize("max_shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_loads_an_export_and_answers_the_same(
    models: tuple[Path, dict[str, list[float]]], tmp_path: Path, name: str, max_shard: str
) -> None:
    checkpoint, answers = models
    model = CONFIGS[name]()
    model.config.save_pretrained(tmp_path)
    arguments = ("--to", "safetensors", "--prefix", f"{name}.", "--max-shard-size", max_shard)
    found = json.loads(run("export", checkpoint, tmp_path, *arguments, "--json"))
    assert TIED[name] == found["tied"]
    assert (max_shard == "20KB") == (tmp_path / "model.safetensors.index.json").exists()
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert (set(), set()) == (set(info["missing_keys"]), set(info["unexpected_keys"]))
    assert answers[name] == answer(loaded.eval())


@pytest.mark.parametrize("max_shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", CONFIGS)
def test_stock_torch_loads_what_was_imported_from_transformers(
    tmp_path: Path, name: str, max_shard: str
) -> None:
    model, other = CONFIGS[name](), CONFIGS[name]()
    model.save_pretrained(tmp_path / "hf", max_shard_size=max_shard)
    ties = [f"--tied={alias}={kept}" for alias, kept in TIED[name].items()]
    run("import", tmp_path / "hf", tmp_path / "c", "--prefix", "model", *ties)
    run("verify", tmp_path / "c")
    state = {"model": other.state_dict()}
    stock_load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_equal(model.state_dict(), state["model"])


# --- several ranks, and torch's own converters


def save_sharded(rank: Rank) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from milepost import Checkpointer

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "replica": Replicate()}
    state = {
        "model": {
            name: distribute_tensor(whole_tensor(name), mesh, [placement])
            for name, placement in placements.items()
        },
        "optim": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]},
    }
    with Checkpointer(rank.root) as ck:
        ck.save(1, state, per_rank={"rng": torch.full((3,), rank.rank)}).wait(60)


def whole_tensor(name: str) -> torch.Tensor:
    torch.manual_seed(len(name))
    return torch.randn(301, 77)


EXPECTED: dict[str, Any] = {
    "model": {name: whole_tensor(name) for name in ("rows", "columns", "replica")},
    "optim": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]},
    "per_rank/0/rng": torch.full((3,), 0),
    "per_rank/1/rng": torch.full((3,), 1),
}


def load_by_ours(rank: Rank) -> dict[str, list[Any]]:
    from milepost import Checkpointer

    with Checkpointer(rank.root) as ck:
        state = {"model": {name: torch.zeros(301, 77) for name in EXPECTED["model"]}}
        ck.load(state, step=9)
    return {name: tensor.tolist() for name, tensor in state["model"].items()}


@pytest.fixture(scope="module")
def sharded(module_folder: Path) -> Iterator[tuple[Path, Node]]:
    """A checkpoint of ours from two ranks, and the daemon."""
    root = module_folder / "sharded"
    with nodes(module_folder / "s", 1, root) as (node,):
        run_ranks(save_sharded, root, [node, node])
        yield root / "step_1", node


def assert_state(found: dict[str, Any], entry: Any = 0) -> None:
    """Compare with what was saved; `entry` is the name of the optimizer's entry."""
    assert EXPECTED.keys() == found.keys()
    assert_equal(EXPECTED["model"], found["model"])
    assert {"step": torch.tensor(3.0)} == found["optim"]["state"][entry]
    assert EXPECTED["optim"]["param_groups"] == found["optim"]["param_groups"]
    for key in ("per_rank/0/rng", "per_rank/1/rng"):
        assert torch.equal(EXPECTED[key], found[key])


def test_an_export_of_shards_is_the_whole(sharded: tuple[Path, Node], tmp_path: Path) -> None:
    checkpoint, _ = sharded
    run("export", checkpoint, tmp_path / "m.pt", "--to", "torch")
    assert_state(torch.load(tmp_path / "m.pt", weights_only=True))
    run("export", checkpoint, tmp_path / "hf", "--to", "safetensors", "--prefix", "model")
    assert_equal(EXPECTED["model"], safetensors.torch.load_file(tmp_path / "hf/model.safetensors"))
    run("diff", checkpoint, tmp_path / "m.pt")


def test_torchs_converters_and_ours_take_what_the_other_wrote(
    sharded: tuple[Path, Node], tmp_path: Path
) -> None:
    checkpoint, node = sharded
    dcp_to_torch_save(checkpoint, tmp_path / "theirs.pt")
    assert_state(torch.load(tmp_path / "theirs.pt", weights_only=True), "0")
    run("import", tmp_path / "theirs.pt", tmp_path / "from_theirs")
    run("diff", checkpoint, tmp_path / "from_theirs")
    run("export", checkpoint, tmp_path / "ours.pt", "--to", "torch")
    step_9 = checkpoint.with_name("step_9")
    torch_save_to_dcp(tmp_path / "ours.pt", step_9)
    run("diff", checkpoint, step_9)
    (found,) = run_ranks(load_by_ours, checkpoint.parent, [node])
    assert {name: tensor.tolist() for name, tensor in EXPECTED["model"].items()} == found
    run("import", tmp_path / "ours.pt", tmp_path / "from_ours")
    dcp_to_torch_save(tmp_path / "from_ours", tmp_path / "again.pt")
    assert_state(torch.load(tmp_path / "again.pt", weights_only=True), "0")
    partial = {"model": {"rows": torch.zeros(301, 77)}}
    planner = DefaultLoadPlanner()
    stock_load(partial, checkpoint_id=tmp_path / "from_ours", planner=planner, no_dist=True)
    assert torch.equal(EXPECTED["model"]["rows"], partial["model"]["rows"])


# --- memory

PEAKS = """
import resource, sys
from milepost import cli

for rest in ("small", "large"):
    sys.argv = ["milepost", *(each.replace("{}", rest) for each in ARGUMENTS)]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, end.code
    sys.stderr.write(f"\\npeak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}\\n")
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "{}", "{}.out", "--to", "torch"),
        ("export", "{}", "{}.out", "--to", "safetensors"),
        ("import", "{}.pt", "{}.out"),
        ("diff", "{}.pt", "{}"),
    ],
)
def test_memory_does_not_grow_with_a_tensor(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    for name, rows in (("small", 10), ("large", 50_000)):
        tensor = torch.arange(float(rows * 1000)).reshape(rows, 1000)
        columns = [((0, at), (rows, 250)) for at in range(0, 1000, 250)]
        write_checkpoint(tmp_path / name, {"model.w": (tensor, columns)})
        torch.save({"model.w": tensor}, tmp_path / f"{name}.pt")
    done = subprocess.run(
        [sys.executable, "-c", PEAKS.replace("ARGUMENTS", repr(arguments))],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert 0 == done.returncode, done.stderr
    small, large = (int(line[5:]) for line in done.stderr.splitlines() if line.startswith("peak "))
    assert large < small + (64 << 20)


# --- a kill

KILLED = """
import os, signal, sys
from milepost import cli
from milepost.exchange import drafts

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

drafts.Draft.POINT = killed
sys.argv = ["milepost", *ARGUMENTS]
cli.main()
"""


@pytest.mark.parametrize("point", ["write", "__exit__"])
@pytest.mark.parametrize(
    "arguments",
    [("export", "c", "out", "--to", "safetensors"), ("export", "c", "out", "--to", "torch"),
     ("import", "m.pt", "out")],
    ids=lambda arguments: " ".join(arguments[::3]),
)  # fmt: skip
def test_a_killed_command_leaves_a_hidden_name_alone_and_can_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], point: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "c", {"w": whole(torch.randn(100, 100))})
    run("export", "c", "m.pt", "--to", "torch")
    script = KILLED.replace("POINT", point).replace("ARGUMENTS", repr(arguments))
    assert -9 == subprocess.run([sys.executable, "-c", script], timeout=100).returncode
    (left,) = {path.name for path in tmp_path.iterdir()} - {"c", "m.pt"}
    assert left.startswith(".out.milepost-")
    run(*arguments)
    run("diff", "c", "out")


# --- a full disk

FULL = """
import os, sys
from pathlib import Path
from milepost import cli
from milepost.exchange import drafts

place, arguments = sys.argv[1], {arguments}
os.chdir(place)
before = sorted(os.listdir())
for reserve in (drafts.reserve, lambda file, size: None):
    drafts.reserve = reserve
    sys.argv = ["milepost", *arguments]
    sys.stderr = sys.stdout
    try:
        cli.main()
    except SystemExit as end:
        print(end.code, before == sorted(os.listdir()))
    sys.stderr = sys.__stderr__
"""


@pytest.mark.root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
@pytest.mark.parametrize(
    "arguments",
    [
        ("export", "{c}", "out", "--to", "torch"),
        ("export", "{c}", "out", "--to", "safetensors"),
        ("export", "{c}", ".", "--to", "safetensors", "--max-shard-size", "1MB"),
        ("export", "{c}", "one.safetensors", "--to", "safetensors"),
        ("import", "{m}", "out"),
    ],
)
def test_a_full_disk_leaves_nothing_behind(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    tensors = {f"w{n}": whole(torch.randn(200_000)) for n in range(8)}
    checkpoint = write_checkpoint(tmp_path / "c", tensors)
    run("export", checkpoint, tmp_path / "m.pt", "--to", "torch")
    named = [each.format(c=checkpoint, m=tmp_path / "m.pt") for each in arguments]
    script = FULL.replace("{arguments}", repr(named))
    lines = in_own_file_system(folder, "tmpfs -o size=3m", script)
    assert ["1 True", "1 True"] == [line for line in lines if line.startswith("1 ")]
    assert 2 == sum("no space left on device" in line for line in lines)
