"""One trial: one rank of one system in one workload, in a process of its own.

`python -m benchmarks.trial TASK`, TASK being JSON; writes an `Answer`. Three phases: saves beside
training steps, for what training loses; saves that are only waited for, for processor time and time
to the commit; one more that is watched, for memory and open files.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from benchmarks import processes, systems
from benchmarks.direct import map_file, write_direct
from benchmarks.results import (
    BARE_WRITER,
    Answer,
    BusySave,
    FloorAnswer,
    IdleSave,
    SystemAnswer,
    Task,
    Timeline,
)
from benchmarks.workloads import STEP_COPIES, Training
from milepost.staging.pinning import default_pinner

FLOOR_REPEATS: Final = 5
WARM_STEPS: Final = 2
PAGE_BYTES: Final = 4096
SETTLE_S: Final = 0.1
"""After the last idle save, before its processor time is read: what is done after the commit counts
too."""


class Step(NamedTuple):
    began_s: float
    ended_s: float
    guard_s: float


class Busy(NamedTuple):
    """A save beside steps, before anything is derived from it."""

    began_s: float
    returned_s: float
    ended_s: float
    steps: list[Step]


class Trial:
    """The phases of a task, and what is measured in each."""

    def __init__(
        self, task: Task, training: Training, system: systems.System, before: processes.Usage
    ) -> None:
        self._task = task
        self._training = training
        self._system = system
        self._before = before
        """What the trainer held before there was a system."""
        self._saves = 0
        self._paths: list[Path] = []
        """Checkpoints that were not yet deleted."""

    def run(self) -> SystemAnswer:
        """Measure everything of the system."""
        began_s = time.perf_counter()
        self._system.prepare(self._training.state(0))
        prepare_s = time.perf_counter() - began_s
        busy, timeline = self._run_busy()
        # Companions work for all ranks: one rank counts them, whoever has started them.
        companions = self._system.companions()
        involved = processes.Group(os.getpid(), companions, is_counted=self._task.rank == 0)
        cpu_s = involved.cpu_s()
        idle = [self._save_idle() for _ in range(self._task.idle_saves)]
        time.sleep(SETTLE_S)
        cpu_s = (involved.cpu_s() - cpu_s) / len(idle)
        self._delete()
        with processes.Watch(involved) as watch:
            self._save_idle()
        self._delete()
        peak, before = watch.peak, self._before
        shared_bytes = peak.shared_bytes - before.shared_bytes
        return SystemAnswer(
            is_synced=self._system.is_synced,
            batches=self._training.batches,
            prepare_s=prepare_s,
            first=busy[0],
            steady=tuple(busy[1:]),
            idle=tuple(idle),
            cpu_s=cpu_s,
            memory_bytes=peak.memory_bytes - before.memory_bytes + shared_bytes,
            shared_bytes=shared_bytes,
            descriptors=peak.descriptors - before.descriptors,
            timeline=timeline,
        )

    def _run_busy(self) -> tuple[list[BusySave], Timeline]:
        self._steps(WARM_STEPS)
        quiet = [self._steps(self._task.quiet_steps)]
        saves: list[Busy] = []
        for _ in range(1 + self._task.saves):
            saves.append(self._save_busy())
            quiet.append(self._steps(self._task.quiet_steps))
        quiet_s = [[_length(step) for step in steps] for steps in quiet]
        busy = [
            # Compared with the steps on both sides: a shared machine is not always equally fast.
            derive(save, statistics.median(before + after))
            for save, before, after in zip(saves, quiet_s[:-1], quiet_s[1:], strict=True)
        ]
        return busy, _timeline(saves, quiet_s)

    def _save_busy(self) -> Busy:
        state, path = self._next()
        began_s = time.perf_counter()
        pending = self._system.save(self._saves, state, path)
        returned_s = time.perf_counter()
        steps = self._steps_until(pending.is_over)
        pending.wait()
        self._delete()
        return Busy(began_s, returned_s, pending.ended_s, steps)

    def _save_idle(self) -> IdleSave:
        state, path = self._next()
        self._barrier()
        began_s = time.perf_counter()
        pending = self._system.save(self._saves, state, path)
        returned_s = time.perf_counter()
        pending.wait()
        self._barrier()
        return IdleSave(returned_s - began_s, pending.ended_s - began_s)

    def _next(self) -> tuple[dict[str, Any], Path]:
        """Return what is saved next, and where."""
        self._saves += 1
        self._paths.append(Path(self._task.folder) / f"step_{self._saves}")
        return self._training.state(self._saves), self._paths[-1]

    def _delete(self) -> None:
        """Delete the checkpoints so far: neither disk nor page cache fills up, and nothing is timed
        meanwhile.
        """
        self._barrier()
        if self._task.rank == 0:
            for path in self._paths:
                shutil.rmtree(path)
        self._paths.clear()
        self._barrier()

    def _steps(self, count: int) -> list[Step]:
        return [self._step(False)[0] for _ in range(count)]

    def _steps_until(self, is_over: Callable[[], bool]) -> list[Step]:
        """Train until a step after which all ranks say so."""
        steps = []
        while True:
            step, all_over = self._step(is_over())
            steps.append(step)
            # A single rank asks again: the save may have ended within the step.
            if all_over or (self._task.world == 1 and is_over()):
                return steps

    def _step(self, is_over: bool) -> tuple[Step, bool]:
        began_s = time.perf_counter()
        guard_s, all_over = self._training.step(self._system.guard(), is_over)
        return Step(began_s, time.perf_counter(), guard_s), all_over

    def _barrier(self) -> None:
        if self._task.world > 1:
            dist.barrier()


def _length(step: Step) -> float:
    return step.ended_s - step.began_s


def derive(save: Busy, quiet_s: float) -> BusySave:
    """Compare a save's steps with quiet ones."""
    inside = [step for step in save.steps if step.ended_s <= save.ended_s]
    guard_s = sum(step.guard_s for step in save.steps)
    stall_s = save.returned_s - save.began_s
    return BusySave(
        stall_s=stall_s,
        guard_s=guard_s,
        lost_s=stall_s + sum(_length(step) - quiet_s for step in save.steps),
        slow_down=(
            statistics.fmean(_length(step) - step.guard_s for step in inside) / quiet_s
            if inside
            else None
        ),
        commit_s=save.ended_s - save.began_s,
    )


def _timeline(saves: list[Busy], quiet_s: list[list[float]]) -> Timeline:
    """Put the steps in a row, each save's call before its first step."""
    steps_s, saved_at = list(quiet_s[0]), []
    for save, after in zip(saves, quiet_s[1:], strict=True):
        saved_at.append(len(steps_s))
        lengths = [_length(step) for step in save.steps]
        lengths[0] += save.returned_s - save.began_s
        steps_s += lengths + after
    return Timeline(tuple(steps_s), tuple(saved_at), statistics.median(chain(*quiet_s)))


# --- floors -------------------------------------------------------------------------------------


class Floor:
    """The rank's part of the state in shared memory, as a file of whole pages."""

    def __init__(self, path: Path, share: list[torch.Tensor]) -> None:
        self.path = path
        self._share = share
        nbytes = sum(tensor.nbytes for tensor in share)
        self._bytes = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, self._bytes)

    def measure(self, folder: Path, training: Training, has_others: bool) -> FloorAnswer:
        """Copy and write, several times, all ranks at once."""
        copies, writes, is_direct = [], [], False
        pinner = default_pinner()
        with map_file(self.path) as mapped, memoryview(mapped) as content:
            base = torch.frombuffer(content, dtype=torch.uint8)
            pinner.register(base.data_ptr(), self._bytes)
            targets = _targets(base, self._share)
            for repeat in range(1 + FLOOR_REPEATS):
                if has_others:
                    dist.barrier()
                began_s = time.perf_counter()
                torch._foreach_copy_(targets, self._share)
                training.synchronize()
                copies.append(time.perf_counter() - began_s)
                if has_others:
                    dist.barrier()
                file = folder / f"floor{repeat}-{os.getpid()}"
                began_s = time.perf_counter()
                is_direct = write_direct(file, content)
                writes.append(time.perf_counter() - began_s)
                file.unlink()
            pinner.unregister(base.data_ptr())
            # They hold the mapping.
            del targets, base
        # The first ones have touched the memory.
        return FloorAnswer(tuple(copies[1:]), tuple(writes[1:]), is_direct)

    def remove(self) -> None:
        self.path.unlink()


def _targets(base: torch.Tensor, share: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view of the memory for each tensor, one after the other."""
    targets, at = [], 0
    for source in share:
        targets.append(base[at : at + source.nbytes].view(source.dtype).view(source.shape))
        at += source.nbytes
    return targets


# --- the process --------------------------------------------------------------------------------


def work(task: Task) -> Answer:
    """Do a task."""
    training = Training(task, task.batches)
    answer = Answer(
        state_bytes=training.state_bytes,
        image_bytes=training.image_bytes,
        share_bytes=sum(tensor.nbytes for tensor in training.share),
        tensors=len(training.tensors),
    )
    if task.system != BARE_WRITER:
        before = processes.Group(os.getpid()).usage()
        try:
            system = systems.make(task, training)
        except systems.Unavailable as error:
            return msgspec.structs.replace(answer, unavailable=str(error))
        return msgspec.structs.replace(answer, system=_run(task, training, system, before))
    floor = Floor(processes.SHARED_MEMORY / f"bench-{os.getpid()}", training.share)
    try:
        measured = floor.measure(Path(task.folder), training, task.world > 1)
        if not training.batches:
            training.calibrate(STEP_COPIES * statistics.median(measured.copy_s))
        before = processes.Group(os.getpid()).usage()
        writer = systems.BareWriter(task, floor.path)
        run = _run(task, training, writer, before)
    finally:
        floor.remove()
    return msgspec.structs.replace(answer, floor=measured, system=run)


def _run(
    task: Task, training: Training, system: systems.System, before: processes.Usage
) -> SystemAnswer:
    try:
        return Trial(task, training, system, before).run()
    finally:
        system.close()


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{task.rendezvous}", rank=task.rank, world_size=task.world
    )
    Path(task.answer).write_bytes(msgspec.json.encode(work(task)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
