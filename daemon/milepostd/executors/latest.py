"""After a commit: `latest` follows, and what no rule keeps goes.

Owns the tries to move `latest`, and that retention waits for them: until the link is durable, a
crash of storage may bring back the one before, and the checkpoint it names must still be there.
One for a daemon; used on the loop only, storage is worked on in threads.
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
from milepost.storage.root import Root
from milepost.wire.messages import Keep, SaveRef

FOLLOW_PAUSES_S: Final = (0.1, 1.0, 10.0, 60.0, 300.0)
"""How long to wait before each further try to let `latest` name what was committed."""


class Latest:
    """Moves `latest`, again if storage did not let it.

    Args:
        in_files: runs work on storage in a thread.
        spawn: keeps a task until it ends.
    """

    def __init__(
        self,
        in_files: Callable[[Callable[[], Any]], Awaitable[Any]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._in_files = in_files
        self._spawn = spawn
        self._removing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By root: one at a time removes, since what another has put aside is not left over."""
        self._following: Counter[str] = Counter()
        """By root, how many commits `latest` has yet to follow."""

    async def advance(self, home: Home, save: SaveRef) -> None:
        """Let `latest` name the checkpoint, unless it names a newer one. Raises what storage does;
        then call `follow_later`. A checkpoint in a place of its own has no `latest`.
        """
        if isinstance(home, Root):
            await self._in_files(partial(home.advance_latest, save))

    def follow_later(self, root: Home, save: SaveRef) -> None:
        """Try again as soon as storage may allow it; the next commit does, too."""
        self._following[str(root.path)] += 1
        self._spawn(self._follow(root, save))

    async def _follow(self, root: Home, save: SaveRef) -> None:
        try:
            for pause_s in FOLLOW_PAUSES_S:
                await asyncio.sleep(pause_s)
                with suppress(Exception):  # the first failure has been told
                    await self.advance(root, save)
                    return
        finally:
            self._following[str(root.path)] -= 1

    async def retain(self, root: Root, keep: Keep) -> tuple[str, ...]:
        """Remove the checkpoints that no rule keeps, and return their names: none while `latest`
        has yet to follow. Raises what storage does.
        """
        if self._following[str(root.path)]:
            return ()
        async with self._removing[str(root.path)]:
            removed: tuple[str, ...] = await self._in_files(partial(_retain, root, keep))
        return removed


def _retain(root: Root, keep: Keep) -> tuple[str, ...]:
    root.finish_removals()
    entries = root.checkpoints()
    save_ids = {entry.name: entry.save_id for entry in entries}
    # One may be long in being deleted, and the next may have found a reader meanwhile, or have been
    # saved anew.
    return tuple(
        name
        for name in removable(root, entries, keep)
        if name not in being_read(root) and root.remove_checkpoint(name, save_ids[name])
    )
