"""After a commit: moves `latest`, then removes the checkpoints that no rule keeps.

Retention waits until `latest` has moved. Before the new link is durable, a crash of storage may
bring back the old one, and the checkpoint that it names must still be there. One object for a
daemon, used on the loop only; threads do the work on storage.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from milepost.storage.claims import being_read, removable
from milepost.storage.homes import Home
from milepost.storage.names import FOREIGN_LATEST_HINT, LATEST_NAME
from milepost.storage.root import Root
from milepost.wire.messages import Keep, SaveRef
from milepostd.ops.logs import emit

FOLLOW_PAUSES_S: Final = (0.1, 1.0, 10.0, 60.0, 300.0)
"""How long to wait before each further try to move `latest`."""


class Latest:
    """Moves `latest`, and tries again if storage refuses.

    Args:
        in_files: runs file work in a thread.
        spawn: starts a task and keeps it until it ends.
    """

    def __init__(
        self,
        in_files: Callable[[Callable[[], Any]], Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._in_files = in_files
        self._spawn = spawn
        self._removing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By root. Only one removal at a time: it takes what another one has just put aside for
        left over."""
        self._following: Counter[str] = Counter()
        """By root: how many commits `latest` has not followed yet."""
        self._told: set[str] = set()
        """Roots with something of that name that is no link, which the log has said."""

    async def advance(self, home: Home, save: SaveRef) -> None:
        """Let `latest` name the checkpoint, unless it names a newer one. A checkpoint in a place of
        its own has no `latest`. If this raises what storage refused, call `follow_later`.
        """
        if not isinstance(home, Root) or await self._in_files(partial(home.advance_latest, save)):
            return
        if str(home.path) not in self._told and await self._in_files(home.is_latest_foreign):
            self._told.add(str(home.path))
            emit("warning", "latest.foreign", job=save.job, file=str(home.path / LATEST_NAME),
                 reason="it is no link, and so not ours", hint=FOREIGN_LATEST_HINT)  # fmt: skip

    def follow_later(self, root: Home, save: SaveRef) -> None:
        """Try again, a few times, later and later. The next commit tries, too."""
        self._following[str(root.path)] += 1
        self._spawn(self._follow(root, save))

    async def _follow(self, root: Home, save: SaveRef) -> None:
        try:
            for pause_s in FOLLOW_PAUSES_S:
                await asyncio.sleep(pause_s)
                with suppress(Exception):  # the first failure is in the log
                    await self.advance(root, save)
                    return
        finally:
            self._following[str(root.path)] -= 1

    async def retain(self, root: Root, keep: Keep) -> tuple[str, ...]:
        """Remove the checkpoints that no rule keeps, and return their names. Remove none while
        `latest` has not followed a commit. Raises what storage refuses.
        """
        if self._following[str(root.path)]:
            return ()
        async with self._removing[str(root.path)]:
            removed: tuple[str, ...] = await self._in_files(partial(_retain, root, keep))
            left = await self._in_files(partial(_left_in, root, removed))
        if left:
            emit("info", "retention.kept", root=str(root.path), file=", ".join(left),
                 reason="people have put these there")  # fmt: skip
        return removed


def _retain(root: Root, keep: Keep) -> tuple[str, ...]:
    root.finish_removals()
    entries = root.checkpoints()
    save_ids = {entry.name: entry.save_id for entry in entries}
    # To delete one may take long. Meanwhile somebody may have begun to read the next, or a save may
    # have replaced it.
    return tuple(
        name
        for name in removable(root, entries, keep)
        if name not in being_read(root) and root.remove_checkpoint(name, save_ids[name])
    )


def _left_in(root: Root, removed: tuple[str, ...]) -> list[str]:
    """Return what is left of directories whose checkpoints were removed: what people put there."""
    return [f"{name}/{entry}" for name in removed for entry in root.foreign_in(name)]
