"""Carries out what decides a save, and what follows from it: publish, give up, discard, retain.

All of it is work on the shared directory (`milepost.storage.root`). Each command ends in exactly
one event, success or failure; what was committed stays so, whatever else fails.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from milepost.storage.homes import Home, home_of
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef
from milepostd.core.commands import Discard, GiveUp, Publish, Retain
from milepostd.core.events import (
    AnyEvent,
    Discarded,
    Fate,
    OutcomeFound,
    Published,
    PublishFailed,
    Retained,
)
from milepostd.executors.failures import cause_of, retried
from milepostd.executors.latest import Latest
from milepostd.ops.faults import FaultPoints
from milepostd.ops.logs import emit


class Verdicts:
    """Executors of the commands that move whole checkpoint directories.

    Args:
        node: this node's id, named in what is told of a failure.
        faults: the points at which a test makes something happen.
        in_files: runs work on storage in a thread.
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

    async def publish(self, command: Publish) -> AnyEvent:
        """Give the save its final name, then let `latest` follow."""
        save, home = command.save, home_of(command.root, command.save)
        try:
            await self._faults.at("before-publish", save)
            publish = partial(self._in_files, partial(home.publish, save))
            path = await retried(publish, command.until_ns)
            at_ms = time.time_ns() // 1_000_000
        except Exception as error:  # every failure becomes the command's one event
            return PublishFailed(save=save, cause=cause_of(error, node=self._node))
        try:
            await self._faults.at("after-publish", save)
            await self._latest.advance(home, save)
            await self._faults.at("before-committed", save)
        except Exception as error:  # the rename has happened: it is a checkpoint
            self._move_latest_later(home, save, error)
        return Published(save=save, path=str(path), at_ms=at_ms)

    def _move_latest_later(self, home: Home, save: SaveRef, error: Exception) -> None:
        """What was committed stays so, whatever becomes of `latest`."""
        cause = cause_of(error, node=self._node)
        emit("warning", "latest.unmoved", job=save.job, save=save.save_id, step=save.step,
             code=cause.code, cause=cause.message)  # fmt: skip
        self._latest.follow_later(home, save)

    async def give_up(self, command: GiveUp) -> AnyEvent:
        """Take the save's directory out of the way, or find out how it ended."""
        save, home = command.save, home_of(command.root, command.save)
        is_forestalled = command.is_coordinator and not command.was_prepared
        look = home.forestall if is_forestalled else home.give_up
        try:
            ask = partial(self._in_files, partial(look, save))
            fate = Fate(await retried(ask, command.until_ns))
        except Exception as error:  # every failure becomes the command's one event
            cause = cause_of(error, node=self._node)
            emit("error", "save.unresolved", job=save.job, save=save.save_id, step=save.step,
                 code=cause.code, cause=cause.message)  # fmt: skip
            fate = Fate.UNKNOWN
            with suppress(Exception):  # the first failure has been told
                if (
                    command.is_coordinator
                    and not command.may_take_effect
                    and await self._in_files(
                        partial(home.is_unpublished, save, was_begun=command.was_prepared)
                    )
                ):
                    fate = Fate.ABORTED
        if fate is Fate.COMMITTED and command.is_coordinator:
            # It was published, in an earlier life perhaps, by one who did not get to this.
            try:
                await self._latest.advance(home, save)
            except Exception as error:  # it is a checkpoint all the same
                self._move_latest_later(home, save, error)
        return OutcomeFound(save=save, fate=fate, path=str(home.checkpoint_dir(save)))

    async def discard(self, command: Discard) -> AnyEvent:
        """Delete what a save left that has ended; if it was committed, what earlier attempts left,
        too.
        """
        try:
            cleared = await self._in_files(
                partial(_discard, home_of(command.root, command.save), command.save)
            )
        except Exception as error:  # leftovers are worth no more than a line
            cause = cause_of(error, node=self._node)
            emit("warning", "save.undiscarded", job=command.save.job, save=command.save.save_id,
                 step=command.save.step, code=cause.code, cause=cause.message)  # fmt: skip
            return Discarded(save=command.save)
        if cleared:
            emit("info", "partial.cleared", job=command.save.job, file=", ".join(cleared))
        return Discarded(save=command.save)

    async def retain(self, command: Retain) -> AnyEvent:
        """Remove the checkpoints that no rule keeps."""
        try:
            removed = await self._latest.retain(Root(command.root), command.keep)
        except Exception as error:  # a checkpoint too many is no loss
            cause = cause_of(error, node=self._node)
            emit("warning", "retention.failed", job=command.job, code=cause.code,
                 cause=cause.message)  # fmt: skip
            return Retained(job=command.job, removed=())
        if removed:
            emit("info", "retention.removed", job=command.job, file=", ".join(removed))
        return Retained(job=command.job, removed=removed)


def _discard(home: Home, save: SaveRef) -> list[str]:
    """Delete what a save left, also what a late writer of this node has made since it ended. Return
    the names of what else was cleared.
    """
    is_committed = home.give_up(save) == "committed"
    home.discard(save)
    return home.clear_abandoned(save) if is_committed else []
