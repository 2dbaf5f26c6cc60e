"""`Place`: a directory that is one checkpoint, published where it stands.

`milepost.dcp.save` takes any path. The parent need not be writable, the directory may hold the
user's own files, and its checkpoint stays loadable until the next one is complete. So no directory
is renamed to a final name; instead the files move up one by one:

    <place>/.milepost-save.<job>.<save_id>              a save under way
    <place>/.milepost-save.<job>.<save_id>.aborted      a save that was given up
    <place>/.milepost-save.<job>.<save_id>.publishing   a save that is moving up

As in a root, one rename of the same directory decides: to `.publishing` or to `.aborted`, and
exactly one of them can win. Any process that finds a `.publishing` directory finishes the work:
first it moves the data files up, under names that are free; then one rename replaces the old
`.metadata`, which is the commit; then it removes the data files of the replaced checkpoint. At
every instant all files that `.metadata` names exist.

The operations are those of `Root`, without `latest` and without retention. All calls block. No
torch.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from milepost.errors import CorruptCheckpoint, Rejected, SaveFailed
from milepost.format.heading import read_heading
from milepost.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    read_manifest,
)
from milepost.storage.blocks import BLOCK_BYTES, write_image
from milepost.storage.durable import (
    delete_tree,
    make_directories,
    replace_file,
    sync_directory,
)
from milepost.storage.fate import Fate
from milepost.storage.modes import UNKNOWN, make_directory
from milepost.storage.names import ABORTED, check_save_id
from milepost.storage.outcomes import given_up, remove_leftovers
from milepost.storage.paths import absolute
from milepost.storage.refusals import reported
from milepost.storage.removals import ABANDONED_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from milepost.wire.messages import SaveRef

SAVE_PREFIX: Final = ".milepost-save."
PUBLISHING: Final = ".publishing"

_OLD_PREFIX: Final = ".old-"
"""Files of the replaced checkpoint, below the directory of the save that replaces it."""

_OLD_LIST: Final = ".replaces"
"""Lists the data files of the checkpoint that is being replaced, one a line."""

_DATA_FILE: Final = re.compile(r"__\d+_\d+\.distcp")
_NOT_THERE: Final = (FileNotFoundError, NotADirectoryError)


class Place:
    """A directory for one checkpoint on a file system that all nodes share.

    Args:
        path: made absolute; see `paths.absolute`.
        umask: gives the modes of what a save makes here; `modes.UNKNOWN`: this process's own.
    """

    def __init__(self, path: str | os.PathLike[str], umask: int = UNKNOWN) -> None:
        self.path: Final = Path(absolute(path))
        self._umask: Final = umask

    # --- before a save ----------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the directory, durably, and finish a publication that a crash has interrupted.

        Also deletes what crashed saves left, if nobody has touched it for `ABANDONED_S`.
        """
        with reported("prepare", self.path):
            make_directories(self.path)
            for directory in self._directories():
                if directory.name.endswith(PUBLISHING):
                    self._move_up(directory)
                elif _age_s(self.path, directory) > ABANDONED_S:
                    delete_tree(directory)

    def is_checkpoint(self) -> bool:
        """Whether a checkpoint stands here: torch's index does. Raises StorageError."""
        with reported("look at", self.path):
            try:
                os.stat(self.path / METADATA_NAME)
            except _NOT_THERE:
                return False
            return True

    def check_shared(self, job: str) -> None:
        """Do nothing: a place has no identity. The coordinator looks for every node's files
        instead.
        """

    # --- writing one save -------------------------------------------------------------------------

    def save_dir(self, save: SaveRef) -> Path:
        """Return where the save's files lie until it is published. Raises UsageError if its save id
        is not valid.
        """
        job = hashlib.blake2s(save.job.encode(), digest_size=6).hexdigest()
        return self.path / f"{SAVE_PREFIX}{job}.{check_save_id(save.save_id)}"

    def checkpoint_dir(self, save: SaveRef) -> Path:
        """Return where the checkpoint of a save stands once it is published."""
        return self.path

    def open_save(self, save: SaveRef) -> Path:
        """Return the save's directory; make it if it is not there. Raises as `Root.open_save`."""
        path = self.save_dir(save)
        with reported("open", path):
            if not self.path.is_dir():
                make_directories(self.path, self._umask)
            make_directory(path, self._umask)
            was_published = self._publishing(save).exists() or self._is_published(save)
            if was_published or self._aborted(save).exists():
                with suppress(OSError):
                    path.rmdir()
                if was_published:
                    raise Rejected("already-committed", f"save {save.save_id} was published")
                raise given_up(save)
        return path

    def is_taken(self, name: str) -> bool:
        """Whether a data file of this name is here, or may soon be. Then a new save's file needs
        another name. Raises StorageError.
        """
        with reported("look at", self.path):
            return os.path.lexists(self.path / name) or any(
                os.path.lexists(directory / name) for directory in self._directories()
            )

    def write_file(self, path: Path, data: bytes) -> None:
        """Make `path` hold `data`, durably, or leave it as it was. Its directory must exist."""
        with reported("write", path, len(data)):
            replace_file(path, data, self._umask)

    def write_image(
        self,
        path: Path,
        image: memoryview,
        *,
        on_block: Callable[[int], None] | None = None,
        before_block: Callable[[int, int], None] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """See `Root.write_image`."""
        with reported("write", path, image.nbytes):
            write_image(path, image, on_block, before_block, block_bytes, self._umask)

    # --- ending one save --------------------------------------------------------------------------

    def publish(self, save: SaveRef) -> Path:
        """Turn the save into the checkpoint that stands here, durably, and return the directory.

        Safe to repeat. Files that do not belong to a checkpoint stay as they are.

        Raises:
            Rejected: "already-committed": a checkpoint stands here and `save.overwrite` is not set,
                or another save is just being published. The save is untouched.
            SaveFailed: as `Root.publish`.
        """
        source, publishing = self.save_dir(save), self._publishing(save)
        with reported("publish", self.path):
            try:
                os.stat(source / METADATA_NAME)
                remove_leftovers(source)
                self._refuse_others(save)
                replace_file(source / _OLD_LIST, "\n".join(self._data_files()).encode())
                sync_directory(source)
                os.rename(source, publishing)
            except FileNotFoundError:
                return self._confirm(save)
            sync_directory(self.path)
            self._move_up(publishing)
        return self.path

    def give_up(self, save: SaveRef) -> Fate:
        """End the save unless it was published, and return how it ended, as `Root.give_up` does."""
        source, aborted = self.save_dir(save), self._aborted(save)
        with reported("give up", source):
            try:
                os.rename(source, aborted)
            except _NOT_THERE:
                return self._fate(save)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # It was given up before, and a late node has made the directory again.
                delete_tree(source)
            if self._publishing(save).exists() or self._is_published(save):
                # A late node had made the directory again after the publication.
                delete_tree(aborted)
            return self._fate(save)

    def forestall(self, save: SaveRef) -> Fate:
        """Give the save up, even if no node has begun it; see `Root.forestall`."""
        found = self.give_up(save)
        if found is not Fate.UNKNOWN:
            return found
        with reported("give up", self.path):
            try:
                self._aborted(save).mkdir(exist_ok=True)
            except _NOT_THERE:
                return Fate.ABORTED  # The place is gone, and with it every way to publish.
        # A node may have made the save's directory before it could see ours: rename once more.
        return self.give_up(save)

    def is_unpublished(self, save: SaveRef, *, was_begun: bool) -> bool:
        """Whether only the caller can publish a save that could not be given up; see
        `Root.is_unpublished`.
        """
        with reported("look for", self.save_dir(save)):
            return (
                (self.save_dir(save).is_dir() or not was_begun)
                and not self._publishing(save).exists()
                and not self._is_published(save)
            )

    def discard(self, save: SaveRef) -> None:
        """Delete what the ended save left, if it was given up."""
        with reported("discard", self.path), suppress(*_NOT_THERE):
            delete_tree(self._aborted(save))

    def clear_abandoned(self, save: SaveRef) -> list[str]:
        """Do nothing: `prepare` removes what crashed saves left."""
        return []

    # --- how it is done ---------------------------------------------------------------------------

    def _publishing(self, save: SaveRef) -> Path:
        path = self.save_dir(save)
        return path.with_name(path.name + PUBLISHING)

    def _aborted(self, save: SaveRef) -> Path:
        path = self.save_dir(save)
        return path.with_name(path.name + ABORTED)

    def _directories(self) -> Iterator[Path]:
        """Yield the directories of all saves, in whatever state they are."""
        try:
            entries = list(os.scandir(self.path))
        except _NOT_THERE:
            return
        for entry in entries:
            if entry.name.startswith(SAVE_PREFIX) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)

    def _data_files(self) -> list[str]:
        """Return the data files of the checkpoint that is here, whichever program wrote it."""
        if not self.is_checkpoint():
            return []
        return sorted(name for name in os.listdir(self.path) if _DATA_FILE.fullmatch(name))

    def _refuse_others(self, save: SaveRef) -> None:
        """Raise if the save must not be published now. Raises Rejected("already-committed")."""
        own = self._publishing(save)
        if not save.overwrite and not own.exists() and self.is_checkpoint():
            raise Rejected(
                "already-committed",
                f"save {save.save_id}: {self.path} holds a checkpoint already",
                "save under another path, or allow it to be overwritten",
            )
        others = [each for each in self._directories() if each.name.endswith(PUBLISHING)]
        if any(each != own for each in others):
            raise Rejected(
                "already-committed",
                f"save {save.save_id}: another save is just being published in {self.path}",
                "let one run save under a path",
            )

    def _move_up(self, publishing: Path) -> None:
        """Finish a publication. Safe to repeat, and while another process does the same: each step
        takes its file from the save's directory, and finds nothing if the file was taken already.
        """
        try:
            manifest = read_manifest(publishing)
        except NotADirectoryError:
            manifest = None
        if manifest is not None:
            for name in manifest.files:
                with suppress(*_NOT_THERE):
                    os.rename(publishing / name, self.path / name)
            sync_directory(self.path)
            self._retire_manifest(publishing, manifest)
            with suppress(*_NOT_THERE):
                os.rename(publishing / METADATA_NAME, self.path / METADATA_NAME)
            sync_directory(self.path)
            with suppress(*_NOT_THERE):
                os.rename(publishing / MANIFEST_NAME, self.path / MANIFEST_NAME)
            sync_directory(self.path)
        for name in _old_list(publishing):
            # Into the directory that is deleted next, not unlinked: if another process has ended
            # this publication, a newer save may have a file of that name by now.
            with suppress(*_NOT_THERE):
                os.rename(self.path / name, publishing / f"{_OLD_PREFIX}{name}")
        delete_tree(publishing)
        sync_directory(self.path)

    def _retire_manifest(self, publishing: Path, new: Manifest) -> None:
        """Remove the old manifest, which would not fit the new index. A checkpoint without one is
        as complete as one of stock torch.
        """
        if _writer_of(self.path) == (new.job, new.save_id):
            return  # Another process has come this far.
        with suppress(*_NOT_THERE):
            os.rename(self.path / MANIFEST_NAME, publishing / f"{_OLD_PREFIX}{MANIFEST_NAME}")
        sync_directory(self.path)

    def _is_published(self, save: SaveRef) -> bool:
        """Whether the checkpoint that stands here is this save's. Raises OSError."""
        return _writer_of(self.path) == (save.job, save.save_id)

    def _fate(self, save: SaveRef) -> Fate:
        """Return what became of a save whose directory is gone; durable when this returns."""
        if self._publishing(save).exists():
            self._move_up(self._publishing(save))
        if self._is_published(save):
            sync_directory(self.path)
            return Fate.COMMITTED
        if self._aborted(save).exists():
            sync_directory(self.path)
            return Fate.ABORTED
        return Fate.UNKNOWN

    def _confirm(self, save: SaveRef) -> Path:
        """Return the checkpoint of a save whose rename found nothing. Raises as `publish` does."""
        source = self.save_dir(save)
        if source.exists():
            raise SaveFailed("internal", f"save {save.save_id}: {source} has no {METADATA_NAME}")
        fate = self._fate(save)
        if fate is Fate.COMMITTED:
            return self.path
        if fate is Fate.ABORTED:
            raise given_up(save)
        raise SaveFailed(
            "outcome-unknown",
            f"save {save.save_id}: {source} is gone, and neither published nor given up",
            "look again: a network file system may show old names for a while",
        )


def _writer_of(directory: Path) -> tuple[str, str]:
    """Return job and save id of the checkpoint in a directory; empty if milepost did not write it,
    or its manifest is damaged. Raises OSError.
    """
    try:
        heading = read_heading(directory)
    except (CorruptCheckpoint, NotADirectoryError):
        return "", ""
    return heading.job, heading.save_id


def _old_list(publishing: Path) -> list[str]:
    try:
        names = (publishing / _OLD_LIST).read_text().splitlines()
    except _NOT_THERE:
        return []
    return [name for name in names if _DATA_FILE.fullmatch(name)]


def _age_s(place: Path, directory: Path) -> float:
    """Return how long ago anything in a save's directory was touched."""
    try:
        touched_s = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(directory)]
        return time.time() - max([directory.stat().st_mtime, *touched_s])
    except _NOT_THERE:
        return 0.0
