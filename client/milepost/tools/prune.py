"""`milepost prune`: retention by hand. Removes only what milepost wrote, and never the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from milepost.storage.claims import removable
from milepost.storage.root import Root
from milepost.tools.listing import require_root
from milepost.wire.messages import Keep

if TYPE_CHECKING:
    from pathlib import Path


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """Names of checkpoints; `kept` and `foreign` are newest first, `removed` oldest first."""

    root: str
    kept: tuple[str, ...]
    removed: tuple[str, ...]
    """The checkpoints that were removed, or, with `dry_run`, would be removed."""
    foreign: tuple[str, ...]
    """The checkpoints that milepost did not write: neither counted nor touched."""
    left: tuple[str, ...] = ()
    """What people have put into the directories of `removed`, as `<name>/<entry>`: it stays there.
    """
    dry_run: bool


def prune(path: Path, keep_last: int, *, dry_run: bool = False) -> Pruning:
    """Keep the newest `keep_last` of our checkpoints, at least one, and what `latest` points at.

    Each removal begins with a rename, so that a reader finds a whole checkpoint or none.

    Raises:
        UsageError: the root is not a directory.
        StorageError: a checkpoint could not be removed; newer ones are then left alone.
    """
    root = Root(require_root(path))
    entries = root.checkpoints()
    removed = removable(root, entries, Keep(last=max(keep_last, 1)))
    left = [f"{name}/{entry}" for name in removed for entry in root.foreign_in(name)]
    if not dry_run:
        save_ids = {entry.name: entry.save_id for entry in entries}
        for name in removed:
            root.remove_checkpoint(name, save_ids[name])
    return Pruning(
        root=str(root.path),
        kept=tuple(entry.name for entry in entries if entry.save_id and entry.name not in removed),
        removed=tuple(removed),
        foreign=tuple(entry.name for entry in entries if not entry.save_id),
        left=tuple(left),
        dry_run=dry_run,
    )
