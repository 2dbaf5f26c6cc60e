"""Checkpoints that lose their name: put aside while another save replaces them, given their name
back, or deleted.

A replacement is two renames: the old checkpoint moves below `.partial`, then the new one gets the
name. A file, the *intent*, is made durable before the first rename and removed after the second. If
a daemon finds an intent whose name is free, it finishes the replacement or undoes it (`settle`).

Files that people put into a checkpoint's directory outlive the checkpoint: before a directory that
has lost its name is deleted, they move to the directory that has the name now (`contents`).
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

import msgpack
import msgspec

from milepost.errors import Rejected
from milepost.format.heading import order_of
from milepost.format.manifest import METADATA_NAME
from milepost.storage.catalog import is_checkpoint, save_id_in
from milepost.storage.contents import carry_over, copy_mode, foreign_in, holds_own, is_own
from milepost.storage.durable import delete_tree, replace_file, sync_directory, unlink
from milepost.storage.names import REPLACED, RootPaths, name_of_aside, name_of_pruned
from milepost.storage.refusals import reported
from milepost.wire.messages import SaveRef


class Replacement(msgspec.Struct, frozen=True):
    """An intent: which save replaces the checkpoint of a name, and where the old one is put."""

    name: str
    save_id: str
    aside: str
    """Name of its directory below `.partial`."""


def read_intent(intent: Path) -> Replacement | None:
    """Return the replacement that is under way; None if there is no such file. Raises OSError."""
    try:
        data = intent.read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.convert(msgpack.unpackb(data), Replacement)


# --- taking a name, and giving it back ------------------------------------------------------------


def put_aside(root: RootPaths, save: SaveRef) -> str | None:
    """Free the save's final name. Return the old directory's new name below `.partial`, or None.

    Raises:
        Rejected: "already-committed": the checkpoint there is newer than this save, or the
            directory has parts of a checkpoint but is not one.
        NotADirectoryError: it is a file or a link.
        OSError: the system refused.
    """
    final = root.top / save.name
    if not os.path.lexists(final):
        return None
    if final.is_symlink() or not final.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    old_id = save_id_in(final)
    if old_id == save.save_id:
        return None  # Another process has published this save: the rename will find no source.
    if order_of(old_id, 0) > order_of(save.save_id, 0):
        # This save was held up while another attempt went back and saved the same name again.
        raise Rejected(
            "already-committed",
            f"save {save.save_id}: {final} already holds save {old_id}, which is newer",
            "nothing to do: training went back and saved this step again",
        )
    if not is_checkpoint(final) and holds_own(final):
        # Perhaps somebody is copying a checkpoint into it.
        raise Rejected(
            "already-committed",
            f"save {save.save_id}: {final} holds parts of a checkpoint but no {METADATA_NAME}",
            "move it away, or save under another step or name",
        )
    aside = root.aside(save.name, old_id, REPLACED)
    remove(root, aside)
    # Durable before the rename, so that a crash right after the rename can be mended.
    replacement = Replacement(save.name, save.save_id, aside.name)
    packed: bytes = msgpack.packb(msgspec.to_builtins(replacement))
    intent = root.intent(save.name)
    with reported("write", intent, len(packed)):
        replace_file(intent, packed)
    try:
        os.rename(final, aside)
    except FileNotFoundError:
        return None  # Retention was quicker.
    return aside.name


def restore(root: RootPaths, name: str, aside: str) -> None:
    """Give a checkpoint that was put aside its name back, unless the name is taken."""
    final = root.top / name
    if os.path.lexists(final):
        return
    try:
        os.rename(root.partial / aside, final)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
            raise
        # Another node has done it meanwhile.
    sync_directory(root.top)
    sync_directory(root.partial)


def is_spent(root: RootPaths, aside: str) -> bool:
    """Whether a directory that was put aside will not get its name back: a checkpoint has the name,
    or the directory is not a checkpoint.
    """
    final = root.top / name_of_aside(aside)
    return is_checkpoint(final) or (final.is_dir() and not is_checkpoint(root.partial / aside))


def restore_or_remove(root: RootPaths, aside: str) -> None:
    """Give a checkpoint that was put aside its name back; delete it if another one has the name."""
    restore(root, name_of_aside(aside), aside)
    if is_spent(root, aside):
        remove(root, root.partial / aside)


def undo_replacement(root: RootPaths, save: SaveRef) -> None:
    """Restore the checkpoint that was put aside for a save that will not replace it."""
    replacement = read_intent(root.intent(save.name))
    if replacement is not None and replacement.save_id == save.save_id:
        restore(root, save.name, replacement.aside)
        unlink(root.intent(save.name))


def settle(root: RootPaths, replacement: Replacement) -> None:
    """Finish or undo a replacement that was interrupted between its renames; forget one that is
    over.
    """
    final = root.top / replacement.name
    source = root.partial / f"{replacement.name}.{replacement.save_id}"
    if not os.path.lexists(final):
        try:
            os.stat(source / METADATA_NAME)
            os.rename(source, final)
            sync_directory(root.top)
            sync_directory(root.partial)
        except FileNotFoundError:
            restore(root, replacement.name, replacement.aside)
    if not source.exists():
        unlink(root.intent(replacement.name))


# --- deleting -------------------------------------------------------------------------------------


def remove(root: RootPaths, path: Path) -> bool:
    """Delete a directory below the root; return whether it was there.

    Renames it first, so that nobody takes a half-deleted checkpoint for a whole one.
    """
    pruned = root.pruned(path.name)
    try:
        os.rename(path, pruned)
    except FileNotFoundError:
        return False
    sync_directory(path.parent)
    sync_directory(root.partial)
    delete_pruned(root, pruned)
    return True


def delete_pruned(root: RootPaths, pruned: Path) -> None:
    """Delete a directory that `remove` has renamed. Foreign entries move to the directory that has
    the checkpoint's name now.

    If an entry cannot be moved now, it stays in the directory until the next call.
    """
    name = name_of_pruned(pruned.name)
    if name is None or not foreign_in(pruned):
        delete_tree(pruned)
        return
    final = root.top / name
    if not os.path.lexists(final) and not _is_replacing(root, name):
        _make_like(final, pruned)
    if final.is_dir() and not final.is_symlink():
        carry_over(pruned, final)
    if not foreign_in(pruned):
        delete_tree(pruned)
        return
    for entry in filter(is_own, os.listdir(pruned)):
        with suppress(OSError):
            unlink(pruned / entry)


def _is_replacing(root: RootPaths, name: str) -> bool:
    """Whether a replacement is between its two renames, so that the name has to stay free."""
    replacement = read_intent(root.intent(name))
    return replacement is not None and all(
        (root.partial / each).exists()
        for each in (replacement.aside, f"{name}.{replacement.save_id}")
    )


def _make_like(path: Path, other: Path) -> None:
    """Make a directory with the mode of another one, unless it exists already."""
    with suppress(FileExistsError):
        path.mkdir(0o700)
        copy_mode(other, path)
        sync_directory(path.parent)
