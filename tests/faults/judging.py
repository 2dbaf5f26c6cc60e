"""Checks after a fault: the content of the root, and whether stock torch finds the state of its
step in each checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.faults.fleet import BRANCH, VALUES, until
from tests.integration import cluster


def check_root(root: Path, known: set[str] | None = None) -> list[str]:
    """Verify every directory under a final name, except the `known` ones; return the names of
    all.
    """
    from milepost.reading.verification import verify

    names = []
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(".") or entry.is_symlink() or entry.name in (known or ()):
            continue
        assert (entry / ".metadata").exists(), f"{entry} has a final name and no .metadata"
        found = verify(entry)
        assert () == found.damages, f"{entry}: {found.damages}"
        assert "manifest" == found.method
        names.append(entry.name)
        if known is not None:
            known.add(entry.name)
    return names


def partials(root: Path) -> list[str]:
    """Return the directories that are not checkpoints."""
    return sorted(os.listdir(root / ".partial"))


def picture(checkpoint: Path) -> list[tuple[str, int, int, int]]:
    """Return name, inode, size and time of every file of a checkpoint."""
    return sorted(
        (entry.name, (seen := entry.stat()).st_ino, seen.st_size, seen.st_mtime_ns)
        for entry in checkpoint.iterdir()
    )


def judge_steps(
    rank: int, world: int, root: str, names: Sequence[str], ranks: int, values: int, branch: int
) -> dict[str, bool]:
    """Load checkpoints with stock torch; say for each whether it holds its step's state."""
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    verdicts = {}
    for name in names:
        path = Path(root) / name
        read = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["replica"]
        assert isinstance(read, TensorStorageMetadata)
        width = read.size[0]
        state: dict[str, Any] = {
            "w": torch.zeros(ranks * values, dtype=torch.float64),
            "replica": torch.zeros(width),
            "step": -1,
        }
        dcp.load(state, checkpoint_id=path, no_dist=True)
        step = int(os.path.realpath(path).rpartition("_")[2])
        verdicts[name] = (
            step == state["step"]
            and torch.equal(torch.full((width,), float(step)), state["replica"])
            and torch.equal(
                torch.arange(ranks * values, dtype=torch.float64) + step + branch * BRANCH,
                state["w"],
            )
        )
    return verdicts


def judge(
    root: Path, names: Sequence[str], ranks: int = 2, values: int = VALUES, branch: int = 0
) -> None:
    """Fail unless stock torch finds in each checkpoint the state of its step."""
    (verdicts,) = cluster.judge(judge_steps, 1, str(root), list(names), ranks, values, branch)
    assert list(dict.fromkeys(names)) == list(verdicts)
    wrong = [name for name, is_right in verdicts.items() if not is_right]
    assert [] == wrong, f"not the state of its step, as stock torch reads it: {wrong}"


@contextlib.contextmanager
def judging(root: Path) -> Iterator[Path]:
    """Give a root to the cases of a module; at the end, judge every checkpoint that they left.

    For a fixture of the module. An error at its end fails the run, whichever cases ran, in whatever
    order, and whether or not they passed. A single case could not judge this: run alone, it would
    find nothing from the others. The verdict names the step, and the step tells the case.
    """
    yield root
    until(lambda: not partials(root), f"nothing is left over, but there is {partials(root)}")
    judge(root, ["latest", *check_root(root)])
