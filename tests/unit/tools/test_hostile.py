"""Files that somebody made to hang, crash or fool the commands. Each is refused by name, and
nothing is left behind.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.exchange.checkpoints import whole, write_checkpoint
from tests.unit.tools.commands import Commands

from milepost.format.manifest import MANIFEST_NAME, METADATA_NAME


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(capsys, monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "root" / "step_1", {"w": whole(torch.zeros(4))}, {"o": 1})


def without_manifest(checkpoint: Path, change: Callable[[Any], None]) -> Path:
    """Change the index, of which nothing has a checksum then."""
    (checkpoint / MANIFEST_NAME).unlink()
    metadata = pickle.loads((checkpoint / METADATA_NAME).read_bytes())
    change(metadata)
    (checkpoint / METADATA_NAME).write_bytes(pickle.dumps(metadata))
    return checkpoint


def renamed(metadata: Any, name: str) -> None:
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop("w")
    index = next(index for index in metadata.storage_data if index.fqn == "w")
    place = metadata.storage_data.pop(index)
    metadata.storage_data[dataclasses.replace(index, fqn=name)] = place


def codes(run: Commands, checkpoint: Path) -> dict[str, int]:
    """Run everything that reads a checkpoint; return the exit codes. What fails leaves nothing."""
    out = checkpoint.parent.parent / "out"
    out.mkdir()
    found = {"list": run("list", checkpoint.parent)}
    found |= {name: run(name, checkpoint) for name in ("inspect", "verify")}
    found["export"] = run("export", checkpoint, out / "m.pt", "--to", "torch")
    if found["export"]:
        assert [] == os.listdir(out)
        assert run.err.startswith("error: ")
    found["diff"] = run("diff", checkpoint, checkpoint)
    return found


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "directory"])
@pytest.mark.parametrize("name", [MANIFEST_NAME, METADATA_NAME, "__0_0.distcp"])
def test_what_stands_in_place_of_a_file_is_refused_and_not_waited_for(
    name: str, make: Callable[[Path], None], checkpoint: Path, run: Commands
) -> None:
    (checkpoint / name).unlink()
    make(checkpoint / name)
    found = codes(run, checkpoint)
    assert (0, 1, 1, 1) == tuple(found[each] for each in ("list", "verify", "export", "diff"))
    # It reads no data files.
    assert found["inspect"] == (0 if name.endswith(".distcp") else 1)


@pytest.mark.parametrize("file", ["x" * 5000, "no/such/file"])
def test_a_file_name_that_the_system_refuses_is_damage(
    file: str, checkpoint: Path, run: Commands
) -> None:
    def change(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = file

    found = codes(run, without_manifest(checkpoint, change))
    assert {"list": 0, "inspect": 0, "verify": 1, "export": 1, "diff": 1} == found


def test_names_give_no_orders_to_the_terminal(checkpoint: Path, run: Commands) -> None:
    without_manifest(checkpoint, lambda metadata: renamed(metadata, "a\n\x1b[2J\r\x9b"))
    assert 0 == run("inspect", checkpoint)
    assert r"'a\n\x1b[2J\r\x9b'" in run.out
    assert not any(order in run.out for order in "\x1b\r\x9b")
    (checkpoint / "__0_0.distcp").write_bytes(b"")
    assert 1 == run("verify", checkpoint)
    assert r"\x1b[2J\r\x9b" in run.err
    assert not any(order in run.err for order in "\x1b\r\x9b")


def test_a_key_that_is_no_text_is_refused_by_name(
    checkpoint: Path, tmp_path: Path, run: Commands
) -> None:
    without_manifest(checkpoint, lambda metadata: renamed(metadata, "\ud800"))
    found = codes(run, checkpoint)
    assert (0, 0, 2) == tuple(found[each] for each in ("list", "inspect", "export"))
    torch.save({"\ud800": torch.ones(1)}, tmp_path / "m.pt")
    assert 2 == run("import", tmp_path / "m.pt", tmp_path / "imported")
    assert r"the key '\ud800' is no text" in run.err
    assert not (tmp_path / "imported").exists()


def test_a_size_that_no_tensor_has_is_damage(
    checkpoint: Path, tmp_path: Path, run: Commands
) -> None:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([1 << 62, 1 << 62, 0])
        entry.chunks = []

    found = codes(run, without_manifest(checkpoint, change))
    assert {"list": 0, "inspect": 1, "verify": 1, "export": 1, "diff": 1} == found
    entry = {"dtype": "F32", "shape": [1 << 62, 1 << 62, 0], "data_offsets": [0, 0]}
    header = json.dumps({"w": entry}).encode()
    file = tmp_path / "m.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert 1 == run("import", file, tmp_path / "imported")
    assert "its entry for 'w' is malformed" in run.err


@pytest.mark.parametrize("path", [("o", (1 << 24) - 1), ("o",) * 5000], ids=["long", "deep"])
def test_a_place_in_the_state_that_none_can_have_is_damage(
    path: tuple[Any, ...], checkpoint: Path, run: Commands
) -> None:
    without_manifest(checkpoint, lambda metadata: metadata.planner_data.update(o=path))
    found = codes(run, checkpoint)
    assert {"list": 0, "inspect": 0, "verify": 0, "export": 1, "diff": 0} == found


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_or_closed_stdout_ends_a_command_with_a_line(
    options: tuple[str, ...],
    checkpoint: Path,
    run: Commands,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert 1 == run("inspect", checkpoint, *options)
        assert "error: [Errno 28] No space left on device\n" == run.err
        patch.setattr(sys, "stdout", None)
        assert 0 == run("inspect", checkpoint, *options)
