"""The ways of saving that are compared, each behind the same four calls.

Every system gets its best documented setting for a machine like this one, and a process group of
its own where it makes collective calls in the background. A save is complete when the system itself
says so; only some of them have synced it by then (`is_synced`).

Sources: torch/distributed/checkpoint/state_dict_saver.py and staging.py (2.13); torch_checkpointing
(0.1.1).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.direct import sync_file
from benchmarks.results import Task
from benchmarks.workloads import Training
from milepost import Checkpointer, Save

SAVE_S_MAX: Final = 300.0
"""How long a save may take before the run is given up."""


class Unavailable(Exception):
    """The system cannot be run here."""


class Pending:
    """A save under way."""

    def __init__(self) -> None:
        self.ended_s = 0.0
        """When it was complete."""
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def end(self, error: BaseException | None = None) -> None:
        """Note that it has ended, now; on any thread."""
        self.ended_s = time.perf_counter()
        self._error = error
        self._ended.set()

    def is_over(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Return once it is complete; raise what went wrong."""
        if not self._ended.wait(SAVE_S_MAX):
            raise TimeoutError(f"no save after {SAVE_S_MAX:g} s")
        if self._error is not None:
            raise self._error


def _of_future(future: Future[Any]) -> Pending:
    pending = Pending()
    future.add_done_callback(lambda done: pending.end(done.exception()))
    return pending


class System(ABC):
    """One way of saving, on one rank."""

    is_synced = True
    """Whether what it calls saved would be there after a crash of the machine."""

    @abstractmethod
    def save(self, step: int, state: dict[str, Any], path: Path) -> Pending:
        """Begin to save; return when training may go on. One at a time."""

    def prepare(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Do what can be done ahead of the first save; most can do nothing."""

    def guard(self) -> AbstractContextManager[object]:
        """Return what an optimizer step has to run under."""
        return contextlib.nullcontext()

    def companions(self) -> list[int]:
        """Return the process ids of others that work for all ranks of this machine."""
        return []

    def close(self) -> None:  # noqa: B027
        """End; nothing is under way."""


class Milepost(System):
    """This project, with an embedded daemon."""

    def __init__(self, task: Task, training: Training) -> None:
        is_overlap = task.system == "milepost-overlap"
        self._checkpointer = Checkpointer(
            task.folder,
            on_failure="raise",
            staging="overlap" if is_overlap else "blocking",
            optimizer=training.optimizer if is_overlap else None,
        )

    def prepare(self, state: dict[str, Any]) -> None:
        self._checkpointer.prepare(state)

    def save(self, step: int, state: dict[str, Any], path: Path) -> Pending:
        pending = Pending()
        save = self._checkpointer.save(step, state, checkpoint_id=path.name)

        def ended(save: Save) -> None:
            pending.end(None if save.phase == "committed" else save.failure())

        save.add_done_callback(ended)
        return pending

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        # The hook on torch's optimizers would wait too, but could not be told from their work.
        self._checkpointer.guard()
        yield

    def companions(self) -> list[int]:
        return [int(self._checkpointer.status()["node"]["pid"])]

    def close(self) -> None:
        self._checkpointer.close()


class TorchSave(System):
    """`dcp.save`, which returns when all is written."""

    def __init__(self, task: Task) -> None:
        pass

    def save(self, step: int, state: dict[str, Any], path: Path) -> Pending:
        dcp.save(state, checkpoint_id=path)
        pending = Pending()
        pending.end()
        return pending


class TorchAsync(System):
    """`dcp.async_save`, in a thread or a process, with the default stager or a shared-memory stager
    that is used again for each save.
    """

    def __init__(self, task: Task) -> None:
        self._group = dist.new_group(backend="gloo")
        self._staging: Future[Any] | None = None
        self._type = AsyncCheckpointerType.PROCESS
        self._stager: DefaultStager | None = None
        if task.system == "torch-thread":
            self._type = AsyncCheckpointerType.THREAD
        if task.system.startswith("torch-process-shm"):
            has_device = task.device != "cpu"
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=has_device,
                    use_shared_memory=True,
                    use_async_staging=task.system.endswith("-async"),
                    use_non_blocking_copy=has_device,
                )
            )

    def save(self, step: int, state: dict[str, Any], path: Path) -> Pending:
        response = dcp.async_save(
            state,
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=self._type,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self._staging = response.staging_completion
            return _of_future(response.upload_completion)
        return _of_future(response)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        if self._staging is not None:
            self._staging.result()
            self._staging = None
        yield

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class TorchCheckpointing(System):
    """torch_checkpointing: a child a rank, staging behind the step, a lock for the optimizer. Its
    files are its own, not those of torch's distributed checkpoints.

    It ends a save when all is in the page cache. `-synced`: rank 0 then syncs all files, in a
    thread, and the save ends when they could be found after a crash, as with the other systems.
    """

    def __init__(self, task: Task) -> None:
        self.is_synced = task.system.endswith("-synced")
        self._has_to_sync = self.is_synced and task.rank == 0
        if importlib.util.find_spec("torch_checkpointing") is None:
            raise Unavailable(
                "torch_checkpointing is not installed: pip install -e '.[bench-peers]'"
            )
        package: Any = importlib.import_module("torch_checkpointing")
        filesystem: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        # Direct I/O, its default, fails on ext4 (EINVAL): what torch.save writes is not aligned.
        storage = filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
        config = package.CheckpointManager.Config(storage_config=storage)
        self._manager: Any = package.CheckpointManager(config)

    def prepare(self, state: dict[str, Any]) -> None:
        self._manager.prewarm_staging(state)

    def save(self, step: int, state: dict[str, Any], path: Path) -> Pending:
        future = self._manager.save(str(path), state)
        if not self._has_to_sync:
            return _of_future(future)
        pending = Pending()

        def sync() -> None:
            try:
                future.result()
                for file in path.iterdir():
                    sync_file(file)
                sync_file(path)
            except Exception as error:
                pending.end(error)
            else:
                pending.end()

        threading.Thread(target=sync).start()
        return pending

    def guard(self) -> AbstractContextManager[object]:
        lock: AbstractContextManager[object] = self._manager.lock()
        return lock

    def close(self) -> None:
        self._manager.close()


class BareWriter(System):
    """A process that writes the rank's part of the state with direct I/O, and nothing else.

    `source` holds that part, as it was at the start.
    """

    def __init__(self, task: Task, source: Path) -> None:
        self._name = f"rank{task.rank}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.direct", str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def save(self, step: int, state: dict[str, Any], path: Path) -> Pending:
        path.mkdir(exist_ok=True)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{path / self._name}\n")
        self._process.stdin.flush()
        pending = Pending()
        threading.Thread(target=self._await, args=(pending,)).start()
        return pending

    def _await(self, pending: Pending) -> None:
        assert self._process.stdout is not None
        has_written = bool(self._process.stdout.readline())
        pending.end(None if has_written else RuntimeError("the bare writer has died"))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SAVE_S_MAX)
        assert self._process.stdout is not None
        self._process.stdout.close()


def make(task: Task, training: Training) -> System:
    """Make the system of a task. Raises Unavailable."""
    match task.system:
        case "milepost" | "milepost-overlap":
            return Milepost(task, training)
        case "torch-save":
            return TorchSave(task)
        case "torch-checkpointing" | "torch-checkpointing-synced":
            return TorchCheckpointing(task)
        case _:
            return TorchAsync(task)
