"""The names below a root: what a checkpoint may be called, and where each kind of directory lies.

    <root>/<name>                               a checkpoint
    <root>/latest                               a link to one of them
    <root>/.partial/<name>.<save_id>            a save under way
    <root>/.partial/<name>.<save_id>.aborted    a save that was given up
    <root>/.partial/<name>.<save_id>.replaced   a checkpoint that another save replaces
    <root>/.partial/<name>.<save_id>.retired    a checkpoint that is about to be deleted
    <root>/.partial/<anything>.pruned-<hex>     what is being deleted
    <root>/.milepost-run/                       locks, attempts, claims
    <root>/.milepost-run/replace-<name>         the intent to replace a checkpoint

Pure: touches no file.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Final, NamedTuple

from milepost.errors import UsageError
from milepost.wire.messages import SaveRef

PARTIAL_NAME: Final = ".partial"
RUN_NAME: Final = ".milepost-run"
LATEST_NAME: Final = "latest"
FOREIGN_LATEST_HINT: Final = "move it away, and the next checkpoint makes the link"
"""Hint if something that is not a link has the name `latest`."""

NAME_BYTES_MAX: Final = 200
"""Longest checkpoint name: with save id and suffix it must stay below the 255 bytes of a path
component.
"""

ABORTED: Final = ".aborted"
REPLACED: Final = ".replaced"
RETIRED: Final = ".retired"
_PRUNED_MARK: Final = ".pruned-"

_UNKNOWN_ID: Final = "0-0"
"""Stands for the save id of a checkpoint that milepost did not write."""

_STEP_NAME: Final = re.compile(r"step_(\d+)")
_SAVE_ID: Final = re.compile(r"\d[A-Za-z0-9_-]*")
_UNFINISHED: Final = re.compile(r"(?P<name>.+)\.(?P<save_id>\d+-\d+)(\.aborted)?")
_PRUNED: Final = re.compile(r".*\.pruned-[0-9a-f]{8}", re.DOTALL)


def check_name(name: str) -> str:
    """Return the name if a checkpoint may have it: one visible path component that is not ours.

    Raises UsageError, which says which rule the name breaks, and why there is one.
    """
    problem = _problem_of(name)
    if problem is not None:
        shown = f"{name[:40]!r}..." if len(name) > 80 else repr(name)
        reason, hint = problem
        raise UsageError("usage", f"{shown} cannot name a checkpoint: {reason}", hint)
    return name


def _problem_of(name: str) -> tuple[str, str] | None:
    """Return why a name is refused, and what to do; None if it will do."""
    if not name:
        return "it is empty", "give a name, or leave it out for step_<step>"
    if "/" in name:
        return (
            "it is a path, and a checkpoint lies directly below its root",
            "give one path component, or make a Checkpointer for another root",
        )
    if name.startswith("."):
        return (
            "it begins with a dot, as what milepost keeps below a root does; such directories are"
            " neither listed nor loaded",
            "give a name without the dot",
        )
    if name == LATEST_NAME:
        return (
            f"{LATEST_NAME!r} is the link to the newest checkpoint",
            f"give another name; {LATEST_NAME!r} names this checkpoint once it is committed",
        )
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        length = 0
    if length == 0 or not name.isprintable():
        return (
            "it has a character that cannot be printed, and could not be typed at a command",
            "leave control characters out",
        )
    if length > NAME_BYTES_MAX:
        return (
            f"it is {length} bytes long, and a file's name may have 255, of which milepost needs"
            " some for the save's id",
            f"give a name of at most {NAME_BYTES_MAX} bytes",
        )
    return None


def check_save_id(save_id: str) -> str:
    """Return the save id if it may be part of a file's name. Raises UsageError."""
    if not _SAVE_ID.fullmatch(save_id):
        raise UsageError("usage", f"{save_id!r} is not a save id")
    return save_id


def step_in(name: str) -> int:
    """Return the step in a name like `step_12`; -1 for any other name."""
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match else -1


class RootPaths:
    """Where everything lies below one root.

    Attributes:
        top: the root itself, absolute.
        partial: the directory of everything that is not a checkpoint.
        run: the directory of locks, attempts and claims.
        latest: the link to the newest checkpoint.
    """

    def __init__(self, top: Path) -> None:
        self.top: Final = top
        self.partial: Final = top / PARTIAL_NAME
        self.run: Final = top / RUN_NAME
        self.latest: Final = top / LATEST_NAME

    def save_dir(self, save: SaveRef) -> Path:
        """Return where a save's files lie until it is published or given up.

        Raises UsageError if its name or its save id is not valid.
        """
        save_id = check_save_id(save.save_id)
        return self.partial / f"{check_name(save.name)}.{save_id}"

    def aborted_dir(self, save: SaveRef) -> Path:
        """Return where a save's files lie once it was given up. Raises UsageError."""
        path = self.save_dir(save)
        return path.with_name(path.name + ABORTED)

    def aside(self, name: str, save_id: str, suffix: str) -> Path:
        """Return the place of a checkpoint that has lost its name; `suffix` says why it has."""
        known = save_id if _SAVE_ID.fullmatch(save_id) else _UNKNOWN_ID
        return self.partial / f"{name}.{known}{suffix}"

    def pruned(self, name: str) -> Path:
        """Return a new place for a directory that will be deleted."""
        return self.partial / f"{name}{_PRUNED_MARK}{secrets.token_hex(4)}"

    def intent(self, name: str) -> Path:
        """Return the file that says which save is replacing the checkpoint of this name."""
        return self.run / f"replace-{name}"


def name_of_aside(directory: str) -> str:
    """Return the checkpoint's name from the name that `RootPaths.aside` gave its directory."""
    return directory.rsplit(".", 2)[0]


def name_of_pruned(directory: str) -> str | None:
    """Return the name of the checkpoint that is being deleted; None for a save that never became a
    checkpoint.
    """
    lost = directory.rpartition(_PRUNED_MARK)[0]
    return name_of_aside(lost) if lost.endswith((REPLACED, RETIRED)) else None


def is_pruned(directory: str) -> bool:
    """Whether a directory below `.partial` is being deleted."""
    return _PRUNED.fullmatch(directory) is not None


class UnfinishedSave(NamedTuple):
    """A save that has not become a checkpoint, according to the name of its directory."""

    name: str
    save_id: str


def unfinished_save(directory: str) -> UnfinishedSave | None:
    """Read the name of a directory below `.partial`; None if no save made it."""
    found = _UNFINISHED.fullmatch(directory)
    return None if found is None else UnfinishedSave(found["name"], found["save_id"])
