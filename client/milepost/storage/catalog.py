"""What lies below a root: checkpoints, and directories that are not checkpoints. Only reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from milepost.errors import CorruptCheckpoint
from milepost.format.heading import Heading, order_of, read_heading
from milepost.format.manifest import METADATA_NAME, Manifest, read_manifest
from milepost.storage.names import RootPaths, step_in
from milepost.storage.refusals import reported
from milepost.wire.messages import SaveRef


@dataclass(frozen=True)
class CheckpointEntry:
    """One committed checkpoint below a root."""

    name: str
    path: Path
    step: int
    """From the manifest, else from a name like `step_12`, else -1."""
    save_id: str
    """Empty if milepost did not write it."""
    order: tuple[int, int, int]
    """(attempt, step, count of the save): the greatest is the newest. A step that was rolled back
    is older than a lower step of the attempt that followed.
    """

    @cached_property
    def manifest(self) -> Manifest | None:
        """The whole manifest, read at first use; None for a checkpoint of stock torch.

        Raises CorruptCheckpoint, OSError.
        """
        return read_manifest(self.path)


def checkpoints(root: RootPaths) -> list[CheckpointEntry]:
    """See `Root.checkpoints`."""
    found: list[CheckpointEntry] = []
    with reported("list", root.top):
        for entry in os.scandir(root.top):
            path = Path(entry.path)
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            try:
                heading = read_heading(path)
            except CorruptCheckpoint:
                heading = Heading()
            if not is_checkpoint(path):
                continue  # Asked last: it may be deleted at this moment.
            step = heading.step if heading.step >= 0 else step_in(entry.name)
            order = order_of(heading.save_id, step)
            found.append(CheckpointEntry(entry.name, path, step, heading.save_id, order))
    return sorted(found, key=lambda each: (each.order, each.name), reverse=True)


def partials(root: RootPaths) -> list[Path]:
    """See `Root.partials`."""
    with reported("list", root.partial):
        try:
            entries = list(os.scandir(root.partial))
        except FileNotFoundError:
            return []
        return sorted(Path(each.path) for each in entries if each.is_dir(follow_symlinks=False))


def is_checkpoint(path: Path) -> bool:
    """Whether a directory has torch's index."""
    return (path / METADATA_NAME).exists()


def save_id_in(path: Path) -> str:
    """Return the id of the save that wrote a checkpoint; empty if milepost did not write it, or its
    manifest is damaged.

    Raises OSError.
    """
    try:
        return read_heading(path).save_id
    except (CorruptCheckpoint, NotADirectoryError):
        return ""


def is_published(root: RootPaths, save: SaveRef) -> bool:
    """Whether this save wrote the checkpoint of its name. Raises OSError."""
    return save_id_in(root.top / save.name) == save.save_id
