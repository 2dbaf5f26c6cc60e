"""milepost with what it requires, and nothing else: no numpy, no safetensors, no transformers.

What runs on the pages for people is in `test_readme.py`, the demonstration in `test_demo.py`; both
run in the same environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from typer.main import get_group

from milepost.cli import app
from tests.integration.alone import TREE

COMMAND_S = 60

MAKE = """
import torch, torch.distributed.checkpoint as dcp
table = torch.arange(80.0).reshape(20, 4)
state = {"model": {"wte.weight": table, "bias": torch.ones(3), "head.weight": table}, "epoch": 3}
dcp.save(state, checkpoint_id="step_1", no_dist=True)
"""

LOAD_ON_TWO_RANKS = """
import torch, torch.distributed as dist
from milepost import Checkpointer
dist.init_process_group("gloo")
with Checkpointer("checkpoints") as ck:
    ck.save(1, {"w": torch.arange(10.0)}, per_rank={"rank": dist.get_rank()}).wait()
    state = {"w": torch.zeros(10)}
    report = ck.load(state)
    assert torch.equal(torch.arange(10.0), state["w"])
    assert dist.get_rank() == report.per_rank["rank"]
dist.destroy_process_group()
"""


def run(alone: Path, folder: Path, *command: object, **variables: str) -> tuple[int, str, str]:
    """Run a command of the environment; return its exit code, stdout and stderr."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MILEPOST", "PYTHON"))
    }
    done = subprocess.run(
        [alone.with_name(str(command[0])), *map(str, command[1:])],
        cwd=folder, env=kept | {"OMP_NUM_THREADS": "1"} | variables, timeout=COMMAND_S,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_nothing_else_is_installed(alone: Path, folder: Path) -> None:
    names = ("numpy", "safetensors", "transformers", "pytest", "hypothesis", "packaging")
    code = f"""
from importlib.util import find_spec
import milepost, milepostd
print([name for name in {names} if find_spec(name)])
print(milepost.__file__, milepostd.__file__)
"""
    exit_code, out, _ = run(alone, folder, "python", "-c", code)
    installed, files = out.splitlines()
    assert (0, "[]") == (exit_code, installed)
    assert all(file.startswith(str(alone.parents[1])) for file in files.split())


def test_every_file_of_both_packages_is_installed(alone: Path) -> None:
    (site_packages,) = alone.parents[1].glob("lib/python*/site-packages")
    packages = {"milepost": TREE / "client", "milepostd": TREE / "daemon"}
    for name, above in packages.items():
        files = [file for file in (above / name).rglob("*") if file.is_file()]
        own = {str(file.relative_to(above)) for file in files if "__pycache__" not in file.parts}
        assert {f"{name}/__init__.py", f"{name}/py.typed"} <= own
        assert set() == {file for file in own if not (site_packages / file).is_file()}


def test_every_command_has_a_help(alone: Path, folder: Path) -> None:
    names = [str(name) for name in get_group(app).commands]
    assert {"status", "list", "export", "import", "diff", "demo"} <= set(names)
    for name in names:
        code, out, err = run(alone, folder, "milepost", name, "--help")
        assert (0, "") == (code, err)
        assert "Usage: milepost " in out
    assert (0, "") == run(alone, folder, "milepostd", "--help")[::2]
    assert 3 == run(alone, folder, "milepost", "status", "--run-dir", folder)[0]


def test_commands_that_read_checkpoints_say_nothing_of_numpy(alone: Path, folder: Path) -> None:
    assert 0 == run(alone, folder, "python", "-c", MAKE)[0]
    commands = (
        "inspect step_1", "verify step_1", "export step_1 model.pt --to torch",
        "export step_1 hf --to safetensors --prefix model.", "import model.pt from_pt",
        "import hf from_hf --prefix model.", "diff step_1 from_pt",
    )  # fmt: skip
    for command in commands:
        code, _, err = run(alone, folder, "milepost", *command.split())
        assert (0, False) == (code, "numpy" in err.lower()), f"{command}: {err}"
    code, out, _ = run(alone, folder, "milepost", "diff", "step_1", "from_hf", "--json")
    assert (1, ["epoch"]) == (code, [each["key"] for each in json.loads(out)["only_in_a"]])


def test_two_ranks_save_and_load_and_the_daemon_logs_nothing_but_its_lines(
    alone: Path, folder: Path
) -> None:
    (folder / "run").mkdir(mode=0o700)
    (folder / "two.py").write_text(LOAD_ON_TWO_RANKS)
    with (folder / "milepostd.log").open("wb") as log:
        daemon = subprocess.Popen(
            [alone.with_name("milepostd"), "--run-dir", folder / "run", "--root", folder,
             "--http", ""],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        code, _, err = run(
            alone, folder, "torchrun", "--nproc-per-node", 2, "two.py",
            MILEPOST_RUN_DIR=str(folder / "run"),
        )  # fmt: skip
    finally:
        daemon.terminate()
        assert 0 == daemon.wait(COMMAND_S)
    lines = (folder / "milepostd.log").read_text().splitlines()
    assert 0 == code, err
    assert "save.committed" in [json.loads(line)["event"] for line in lines]
