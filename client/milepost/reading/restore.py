"""Bringing a checkpoint back into a state, through torch's own reader.

Owns which step is loaded, what is missing or unexpected, and the state of each rank that is stored
apart. Files are read by `torch.distributed.checkpoint.load`; objects are unpickled by it, so a root
must be one you trust.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from milepost.dcp_format.index import read_metadata
from milepost.errors import NAMED_MAX, CorruptCheckpoint, LoadFailed, MilepostError, listed
from milepost.format.manifest import METADATA_NAME
from milepost.link.rendezvous import Group, gather, tell_all
from milepost.reading.verification import verify
from milepost.state.flattening import PER_RANK, flatten, per_rank_prefix
from milepost.storage.root import Root

log = logging.getLogger("milepost")


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        step: the step that was loaded.
        source: "storage" or "memory".
        per_rank: this rank's own state, as given to `save(per_rank=...)`; {} if there was none.
        missing: keys of the state that the checkpoint does not hold (only with `partial=True`).
        unexpected: keys of the checkpoint that the state did not ask for, per-rank state aside.
        elapsed_s: how long it took.
    """

    step: int
    source: str
    per_rank: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    elapsed_s: float = 0.0


def choose_checkpoint(root: Root, step: int | None) -> tuple[int, str]:
    """Return step and directory name of a committed checkpoint: of that step, or the newest.

    Raises LoadFailed("not-found"), naming the steps there are.
    """
    entries = [entry for entry in root.checkpoints() if entry.step >= 0]
    for entry in entries:
        if step is None or entry.step == step:
            return entry.step, entry.name
    there = ", ".join(str(each) for each in sorted({entry.step for entry in entries})) or "none"
    what = "any checkpoint" if step is None else f"step {step}"
    raise LoadFailed("not-found", f"{root.path} does not hold {what}; steps there: {there}")


def warn_of_unexpected(report: LoadReport) -> None:
    """Say what the checkpoint holds and the state did not ask for: a resume that loses state is
    found here or never.
    """
    if report.unexpected:
        named = ", ".join(map(repr, report.unexpected[:NAMED_MAX]))
        more = " ..." if len(report.unexpected) > NAMED_MAX else ""
        log.warning(
            "step %s holds %s keys that the state did not ask for and that were not loaded: %s%s "
            "(a fresh optimizer asks for nothing; torch's get_state_dict() fills it first)",
            report.step, len(report.unexpected), named, more,
        )  # fmt: skip


def check_whole(checkpoint: Path, group: Group, topic: str, timeout_s: float) -> None:
    """Read every byte of a checkpoint once, divided among the ranks, and compare it with its
    checksums; all ranks of the group call it.

    torch writes checksums and never looks at them: a flipped bit loads as a wrong weight. What is
    read here stays in the page cache for the load that follows.

    Raises CorruptCheckpoint on every rank if any has found damage, naming file and tensor.
    """
    try:
        damages = verify(checkpoint, share=(group.rank, group.world)).damages
        told = [f"{damage.file}: {damage.key + ': ' if damage.key else ''}{damage.text}"
                for damage in damages]  # fmt: skip
    except MilepostError as error:
        told = [error.message]
    said = gather(group, topic, msgpack.packb(told[:NAMED_MAX]), timeout_s)

    def judge() -> bytes:
        found = list(dict.fromkeys(text for each in said for text in msgpack.unpackb(each)))
        if found:
            raise CorruptCheckpoint(
                "corrupt",
                f"{checkpoint} is damaged: {listed(found, '; ')}",
                "load another step; verify=False loads it as it is",
            )
        return b""

    tell_all(group, topic, judge, timeout_s)


def load_checkpoint(
    checkpoint: Path,
    step: int,
    state: dict[str, Any],
    *,
    rank: int,
    partial: bool,
    process_group: dist.ProcessGroup | None,
) -> LoadReport:
    """Load a checkpoint into `state`, in place, as `dcp.load` does; all ranks of the group call it.

    Raises:
        LoadFailed: keys are missing and `partial` is not set, or torch could not load it.
        CorruptCheckpoint: `.metadata` is damaged.
    """
    started_s = time.monotonic()
    metadata = read_metadata(checkpoint / METADATA_NAME)
    missing, unexpected = _compare(state, metadata)
    if missing and not partial:
        named = ", ".join(repr(key) for key in missing[:NAMED_MAX])
        raise LoadFailed(
            "load-failed",
            f"{checkpoint} lacks {len(missing)} of the keys that the state asks for: {named}"
            + (" ..." if len(missing) > NAMED_MAX else ""),
            "load(partial=True) leaves them as they are",
        )
    with warnings.catch_warnings():
        # Without torch.distributed one process loads alone, which is what the caller wants.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable")
        try:
            dcp.load(
                state,
                storage_reader=FileSystemReader(checkpoint),
                planner=DefaultLoadPlanner(allow_partial_load=partial),
                process_group=process_group,
            )
            per_rank = _load_per_rank(checkpoint, metadata, rank)
        except MilepostError:
            raise
        except (Exception, CheckpointException) as error:
            raise LoadFailed(
                "load-failed",
                f"{checkpoint} cannot be loaded: {_first_line(error)}",
                f"`milepost verify {checkpoint}` tells whether it is damaged, `milepost inspect` "
                "what it holds",
            ) from error
    return LoadReport(
        step=step,
        source="storage",
        per_rank=per_rank,
        missing=missing,
        unexpected=unexpected,
        elapsed_s=time.monotonic() - started_s,
    )


def _compare(
    state: Mapping[str, Any], metadata: Metadata
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what the state asks for in vain, and what the checkpoint holds beside."""
    wanted, _ = flatten(state)
    held = metadata.state_dict_metadata
    missing = tuple(key for key in wanted if key not in held)
    unexpected = tuple(
        key for key in held if key not in wanted and not key.startswith(f"{PER_RANK}/")
    )
    return missing, unexpected


def _load_per_rank(checkpoint: Path, metadata: Metadata, rank: int) -> dict[str, Any]:
    """Return one rank's own state, nested as it was given."""
    prefix = per_rank_prefix(rank)
    keys = {key for key in metadata.state_dict_metadata if key.startswith(prefix)}
    if not keys:
        return {}
    own: dict[str, Any] = {}
    _load_state_dict(
        own,
        storage_reader=FileSystemReader(checkpoint),
        planner=_ExactKeys(keys),
        no_dist=True,
    )
    return {name[len(prefix) :]: value for name, value in own.items()}


class _ExactKeys(_EmptyStateDictLoadPlanner):
    """Loads exactly these flattened keys into an empty state; torch's own planner takes prefixes,
    by which `per_rank/1/a` would bring `per_rank/1/a.b` along.
    """

    def __init__(self, keys: set[str]) -> None:
        super().__init__(keys=keys)  # type: ignore[no-untyped-call]

    def _should_include_key(self, key: str, metadata: Metadata) -> bool:
        assert self.keys is not None
        return key in self.keys


def _first_line(error: BaseException) -> str:
    """Return what torch's error says, without the tracebacks it carries along."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {_first_line(cause)}"
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
