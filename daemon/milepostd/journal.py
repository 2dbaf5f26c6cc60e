"""What a daemon that was killed has to know of its jobs when it starts again.

Kept in the run directory, one file for each attempt of a job: its `Join` (cohort, root, retention,
deadline). The file is written before the first byte of a save, and stays until the attempt's last
save has ended. It does not say what was staged: each slot of an arena holds its own record
(`executors/arenas.py`). Not synced: a machine that loses power loses the arenas too.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from milepost.errors import MilepostError, ProtocolError
from milepost.wire.messages import Join, decode_client, encode

_log = logging.getLogger(__name__)


class Journal:
    """The journal of one run directory. One daemon at a time owns it."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "journal"

    def keep(self, join: Join) -> None:
        """Remember an attempt of a job. Raises OSError."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        path = self._path(join.job, join.attempt)
        draft = path.with_suffix(".new")
        draft.write_bytes(encode(join))
        draft.rename(path)

    def forget(self, job: str, attempt: int) -> None:
        """Forget an attempt that has no unfinished save."""
        self._path(job, attempt).unlink(missing_ok=True)

    def recall(self) -> list[Join]:
        """Return what was kept; of each job in the order of its attempts. A file that cannot be
        read is left out, and logged.
        """
        found: list[Join] = []
        for entry in os.scandir(self._folder) if self._folder.is_dir() else ():
            if not entry.name.endswith(".join"):
                continue
            try:
                message = decode_client(Path(entry.path).read_bytes())
                if not isinstance(message, Join):
                    raise ProtocolError("protocol", f"it holds a {type(message).__name__}")
                found.append(message)
            except (OSError, MilepostError) as error:
                fields = {"file": entry.path, "cause": str(error)}
                _log.warning("journal.unreadable", extra={"fields": fields})
        return sorted(found, key=lambda join: (join.job, join.attempt))

    def _path(self, job: str, attempt: int) -> Path:
        digest = hashlib.blake2b(job.encode(), digest_size=12).hexdigest()
        return self._folder / f"{digest}-{attempt}.join"
