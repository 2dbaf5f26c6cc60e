"""The arguments of a Checkpointer: checks them, and finds the job's name.

Pure except that it reads the environment; knows nothing of daemons, arenas or saves.
"""

from __future__ import annotations

import hashlib
import operator
import os
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint.planner import SavePlanner

from milepost.errors import UsageError
from milepost.staging.behind import BehindStaging
from milepost.staging.blocking import BlockingStaging
from milepost.staging.selection import Optimizers
from milepost.staging.strategy import Staging
from milepost.state.planners import is_default
from milepost.storage.names import check_name
from milepost.storage.retention import Policy

JOB_CHARACTERS_MAX: Final = 200
"""Longest name of a job. The name is in every log line and every message."""

JOB_VARIABLES: Final = ("MILEPOST_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "JOB_NAME")
"""Variables in which launchers put the job's name; the first one that is set counts."""


def check_options(
    on_busy: object,
    on_failure: object,
    staging: object,
    slots: int,
    deadline_s: float,
    keep: object,
    planner: object = None,
    overwrite: object = False,
    check_replicas: object = "warn",
) -> None:
    """Refuse invalid options. Raises UsageError."""
    check_choice("check_replicas", check_replicas, ("warn", "raise", "off"))
    check_choice("on_busy", on_busy, ("wait", "skip"))
    check_choice("on_failure", on_failure, ("warn", "raise"))
    check_choice("staging", staging, ("blocking", "overlap"))
    if type(slots) is not int or slots < 2:
        raise UsageError(
            "usage",
            f"slots is {slots!r}, not a whole number of at least 2",
            "one is written while the other is filled",
        )
    if type(deadline_s) not in (int, float) or not deadline_s > 0:
        raise UsageError("usage", f"deadline_s is {deadline_s!r}, not a number of seconds above 0")
    if keep is not None and not isinstance(keep, Policy):
        raise UsageError(
            "usage",
            f"keep is {keep!r}, not a rule",
            "use KeepLast(n), KeepEvery(steps) or Protect(steps)",
        )
    if planner is not None and not isinstance(planner, SavePlanner):
        raise UsageError(
            "usage",
            f"planner is {planner!r}, not a SavePlanner",
            "pass an instance of torch.distributed.checkpoint.SavePlanner, or leave it out",
        )
    if not isinstance(overwrite, bool):
        raise UsageError("usage", f"overwrite is {overwrite!r}, not True or False")


def make_staging(
    staging: str, optimizer: Optimizers | None, planner: SavePlanner | None
) -> Staging:
    """Return the way of staging that is asked for. Raises UsageError."""
    if staging != "overlap":
        if optimizer is not None:
            raise UsageError(
                "usage", "optimizer= has no effect with staging='blocking'", "leave it out"
            )
        return BlockingStaging()
    if planner is not None and not is_default(planner):
        raise UsageError(
            "usage",
            f"staging='overlap' does not work with a {type(planner).__name__}: a SavePlanner may "
            "return copies, which the guard cannot recognise",
            "use staging='blocking' with a planner of your own",
        )
    return BehindStaging(optimizer)


STEP_MAX: Final = 2**63 - 1
"""Largest step that msgpack and the manifest can hold."""


def check_step(step: object) -> int:
    """Return a step as a plain int; accepts numpy's integers, too. Raises UsageError."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= STEP_MAX:
        raise UsageError("usage", f"step is {step!r}, not a whole number from 0 to {STEP_MAX}")
    return number


def check_repeated(name: str, taken_by: str | None, *, overwrite: bool) -> None:
    """Refuse a name that this attempt has used. Raises UsageError("already-committed")."""
    if taken_by is not None and not overwrite:
        raise UsageError(
            "already-committed",
            f"{name} is taken by {taken_by}",
            "save another step, or make the Checkpointer with overwrite=True",
        )


def directory_name(step: int, checkpoint_id: object) -> str:
    """Return the name of a checkpoint's directory below its root. Raises UsageError."""
    if checkpoint_id is None:
        return f"step_{step}"
    if not isinstance(checkpoint_id, str):
        raise UsageError(
            "usage",
            f"checkpoint_id is {checkpoint_id!r}, not a str",
            "give one path component below the root, or leave it out",
        )
    return check_name(checkpoint_id)


def find_root(root: object) -> Path:
    """Return the root as an absolute path without links. Raises UsageError if it is not a path on a
    file system.
    """
    text = _path_of(root)
    if not text:
        raise UsageError("usage", f"root is {root!r}, not a path", "name a directory")
    if not isinstance(text, str) or not _is_printable(text):
        raise UsageError(
            "usage", f"root is {root!r}, which has characters that are not text", "rename it"
        )
    if "://" in text:
        raise UsageError(
            "usage", f"root is the URL {text}", "mount it; object stores are not supported"
        )
    if text.startswith("~"):
        raise UsageError(
            "usage", f"root is {text}, and only a shell expands ~", "use os.path.expanduser()"
        )
    path = Path(os.path.realpath(text))
    try:
        is_other = path.exists() and not path.is_dir()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(
            "usage",
            f"root is {path}, which cannot be examined: {reason}",
            "give this user search permission (x) on all directories above it",
        ) from error
    if is_other:
        raise UsageError("usage", f"root is {path}, which is a file", "name a directory")
    return path


def find_run_dir(given: object) -> Path:
    """Return a run directory as an absolute path. Raises UsageError if it is not a path."""
    text = _path_of(given)
    if not text or not isinstance(text, str) or not _is_printable(text):
        raise UsageError(
            "usage", f"run_dir is {given!r}, not a path", "name the daemon's --run-dir"
        )
    return Path(text).absolute()


def _path_of(given: object) -> object:
    """Return the caller's path, as str or bytes; empty if it is not a path."""
    try:
        found: object = os.fspath(given)  # type: ignore[call-overload]
    except TypeError:
        return ""
    return found


def _is_printable(text: str) -> bool:
    """Whether a name can go into a log line and a message unchanged: it has no control characters
    and no lone surrogates.
    """
    return text.isprintable()


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not one of the choices. Raises UsageError, which names them."""
    if value not in choices:
        raise UsageError(
            "usage", f"{name} is {value!r}, not one of {', '.join(map(repr, choices))}"
        )


def job_name(given: object, root: Path) -> str:
    """Return the job's name: the given one, else the launcher's, else a hash of the root."""
    if given is not None:
        name = given if isinstance(given, str) and _is_printable(given) else ""
        if not name.strip() or len(name) > JOB_CHARACTERS_MAX:
            raise UsageError(
                "usage",
                f"job is {given!r}, not 1 to {JOB_CHARACTERS_MAX} printable characters",
            )
        return name
    for variable in JOB_VARIABLES:
        found = "".join(filter(str.isprintable, os.environ.get(variable, ""))).strip()
        # torchrun with a fixed port gives every run the id "none".
        if found and found != "none":
            return found[:JOB_CHARACTERS_MAX]
    return hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()
