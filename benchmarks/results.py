"""What a run of the benchmarks found, as `bench-results.json` holds it.

Owns the shape of that file, and of what the process of a trial is told and answers. Times are in
seconds, taken with `time.perf_counter`, sizes in bytes. No torch, no measuring.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

FORMAT_VERSION: Final = 1

BARE_WRITER: Final = "bare-writer"
"""Not a system: a process that does nothing but write the same bytes with direct I/O."""

OURS: Final = ("milepost", "milepost-overlap")
OTHERS: Final = (
    "torch-save",
    "torch-thread",
    "torch-process",
    "torch-process-shm",
    "torch-process-shm-async",
    "torch-checkpointing",
    "torch-checkpointing-synced",
)
SYSTEMS: Final[tuple[str, ...]] = (*OURS, *OTHERS)

OUR_READERS: Final = ("milepost", "milepost-path", "milepost-whole")
READERS: Final[tuple[str, ...]] = (*OUR_READERS, "torch-load", "torch-checkpointing")
"""Ways of loading."""

WRITER: Final = "writer"
"""No way of loading: the process that writes what the others load."""


class Spread(msgspec.Struct, frozen=True):
    """One quantity over all repeats."""

    values: tuple[float, ...]
    """As measured, in the order in which they were."""
    median: float
    low: float
    high: float


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of values, of which there is at least one."""
    kept = tuple(values)
    return Spread(kept, statistics.median(kept), min(kept), max(kept))


# --- a trial's task and answer ------------------------------------------------------------------


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has to do: one system, one workload, as one rank."""

    workload: str
    size: float
    """Factor on the workload's full size."""
    system: str
    device: str
    rank: int
    world: int
    folder: str
    """Where checkpoints go, the same for all its ranks."""
    rendezvous: str
    """A file for the process group."""
    answer: str
    """The file that the answer goes to."""


class Task(RankTask, frozen=True, kw_only=True):
    """A trial of saving. `system` is a name of `SYSTEMS`, or `BARE_WRITER`, which measures the
    floors too; `folder` is empty, and this task's alone.
    """

    batches: int
    """Forward and backward passes in a training step; 0, for the bare writer: to be found, so that
    they take some multiple of a copy of the rank's part."""
    quiet_steps: int
    """Steps before each save that it is compared with."""
    saves: int
    """Saves beside training steps, after the first."""
    idle_saves: int
    """Saves without steps: for processor time and the time to the commit."""


class LoadTask(RankTask, frozen=True, kw_only=True):
    """A trial of loading. `system` is a name of `READERS`, or `WRITER`, which writes to `folder`
    what the others load.
    """

    loads: int
    """Of each kind, cold and warm."""


class BusySave(msgspec.Struct, frozen=True):
    """A save with training going on."""

    stall_s: float
    """How long the call took."""
    guard_s: float
    """How long optimizer steps were held back until the state could change."""
    lost_s: float
    """How much later training was for it, all told: stall, guard and slower steps."""
    slow_down: float | None
    """Step time with the save in the background, guard left out, over that of quiet steps; None if
    no whole step fell into it."""
    commit_s: float
    """From the call until the system says that the checkpoint is complete."""


class IdleSave(msgspec.Struct, frozen=True):
    """A save while the trainer only waits for it."""

    stall_s: float
    commit_s: float


class Timeline(msgspec.Struct, frozen=True):
    """The training steps of one process from its first save on; entry i is step i."""

    steps_s: tuple[float, ...]
    """From the end of the step before, so that calls of `save` count."""
    saved_at: tuple[int, ...]
    """Steps that began with a save."""
    quiet_s: float
    """A step between saves, the median of all."""


class SystemAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial measured of its system."""

    is_synced: bool
    """Whether the system syncs what it wrote before it says that a save is complete."""
    batches: int
    """Passes in each step."""
    prepare_s: float
    """What was paid ahead of the first save, where the system has a call for that."""
    first: BusySave
    steady: tuple[BusySave, ...]
    idle: tuple[IdleSave, ...]
    cpu_s: float
    """Processor time of one idle save, in all processes that this rank started."""
    memory_bytes: int
    """Most memory that those processes had beyond what the trainer had before: private and file
    pages of all of them, and files in shared memory, once."""
    shared_bytes: int
    """The part of it in shared memory."""
    descriptors: int
    """Most open files that they had, beyond those of the trainer before."""
    timeline: Timeline


class FloorAnswer(msgspec.Struct, frozen=True):
    """What the machine can do: of one rank, all ranks at the same time."""

    copy_s: tuple[float, ...]
    """One thread copies the rank's part into shared memory that was touched before."""
    write_s: tuple[float, ...]
    """The same bytes into a new file, sequentially, direct where possible; then fsync."""
    is_direct: bool


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial writes to `Task.answer`."""

    state_bytes: int
    """Of all ranks together, replicas once."""
    image_bytes: int
    """The same with torch's container around each tensor, as it lies in files and shared memory."""
    share_bytes: int
    """This rank's part of these."""
    tensors: int
    """That this rank holds."""
    floor: FloorAnswer | None = None
    system: SystemAnswer | None = None
    unavailable: str = ""
    """Why the system cannot be run here."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One load on one rank, and the floor just before it; all ranks at the same time."""

    load_s: float
    load_cpu_s: float
    floor_s: float
    floor_cpu_s: float
    memory_bytes: int
    """Most memory of the process during the load, beyond what it had before and what was loaded
    into new memory."""


class LoadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial of loading writes to `RankTask.answer`."""

    state_bytes: int
    """As in `Answer`."""
    tensors: int
    cold: tuple[Sample, ...] = ()
    """Nothing in the page cache. The floor: the data files past it, sequentially, each rank its
    own, into memory that was touched before."""
    warm: tuple[Sample, ...] = ()
    """All in the page cache. The floor: copied from there, otherwise the same."""
    unavailable: str = ""


# --- the file -----------------------------------------------------------------------------------


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run took place."""

    processor: str
    cores: int
    memory_bytes: int
    device: str
    file_system: str
    """Kind of file system that the checkpoints went to."""
    kernel: str
    python: str
    packages: dict[str, str]
    load: float
    """Load average when the run began: above a few tenths, trust nothing."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the run was asked for."""

    size: float
    repeats: int
    saves: int
    idle_saves: int
    quiet_steps: int
    loads: int = 0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a system costs in one workload. Over ranks: times are of the slowest, the rest sums."""

    is_synced: bool
    prepare_s: Spread
    first_stall_s: Spread
    first_lost_s: Spread
    stall_s: Spread
    guard_s: Spread
    lost_s: Spread
    slow_down: Spread | None
    busy_commit_s: Spread
    commit_s: Spread
    """Nobody else uses the machine meanwhile."""
    cpu_s: Spread
    memory_bytes: Spread
    shared_bytes: Spread
    descriptors: Spread


class Floors(msgspec.Struct, frozen=True):
    """What the machine can do; see `FloorAnswer`."""

    copy_s: Spread
    write_s: Spread
    is_direct: bool


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One workload."""

    world: int
    tensors: int
    state_bytes: int
    image_bytes: int
    """With torch's containers, objects apart."""
    step_s: Spread
    floors: Floors
    bare_writer: Cost | None
    costs: dict[str, Cost]
    """By system."""
    timelines: dict[str, Timeline]
    """By system, of one repeat and rank 0."""
    failures: dict[str, str]
    """By system, why there is no cost."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The coordinator's planning for many ranks."""

    ranks: int
    tensors: int
    """A rank's."""
    plan_s: float
    """From the frames with all offers to the frames with all layouts."""
    plan_memory_bytes: int
    """Most memory of the planner's process until then, torch's import included, and what the
    coordinator's grew by."""
    steady_s: float
    """The coordinator's work for a later save, which needs no plan; index and files apart."""
    steady_wire_bytes: float
    """A rank's share of all frames of such a save, from its first word to its end."""
    index_s: float
    """Manifest and `.metadata` of the first save, written and synced."""
    later_index_s: float
    """The same for a later save."""
    index_memory_bytes: int


class LoadCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a system's loads of one kind cost. Over ranks: times are of the slowest, processor times
    sum, memory is a rank's most.
    """

    load_s: Spread
    cpu_s: Spread
    first_ratio: Spread
    """Of the first load in each process, over its floor."""
    ratio: Spread
    """Each load's time over that of the floor just before it."""
    cpu_ratio: Spread
    """The same of processor time."""
    memory_bytes: Spread


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """One workload's loads."""

    world: int
    tensors: int
    state_bytes: int
    read_s: Spread
    """The floor of a cold load, over all trials."""
    copy_s: Spread
    """The floor of a warm one."""
    cold: dict[str, LoadCost]
    """By system."""
    warm: dict[str, LoadCost]
    failures: dict[str, str]
    """By system, why there is no cost."""


class IndexRead(msgspec.Struct, frozen=True, kw_only=True):
    """A load of one rank's part of a checkpoint of many ranks, up to its first data read."""

    ranks: int
    tensors: int
    """A rank's."""
    chunks: int
    """Of the whole checkpoint."""
    read_s: float
    cpu_s: float
    memory_bytes: int
    """What the process grew by at most."""
    stock_s: float
    """torch's own reader reads `.metadata`, no more."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """`bench-results.json`."""

    version: int = FORMAT_VERSION
    at: str
    """When the run began, UTC."""
    machine: Machine
    options: Options
    workloads: dict[str, Measured]
    failures: dict[str, str]
    """By workload, why it is missing: not even the floors could be measured."""
    planning: tuple[Planned, ...]
    loads: dict[str, Loaded] = {}
    """By workload; one that failed stands in `failures`."""
    indexes: tuple[IndexRead, ...] = ()


def write_results(path: Path, results: Results) -> None:
    """Write the file, for people too."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def read_results(path: Path) -> Results:
    """Read the file. Raises OSError; msgspec.DecodeError if it is no results file."""
    return msgspec.json.decode(path.read_bytes(), type=Results)
