"""This run's right to its root: what rank 0 claims and checks there, for all ranks.

Owns the job's claim on the root. It must not know of daemons, or of saves that are under way.
One thread at a time, except for `close`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from milepost.advice import tell_branch
from milepost.errors import Rejected, StorageError
from milepost.storage.claims import Ownership, check_ours, find_other
from milepost.storage.names import FOREIGN_LATEST_HINT, LATEST_NAME
from milepost.storage.root import Root

if TYPE_CHECKING:
    from pathlib import Path

    from milepost.wire.messages import SaveRef

log = logging.getLogger("milepost")

UNWRITABLE: Final = frozenset({"permission", "read-only"})
"""Error codes of a root to which this user cannot write, though others may."""


class RootAccess:
    """The root as one rank may use it. Rank 0 makes every check for all ranks; on the other ranks
    each check passes.

    Args:
        path: the root.
        is_first: whether this is rank 0.
        overwrite: whether directories that milepost did not write may be replaced.
    """

    def __init__(self, path: Path, *, is_first: bool, overwrite: bool) -> None:
        self._path = path
        self._is_first = is_first
        self._overwrite = overwrite
        self._ownership: Ownership | None = None
        """The claim, from the first save or `prepare()` on."""
        self._is_begun = False
        """Whether something was loaded or saved."""

    def enter(self, name: str) -> tuple[str, int]:
        """Make the root; return the job's name on the wire and its next attempt.

        The name ends with the root's identity. So two roots are two jobs to a daemon, even if one
        launcher runs both, or if a root was deleted and made again under the same path.
        """
        root = Root(self._path)
        root.prepare()
        job = f"{name}@{root.identity()}"
        other = find_other(root, job)
        if other:
            log.warning("%s: load() works, but prepare() and save() are refused until then", other)
        if root.is_latest_foreign():
            taken = root.path / LATEST_NAME
            log.warning("%s is no link, and stays as it is: %s", taken, FOREIGN_LATEST_HINT)
        return job, root.claim_attempt(name)

    def enter_or_read(self, name: str) -> tuple[str, int]:
        """Enter the root; return attempt 0 if the root can only be read."""
        try:
            return self.enter(name)
        except StorageError as error:
            if error.code not in UNWRITABLE or not os.access(self._path, os.R_OK | os.X_OK):
                raise
            log.info("load() works, but prepare() and save() are refused: %s", error.message)
            return name, 0

    def enter_late(self, name: str) -> tuple[str, int]:
        """Enter the root before the first save. Raises Rejected if it cannot be written to."""
        try:
            return self.enter(name)
        except StorageError as error:
            hint = "load() works; to save, use a root that this user can write to"
            raise Rejected(error.code, error.message, hint) from error

    def claim_attempt(self, job: str) -> int:
        """Claim a further attempt of the job. Raises StorageError."""
        return Root(self._path).claim_attempt(job)

    def claim(self, job: str) -> None:
        """Claim the root for this job. Raises Rejected("root-locked")."""
        if self._is_first and self._ownership is None:
            self._ownership = Ownership.take(Root(self._path), job)

    def check(self, ref: SaveRef, attempt: int) -> None:
        """Claim the root for a save, and refuse to replace a directory that milepost did not write.

        Raises Rejected("root-locked"), UsageError("already-committed").
        """
        if not self._is_first:
            return
        self.claim(ref.job)
        if not self._overwrite:
            check_ours(self._path / ref.name)
        if not self._is_begun:
            self._is_begun = True
            tell_branch(Root(self._path), ref.step, attempt)

    def note_load(self) -> None:
        """Note that the run goes on from a checkpoint."""
        self._is_begun = True

    def close(self) -> None:
        """Give up the claim. Idempotent."""
        if self._ownership is not None:
            self._ownership.close()
