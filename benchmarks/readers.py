"""The ways of loading that are compared, each behind the same call; and the writing of what they
load.

milepost and stock torch load the same checkpoint, which milepost has written; torch_checkpointing
has files of its own. Sources: torch/distributed/checkpoint/state_dict_loader.py (2.13);
torch_checkpointing (0.1.1).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch.distributed.checkpoint as dcp

import milepost
from benchmarks.results import LoadTask

STEP: Final = 1

Load: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Loads into a state, and returns what was loaded: that state, or a new one."""


class Unavailable(Exception):
    """The system cannot be run here."""


def checkpoint_of(task: LoadTask) -> Path:
    """Return the checkpoint that a task's system loads."""
    folder = Path(task.folder)
    if task.system == "torch-checkpointing":
        return folder / "peer"
    return folder / "root" / f"step_{STEP}"


def write(task: LoadTask, state: dict[str, Any]) -> None:
    """Write a state for all systems; all ranks call it."""
    with milepost.Checkpointer(Path(task.folder) / "root", on_failure="raise") as checkpointer:
        checkpointer.save(STEP, state).wait()
    if _has_peer():
        manager = _peer()
        manager.save(str(Path(task.folder) / "peer"), state)
        manager.close()


def _has_peer() -> bool:
    return importlib.util.find_spec("torch_checkpointing") is not None


def _peer() -> Any:
    package: Any = importlib.import_module("torch_checkpointing")
    filesystem: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
    # As for saving: direct I/O, its default, fails on ext4.
    config = package.CheckpointManager.Config.with_sync_save()
    config.storage_config = filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
    return package.CheckpointManager(config)


def make(task: LoadTask) -> Load:
    """Return the way of loading of a task. Raises Unavailable."""
    checkpoint = checkpoint_of(task)
    # Asked for here: milepost imports what it consists of when it is first asked for it.
    load_path = milepost.load
    match task.system:
        case "milepost":
            checkpointer = milepost.Checkpointer(checkpoint.parent)

            def load(state: dict[str, Any]) -> dict[str, Any]:
                checkpointer.load(state, step=STEP)
                return state
        case "milepost-path":

            def load(state: dict[str, Any]) -> dict[str, Any]:
                load_path(checkpoint, state)
                return state
        case "milepost-whole":

            def load(state: dict[str, Any]) -> dict[str, Any]:
                whole: dict[str, Any] = load_path(checkpoint).state
                return whole
        case "torch-load":

            def load(state: dict[str, Any]) -> dict[str, Any]:
                dcp.load(state, checkpoint_id=checkpoint)
                return state
        case "torch-checkpointing":
            if not _has_peer():
                raise Unavailable(
                    "torch_checkpointing is not installed: pip install -e '.[bench-peers]'"
                )
            manager = _peer()

            def load(state: dict[str, Any]) -> dict[str, Any]:
                loaded: dict[str, Any] = manager.load(str(checkpoint), into=state)
                return loaded
        case _:
            raise ValueError(f"no way of loading is called {task.system!r}")
    return load
