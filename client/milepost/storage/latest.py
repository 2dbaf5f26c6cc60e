"""The link `latest`: which checkpoint it names, and when it moves."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress

from milepost.errors import CorruptCheckpoint
from milepost.format.heading import order_of, read_heading
from milepost.storage.catalog import checkpoints, is_checkpoint, is_published
from milepost.storage.durable import sync_directory, unlink
from milepost.storage.names import LATEST_NAME, RootPaths, check_name
from milepost.storage.refusals import reported
from milepost.wire.messages import SaveRef


def latest(root: RootPaths) -> str | None:
    """See `Root.latest`."""
    return latest_target(root) or next((each.name for each in checkpoints(root)), None)


def latest_target(root: RootPaths) -> str | None:
    """See `Root.latest_target`."""
    with reported("read", root.latest):
        try:
            name = os.readlink(root.latest)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EINVAL):
                raise
            return None
        return name if "/" not in name and is_checkpoint(root.top / name) else None


def is_foreign(root: RootPaths) -> bool:
    """See `Root.is_latest_foreign`."""
    return os.path.lexists(root.latest) and not root.latest.is_symlink()


def move_latest(root: RootPaths, name: str) -> None:
    """See `Root.move_latest`."""
    if is_foreign(root):
        return
    temp = root.partial / f"{LATEST_NAME}.{secrets.token_hex(8)}"
    with reported("move", root.latest):
        os.symlink(check_name(name), temp)
        try:
            os.rename(temp, root.latest)
        except OSError:
            unlink(temp)
            raise
        sync_directory(root.top)


def advance_latest(root: RootPaths, save: SaveRef) -> bool:
    """See `Root.advance_latest`."""
    if is_foreign(root):
        return False
    if not is_published(root, save):
        return False  # Retention was quicker.
    target, order = save.name, order_of(save.save_id, save.step)
    seen = _folders(root)
    name = latest_target(root)
    if name is not None and name != save.name:
        with reported("read", root.top / name):
            there = read_heading(root.top / name)
        if order_of(there.save_id, there.step) > order:
            return False
    while True:
        move_latest(root, target)
        newer: list[tuple[tuple[int, int, int], str]] = []
        found = _folders(root)
        for name, _ in found - seen:
            with suppress(CorruptCheckpoint, OSError):
                there = read_heading(root.top / name)
                newer.append((order_of(there.save_id, there.step), name))
        if max(newer, default=(order, target))[0] <= order:
            return target == save.name
        # A newer save was published while this call was held up. `latest` may have named it
        # already, and this call may have moved it back.
        (order, target), seen = max(newer), found


def _folders(root: RootPaths) -> set[tuple[str, int]]:
    """Return names and inodes of possible checkpoints. A replaced checkpoint has another inode."""
    with reported("list", root.top):
        return {
            (entry.name, entry.inode())
            for entry in os.scandir(root.top)
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        }
