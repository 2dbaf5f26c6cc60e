"""The command line: what it says of whole and of damaged checkpoints, ours and stock torch's."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.unit.reading.checkpoints import adopt
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.serialization import set_crc32_options

from milepost import cli
from milepost.dcp_format.index import read_metadata
from milepost.errors import Unavailable
from milepost.format.manifest import MANIFEST_NAME, Manifest, encode_manifest, read_manifest
from milepost.tools import status as status_tool
from milepost.tools.status import duration
from milepost.wire.messages import NodeRef
from milepostd.core.node import Node, NodeSettings
from milepostd.core.status import status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

# Stock torch warns that it saves for one process, which is what is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE: Mapping[str, Any] = {
    "w": torch.arange(5000, dtype=torch.float32).reshape(100, 50),
    "b": torch.zeros(0, 3),
    "scalar": torch.tensor(7, dtype=torch.int64),
    "meta": {"epoch": 3, "names": ["a", "b"]},
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that stock torch wrote."""
    path = tmp_path_factory.mktemp("stock") / "step_7"
    stock_save(dict(STATE), checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def foreign(stock: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return shutil.copytree(stock, tmp_path / "step_7")


@pytest.fixture
def ours(foreign: Path) -> Path:
    """The same with a manifest, as milepost would have written it."""
    adopt(foreign, step=7)
    return foreign


class Run:
    """Runs commands in this process, as the console script does."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.out = ""
        self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["milepost", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        self.out, self.err = self._capsys.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return code

    def json(self, *arguments: object) -> tuple[int, Any]:
        code = self(*arguments, "--json")
        return code, json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys, monkeypatch)


def place_of(checkpoint: Path, key: str) -> tuple[Path, int, int]:
    """Return file, offset and length of a key's only blob."""
    ((_, info),) = [
        (index, info)
        for index, info in read_metadata(checkpoint).storage_data.items()
        if index.fqn == key
    ]
    return checkpoint / info.relative_path, info.offset, info.length


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def rewrite_index(checkpoint: Path, change: Callable[[Any], None]) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


# --- verify


def test_a_whole_checkpoint_is_whole_by_its_manifest(ours: Path, run: Run) -> None:
    code, found = run.json("verify", ours)
    assert (code, found["method"], found["damages"]) == (0, "manifest", [])
    assert found["blobs"] == len(read_metadata(ours).storage_data)
    assert found["bytes"] == sum(read_manifest(ours).lengths)  # type: ignore[union-attr]


def test_a_whole_checkpoint_of_stock_torch_is_whole_by_its_containers(
    foreign: Path, run: Run
) -> None:
    assert run("verify", foreign) == 0
    assert "whole" in run.out
    assert "zip checksums" in run.out
    assert run.err == ""


@pytest.mark.parametrize("with_manifest", [True, False])
def test_one_flipped_bit_of_a_payload_is_found_and_its_file_and_tensor_named(
    foreign: Path, run: Run, with_manifest: bool
) -> None:
    if with_manifest:
        adopt(foreign, 7)
    file, offset, length = place_of(foreign, "w")
    flip(file, offset + length // 2)
    code, found = run.json("verify", foreign)
    ((damage),) = found["damages"]
    assert (code, damage["file"], damage["key"]) == (1, file.name, "w")
    assert "CRC-32" in damage["text"]


def test_one_flipped_bit_of_an_object_is_found(ours: Path, run: Run) -> None:
    file, offset, length = place_of(ours, "meta.epoch")
    flip(file, offset + length // 2)
    assert run("verify", ours) == 1
    assert f"{file.name}, meta.epoch: CRC-32" in run.err


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_truncated_file_is_found(foreign: Path, run: Run, with_manifest: bool) -> None:
    if with_manifest:
        adopt(foreign, 7)
    file, offset, length = place_of(foreign, "w")
    os.truncate(file, offset + length - 1)
    code, found = run.json("verify", foreign)
    assert code == 1
    assert "w" in {damage["key"] for damage in found["damages"]}


def test_bytes_added_at_the_end_are_found_by_the_manifest(ours: Path, run: Run) -> None:
    file, _, _ = place_of(ours, "w")
    with file.open("ab") as stream:
        stream.write(b"x")
    assert run("verify", ours) == 1
    assert "bytes long, written were" in run.err


@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_missing_file_is_found_with_every_key_in_it(
    foreign: Path, run: Run, with_manifest: bool
) -> None:
    if with_manifest:
        adopt(foreign, 7)
    file, _, _ = place_of(foreign, "w")
    file.unlink()
    code, found = run.json("verify", foreign)
    assert code == 1
    assert {damage["key"] for damage in found["damages"]} >= {"w", "scalar"}
    assert {damage["text"] for damage in found["damages"]} == {"the file is missing"}


def test_a_missing_file_is_one_line_for_people(ours: Path, run: Run) -> None:
    name = next(ours.glob("*.distcp"))
    name.unlink()
    assert run("verify", str(ours)) == 1
    (line,) = [line for line in run.err.splitlines() if "the file is missing" in line]
    assert line.startswith(f"{name.name}, ")
    assert " more: " in line


def test_swapped_files_of_equal_shape_are_found(tmp_path: Path, run: Run) -> None:
    checkpoint = tmp_path / "step_1"
    stock_save({"a": torch.zeros(64)}, checkpoint_id=checkpoint, no_dist=True)
    (only,) = checkpoint.glob("*.distcp")
    stock_save({"a": torch.ones(64)}, checkpoint_id=tmp_path / "other", no_dist=True)
    other = next((tmp_path / "other").glob("*.distcp")).read_bytes()
    (checkpoint / "__1_0.distcp").write_bytes(other)

    def add_second(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["a"]
        entry.size = torch.Size([128])
        entry.chunks = [ChunkStorageMetadata(torch.Size([at]), torch.Size([64])) for at in (0, 64)]
        info = next(iter(metadata.storage_data.values()))
        second = type(info)("__1_0.distcp", info.offset, info.length)
        metadata.storage_data = {
            MetadataIndex("a", torch.Size([0]), 0): info,
            MetadataIndex("a", torch.Size([64]), 1): second,
        }

    rewrite_index(checkpoint, add_second)
    adopt(checkpoint, 1)
    assert run("verify", checkpoint) == 0
    (checkpoint / "__1_0.distcp").write_bytes(only.read_bytes())
    only.write_bytes(other)
    code, found = run.json("verify", checkpoint)
    assert (code, len(found["damages"])) == (1, 2)


def test_an_index_of_another_save_is_found(ours: Path, run: Run) -> None:
    def move(metadata: Any) -> None:
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == "w")
        info.offset += 64

    rewrite_index(ours, move)
    assert run("verify", ours) == 1
    assert ".metadata, w: the index alone places it" in run.err


def test_a_payload_of_another_size_is_found_without_a_manifest(foreign: Path, run: Run) -> None:
    def grow(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["w"]
        entry.size = torch.Size([100, 51])
        entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([100, 51]))]

    rewrite_index(foreign, grow)
    assert run("verify", foreign) == 1
    assert "the container at" in run.err
    assert "holds 20000 bytes of elements, the index asks for 20400" in run.err


def test_containers_written_without_checksums_are_named_as_unchecked(
    tmp_path: Path, run: Run
) -> None:
    set_crc32_options(False)
    try:
        stock_save({"a": torch.ones(64)}, checkpoint_id=tmp_path / "c", no_dist=True)
    finally:
        set_crc32_options(True)
    code, found = run.json("verify", tmp_path / "c")
    assert (code, found["damages"], found["unchecked"]) == (0, [], ["a"])


@pytest.mark.parametrize("name", [".metadata", MANIFEST_NAME])
def test_a_damaged_index_or_manifest_is_damage_not_a_crash(ours: Path, run: Run, name: str) -> None:
    os.truncate(ours / name, 40)
    code, found = run.json("verify", ours)
    assert code == 1
    assert name in {damage["file"] for damage in found["damages"]}


def test_a_manifest_that_points_outside_is_not_followed(ours: Path, run: Run) -> None:
    hostile = Manifest(
        files=("../../etc/passwd",),
        file_bytes=(1,),
        keys=("w",),
        files_of=(0,),
        offsets=(0,),
        lengths=(1,),
        crcs=(0,),
    )
    (ours / MANIFEST_NAME).write_bytes(encode_manifest(hostile))
    code, found = run.json("verify", ours)
    assert (code, found["method"]) == (1, "containers")


def test_what_is_no_checkpoint_is_a_usage_error(tmp_path: Path, run: Run) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert run("verify", path) == 2
        assert run.err.startswith("error: ")
        assert run.out == ""


# --- inspect


def test_inspect_lists_keys_shapes_dtypes_shards_and_files(ours: Path, run: Run) -> None:
    code, found = run.json("inspect", ours)
    tensors = {tensor["key"]: tensor for tensor in found["tensors"]}
    file, _, _ = place_of(ours, "w")
    assert code == 0
    assert tensors["w"] == {
        "key": "w",
        "dtype": "float32",
        "size": [100, 50],
        "shards": 1,
        "bytes": 20_000,
        "files": [file.name],
    }
    assert {entry["key"] for entry in found["objects"]} == {"meta.epoch", "meta.names"}
    assert [entry["bytes"] for entry in found["files"]] == [file.stat().st_size]
    assert (found["step"], found["job"], found["problems"]) == (7, "a-job", [])


def test_inspect_without_a_manifest_says_the_same_of_the_state(foreign: Path, run: Run) -> None:
    code, found = run.json("inspect", foreign)
    assert (code, found["step"], len(found["tensors"])) == (0, -1, 3)


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([((0, 0), (50, 50))], ("coverage-gap", "no shard holds [50:100, 0:50]")),
        (
            [((0, 0), (60, 50)), ((50, 0), (50, 50))],
            ("coverage-overlap", "shard 0, [0:60, 0:50], and shard 1, [50:100, 0:50], overlap"),
        ),
    ],
)
def test_inspect_names_the_tensor_that_does_not_tile(
    foreign: Path, run: Run, boxes: list[Any], expected: tuple[str, str]
) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]

    rewrite_index(foreign, change)
    assert run("inspect", foreign) == 1
    code, text = expected
    assert f"w: {text} [{code}]" in run.err.splitlines()


def test_inspect_names_a_shard_that_no_file_holds(foreign: Path, run: Run) -> None:
    def drop(metadata: Any) -> None:
        metadata.storage_data = {
            index: info
            for index, info in metadata.storage_data.items()
            if index.fqn not in ("w", "meta.epoch")
        }

    rewrite_index(foreign, drop)
    code, found = run.json("inspect", foreign)
    assert code == 1
    assert {problem["key"] for problem in found["problems"]} == {"w", "meta.epoch"}


# --- list and prune


@pytest.fixture
def root(stock: Path, tmp_path: Path) -> Path:
    """Three checkpoints of ours (one after a rollback), one of stock torch, one partial."""
    root = tmp_path / "root"
    for step, save_id in ((10, "1-1"), (20, "1-2"), (15, "2-1")):
        shutil.copytree(stock, root / f"step_{step}")
        adopt(root / f"step_{step}", step, save_id)
    shutil.copytree(stock, root / "theirs")
    (root / ".partial" / "step_25.2-2").mkdir(parents=True)
    (root / ".partial" / "step_30.2-3.aborted").mkdir()
    (root / "latest").symlink_to("step_15")
    return root


def test_list_puts_the_newest_first_and_names_partial_ones_apart(root: Path, run: Run) -> None:
    code, found = run.json("list", root)
    assert code == 0
    names = [entry["name"] for entry in found["checkpoints"]]
    assert names == ["step_15", "step_20", "step_10", "theirs"]
    assert [e["name"] for e in found["checkpoints"] if e["is_latest"]] == ["step_15"]
    assert {entry["name"]: entry["state"] for entry in found["partials"]} == {
        "step_25.2-2": "incomplete",
        "step_30.2-3.aborted": "aborted",
    }


def test_list_for_people_goes_to_stdout_a_line_each(root: Path, run: Run) -> None:
    assert run("list", root) == 0
    lines = run.out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("step_")][:3] == [
        "step_15",
        "step_20",
        "step_10",
    ]
    assert run.err == ""


@pytest.mark.parametrize("command", ["list", "prune"])
def test_a_checkpoint_where_a_root_is_meant_is_refused(root: Path, run: Run, command: str) -> None:
    flags = ["--keep-last", "1"] if command == "prune" else []
    checkpoint = (root / "latest").resolve()
    assert run(command, str(checkpoint), *flags) == 2
    assert f"{checkpoint} is a checkpoint, not a root" in run.err
    assert f"did you mean {root}?" in run.err


def test_prune_removes_the_oldest_of_ours_only(root: Path, run: Run) -> None:
    assert run("prune", root, "--keep-last", 1) == 0
    assert sorted(path.name for path in root.glob("[!.]*")) == ["latest", "step_15", "theirs"]
    assert sorted(os.listdir(root / ".partial")) == ["step_25.2-2", "step_30.2-3.aborted"]


def test_prune_says_what_would_go_and_touches_nothing(root: Path, run: Run) -> None:
    code, found = run.json("prune", root, "--keep-last", 2, "--dry-run")
    assert (code, found["removed"], found["foreign"]) == (0, ["step_10"], ["theirs"])
    assert (root / "step_10").exists()


@pytest.mark.parametrize("is_dry", [True, False])
def test_prune_leaves_what_people_have_put_into_a_checkpoint_and_says_so(
    root: Path, run: Run, is_dry: bool
) -> None:
    (root / "step_10" / "logs").mkdir()
    (root / "step_10" / "config.json").write_text("{}")
    flags = ["--dry-run"] if is_dry else []
    assert run("prune", root, "--keep-last", 1, *flags) == 0
    stays = "would stay" if is_dry else "stays"
    assert f"people have put there {stays}: step_10/config.json, step_10/logs" in run.err
    if not is_dry:
        assert sorted(os.listdir(root / "step_10")) == ["config.json", "logs"]
        assert not (root / "step_20").exists()


def test_prune_keeps_what_latest_points_at(root: Path, run: Run) -> None:
    (root / "latest").unlink()
    (root / "latest").symlink_to("step_10")
    assert run("prune", root, "--keep-last", 1) == 0
    assert sorted(path.name for path in root.glob("step_*")) == ["step_10", "step_15"]


def test_prune_never_takes_them_all(root: Path, run: Run) -> None:
    assert run("prune", root, "--keep-last", 0) == 2
    assert len(list(root.glob("step_*"))) == 3


# --- status


def picture() -> dict[str, Any]:
    """A real status with a job, a failure, a save in flight and a peer drawn in."""
    node = Node(NodeSettings(node=NodeRef("n1", "tcp://10.0.0.1:9471", "")))
    found = status_of(node, 0)
    found["node"] = {
        "node_id": "n1",
        "pid": 4,
        "version": "0.1.0",
        "uptime_s": 3725.0,
        "peer_address": "tcp://10.0.0.1:9471",
        "http": "http://127.0.0.1:9470",
    }
    found["writer"] = {
        "threads": 2, "nice": 10, "io_class": "best-effort", "cpus": "4-7",
        "cpus_reason": "away from the trainers", "write_mbps": 50,
    }  # fmt: skip
    return found


def test_an_idle_daemon_is_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_tool, "fetch", lambda *_: picture())
    assert run("status") == 0
    assert "node n1: accepting saves, milepostd 0.1.0, pid 4, up 1 h 2 min" in run.out
    assert "nothing is being saved" in run.out


def test_a_busy_daemon_is_shown_with_what_each_save_waits_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = picture()
    found["saves"] = [
        {
            "job": "j[red]", "save_id": "1-2", "step": 20, "name": "step_20", "role": "participant",
            "phase": "writing", "age_s": 61.0, "bytes_total": 2_000_000, "bytes_written": 500_000,
            "waits_for": "the disk: rank 0",
        }
    ]  # fmt: skip
    found["jobs"] = [
        {
            "job": "j[red]", "root": "/checkpoints", "attempt": 2, "world": 8, "ranks_here": [0, 1],
            "coordinator": True, "committed_total": 4, "failed_total": 1, "skipped_total": 0,
            "last_committed": {
                "step": 10, "name": "step_10", "path": "/checkpoints/step_10", "bytes": 4_000_000,
                "elapsed_s": 1.5, "at_ms": 1_700_000_000_000,
            },
            "last_failed": {
                "step": 15, "save_id": "1-1", "code": "no-space", "message": "pwrite /x: no space",
                "hint": "free space", "node": "n1", "rank": 0,
            },
        }
    ]  # fmt: skip
    found["peers"] = [{"node_id": "n2", "address": "tcp://10.0.0.2:9471", "last_heard_s": 1.0}]
    monkeypatch.setattr(status_tool, "fetch", lambda *_: found)
    assert run("status") == 0
    for part in (
        "writes with 2 threads, niceness 10, I/O class best-effort, on cores 4-7",
        "at most 50 MB/s",
        "500.0 kB of 2.0 MB", "the disk: rank 0", "1 min 1 s", "j[red]", "2 of 8", "step 10",
        "pwrite /x: no space [no-space]", "hint: free space", "tcp://10.0.0.2:9471",
    ):  # fmt: skip
        assert part in run.out, part
    assert run.json("status") == (0, found)


def test_no_daemon_is_exit_3(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: object) -> dict[str, Any]:
        raise Unavailable("daemon-unreachable", "no daemon answers at /run/x", "start one")

    monkeypatch.setattr(status_tool, "fetch", fetch)
    assert run("status") == 3
    assert run.err == "error: no daemon answers at /run/x\nhint: start one\n"


def test_a_url_that_nobody_serves_is_exit_3_and_one_that_is_none_exit_2(run: Run) -> None:
    assert run("status", "--url", "http://127.0.0.1:1") == 3
    assert run("status", "--url", "file:///etc/passwd") == 2
    assert run("status", "--url", "http://127.0.0.1:1", "--run-dir", "/x") == 2


@pytest.mark.parametrize("arguments", [("frobnicate",), ("list",), ("list", "--no-such-flag", "x")])
def test_wrong_usage_is_exit_2(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments) == 2
    assert run.out == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.96, "60.0 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (None, "")],
)
def test_durations_are_said_as_people_say_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
