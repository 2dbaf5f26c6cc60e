"""Carries out what decides a save, and what follows from it: publish, give up, discard, retain.

All of it is work on the shared directory (`milepost.storage.root`). What was committed stays
committed, whatever else fails.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from milepost.storage.fate import Fate
from milepost.storage.homes import Home, home_of
from milepost.storage.root import Root
from milepost.wire.messages import Cause, SaveRef
from milepostd.core.commands import Discard, GiveUp, Publish, Retain
from milepostd.core.events import Discarded, OutcomeFound, Published, Retained
from milepostd.executors.failures import cause_of, retried
from milepostd.executors.latest import Latest
from milepostd.ops.faults import FaultPoints
from milepostd.ops.logs import emit


class SaveDirectories:
    """Executors of Publish, GiveUp, Discard and Retain.

    Args:
        node: this node's id, named in the causes of failures.
        faults: the points at which a test makes something happen.
        in_files: runs file work in a thread.
        latest: moves `latest` after a commit.
    """

    def __init__(
        self,
        node: str,
        faults: FaultPoints,
        in_files: Callable[[Callable[[], Any]], Awaitable[Any]],
        latest: Latest,
    ) -> None:
        self._node = node
        self._faults = faults
        self._in_files = in_files
        self._latest = latest

    async def publish(self, command: Publish) -> Published:
        """Give the save its final name, then let `latest` follow. Raises what storage does, unless
        the checkpoint has its final name.
        """
        save, home = command.save, home_of(command.root, command.save)
        await self._faults.at("before-publish", save)
        publish = partial(self._in_files, partial(home.publish, save))
        path = await retried(publish, command.until_ns)
        at_ms = time.time_ns() // 1_000_000
        try:
            await self._faults.at("after-publish", save)
            await self._latest.advance(home, save)
            await self._faults.at("before-committed", save)
        except Exception as error:  # the rename has happened: it is a checkpoint
            self._move_latest_later(home, save, error)
        return Published(save=save, path=str(path), at_ms=at_ms)

    async def give_up(self, command: GiveUp) -> OutcomeFound:
        """Move the save's directory out of the way, or find out how the save ended."""
        save, home = command.save, home_of(command.root, command.save)
        is_forestalled = command.is_coordinator and not command.was_prepared
        look = home.forestall if is_forestalled else home.give_up
        try:
            ask = partial(self._in_files, partial(look, save))
            fate = await retried(ask, command.until_ns)
        except Exception as error:  # there is a second way to find out
            cause = cause_of(error, node=self._node)
            emit("error", "save.unresolved", job=save.job, save=save.save_id, step=save.step,
                 code=cause.code, cause=cause.message)  # fmt: skip
            fate = Fate.ABORTED if await self._is_unpublished(command) else Fate.UNKNOWN
        if fate is Fate.COMMITTED and command.is_coordinator:
            # The daemon that published it may have ended before it moved `latest`.
            try:
                await self._latest.advance(home, save)
            except Exception as error:  # it is a checkpoint all the same
                self._move_latest_later(home, save, error)
        return OutcomeFound(save=save, fate=fate, path=_final_path(command))

    async def _is_unpublished(self, command: GiveUp) -> bool:
        """Whether a directory that could not be moved is unpublished, and stays so."""
        if not command.is_coordinator or command.may_take_effect:
            return False
        home = home_of(command.root, command.save)
        look = partial(home.is_unpublished, command.save, was_begun=command.was_prepared)
        with suppress(Exception):  # the first failure is in the log
            return bool(await self._in_files(look))
        return False

    async def discard(self, command: Discard) -> Discarded:
        """Delete what an ended save left; if it was committed, also what earlier attempts left."""
        home = home_of(command.root, command.save)
        cleared = await self._in_files(partial(_delete_left_over, home, command.save))
        if cleared:
            emit("info", "partial.cleared", job=command.save.job, file=", ".join(cleared))
        return Discarded(save=command.save)

    async def retain(self, command: Retain) -> Retained:
        """Remove the checkpoints that no rule keeps."""
        removed = await self._latest.retain(Root(command.root), command.keep)
        if removed:
            emit("info", "retention.removed", job=command.job, file=", ".join(removed))
        return Retained(job=command.job, removed=removed)

    def _move_latest_later(self, home: Home, save: SaveRef, error: Exception) -> None:
        """Log that `latest` could not follow a commit, and have it tried again."""
        cause = cause_of(error, node=self._node)
        emit("warning", "latest.unmoved", job=save.job, save=save.save_id, step=save.step,
             code=cause.code, cause=cause.message)  # fmt: skip
        self._latest.follow_later(home, save)


def not_found(command: GiveUp, cause: Cause) -> OutcomeFound:
    """Return that the outcome is unknown."""
    return OutcomeFound(save=command.save, fate=Fate.UNKNOWN, path=_final_path(command))


def not_discarded(command: Discard, cause: Cause) -> Discarded:
    """Log the cause: leftovers are not worth a failure."""
    emit("warning", "save.undiscarded", job=command.save.job, save=command.save.save_id,
         step=command.save.step, code=cause.code, cause=cause.message)  # fmt: skip
    return Discarded(save=command.save)


def not_retained(command: Retain, cause: Cause) -> Retained:
    """Log the cause: a checkpoint too many is not worth a failure."""
    emit("warning", "retention.failed", job=command.job, code=cause.code,
         cause=cause.message)  # fmt: skip
    return Retained(job=command.job, removed=())


def _final_path(command: GiveUp) -> str:
    return str(home_of(command.root, command.save).checkpoint_dir(command.save))


def _delete_left_over(home: Home, save: SaveRef) -> list[str]:
    """Delete what a save left, also what a late writer of this node made after its end. Return the
    names of what earlier attempts left and this call deleted.
    """
    is_committed = home.give_up(save) is Fate.COMMITTED
    home.discard(save)
    return home.clear_abandoned(save) if is_committed else []
