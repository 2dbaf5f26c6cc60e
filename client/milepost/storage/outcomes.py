"""How a save ends: it is published, or it is given up, each by one rename of the same directory.

Publishing renames `.partial/X` to its final name, giving up renames it to `.partial/X.aborted`.
Both take the same source, so exactly one of them can win. A process that does not find the source
looks where it went.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from milepost.errors import Rejected, SaveFailed
from milepost.format.manifest import FRAGMENT_PREFIX, METADATA_NAME, read_manifest
from milepost.storage.aside import put_aside, read_intent, remove, restore, undo_replacement
from milepost.storage.catalog import is_published
from milepost.storage.contents import carry_over, copy_mode
from milepost.storage.durable import TEMP_PREFIX, sync_directory, unlink
from milepost.storage.fate import Fate
from milepost.storage.modes import make_directory
from milepost.storage.names import RootPaths
from milepost.storage.refusals import reported
from milepost.wire.messages import SaveRef

_LATER_FILE: Final = re.compile(r"__\d+_[1-9]\d*\.distcp")
"""A data file of a rank that has written its image more than once."""


def open_save(root: RootPaths, save: SaveRef, umask: int) -> Path:
    """See `Root.open_save`."""
    path = root.save_dir(save)
    with reported("open", path):
        if root.run.exists():
            # Somebody may have removed only `.partial` while tidying up.
            make_directory(root.partial, umask)
        make_directory(path, umask)
        was_published = is_published(root, save)
        if was_published or root.aborted_dir(save).exists():
            with suppress(OSError):
                path.rmdir()
            if was_published:
                raise Rejected("already-committed", f"save {save.save_id} was published")
            raise given_up(save)
    return path


# --- publishing -----------------------------------------------------------------------------------


def publish(root: RootPaths, save: SaveRef) -> Path:
    """See `Root.publish`."""
    source, final = root.save_dir(save), root.top / save.name
    aside = None
    with reported("publish", final):
        try:
            os.stat(source / METADATA_NAME)
            remove_leftovers(source)
            copy_mode(final, source)
            sync_directory(source)
            if save.overwrite:
                aside = put_aside(root, save)
            os.rename(source, final)
        except FileNotFoundError:
            if aside is not None:
                restore(root, save.name, aside)
            return _confirm(root, save)
        except OSError as error:
            if aside is not None:
                with suppress(OSError):
                    restore(root, save.name, aside)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            is_other = error.errno == errno.ENOTDIR
            raise Rejected(
                "already-committed",
                f"save {save.save_id}: {final} exists already"
                + (", and is no directory" if is_other else ""),
                "save under another step or name, or "
                + ("move it away" if is_other else "set overwrite=True"),
            ) from error
        sync_directory(root.top)
        sync_directory(root.partial)
        if aside is not None:
            # If this fails, `discard` does it later.
            with suppress(OSError):
                carry_over(root.partial / aside, final)
        if save.overwrite:
            unlink(root.intent(save.name))
    return final


def remove_leftovers(directory: Path) -> None:
    """Remove everything from a save's directory that does not belong to a checkpoint: fragments,
    temporary files, and data files that were written again.
    """
    names = os.listdir(directory)
    unwanted = {name for name in names if name.startswith((FRAGMENT_PREFIX, TEMP_PREFIX))}
    if any(_LATER_FILE.fullmatch(name) for name in names):
        # The manifest names the valid one of a rank's files.
        manifest = read_manifest(directory)
        if manifest is not None:
            data_files = {name for name in names if name.endswith(".distcp")}
            unwanted |= data_files - set(manifest.files)
    for name in unwanted:
        unlink(directory / name)


def _confirm(root: RootPaths, save: SaveRef) -> Path:
    """Return the checkpoint of a save whose rename found nothing; raise if there is none.

    Raises as `publish` does.
    """
    source = root.save_dir(save)
    if source.exists():
        raise SaveFailed("internal", f"save {save.save_id}: {source} has no {METADATA_NAME}")
    fate = _fate(root, save)
    if fate is Fate.COMMITTED:
        return root.top / save.name
    if fate is Fate.ABORTED:
        raise given_up(save)
    raise SaveFailed(
        "outcome-unknown",
        f"save {save.save_id}: {source} is gone, and neither published nor given up",
        "look again: a network file system may show old names for a while",
    )


def given_up(save: SaveRef) -> SaveFailed:
    """Return the error for a caller that comes too late: the save was given up."""
    return SaveFailed("aborted", f"save {save.save_id} of {save.name} was given up")


# --- giving up ------------------------------------------------------------------------------------


def give_up(root: RootPaths, save: SaveRef) -> Fate:
    """See `Root.give_up`."""
    source, aborted = root.save_dir(save), root.aborted_dir(save)
    with reported("give up", source):
        try:
            os.rename(source, aborted)
        except FileNotFoundError:
            return _fate(root, save)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # It was given up before, and a late node has made the directory again.
            remove(root, source)
        if is_published(root, save):
            # A late node had made the directory again after the publication.
            remove(root, aborted)
        return _fate(root, save)


def forestall(root: RootPaths, save: SaveRef) -> Fate:
    """See `Root.forestall`."""
    found = give_up(root, save)
    if found is not Fate.UNKNOWN:
        return found
    aborted = root.aborted_dir(save)
    with reported("give up", aborted):
        try:
            aborted.mkdir(exist_ok=True)
        except FileNotFoundError:
            return Fate.ABORTED  # The root itself is gone, and with it every way to publish.
    # A node may have made the save's directory before it could see ours: rename once more.
    return give_up(root, save)


def _fate(root: RootPaths, save: SaveRef) -> Fate:
    """Return what became of a save whose directory is gone; durable when this returns."""
    if is_published(root, save):
        sync_directory(root.top)
        sync_directory(root.partial)
        return Fate.COMMITTED
    if root.aborted_dir(save).exists():
        sync_directory(root.partial)
        undo_replacement(root, save)
        return Fate.ABORTED
    return Fate.UNKNOWN


def is_unpublished(root: RootPaths, save: SaveRef, *, was_begun: bool) -> bool:
    """See `Root.is_unpublished`."""
    with reported("look for", root.save_dir(save)):
        replacement = read_intent(root.intent(save.name))
        return (
            (root.save_dir(save).is_dir() or not was_begun)
            and not is_published(root, save)
            and (replacement is None or replacement.save_id != save.save_id)
        )
