"""The trainers' shared memory on the daemon's side: mapped for the writers, searched for what was
staged, removed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from milepost.errors import MilepostError
from milepost.memory.arena import Arena, SlotRecord, SlotState, find_arenas
from milepost.wire.messages import SaveRef, Staged
from milepostd.core.commands import RemoveArenas, SweepArenas
from milepostd.executors.sealing import Containers
from milepostd.ops.logs import emit

_log = logging.getLogger(__name__)


class OpenArenas:
    """The arenas that this daemon has mapped. They stay mapped from save to save, since mapping one
    again costs 0.1 s of CPU per GiB.

    Thread-safe. An arena whose file was removed or replaced is unmapped at the next `get`; `forget`
    does it at once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, tuple[tuple[int, int], Arena]] = {}
        self._containers: WeakKeyDictionary[Arena, Containers] = WeakKeyDictionary()

    def get(self, path: str) -> Arena:
        """Return the arena at `path`; do not close it. Raises Rejected("arena-invalid")."""
        with self._lock:
            for other, (identity, _) in list(self._open.items()):
                if _file_identity(other) != identity:
                    self._close(other)
            if path not in self._open:
                identity = _file_identity(path)
                self._open[path] = (identity, Arena.open(Path(path)))
            return self._open[path][1]

    def containers(self, arena: Arena) -> Containers:
        """Return the containers of its images. Raises Rejected("arena-invalid")."""
        with self._lock:
            found = self._containers.get(arena)
            if found is None:
                found = self._containers[arena] = Containers(arena)
            return found

    def forget(self, path: str) -> None:
        """Unmap the arena; if an image is being written from it, then after that."""
        with self._lock:
            self._close(path)

    def close(self) -> None:
        """Unmap all."""
        with self._lock:
            for path in list(self._open):
                self._close(path)

    def _close(self, path: str) -> None:
        _, arena = self._open.pop(path, (None, None))
        if arena is not None:
            arena.close()


def _file_identity(path: str) -> tuple[int, int]:
    try:
        status = os.lstat(path)
    except OSError:
        return (0, 0)
    return (status.st_dev, status.st_ino)


def arenas_of(job: str, attempt: int, ranks: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """Return rank and path of each arena that these ranks of an attempt hold or have left."""
    return tuple(
        (file.rank, str(file.path))
        for file in find_arenas(job)
        if file.attempt == attempt and file.rank in ranks
    )


def find_staged(job: str, attempt: int, ranks: Iterable[int]) -> list[tuple[int, Staged]]:
    """Return what the arenas of these ranks hold completely staged, as (rank, the rank's message),
    in the order of the saves.

    Slots that were being filled, damaged arenas and arenas of another attempt are left out: their
    content cannot become a checkpoint.
    """
    wanted = set(ranks)
    found: list[tuple[int, int, Staged]] = []
    for file in find_arenas(job):
        if file.attempt != attempt or file.rank not in wanted:
            continue
        for slot, record in _staged_records(file.path):
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
                slot=slot,
                image_bytes=record.image_bytes,
            )
            count = int(record.save_id.rpartition("-")[2] or 0)
            found.append((count, file.rank, staged))
    return [(rank, staged) for _, rank, staged in sorted(found, key=lambda each: each[:2])]


def _staged_records(path: Path) -> Iterator[tuple[int, SlotRecord]]:
    """Yield index and record of each staged slot. Leaves out damaged slots, and logs them."""
    try:
        arena = Arena.open(path)
    except (OSError, MilepostError) as error:
        _warn_unreadable(path, error)
        return
    try:
        for slot in arena.slots:
            if slot.state is SlotState.STAGED:
                try:
                    record = slot.record()
                except MilepostError as error:
                    _warn_unreadable(path, error)
                else:
                    yield slot.index, record
    finally:
        arena.close()


def _warn_unreadable(path: Path, error: Exception) -> None:
    fields = {"file": str(path), "cause": str(error)}
    _log.warning("arena.unreadable", extra={"fields": fields})


class ArenaRemoval:
    """Removes arenas that nobody needs any more. What cannot be removed is only logged.

    Args:
        arenas: unmaps them first.
        in_files: runs file work in a thread.
    """

    def __init__(
        self, arenas: OpenArenas, in_files: Callable[[Callable[[], Any]], Awaitable[Any]]
    ) -> None:
        self._arenas = arenas
        self._in_files = in_files

    async def sweep(self, command: SweepArenas) -> None:
        """Remove what earlier attempts of these ranks have left."""

        def left_over() -> tuple[str, ...]:
            return tuple(
                str(file.path)
                for file in find_arenas(command.job)
                if file.attempt < command.below_attempt and file.rank in command.ranks
            )

        await self.remove(RemoveArenas(paths=await self._in_files(left_over)))

    async def remove(self, command: RemoveArenas) -> None:
        """Remove these arenas."""
        for path in command.paths:
            self._arenas.forget(path)
            try:
                await self._in_files(partial(Path(path).unlink, missing_ok=True))
            except OSError as error:
                emit("warning", "arena.unremoved", file=path, cause=str(error))
