"""The table of slow commands: who carries each one out, and what its failure is.

The law of one completion is kept here and nowhere else. An executor returns its command's
completion event. If it returns a `Cause` or raises, the same row of the table makes the failure
event of it. So each slow command ends in exactly one event. Even an executor that is broken only
fails its save; the log has the trace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from milepost.wire.messages import Cause
from milepostd.core.commands import (
    BuildIndex,
    Discard,
    GiveUp,
    MakePlan,
    Publish,
    Retain,
    SlowCommand,
    WriteFragment,
    WriteImage,
)
from milepostd.core.events import (
    AnyEvent,
    Discarded,
    FileFailed,
    FragmentFailed,
    IndexFailed,
    PlanFailed,
    PublishFailed,
)
from milepostd.executors.directories import SaveDirectories, not_discarded, not_found, not_retained
from milepostd.executors.failures import cause_of
from milepostd.executors.images import Images
from milepostd.executors.plans import Plans

C = TypeVar("C")


class Executor(NamedTuple, Generic[C]):
    """A row of the table: how one kind of command is carried out."""

    execute: Callable[[C], Awaitable[AnyEvent | Cause]]
    """Returns the completion event, or the cause of the failure; or raises."""
    failed: Callable[[C, Cause], AnyEvent]
    """Returns the completion event of a command that failed."""


def make_executors(
    images: Images, plans: Plans, directories: SaveDirectories
) -> dict[type, Executor[Any]]:
    """Return the row of each slow command."""

    async def discard(command: Discard) -> Discarded:
        images.forget(command.save)
        return await directories.discard(command)

    def file_failed(command: WriteImage, cause: Cause) -> FileFailed:
        return FileFailed(save=command.save, rank=command.rank, cause=cause)

    def fragment_failed(command: WriteFragment, cause: Cause) -> FragmentFailed:
        return FragmentFailed(save=command.save, cause=cause)

    def plan_failed(command: MakePlan, cause: Cause) -> PlanFailed:
        return PlanFailed(save=command.save, cause=cause)

    def index_failed(command: BuildIndex, cause: Cause) -> IndexFailed:
        return IndexFailed(save=command.save, cause=cause)

    def publish_failed(command: Publish, cause: Cause) -> PublishFailed:
        return PublishFailed(save=command.save, cause=cause)

    return {
        WriteImage: Executor(images.write_image, file_failed),
        WriteFragment: Executor(images.write_fragment, fragment_failed),
        MakePlan: Executor(plans.make_plan, plan_failed),
        BuildIndex: Executor(plans.build_index, index_failed),
        Publish: Executor(directories.publish, publish_failed),
        GiveUp: Executor(directories.give_up, not_found),
        Discard: Executor(discard, not_discarded),
        Retain: Executor(directories.retain, not_retained),
    }


async def carry_out(
    table: Mapping[type, Executor[Any]], command: SlowCommand, node: str
) -> AnyEvent:
    """Carry out a slow command and return its one completion event. Never raises an Exception.

    Args:
        table: from `make_executors`.
        command: what to do.
        node: this node's id, named in the cause of a failure.
    """
    executor = table[type(command)]
    try:
        outcome = await executor.execute(command)
    except Exception as error:  # the law: whatever happens, one event
        rank = command.rank if isinstance(command, WriteImage) else -1
        outcome = cause_of(error, node=node, rank=rank)
    return executor.failed(command, outcome) if isinstance(outcome, Cause) else outcome
