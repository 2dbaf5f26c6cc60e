"""What a daemon has to know of its jobs after it was killed: kept in its run directory.

One file an attempt of a job: its `Join` (cohort, root, retention, deadline), written before the
first byte of a save is, and there until the last of its saves has ended. What was staged needs no
journal: the arenas tell, since each slot holds its own record. Not synced: a machine that loses
power loses the arenas too. No torch, no sockets.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from milepost.errors import MilepostError, ProtocolError
from milepost.memory.arena import Arena, SlotState, find_arenas
from milepost.wire.messages import Join, SaveRef, Staged, decode_client, encode

_log = logging.getLogger(__name__)


class Journal:
    """The journal of one run directory; one daemon at a time owns it."""

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
        """Forget an attempt of which nothing is pending."""
        self._path(job, attempt).unlink(missing_ok=True)

    def recall(self) -> list[Join]:
        """Return what was kept, a job's attempts in their order; what cannot be read is left out,
        with a log line.
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


def find_staged(job: str, attempt: int, ranks: Iterable[int]) -> list[tuple[int, Staged]]:
    """Return what the arenas of these ranks hold completely staged, as the ranks would say it, in
    the order of the saves.

    Slots that were being filled, arenas that are damaged or of another attempt are passed over:
    what is in them cannot become a checkpoint.
    """
    wanted = set(ranks)
    found: list[tuple[int, int, Staged]] = []
    for file in find_arenas(job):
        if file.attempt != attempt or file.rank not in wanted:
            continue
        try:
            arena = Arena.open(file.path)
        except (OSError, MilepostError) as error:
            fields = {"file": str(file.path), "cause": str(error)}
            _log.warning("arena.unreadable", extra={"fields": fields})
            continue
        try:
            for slot in arena.slots:
                if slot.state is not SlotState.STAGED:
                    continue
                try:
                    record = slot.record()
                except MilepostError as error:
                    fields = {"file": str(file.path), "cause": str(error)}
                    _log.warning("arena.unreadable", extra={"fields": fields})
                    continue
                if record.job != job or record.rank != file.rank:
                    continue
                save = SaveRef(
                    job=job,
                    save_id=record.save_id,
                    step=record.step,
                    name=record.name,
                    overwrite=record.overwrite,
                    place=record.place,
                )
                staged = Staged(
                    save=save,
                    layout_id=record.layout_id,
                    arena=str(file.path),
                    slot=slot.index,
                    image_bytes=record.image_bytes,
                )
                count = int(record.save_id.rpartition("-")[2] or 0)
                found.append((count, file.rank, staged))
        finally:
            arena.close()
    return [(rank, staged) for _, rank, staged in sorted(found, key=lambda each: each[:2])]
