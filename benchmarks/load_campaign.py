"""The loads of a run: every way of loading on every workload, in turn, several times over; and the
index of a checkpoint of many ranks.

As `campaign`, whose saves come first: one trial at a time, in an order that rotates.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.launching import Failed, Rank, launch, said
from benchmarks.results import (
    WRITER,
    IndexRead,
    LoadAnswer,
    LoadCost,
    Loaded,
    LoadTask,
    Options,
    Sample,
    spread,
)

SIZES: Final = {"large": 1.0, "small": 1.0, "ranks": 1.6}
"""The workloads, and a factor on their sizes: loads of two ranks are of 1.6 GiB."""

INDEX_RANK: Final = 517
"""Whose part is loaded: not the first, whose file comes first; that modulo the number of ranks."""


def load_workload(
    name: str,
    world: int,
    place: Path,
    options: Options,
    device: str,
    systems: Sequence[str],
    say: Callable[[str], None],
) -> Loaded:
    """Measure one workload's loads. Raises Failed if there is nothing to load."""
    folder = Path(tempfile.mkdtemp(prefix="loads-", dir=place))

    def start(system: str) -> list[LoadAnswer]:
        def task(rank: Rank) -> LoadTask:
            return LoadTask(
                workload=name,
                size=options.size * SIZES[name],
                system=system,
                device=device,
                rank=rank.rank,
                world=rank.world,
                folder=str(folder),
                rendezvous=rank.rendezvous,
                answer=rank.answer,
                loads=options.loads,
            )

        return launch("benchmarks.loads", world, task, LoadAnswer)

    answers: defaultdict[str, list[list[LoadAnswer]]] = defaultdict(list)
    failures: dict[str, str] = {}
    try:
        say(f"loads of {name}: writing")
        written = start(WRITER)
        os.sync()
        for repeat in range(options.repeats):
            turn = repeat % max(1, len(systems))
            for system in (*systems[turn:], *systems[:turn]):
                if system in failures:
                    continue
                say(f"loads of {name}, round {repeat + 1} of {options.repeats}: {system}")
                try:
                    ranks = start(system)
                except Failed as error:
                    failures[system] = str(error)
                    continue
                unavailable = next((each.unavailable for each in ranks if each.unavailable), "")
                if unavailable:
                    failures[system] = unavailable
                else:
                    answers[system].append(ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    measured = {system: answers[system] for system in systems if system not in failures}
    if not measured:
        raise Failed("; ".join(f"{system}: {why}" for system, why in failures.items()))
    colds = {system: _rounds(found, _cold) for system, found in measured.items()}
    warms = {system: _rounds(found, _warm) for system, found in measured.items()}
    return Loaded(
        world=world,
        tensors=written[0].tensors,
        state_bytes=written[0].state_bytes,
        read_s=spread(_floors(colds.values())),
        copy_s=spread(_floors(warms.values())),
        cold={system: _cost(rounds) for system, rounds in colds.items()},
        warm={system: _cost(rounds) for system, rounds in warms.items()},
        failures=failures,
    )


class _Load(msgspec.Struct, frozen=True):
    """One load of all ranks together."""

    load_s: float
    cpu_s: float
    floor_s: float
    floor_cpu_s: float
    memory_bytes: int


def _cold(answer: LoadAnswer) -> tuple[Sample, ...]:
    return answer.cold


def _warm(answer: LoadAnswer) -> tuple[Sample, ...]:
    return answer.warm


def _rounds(
    found: Iterable[Sequence[LoadAnswer]], kind: Callable[[LoadAnswer], tuple[Sample, ...]]
) -> list[list[_Load]]:
    """Put the ranks of each load together; a list a process."""
    return [
        [
            _Load(
                load_s=max(each.load_s for each in samples),
                cpu_s=sum(each.load_cpu_s for each in samples),
                floor_s=max(each.floor_s for each in samples),
                floor_cpu_s=sum(each.floor_cpu_s for each in samples),
                memory_bytes=max(each.memory_bytes for each in samples),
            )
            for samples in zip(*map(kind, ranks), strict=True)
        ]
        for ranks in found
    ]


def _floors(systems: Iterable[list[list[_Load]]]) -> list[float]:
    return [each.floor_s for rounds in systems for each in chain(*rounds)]


def _cost(rounds: list[list[_Load]]) -> LoadCost:
    loads = list(chain(*rounds))
    return LoadCost(
        load_s=spread(each.load_s for each in loads),
        cpu_s=spread(each.cpu_s for each in loads),
        first_ratio=spread(each[0].load_s / each[0].floor_s for each in rounds),
        ratio=spread(each.load_s / each.floor_s for each in loads),
        cpu_ratio=spread(each.cpu_s / each.floor_cpu_s for each in loads),
        memory_bytes=spread(each.memory_bytes for each in loads),
    )


def read_index(checkpoint: Path, ranks: int, tensors: int) -> IndexRead:
    """Load one rank's part of a checkpoint as `planning` writes it, up to the first data read; in a
    process of its own. Raises Failed.
    """
    rank = INDEX_RANK % ranks
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.indexing", str(checkpoint), str(rank), str(ranks),
         str(tensors)],
        capture_output=True, check=False, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    if ended.returncode:
        raise Failed(f"exit code {ended.returncode}: {said(ended.stderr.decode())}")
    return msgspec.json.decode(ended.stdout, type=IndexRead)
