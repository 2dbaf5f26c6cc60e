"""`milepost.load`: a checkpoint by its path, without a Checkpointer."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.reading.checkpoints import adopt, stock_save

import milepost
from milepost import cli
from milepost.errors import CorruptCheckpoint, LoadFailed, UsageError

# Stock torch warns that it saves for one process, which is what is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2 by milepost, and what stock torch has saved as `theirs`."""
    for step in (1, 2):
        path = stock_save(tmp_path / f"step_{step}", {"w": torch.full((3,), float(step))})
        adopt(path, step, f"1-{step}")
    stock_save(tmp_path / "theirs", {"w": torch.full((3,), 9.0)})
    (tmp_path / "latest").symlink_to("step_2")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "step", "value"), [("step_1", 1, 1.0), ("latest", 2, 2.0), ("theirs", -1, 9.0)]
)
def test_a_checkpoint_is_loaded_by_its_path_into_a_state_or_without_one(
    root: Path, name: str, step: int, value: float
) -> None:
    state = {"w": torch.zeros(3)}
    for report in (milepost.load(root / name, state), milepost.load(str(root / name))):
        assert step == report.step
        assert torch.equal(torch.full((3,), value), report.state["w"])
    assert torch.equal(torch.full((3,), value), state["w"])


def test_of_a_directory_of_checkpoints_the_newest_is_loaded_or_a_step(root: Path) -> None:
    assert 2 == milepost.load(root).step
    assert 1 == milepost.load(root, step=1).step


def test_fallback_passes_over_what_is_damaged(root: Path) -> None:
    next((root / "step_2").glob("*.distcp")).unlink()
    with pytest.raises(CorruptCheckpoint):
        milepost.load(root)
    report = milepost.load(root, fallback=True)
    assert (1, (2,)) == (report.step, report.damaged)


@pytest.mark.parametrize(
    ("path", "arguments", "text"),
    [
        (3, {}, "path is 3"),
        ("step_1", {"step": 1}, "is one checkpoint"),
        ("step_1", {"fallback": True}, "is one checkpoint"),
        ("", {"step": -1}, "step is -1"),
        ("", {"no_dist": True, "process_group": object()}, "process_group"),
    ],
)
def test_what_makes_no_sense_is_refused(
    root: Path, path: Any, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        milepost.load(root / path if isinstance(path, str) else path, **arguments)


def test_a_path_that_is_not_there_and_a_directory_without_checkpoints_are_not_found(
    tmp_path: Path,
) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(LoadFailed) as caught:
            milepost.load(path)
        assert "not-found" == caught.value.code


def test_loading_starts_no_daemon_and_writes_nothing(root: Path, tmp_path: Path) -> None:
    def there() -> list[tuple[str, int]]:
        return sorted((str(path), path.lstat().st_mtime_ns) for path in root.rglob("*"))

    before = there()
    script = f"import milepost; print(milepost.load({str(root)!r}).step)"
    places = {"MILEPOST_RUN_DIR": "/nowhere", "MILEPOST_SHM_DIR": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2\n" == done.stdout
    assert before == there()


class Config:
    """A class of the user's."""


def test_an_index_with_a_class_of_someones_own_is_read_if_it_is_allowed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "theirs" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta.modules = [Config]
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpoint, match=r"names .*\.Config, which no index") as caught:
        milepost.load(root / "theirs")
    for text in ("add_safe_globals([Config])", "allow_pickle=True"):
        assert text in caught.value.hint
    with torch.serialization.safe_globals([Config]):
        assert 9.0 == milepost.load(root / "theirs").state["w"][0]
    assert 9.0 == milepost.load(root / "theirs", allow_pickle=True).state["w"][0]


class Poison:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_poisoned_index_runs_nothing_whoever_reads_it(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = root / "mark"
    path = root / "step_2" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Poison(mark)
    path.write_bytes(pickle.dumps(metadata))
    for command in (
        ["inspect", "step_2"], ["verify", "step_2"], ["list", "."], ["diff", "step_1", "step_2"],
        ["export", "step_2", "out.pt", "--to", "torch"],
    ):  # fmt: skip
        arguments = [str(root / each) if (root / each).exists() else each for each in command]
        monkeypatch.setattr(sys, "argv", ["milepost", *arguments])
        monkeypatch.chdir(root)
        with contextlib.suppress(SystemExit):
            cli.main()
        assert not mark.exists(), command
    for verify in (True, False):
        with pytest.raises(CorruptCheckpoint):
            milepost.load(root / "step_2", verify=verify)
    assert not mark.exists()
    assert 1 == milepost.load(root, fallback=True).step
