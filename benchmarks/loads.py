"""One trial of loading: one rank of one system, in a process of its own.

`python -m benchmarks.loads TASK`, TASK being JSON; writes a `LoadAnswer`. Each load comes right
after its floor, a plain read of the same data files by as many threads as are best for that, so
that a machine whose speed changes changes both. Cold and warm loads take turns.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks import readers
from benchmarks.direct import drop_cached, read_files
from benchmarks.results import WRITER, LoadAnswer, LoadTask, Sample
from benchmarks.workloads import Training
from milepost.fetching.copying import bytes_at

PAGE_BYTES: Final = 4096

THREADS: Final = (1, 2, 4)
"""How many reads the floors have under way: whatever is fastest."""


class Spent(NamedTuple):
    """What something took."""

    wall_s: float
    cpu_s: float


def spent(act: Callable[[], object]) -> Spent:
    """Do it, and return what it took of this process."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    act()
    return Spent(time.perf_counter() - began_s, time.process_time() - cpu_s)


class Floor:
    """Reads of this rank's data file into memory that was touched before."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._paths = sorted(folder.glob(f"__{rank}_*.distcp"))
        nbytes = sum(-(-path.stat().st_size // PAGE_BYTES) * PAGE_BYTES for path in self._paths)
        # As the state's own memory is allocated, but for where it begins.
        self._memory = torch.zeros(nbytes + PAGE_BYTES, dtype=torch.uint8)
        at = -self._memory.data_ptr() % PAGE_BYTES
        self._view = bytes_at(self._memory.data_ptr() + at, nbytes)
        self._threads: dict[bool, int] = {}

    def measure(self, *, is_cold: bool) -> Spent:
        """Read past the page cache, or out of it."""
        threads = self._threads.get(is_cold)
        if threads is None:
            found = {each: self._read(each, is_cold) for each in THREADS}
            threads = self._threads[is_cold] = min(found, key=lambda each: found[each].wall_s)
        return self._read(threads, is_cold)

    def _read(self, threads: int, is_cold: bool) -> Spent:
        barrier()
        return spent(lambda: read_files(self._paths, self._view, threads, direct=is_cold))


def barrier() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


# --- memory -------------------------------------------------------------------------------------


def memory_bytes(kind: str) -> int:
    """Return `VmRSS`, what this process has, or `VmHWM`, the most since `forget_peak`."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def forget_peak() -> None:
    """Begin anew with `VmHWM`. Source: proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")


# --- loads --------------------------------------------------------------------------------------


class Trial:
    """The loads of a task."""

    def __init__(self, task: LoadTask, state: dict[str, Any], load: readers.Load) -> None:
        self._task = task
        self._state = state
        self._load = load
        self._sums = sums_of(state["model"], state["model"])
        self._checkpoint = readers.checkpoint_of(task)
        # Of milepost's files for all, since they have the same bytes.
        native = readers.checkpoint_of(msgspec.structs.replace(task, system="milepost"))
        self._floor = Floor(native, task.rank)

    def run(self) -> LoadAnswer:
        """Measure everything."""
        cold, warm = [], []
        for number in range(self._task.loads):
            cold.append(self._measure(is_cold=True, is_first=number == 0))
            warm.append(self._measure(is_cold=False, is_first=False))
        return LoadAnswer(state_bytes=0, tensors=0, cold=tuple(cold), warm=tuple(warm))

    def _measure(self, *, is_cold: bool, is_first: bool) -> Sample:
        self._prepare(is_cold)
        floor = self._floor.measure(is_cold=is_cold)
        # Others may have written to the page cache what the floor has read past.
        self._prepare(is_cold)
        if is_first:
            for tensor in self._state["model"].values():
                local_of(tensor).zero_()
        found: list[dict[str, Any]] = []
        barrier()
        forget_peak()
        before_bytes = memory_bytes("VmRSS")
        taken = spent(lambda: found.append(self._load(self._state)))
        grown_bytes = memory_bytes("VmHWM") - before_bytes
        loaded = found.pop()
        if loaded is not self._state:
            own = {id(each): each for each in map(local_of, self._state["model"].values())}
            new = map(local_of, loaded["model"].values())
            grown_bytes -= sum(each.nbytes for each in new if id(each) not in own)
        if is_first and self._sums != sums_of(loaded["model"], self._state["model"]):
            raise RuntimeError(f"{self._task.system} has not loaded what was saved")
        return Sample(
            load_s=taken.wall_s,
            load_cpu_s=taken.cpu_s,
            floor_s=floor.wall_s,
            floor_cpu_s=floor.cpu_s,
            memory_bytes=max(0, grown_bytes),
        )

    def _prepare(self, is_cold: bool) -> None:
        """Have everything in the page cache, or nothing."""
        barrier()
        if self._task.rank == 0:
            if is_cold:
                drop_cached(Path(self._task.folder))
            else:
                for path in sorted(Path(self._task.folder).rglob("*")):
                    if path.is_file():
                        warm_up(path)
        barrier()


def warm_up(path: Path) -> None:
    """Read a file through the page cache."""
    with path.open("rb", buffering=0) as file:
        memory = bytearray(1 << 20)
        while file.readinto(memory):
            pass


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sums_of(tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> list[int]:
    """Return a number for the bits of each tensor of `like`: of those whole there, of shards there
    this rank's parts.
    """
    found = []
    for name, own in like.items():
        tensor = tensors[name]
        if isinstance(own, DTensor) and not isinstance(tensor, DTensor):
            rows = own.to_local().size(0)
            tensor = tensor[own.device_mesh.get_local_rank() * rows :][:rows]
        found.append(int(local_of(tensor).view(torch.int32).sum()))
    return found


def work(task: LoadTask) -> LoadAnswer:
    """Do a task."""
    training = Training(task)
    answer = LoadAnswer(state_bytes=training.state_bytes, tensors=len(training.tensors))
    state = training.state(readers.STEP)
    if task.system == WRITER:
        readers.write(task, state)
        return answer
    try:
        load = readers.make(task)
    except readers.Unavailable as error:
        return msgspec.structs.replace(answer, unavailable=str(error))
    found = Trial(task, state, load).run()
    return msgspec.structs.replace(answer, cold=found.cold, warm=found.warm)


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=LoadTask)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{task.rendezvous}", rank=task.rank, world_size=task.world
    )
    Path(task.answer).write_bytes(msgspec.json.encode(work(task)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
