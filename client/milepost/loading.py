"""`load`: reading a checkpoint without a Checkpointer, a daemon or the right to write."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from milepost.concurrency.waiting import check_timeout
from milepost.errors import CorruptCheckpoint, LoadFailed, UsageError
from milepost.format.heading import read_heading
from milepost.format.manifest import METADATA_NAME
from milepost.link.rendezvous import Group, join_group, tell_all
from milepost.options import check_step
from milepost.reading.choice import load_chosen
from milepost.reading.restore import LoadOptions, LoadReport, load_checkpoint
from milepost.storage.claims import reading
from milepost.storage.paths import absolute
from milepost.storage.root import Root

if TYPE_CHECKING:
    import torch.distributed as dist

_STEP_NAME: Final = re.compile(r"step_(\d+)")


def load(
    path: str | os.PathLike[str],
    state: dict[str, Any] | None = None,
    *,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    partial: bool = False,
    verify: bool = True,
    fallback: bool = False,
    cast: bool = False,
    allow_pickle: bool = False,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Load a checkpoint by its path, such as one of another run, or in a program that only reads.

    Needs neither a daemon nor the right to write. All ranks of the group call it.

    Args:
        path: the directory of a checkpoint of milepost or stock torch; or a directory of
            checkpoints, from which the newest is loaded, or that of `step`.
        state: a template, as for `Checkpointer.load`, filled in place; None: everything, nested as
            it was saved, in `LoadReport.state`; each rank gets the whole.
        step: which checkpoint of a directory of checkpoints.
        process_group: the ranks that load together; None: the default group, or one process
            without torch.distributed.
        no_dist: load in this process alone, also where torch.distributed is set up.
        partial, verify, fallback, cast, allow_pickle: as for `Checkpointer.load`; `fallback` is for
            a directory of checkpoints.
        timeout_s: how long the ranks wait for one another, at each step of the load.

    Raises:
        LoadFailed, CorruptCheckpoint: as `Checkpointer.load`.
        UsageError: an argument is wrong.
    """
    check_timeout(timeout_s)
    step = None if step is None else check_step(step)
    try:
        place = Path(absolute(path))
    except TypeError as error:
        raise UsageError("usage", f"path is {path!r}, not a path", "name a directory") from error
    if no_dist and process_group is not None:
        raise UsageError("usage", "no_dist=True and a process_group were given", "leave one out")
    group = Group(0, 1, None) if no_dist else join_group(process_group)
    options = LoadOptions(partial, verify, cast, allow_pickle)

    def find() -> bytes:
        return json.dumps(_find(place, step, fallback=fallback)).encode()

    found, found_step = json.loads(tell_all(group, "load/place", find, timeout_s))
    if not found:
        return load_chosen(
            Root(place),
            state,
            options,
            step=step,
            fallback=fallback,
            group=group,
            topic="load",
            timeout_s=timeout_s,
        ).report
    checkpoint = Path(found)
    with reading(Root(checkpoint.parent), checkpoint.name):
        return load_checkpoint(
            checkpoint, found_step, state, options, group=group, topic="load", timeout_s=timeout_s
        )


def _find(place: Path, step: int | None, *, fallback: bool) -> tuple[str, int]:
    """Return the checkpoint at a path, and its step; no name if the path holds several."""
    if not (place / METADATA_NAME).exists():
        if place.is_dir():
            return "", -1
        raise LoadFailed("not-found", f"{place}: no such directory", "name a checkpoint, or a root")
    if fallback or step is not None:
        raise UsageError(
            "usage",
            f"{place} is one checkpoint; step and fallback need a directory of checkpoints",
            f"name {place.parent}",
        )
    checkpoint = place.resolve()
    try:
        found = read_heading(checkpoint).step
    except (CorruptCheckpoint, OSError):
        found = -1  # Verification tells what is wrong with the manifest.
    match = _STEP_NAME.fullmatch(checkpoint.name)
    return str(checkpoint), int(match[1]) if found < 0 and match else found
