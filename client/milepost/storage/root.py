"""`Root`: all that may be done with a directory of checkpoints.

This is the face of the folder, and says what each operation promises. The code is in the modules
below it, by subject, and the state runs one way: `names` and `durable`, then `catalog` (what is
there), `contents` (what of it is not ours), `latest`, `aside` (checkpoints that lose their name),
`outcomes` (publishing and giving up), `removals`, `opening`. Nothing else writes under a root, but
for `claims`. Knows nothing of plans, tensors or messages, and never imports torch.

All calls block: use a thread. A `Root` has no state beside its path, so any number of threads and
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
from milepost.storage.refusals import reported

if TYPE_CHECKING:
    from collections.abc import Callable

    from milepost.storage.catalog import CheckpointEntry
    from milepost.storage.fate import Fate
    from milepost.wire.messages import SaveRef


class Root:
    """One directory of checkpoints on a file system that all nodes share.

    Args:
        path: made absolute, not resolved: the daemon and its peers compare it as it was given.
        umask: gives the modes of what a save makes here; `modes.UNKNOWN`: this process's own.
    """

    def __init__(self, path: str | os.PathLike[str], umask: int = UNKNOWN) -> None:
        self.path: Final = Path(os.path.abspath(path))
        self._umask: Final = umask
        self._paths: Final = RootPaths(self.path)

    @property
    def run_path(self) -> Path:
        """Where locks, attempts and leases are."""
        return self._paths.run

    # --- the root itself --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the root and its own directories, durably, and finish what a crash interrupted.

        A replacement that was cut in two is completed if the new checkpoint still lies under
        `.partial`, else undone. What was being deleted goes. Safe at any time, also beside other
        nodes and an older attempt that still publishes.
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

        It is above those of all checkpoints there, even of one copied from another root: what is
        saved from now on has to be newer.
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

        Direct I/O where the file system, the memory's alignment and the length (whole pages) allow,
        else buffered; nothing stays in the page cache. The directory is not synced: the
        `write_file` that follows does that. The GIL is free while blocks are written.

        Args:
            on_block: called after each block with its bytes; what it raises ends the write.
            before_block: called before each block with its bytes and with all bytes that are left,
                the block's included; it may wait, and what it raises ends the write.
            block_bytes: the largest block, whole pages.

        Raises:
            StorageError: also if the file exists already.
        """
        with reported("write", path, image.nbytes):
            write_image(path, image, on_block, before_block, block_bytes, self._umask)

    def is_taken(self, name: str) -> bool:
        """Whether a data file must not have this name though the save's directory has none of it:
        never, since that directory becomes the checkpoint.
        """
        return False

    # --- ending one save --------------------------------------------------------------------------

    def publish(self, save: SaveRef) -> Path:
        """Turn the save into a checkpoint by one rename, durably, and return its directory.

        Safe to repeat: a save that was published already is confirmed. Before the rename, manifest
        fragments and leftovers of broken attempts are removed. With `save.overwrite` an older
        checkpoint of that name is put aside; `discard` deletes it, and it is put back if the save
        turns out to be given up. What people put into its directory, and the directory's mode, pass
        to the new checkpoint.

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
        """Give the save up, even if no node has begun it. Only for the one who publishes it.

        A late node finds the directory of the given-up save and does not begin. Returns as
        `give_up` does; a save that was never begun is aborted.
        """
        return outcomes.forestall(self._paths, save)

    def is_unpublished(self, save: SaveRef, *, was_begun: bool) -> bool:
        """Whether a save that could not be given up can be published by the caller only.

        Only for the one who publishes it, and only if none of its renames may still take effect.
        True if the files are where they were (or nowhere, unless it `was_begun`), and no intent to
        replace would make `prepare` publish them. Raises StorageError.
        """
        return outcomes.is_unpublished(self._paths, save, was_begun=was_begun)

    # --- latest -----------------------------------------------------------------------------------

    def latest(self) -> str | None:
        """Return the checkpoint that `latest` names, else the newest one; None if there is none."""
        return latest.latest(self._paths)

    def is_latest_foreign(self) -> bool:
        """Whether something has the name `latest` that is no link: people's own, and left alone."""
        return latest.is_foreign(self._paths)

    def latest_target(self) -> str | None:
        """Return the checkpoint that `latest` names; None if there is no such checkpoint."""
        return latest.latest_target(self._paths)

    def move_latest(self, name: str) -> None:
        """Let `latest` name the checkpoint, durably; there is no instant without a `latest`.

        Nothing happens if something that is no link has that name.
        """
        latest.move_latest(self._paths, name)

    def advance_latest(self, save: SaveRef) -> bool:
        """Let `latest` name the published save, unless it names a newer one; return whether it
        does.

        Newer by (attempt, step): a save that was slower than its successor never moves it back, not
        even if it was held up between looking and moving. Nothing happens if something that is no
        link has that name.
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
        """Delete a checkpoint; return whether it was there. It loses its name first, so that a
        crash leaves no half of one. What people put into its directory stays there.

        Args:
            save_id: the save that must have written it; if another save has got the name meanwhile,
                nothing happens. None: whichever it is.
        """
        return removals.remove_checkpoint(self._paths, name, save_id)

    def foreign_in(self, name: str) -> list[str]:
        """Return what people have put into a checkpoint's directory, sorted. Raises StorageError.

        If the checkpoint is gone, it is what a removal has left there.
        """
        with reported("list", self.path / name):
            return foreign_in(self.path / name)

    def finish_removals(self) -> None:
        """Mend removals that a crash has interrupted: what is half deleted goes, what was only put
        aside gets its name back.

        To be called before removing; safe beside others that remove.
        """
        removals.finish_removals(self._paths)

    def discard(self, save: SaveRef) -> None:
        """Delete what the ended save left under `.partial`: its files if it was given up, and the
        checkpoint it replaced. Also finishes interrupted deletions.
        """
        removals.discard(self._paths, save)

    def clear_abandoned(self, save: SaveRef) -> list[str]:
        """Give up and delete unfinished saves of earlier attempts; return their names.

        To be called after `save` was published. Saves touched within `ABANDONED_S` stay: what all
        ranks had staged is finished even after a newer attempt has begun.
        """
        return removals.clear_abandoned(self._paths, save)
