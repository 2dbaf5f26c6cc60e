"""`milepost list`: what lies under a root. Reads directories and the beginnings of manifests, and
never imports torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from milepost.errors import UsageError
from milepost.format.manifest import METADATA_NAME
from milepost.storage.root import Root

if TYPE_CHECKING:
    from pathlib import Path


class ListedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint."""

    name: str
    step: int
    """-1 if neither the manifest nor the name says it."""
    path: str
    bytes: int
    files: int
    save_id: str
    """Empty if milepost did not write it."""
    is_latest: bool
    """`latest` points here."""
    modified_at_ms: int
    """When `.metadata`, the last file, was written, by the file system's clock: moments before the
    commit. 0 if that cannot be read."""


class ListedPartial(msgspec.Struct, frozen=True, kw_only=True):
    """A directory that is not a checkpoint."""

    name: str
    path: str
    bytes: int
    state: str
    """`incomplete` (in flight, or left by a crash), `aborted`, `replaced` or `pruned`."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """Everything under a root, checkpoints newest first."""

    root: str
    checkpoints: tuple[ListedCheckpoint, ...]
    partials: tuple[ListedPartial, ...]


def require_directory(path: Path) -> Path:
    """Return the path if it is a directory. Raises UsageError."""
    if not path.is_dir():
        kind = "not a directory" if path.exists() else "no such directory"
        raise UsageError("usage", f"{path}: {kind}")
    return path


def require_root(path: Path) -> Path:
    """Return the path if it can be a root. Raises UsageError, also for a checkpoint."""
    if (require_directory(path) / METADATA_NAME).exists():
        raise UsageError(
            "usage", f"{path} is a checkpoint, not a root", f"did you mean {path.parent}?"
        )
    return path


def list_root(path: Path) -> Listing:
    """Return what lies under a root. Raises UsageError if it is not a root, StorageError."""
    root = Root(require_root(path))
    latest = root.latest()
    checkpoints = []
    for entry in root.checkpoints():
        files, size = _measure(entry.path)
        checkpoints.append(
            ListedCheckpoint(
                name=entry.name,
                step=entry.step,
                path=str(entry.path),
                bytes=size,
                files=files,
                save_id=entry.save_id,
                is_latest=entry.name == latest,
                modified_at_ms=_modified_at_ms(entry.path),
            )
        )
    partials = [
        ListedPartial(
            name=partial.name,
            path=str(partial),
            bytes=_measure(partial)[1],
            state=_state(partial.name),
        )
        for partial in root.partials()
    ]
    return Listing(root=str(root.path), checkpoints=tuple(checkpoints), partials=tuple(partials))


def _state(name: str) -> str:
    last = name.rpartition(".")[2]
    if last in ("aborted", "replaced"):
        return last
    return "pruned" if last.startswith("pruned-") else "incomplete"


def _modified_at_ms(directory: Path) -> int:
    try:
        return (directory / METADATA_NAME).stat().st_mtime_ns // 1_000_000
    except OSError:
        return 0


def _measure(directory: Path) -> tuple[int, int]:
    """Return the number of files and their bytes; files that vanish meanwhile do not count."""
    files = size = 0
    try:
        for entry in os.scandir(directory):
            if entry.is_file(follow_symlinks=False):
                size += entry.stat(follow_symlinks=False).st_size
                files += 1
    except FileNotFoundError:
        pass
    return files, size
