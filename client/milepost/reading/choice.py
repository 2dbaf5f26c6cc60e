"""Which checkpoint a load takes: that of a step, the newest, or the newest that is whole.

Rank 0 chooses and tells the others, since ranks may see a shared directory differently.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any, Final, NamedTuple

from milepost.errors import CorruptCheckpoint, LoadFailed, MilepostError, listed
from milepost.format.manifest import MANIFEST_NAME
from milepost.link.rendezvous import Group, tell_all
from milepost.reading.restore import LoadOptions, LoadReport, load_checkpoint
from milepost.storage.catalog import CheckpointEntry
from milepost.storage.claims import reading
from milepost.storage.root import Root

log = logging.getLogger("milepost")

UNREADABLE: Final = frozenset({"corrupt", "io-error", "not-found"})
"""Error codes of a checkpoint that is not whole. Other codes are about the state."""


class Loaded(NamedTuple):
    """A report, and the name of the checkpoint that was loaded."""

    report: LoadReport
    name: str


def load_chosen(
    root: Root,
    state: Any,
    options: LoadOptions,
    *,
    step: int | None,
    fallback: bool,
    group: Group,
    topic: str,
    timeout_s: float,
) -> Loaded:
    """Load a committed checkpoint of a root: the one of this step, or the newest. All ranks call
    it.

    fallback: if it is damaged, take the next older one, and so on, and say so in the log.

    Raises LoadFailed("not-found"), which names the steps there are, and whatever `load_checkpoint`
    raises.
    """
    last: CheckpointEntry | None = None
    """What rank 0 has chosen."""
    passed: set[str] = set()
    damaged: list[int] = []
    fault: MilepostError | None = None

    def choose() -> bytes:
        nonlocal last
        entries = [entry for entry in root.checkpoints() if entry.step >= 0]
        if last is None:
            last = _chosen(root, entries, step)
        else:
            passed.add(last.name)
            before = last
            last = next(
                (
                    each
                    for each in entries
                    if each.name not in passed and _is_older(each, before, step)
                ),
                None,
            )
            if last is None:
                assert fault is not None
                raise type(fault)(
                    fault.code,
                    f"{fault.message}; no older checkpoint is whole either: steps "
                    f"{listed(damaged)} are damaged",
                    fault.hint,
                )
        return json.dumps([last.step, last.name]).encode()

    while True:
        place = f"{topic}/{len(damaged)}"
        chosen, name = json.loads(tell_all(group, f"{place}/choice", choose, timeout_s))
        try:
            with reading(root, name):
                report = load_checkpoint(
                    root.path / name,
                    chosen,
                    state,
                    options,
                    group=group,
                    topic=place,
                    timeout_s=timeout_s,
                )
        except (CorruptCheckpoint, LoadFailed) as error:
            if not fallback or error.code not in UNREADABLE:
                raise
            fault = error
            damaged.append(chosen)
            if group.rank == 0:
                log.warning("step %s is damaged, so an older one is loaded: %s", chosen, error)
            continue
        return Loaded(replace(report, damaged=tuple(damaged)), name)


def _has_no_order(entry: CheckpointEntry) -> bool:
    """Whether it is a checkpoint of ours that does not say how new it is."""
    return not entry.save_id and (entry.path / MANIFEST_NAME).exists()


def _is_older(entry: CheckpointEntry, other: CheckpointEntry, step: int | None) -> bool:
    if _has_no_order(other):
        # It was chosen as the newest of all, or by its step.
        return step is None or entry.step < step
    return (entry.order, entry.name) < (other.order, other.name)


def _chosen(root: Root, entries: list[CheckpointEntry], step: int | None) -> CheckpointEntry:
    newest = root.latest_target() if step is None else None
    for entry in entries:
        if entry.name == newest and _has_no_order(entry):
            return entry
    for entry in entries:
        if step is None or entry.step == step:
            return entry
    there = ", ".join(str(each) for each in sorted({entry.step for entry in entries})) or "none"
    what = "any checkpoint" if step is None else f"step {step}"
    raise LoadFailed("not-found", f"{root.path} does not hold {what}; steps there: {there}")
