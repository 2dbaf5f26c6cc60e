"""One run of the benchmarks: every system on every workload, in turn, several times over.

Starts one trial at a time (`trial`), one process a rank, and puts together what they answer. The
order within a round rotates, so that no system always follows the same one. This process imports
no torch and sleeps while trials measure.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import psutil

from benchmarks.launching import Failed, Rank, launch
from benchmarks.load_campaign import load_workload, read_index
from benchmarks.planning import plan
from benchmarks.results import (
    BARE_WRITER,
    Answer,
    Cost,
    Floors,
    IndexRead,
    Loaded,
    Machine,
    Measured,
    Options,
    Planned,
    Results,
    SystemAnswer,
    Task,
    Timeline,
    spread,
)

WORLDS: Final = {"large": 1, "small": 1, "ranks": 2}
"""The workloads, and how many ranks each has."""

PLANS: Final = ((64, 2000), (1024, 1000))
"""Ranks, and tensors of each, that the planner is given."""

PACKAGES: Final = ("milepost", "torch", "torch_checkpointing", "numpy", "isal")


def run(
    folder: Path,
    options: Options,
    *,
    device: str,
    workloads: Sequence[str],
    systems: Sequence[str],
    loads: Sequence[str],
    readers: Sequence[str],
    with_planning: bool,
    with_index: bool,
    say: Callable[[str], None],
) -> Results:
    """Measure and return all that was found.

    Args:
        folder: where checkpoints go, on the storage to be measured; made if missing. What this run
            writes there is deleted.
        options: how much of everything.
        device: where the states lie, "cpu" or "cuda".
        workloads: whose saves are measured, of `WORLDS`.
        systems: ways of saving, of `results.SYSTEMS`.
        loads: workloads whose loads are measured.
        readers: ways of loading, of `results.READERS`.
        with_planning: whether the planner is measured too.
        with_index: whether a load is measured of a checkpoint that it has planned.
        say: told what is going on.
    """
    at, load = datetime.now(UTC), os.getloadavg()[0]
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    machine = _describe(folder, device, load)
    place = Path(tempfile.mkdtemp(prefix="run-", dir=folder.resolve()))
    try:
        measured: dict[str, Measured] = {}
        failures: dict[str, str] = {}
        for name in workloads:
            try:
                measured[name] = _measure(name, place, options, device, systems, say)
            except Failed as error:
                failures[name] = str(error)
        loaded: dict[str, Loaded] = {}
        for name in loads:
            try:
                loaded[name] = load_workload(
                    name, WORLDS[name], place, options, device, readers, say
                )
            except Failed as error:
                failures[f"loads of {name}"] = str(error)
        planned: list[Planned] = []
        indexes: list[IndexRead] = []
        for ranks, tensors in PLANS:
            fewer = max(2, round(ranks * min(1.0, options.size)))
            is_read = with_index and (ranks, tensors) == PLANS[-1]

            def read(checkpoint: Path, ranks: int = fewer, tensors: int = tensors) -> None:
                say(f"reading the index of {ranks} ranks of {tensors} tensors")
                indexes.append(read_index(checkpoint, ranks, tensors))

            if with_planning or is_read:
                say(f"planning for {fewer} ranks of {tensors} tensors")
                try:
                    found = plan(place / "planning", fewer, tensors, read if is_read else None)
                except Failed as error:
                    failures["index"] = str(error)
                else:
                    planned += [found] if with_planning else []
    finally:
        shutil.rmtree(place, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
    return Results(
        at=at.isoformat(timespec="seconds"),
        machine=machine,
        options=options,
        workloads=measured,
        failures=failures,
        planning=tuple(planned),
        loads=loaded,
        indexes=tuple(indexes),
    )


def _measure(
    name: str,
    place: Path,
    options: Options,
    device: str,
    systems: Sequence[str],
    say: Callable[[str], None],
) -> Measured:
    """Measure one workload."""
    answers: defaultdict[str, list[list[Answer]]] = defaultdict(list)
    failures: dict[str, str] = {}
    batches = 0
    for repeat in range(options.repeats):
        turn = repeat % max(1, len(systems))
        for system in (BARE_WRITER, *systems[turn:], *systems[:turn]):
            if system in failures:
                continue
            say(f"{name}, round {repeat + 1} of {options.repeats}: {system}")
            try:
                ranks = _start(name, system, place, options, device, batches)
            except Failed as error:
                if system == BARE_WRITER:
                    raise
                failures[system] = str(error)
                continue
            answers[system].append(ranks)
            unavailable = next((each.unavailable for each in ranks if each.unavailable), "")
            if unavailable:
                failures[system] = unavailable
            if not batches:
                batches = round(statistics.fmean(_system(each).batches for each in ranks))
    bare = answers.pop(BARE_WRITER)
    measured = {system: found for system, found in answers.items() if system not in failures}
    return Measured(
        world=WORLDS[name],
        tensors=bare[0][0].tensors,
        state_bytes=bare[0][0].state_bytes,
        image_bytes=bare[0][0].image_bytes,
        step_s=spread(
            _system(ranks[0]).timeline.quiet_s
            for found in (bare[1:] or bare, *measured.values())
            for ranks in found
        ),
        floors=_floors(bare),
        bare_writer=_cost(bare),
        costs={system: _cost(found) for system, found in measured.items()},
        timelines={system: _timeline(found) for system, found in measured.items()},
        failures=failures,
    )


def _start(
    workload: str, system: str, place: Path, options: Options, device: str, batches: int
) -> list[Answer]:
    """Run a trial, one process a rank; return their answers. Raises Failed."""
    folder = Path(tempfile.mkdtemp(prefix=f"{system}-", dir=place))

    def task(rank: Rank) -> Task:
        return Task(
            workload=workload,
            size=options.size,
            system=system,
            device=device,
            rank=rank.rank,
            world=rank.world,
            folder=str(folder),
            rendezvous=rank.rendezvous,
            answer=rank.answer,
            batches=batches,
            quiet_steps=options.quiet_steps,
            saves=options.saves,
            idle_saves=options.idle_saves,
        )

    try:
        return launch("benchmarks.trial", WORLDS[workload], task, Answer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # What this system left to the page cache must not be written out during the next one.
        os.sync()


# --- putting answers together -------------------------------------------------------------------


def _system(answer: Answer) -> SystemAnswer:
    assert answer.system is not None
    return answer.system


def _floors(rounds: Sequence[Sequence[Answer]]) -> Floors:
    floors = [[rank.floor for rank in ranks if rank.floor is not None] for ranks in rounds]
    return Floors(
        spread(
            max(each) for ranks in floors for each in zip(*(f.copy_s for f in ranks), strict=True)
        ),
        spread(
            max(each) for ranks in floors for each in zip(*(f.write_s for f in ranks), strict=True)
        ),
        all(floor.is_direct for ranks in floors for floor in ranks),
    )


def _cost(rounds: Sequence[Sequence[Answer]]) -> Cost:
    """Put the ranks of each round together, and then the rounds."""
    answers = [[_system(answer) for answer in ranks] for ranks in rounds]
    firsts = [[rank.first for rank in ranks] for ranks in answers]
    steady = [
        save for ranks in answers for save in zip(*(rank.steady for rank in ranks), strict=True)
    ]
    idle = [save for ranks in answers for save in zip(*(rank.idle for rank in ranks), strict=True)]
    slow_downs = [
        max(known)
        for save in steady
        if (known := [rank.slow_down for rank in save if rank.slow_down is not None])
    ]
    return Cost(
        is_synced=answers[0][0].is_synced,
        prepare_s=spread(max(rank.prepare_s for rank in ranks) for ranks in answers),
        first_stall_s=spread(max(rank.stall_s for rank in save) for save in firsts),
        first_lost_s=spread(max(rank.lost_s for rank in save) for save in firsts),
        stall_s=spread(max(rank.stall_s for rank in save) for save in steady),
        guard_s=spread(max(rank.guard_s for rank in save) for save in steady),
        lost_s=spread(max(rank.lost_s for rank in save) for save in steady),
        slow_down=spread(slow_downs) if slow_downs else None,
        busy_commit_s=spread(max(rank.commit_s for rank in save) for save in steady),
        commit_s=spread(max(rank.commit_s for rank in save) for save in idle),
        cpu_s=spread(sum(rank.cpu_s for rank in ranks) for ranks in answers),
        memory_bytes=spread(sum(rank.memory_bytes for rank in ranks) for ranks in answers),
        shared_bytes=spread(sum(rank.shared_bytes for rank in ranks) for ranks in answers),
        descriptors=spread(sum(rank.descriptors for rank in ranks) for ranks in answers),
    )


def _timeline(rounds: Sequence[Sequence[Answer]]) -> Timeline:
    return _system(rounds[-1][0]).timeline


# --- the machine --------------------------------------------------------------------------------


def _describe(folder: Path, device: str, load: float) -> Machine:
    mounts = [
        partition
        for partition in psutil.disk_partitions(all=True)
        if folder.resolve().is_relative_to(partition.mountpoint)
    ]
    packages = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            packages[name] = version(name)
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        device=device,
        file_system=max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "",
        kernel=platform.release().partition("-")[0],
        python=platform.python_version(),
        packages=packages,
        load=load,
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
