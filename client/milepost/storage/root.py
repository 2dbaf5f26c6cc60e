"""`Root`: all that may be done with a directory of checkpoints.

This module is the interface of the folder: it says what each operation promises. The code is in the
modules below it, by subject. Each of them imports only earlier ones: `names` and `durable`, then
`catalog` (what is there), `contents` (which entries are not ours), `latest`, `aside` (checkpoints
that lose their name), `outcomes` (publishing and giving up), `removals`, `opening`. Only these
modules and `claims` write under a root. Knows nothing of plans, tensors or messages, and never
imports torch.

All calls block: use a thread. A `Root` has no state except its path, so any number of threads and
processes may use the same one.

Errors: StorageError for what the system refused, UsageError for a name that is not valid.
Sources: rename(2), fsync(2), and for the names of files torch/distributed/checkpoint/filesystem.py
(2.13).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from milepost.storage import catalog, latest, opening, outcomes, removals
from milepost.storage.blocks import BLOCK_BYTES, write_image
from milepost.storage.contents import foreign_in
from milepost.storage.durable import replace_file
from milepost.storage.modes import UNKNOWN
from milepost.storage.names import RootPaths
from milepost.storage.paths import absolute
from milepost.storage.refusals import reported

if TYPE_CHECKING:
    from collections.abc import Callable

    from milepost.storage.catalog import CheckpointEntry
    from milepost.storage.fate import Fate
    from milepost.wire.messages import SaveRef


class Root:
    """One directory of checkpoints on a file system that all nodes share.

    Args:
        path: made absolute, see `paths.absolute`: the daemon and its peers compare it.
        umask: gives the modes of what a save makes here; `modes.UNKNOWN`: this process's own.
    """

    def __init__(self, path: str | os.PathLike[str], umask: int = UNKNOWN) -> None:
        self.path: Final = Path(absolute(path))
        self._umask: Final = umask
        self._paths: Final = RootPaths(self.path)

    @property
    def run_path(self) -> Path:
        """Where locks, attempts and leases are."""
        return self._paths.run

    # --- the root itself --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the root and its own directories, durably, and finish what a crash interrupted.

        An interrupted replacement is completed if the new checkpoint is still under `.partial`,
        otherwise undone. An interrupted deletion is finished. Safe at any time, even while other
        nodes do the same or an older attempt still publishes.
        """
        opening.prepare(self._paths)

    def identity(self) -> str:
        """Return the root's own name, drawn when it was first used.

        A root that was deleted and made again at the same path has another one. `prepare` must have
        run.
        """
        return opening.identity(self._paths)

    def check_shared(self, job: str) -> None:
        """Make sure that this node sees the same root as the other ranks of the job.

        Args:
            job: its name on the wire, `<name>@<root identity>`; without `@` nothing is checked.

        Raises:
            StorageError: "root-not-shared": another root lies at this path, or none.
        """
        opening.check_shared(self._paths, job)

    def claim_attempt(self, job: str) -> int:
        """Take the next attempt number of this root, durably; no two callers get the same one.

        It is greater than the attempts of all checkpoints there, even of a checkpoint copied from
        another root: later saves have to be newer.
        """
        return opening.claim_attempt(self._paths, job)

    # --- writing one save -------------------------------------------------------------------------

    def save_dir(self, save: SaveRef) -> Path:
        """Return where the save's files lie until it is published. Raises UsageError if its name or
        save id is not valid.
        """
        return self._paths.save_dir(save)

    def checkpoint_dir(self, save: SaveRef) -> Path:
        """Return where the checkpoint of a save stands once it is published."""
        return self.path / save.name

    def open_save(self, save: SaveRef) -> Path:
        """Return the save's directory; make it if it is not there.

        A save that has ended is not begun again: a late node is refused.

        Raises:
            SaveFailed: "aborted": the save was given up.
            Rejected: "already-committed": it was published.
        """
        return outcomes.open_save(self._paths, save, self._umask)

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
        """Write `image` as the new file `path` and sync it; after a failure there is no such file.

        Uses direct I/O if the file system, the memory's alignment and the length (whole pages)
        allow it, otherwise buffered I/O. Leaves nothing in the page cache. Does not sync the
        directory: the `write_file` that follows does. Releases the GIL while it writes blocks.

        Args:
            on_block: called after each block with its length; an exception from it ends the write.
            before_block: called before each block with its length and the length of all that is
                left, this block included; it may wait, and an exception from it ends the write.
            block_bytes: the largest block, whole pages.

        Raises:
            StorageError: also if the file exists already.
        """
        with reported("write", path, image.nbytes):
            write_image(path, image, on_block, before_block, block_bytes, self._umask)

    def is_taken(self, name: str) -> bool:
        """Whether a data file must not have this name although it is free in the save's directory.
        Never, since that directory becomes the checkpoint.
        """
        return False

    # --- ending one save --------------------------------------------------------------------------

    def publish(self, save: SaveRef) -> Path:
        """Turn the save into a checkpoint by one rename, durably, and return its directory.

        Safe to repeat: confirms a save that was published already. Before the rename, removes
        manifest fragments and leftovers of failed attempts to write. With `save.overwrite`, puts an
        older checkpoint of that name aside; `discard` deletes it. If the save turns out to be given
        up, the older checkpoint is put back. Files that people put into its directory, and the
        directory's mode, pass to the new checkpoint.

        Raises:
            Rejected: "already-committed": the name is taken by a newer save, by parts of a
                checkpoint without an index, by something that is no directory, or by anything
                without `save.overwrite`. The save is untouched.
            SaveFailed: "aborted": it was given up; "outcome-unknown": it is in neither place;
                "internal": it has no `.metadata`.
        """
        return outcomes.publish(self._paths, save)

    def give_up(self, save: SaveRef) -> Fate:
        """End the save unless it was published, and return what became of it. Safe to repeat, on
        any node.
        """
        return outcomes.give_up(self._paths, save)

    def forestall(self, save: SaveRef) -> Fate:
        """Give the save up, even if no node has begun it. Only for the coordinator.

        A late node finds the directory of the given-up save and does not begin. Returns the same as
        `give_up`; a save that was never begun is aborted.
        """
        return outcomes.forestall(self._paths, save)

    def is_unpublished(self, save: SaveRef, *, was_begun: bool) -> bool:
        """Whether only the caller can publish a save that could not be given up.

        Only for the coordinator, and only if none of its renames may still take effect. True if the
        files are where they were (or nowhere, unless it `was_begun`), and if no intent to replace
        would make `prepare` publish them. Raises StorageError.
        """
        return outcomes.is_unpublished(self._paths, save, was_begun=was_begun)

    # --- latest -----------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """Return the checkpoint that `latest` names, else the newest one; None if there is none."""
        return latest.latest(self._paths)

    def is_latest_foreign(self) -> bool:
        """Whether `latest` is not a link. Then it belongs to the user, and is left alone."""
        return latest.is_foreign(self._paths)

    def latest_target(self) -> str | None:
        """Return the checkpoint that `latest` names; None if there is no such checkpoint."""
        return latest.latest_target(self._paths)

    def move_latest(self, name: str) -> None:
        """Let `latest` name the checkpoint, durably; there is no instant without a `latest`.

        Nothing happens if `latest` is not a link.
        """
        latest.move_latest(self._paths, name)

    def advance_latest(self, save: SaveRef) -> bool:
        """Let `latest` name the published save, unless it names a newer one; return whether it
        does.

        (attempt, step) decides which one is newer. A save that was slower than its successor never
        moves `latest` back, even if it was held up between looking and moving. Nothing happens if
        `latest` is not a link.
        """
        return latest.advance_latest(self._paths, save)

    # --- what is there ----------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointEntry]:
        """Return the committed checkpoints, newest first: directories with `.metadata`, also those
        of stock torch.

        A checkpoint with a damaged manifest is listed by its name; reading `manifest` raises.
        """
        return catalog.checkpoints(self._paths)

    def partials(self) -> list[Path]:
        """Return the directories that are not checkpoints: saves in flight or given up, and
        checkpoints that are being replaced or deleted.
        """
        return catalog.partials(self._paths)

    # --- removing ---------------------------------------------------------------------------------

    def remove_checkpoint(self, name: str, save_id: str | None = None) -> bool:
        """Delete a checkpoint; return whether it existed. It loses its name first, so that a crash
        never leaves a half-deleted checkpoint. Files that people put into its directory stay there.

        Args:
            save_id: the save that must have written it. If another save has the name by now,
                nothing happens. None: any save.
        """
        return removals.remove_checkpoint(self._paths, name, save_id)

    def foreign_in(self, name: str) -> list[str]:
        """Return the entries that people put into a checkpoint's directory, sorted. Raises
        StorageError.

        If the checkpoint is gone, these are the entries that a removal left there.
        """
        with reported("list", self.path / name):
            return foreign_in(self.path / name)

    def finish_removals(self) -> None:
        """Finish removals that a crash interrupted: delete what is half deleted, and give
        checkpoints that were only put aside their names back.

        Call it before removing. Safe while others remove.
        """
        removals.finish_removals(self._paths)

    def discard(self, save: SaveRef) -> None:
        """Delete what the ended save left under `.partial`: its files if it was given up, and the
        checkpoint it replaced. Also finishes interrupted deletions.
        """
        removals.discard(self._paths, save)

    def clear_abandoned(self, save: SaveRef) -> list[str]:
        """Give up and delete unfinished saves of earlier attempts; return their names.

        Call it after `save` was published. Saves touched within `ABANDONED_S` stay: a save that all
        ranks had staged is finished even after a newer attempt has begun.
        """
        return removals.clear_abandoned(self._paths, save)
