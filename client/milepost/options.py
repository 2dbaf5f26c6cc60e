"""What a Checkpointer is told: options checked, and the job's name found.

Pure but for reading the environment; knows nothing of daemons, arenas or saves.
"""

from __future__ import annotations

import hashlib
import operator
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from milepost.errors import UsageError
from milepost.overlap import Optimizers, Overlap
from milepost.planning import is_default
from milepost.retention import Policy

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlanner

JOB_CHARACTERS_MAX: Final = 200
"""Longest name of a job: it is on every line of the log and in every message."""

JOB_VARIABLES: Final = ("MILEPOST_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "JOB_NAME")
"""Where launchers say what the job is called, first match wins."""


def check_options(
    on_busy: object,
    on_failure: object,
    staging: object,
    slots: int,
    deadline_s: float,
    keep: object,
) -> None:
    """Refuse options that are none. Raises UsageError."""
    check_choice("on_busy", on_busy, ("wait", "skip"))
    check_choice("on_failure", on_failure, ("warn", "raise"))
    check_choice("staging", staging, ("blocking", "overlap"))
    if type(slots) is not int or slots < 2:
        raise UsageError(
            "usage",
            f"slots is {slots!r}, not a whole number of at least 2",
            "one is written while one is filled",
        )
    if type(deadline_s) not in (int, float) or not deadline_s > 0:
        raise UsageError("usage", f"deadline_s is {deadline_s!r}, not above 0")
    if keep is not None and not isinstance(keep, Policy):
        raise UsageError(
            "usage", f"keep is a {type(keep).__name__}", "use KeepLast(n) and the like"
        )


def make_overlap(
    staging: str, optimizer: Optimizers | None, planner: SavePlanner | None
) -> Overlap | None:
    """Return what copies in the background, if that is asked for. Raises UsageError."""
    if staging != "overlap":
        if optimizer is not None:
            raise UsageError(
                "usage", "optimizer= has no effect with staging='blocking'", "leave it out"
            )
        return None
    if planner is not None and not is_default(planner):
        raise UsageError(
            "usage",
            f"staging='overlap' with a {type(planner).__name__}: what a SavePlanner hands over "
            "cannot be told from a copy",
            "use staging='blocking' with a planner of your own",
        )
    return Overlap(optimizer)


STEP_MAX: Final = 2**63 - 1
"""Largest step: what msgpack and the manifest hold."""


def check_step(step: object) -> int:
    """Return a step as a plain int; numpy's and the like are taken. Raises UsageError."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= STEP_MAX:
        raise UsageError("usage", f"step is {step!r}, not a whole number from 0 to {STEP_MAX}")
    return number


def find_root(root: str | os.PathLike[str]) -> Path:
    """Return the root as an absolute path without links. Raises UsageError for what is no path of a
    file system.
    """
    try:
        text = os.fspath(root)
    except TypeError:
        text = ""
    if not text:
        raise UsageError("usage", f"root is {root!r}, not a path", "name a directory")
    if "://" in text:
        raise UsageError("usage", f"root is the URL {text}", "mount it; there are no object stores")
    if text.startswith("~"):
        raise UsageError("usage", f"root is {text}, and ~ is the shell's", "os.path.expanduser()")
    return Path(os.path.realpath(text))


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is none of the choices. Raises UsageError naming them."""
    if value not in choices:
        raise UsageError(
            "usage", f"{name} is {value!r}, not one of {', '.join(map(repr, choices))}"
        )


def job_name(given: str | None, root: Path) -> str:
    """Return the job's name: as given, as the launcher has it, else a hash of the root."""
    if given is not None:
        if not given.strip() or len(given) > JOB_CHARACTERS_MAX:
            raise UsageError("usage", f"job is {given!r}, not 1 to {JOB_CHARACTERS_MAX} characters")
        return given
    for variable in JOB_VARIABLES:
        found = os.environ.get(variable, "")
        # torchrun with a fixed port gives every run the id "none".
        if found and found != "none":
            return found[:JOB_CHARACTERS_MAX]
    return hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()
