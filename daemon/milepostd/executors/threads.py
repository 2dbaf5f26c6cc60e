"""Threads for file work that may hang: a write to a broken mount may never return, and cannot be
cancelled.

Each call gets a thread of its own, so that one that hangs does no harm: `abandon` gives back its
permit, and it does not keep the process from ending. (The first hung writes would use up the fixed
threads of a `ThreadPoolExecutor`, which are also joined at exit.) Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """Runs blocking calls, a bounded number at a time.

    Args:
        name: of the threads.
        permits: how many calls run at once; further calls wait in order.
    """

    def __init__(self, name: str, permits: int) -> None:
        self._name = name
        self._permits = asyncio.Semaphore(permits)
        self._running: set[Hashable] = set()

    async def run(self, work: Callable[[], T], key: Hashable = None) -> T:
        """Return what `work()` returns, or raise what it raises. `key` names the call for
        `abandon`.
        """
        await self._permits.acquire()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        token: Hashable = object() if key is None else key
        self._running.add(token)

        def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
            if not done.done():
                set_outcome(outcome)

        def call() -> None:
            try:
                value = work()
            except BaseException as error:
                outcome = (done.set_exception, error)
            else:
                outcome = (done.set_result, value)  # type: ignore[assignment]
            # A loop that has ended raises; then nobody waits for this call any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, *outcome)

        threading.Thread(target=call, name=self._name, daemon=True).start()
        try:
            return await done
        finally:
            if token in self._running:
                self._running.discard(token)
                self._permits.release()

    def abandon(self, key: Hashable) -> None:
        """Give up on a call that hangs: another one may run in its place. If the call ends after
        all, so does its `run`.
        """
        if key in self._running:
            self._running.discard(key)
            self._permits.release()
