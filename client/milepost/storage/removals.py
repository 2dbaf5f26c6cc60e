"""Removals from a root: old checkpoints, what ended saves left, and abandoned saves."""

from __future__ import annotations

import errno
import os
from typing import Final

from milepost.format.heading import order_of
from milepost.storage.aside import delete_pruned, is_spent, remove, restore, restore_or_remove
from milepost.storage.catalog import partials, save_id_in
from milepost.storage.durable import delete_tree, sync_directory
from milepost.storage.fate import Fate
from milepost.storage.names import (
    REPLACED,
    RETIRED,
    RootPaths,
    check_name,
    is_pruned,
    name_of_aside,
    unfinished_save,
)
from milepost.storage.outcomes import give_up
from milepost.storage.refusals import reported
from milepost.wire.messages import SaveRef

ABANDONED_S: Final = 3600.0
"""Age from which an unfinished save of an earlier attempt counts as abandoned. A daemon that works
on it touches it about every second, and its deadline passed long before this age."""


def remove_checkpoint(root: RootPaths, name: str, save_id: str | None) -> bool:
    """See `Root.remove_checkpoint`."""
    path = root.top / check_name(name)
    with reported("remove", path):
        expected = save_id_in(path) if save_id is None else save_id
        # Put it aside first: then its name cannot pass to another save while we look whose it is.
        # After a crash here, `finish_removals` puts it back.
        aside = root.aside(name, expected, RETIRED)
        try:
            os.rename(path, aside)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False  # It is gone, or another process is removing it.
        if save_id_in(aside) != expected:
            restore(root, name, aside.name)
            return False
        sync_directory(root.top)
        return remove(root, aside)


def finish_removals(root: RootPaths) -> None:
    """See `Root.finish_removals`."""
    with reported("clear", root.partial):
        for name in os.listdir(root.partial):
            if is_pruned(name):
                delete_pruned(root, root.partial / name)
            elif name.endswith(RETIRED):
                restore_or_remove(root, name)


def discard(root: RootPaths, save: SaveRef) -> None:
    """See `Root.discard`."""
    aborted = root.aborted_dir(save)
    with reported("discard", root.partial):
        delete_tree(aborted)
        for name in os.listdir(root.partial):
            was_replaced = name.endswith(REPLACED) and name_of_aside(name) == save.name
            if was_replaced and is_spent(root, name):
                remove(root, root.partial / name)
            elif is_pruned(name):
                delete_pruned(root, root.partial / name)


def clear_abandoned(root: RootPaths, save: SaveRef) -> list[str]:
    """See `Root.clear_abandoned`."""
    attempt, cleared = order_of(save.save_id, 0)[0], []
    with reported("clear", root.partial):
        # The publication has touched the directory: this is the file system's own clock.
        now_s = root.partial.stat().st_mtime
        for path in partials(root):
            found = unfinished_save(path.name)
            if found is None or order_of(found.save_id, 0)[0] >= attempt:
                continue
            touched_s = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)]
            if now_s - max([path.stat().st_mtime, *touched_s]) < ABANDONED_S:
                continue
            left = SaveRef(save.job, found.save_id, 0, found.name)
            if give_up(root, left) is Fate.ABORTED:
                discard(root, left)
                cleared.append(path.name)
    return cleared
