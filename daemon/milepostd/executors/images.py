"""Writes what the node's ranks have staged: their images, then the node's manifest fragment.

Belongs to the event loop; the writing itself (`writer`) happens in threads. Remembers between the
two commands what each written file holds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from milepost.format.manifest import FragmentFile
from milepost.storage.homes import home_of
from milepost.wire.messages import SaveRef, WrittenFile
from milepostd.core.commands import AbandonWrite, WriteFragment, WriteImage
from milepostd.core.events import BytesWritten, FileDurable, FragmentDurable
from milepostd.executors.arenas import OpenArenas
from milepostd.executors.failures import retried
from milepostd.executors.threads import Threads
from milepostd.executors.throttle import BandwidthLimit, Pace
from milepostd.executors.writer import write_fragment, write_rank
from milepostd.ops.faults import FaultPoints
from milepostd.ops.metrics import Counters

PROGRESS_S: Final = 0.1
"""How often the core hears how far a write is. To tell it of every block would wake the loop ten
times as often, for a tenth of the processor time of a save."""


class Images:
    """Executors of WriteImage and WriteFragment.

    Args:
        node: this node's id, which names its fragment.
        arenas: the mapped arenas.
        writers: threads for images.
        files: threads for fragments, apart from the writers: a hung write must not hold them up.
        faults: the points at which a test makes something happen.
        counters: count what is written.
        limit: of the node's bandwidth; None: none.
        post: gives the core an event; called on the loop.
    """

    def __init__(
        self,
        node: str,
        *,
        arenas: OpenArenas,
        writers: Threads,
        files: Threads,
        faults: FaultPoints,
        counters: Counters,
        limit: BandwidthLimit | None,
        post: Callable[[BytesWritten], None],
    ) -> None:
        self._node = node
        self._arenas = arenas
        self._writers = writers
        self._files = files
        self._faults = faults
        self._counters = counters
        self._limit = limit
        self._post = post
        self._paces: dict[tuple[str, str, int], Pace] = {}
        """Of the images that are being written, by job, save and rank."""
        self._written: dict[tuple[str, str], dict[int, FragmentFile]] = {}
        """By job and save: the files that wait for their fragment, by rank."""

    async def write_image(self, command: WriteImage) -> FileDurable:
        """Write a rank's image to its data file. Raises what `write_rank` does."""
        save, rank = command.save, command.rank
        key = (save.job, save.save_id, rank)
        started_s = time.monotonic()
        pace = self._paces[key] = Pace(
            self._limit, until_s=command.until_ns / 1e9, on_wait=self._counters.throttled
        )
        progress = _WriteProgress(save, self._post)

        def on_bytes(count: int) -> None:
            self._faults.at_blocking("mid-write", save)
            self._counters.bytes_written(count)
            progress.add(count)

        write = partial(
            write_rank,
            home_of(command.root, save, command.umask),
            save,
            command.arena,
            command.slot,
            command.layout_id,
            on_bytes,
            self._arenas,
            pace,
        )
        try:
            await self._faults.at("after-staged", save)
            file = await retried(partial(self._writers.run, write, key), command.until_ns)
            await self._faults.at("after-write", save)
        finally:
            self._paces.pop(key, None)
            progress.tell_rest()
        self._counters.write_took(time.monotonic() - started_s)
        self._written.setdefault((save.job, save.save_id), {})[rank] = file
        return FileDurable(
            save=save, file=WrittenFile(rank, file.layout_id, file.file, file.file_bytes)
        )

    async def write_fragment(self, command: WriteFragment) -> FragmentDurable:
        """Write the node's manifest fragment of a save. Raises what `write_fragment` does."""
        save = command.save
        await self._faults.at("before-durable", save)
        files = self._written.pop((save.job, save.save_id))
        ordered = tuple(files[rank] for rank in sorted(files))
        home = home_of(command.root, save, command.umask)
        write = partial(write_fragment, home, save, self._node, ordered)
        name = await retried(partial(self._files.run, write), command.until_ns)
        return FragmentDurable(save=save, fragment=name)

    def abandon(self, command: AbandonWrite) -> None:
        """End a write at its next block. Let other images be written if it hangs before that."""
        key = (command.save.job, command.save.save_id, command.rank)
        if key in self._paces:
            self._paces[key].stop()
        self._writers.abandon(key)

    def forget(self, save: SaveRef) -> None:
        """Forget the files of a save that has ended without a fragment."""
        self._written.pop((save.job, save.save_id), None)

    def paces(self) -> list[Pace]:
        """Return the paces of the writes under way."""
        return [*self._paces.values()]


class _WriteProgress:
    """Tells the core how far a write is. Made on the loop, fed by the writing thread."""

    def __init__(self, save: SaveRef, post: Callable[[BytesWritten], None]) -> None:
        self._save = save
        self._post = post
        self._loop = asyncio.get_running_loop()
        self._untold = 0
        self._told_s = time.monotonic()

    def add(self, count: int) -> None:
        """Count bytes, and tell the core if the last time was a while ago."""
        self._untold += count
        now_s = time.monotonic()
        if now_s - self._told_s >= PROGRESS_S:
            event = BytesWritten(save=self._save, count=self._untold)
            self._loop.call_soon_threadsafe(self._post, event)
            self._untold, self._told_s = 0, now_s

    def tell_rest(self) -> None:
        """Tell the core what it has not heard of yet. Called on the loop."""
        if self._untold:
            self._post(BytesWritten(save=self._save, count=self._untold))
