"""What a node can ask of the world: imperatives. The only output of the core.

The runtime carries them out. Those marked *slow* end in exactly one event, named in their
docstring.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from milepost.wire.messages import (
    Cause,
    DaemonMessage,
    Join,
    Keep,
    NodeRef,
    PeerMessage,
    RankReport,
    SaveRef,
    WrittenFile,
)


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all commands."""


class Reply(Command, frozen=True):
    """Tell a trainer."""

    session: int
    message: DaemonMessage


class Send(Command, frozen=True):
    """Tell a node; may be lost. A message to the node itself is handled by the core and never
    leaves it.
    """

    node: NodeRef
    message: PeerMessage


class MeetPeers(Command, frozen=True):
    """These nodes may now talk to this one."""

    nodes: tuple[NodeRef, ...]


class StartPlanner(Command, frozen=True):
    """A plan will be wanted here soon: start the planner's child ahead of time."""


class WarmPlanner(Command, frozen=True):
    """An index will be wanted here soon: have the planner's child import torch. After the plan, not
    before: trainers wait for the plan, and nobody waits for the index.
    """


class WriteImage(Command, frozen=True):
    """Slow: FileDurable or FileFailed. Write a rank's image to its data file, durably."""

    save: SaveRef
    root: str
    rank: int
    arena: str
    slot: int
    layout_id: str
    until_ns: int
    """Failures that may pass are tried again until this instant."""


class AbandonWrite(Command, frozen=True):
    """A WriteImage outlives its save: it may hang for ever, and must not hold up the next one."""

    save: SaveRef
    rank: int


class WriteFragment(Command, frozen=True):
    """Slow: FragmentDurable or FragmentFailed. Write the node's manifest fragment and sync the
    directory.
    """

    save: SaveRef
    root: str
    files: tuple[WrittenFile, ...]
    until_ns: int
    """Failures that may pass are tried again until this instant."""


class MakePlan(Command, frozen=True):
    """Slow: PlanMade or PlanFailed. `reports` holds an offer or the staged layout of every rank of
    the job.
    """

    save: SaveRef
    reports: tuple[RankReport, ...]


class BuildIndex(Command, frozen=True):
    """Slow: IndexBuilt or IndexFailed. Read all fragments, write manifest and `.metadata`,
    durably.
    """

    save: SaveRef
    root: str
    files: tuple[WrittenFile, ...]
    fragments: tuple[str, ...]
    until_ns: int
    """How long what fails for a passing reason is tried again."""


class Publish(Command, frozen=True):
    """Slow: Published or PublishFailed. The one rename; then `latest`, unless it names a newer."""

    save: SaveRef
    root: str
    until_ns: int
    """Failures that may pass are tried again until this instant."""


class GiveUp(Command, frozen=True):
    """Slow: OutcomeFound. Take the save's directory out of the way, so that it can never be
    published.

    is_coordinator: nobody else publishes, so a directory that was never made counts as aborted,
    unless a node `was_prepared`: then there was one, and that it shows nowhere proves nothing. A
    directory that cannot be moved, and is where it was, is not published either, unless a
    publication `may_take_effect` still. What fails for a passing reason is tried again `until_ns`.
    """

    save: SaveRef
    root: str
    is_coordinator: bool
    until_ns: int = 0
    """0: not at all, since who asks does so again."""
    was_prepared: bool = False
    may_take_effect: bool = False


class Discard(Command, frozen=True):
    """Slow: Discarded. Delete what a failed save left under `.partial`."""

    save: SaveRef
    root: str


class Retain(Command, frozen=True):
    """Slow: Retained. Remove checkpoints that no rule keeps."""

    job: str
    root: str
    keep: Keep


class KeepJournal(Command, frozen=True):
    """Write down what a restarted daemon has to know of this job; before anything of it is
    written.
    """

    message: Join


class ForgetJournal(Command, frozen=True):
    """Nothing is pending of this attempt, and nobody of it is there: a restarted daemon need not
    know it.
    """

    job: str
    attempt: int


class SweepArenas(Command, frozen=True):
    """Unlink what these ranks' earlier attempts left in shared memory."""

    job: str
    below_attempt: int
    ranks: tuple[int, ...]


class RemoveArenas(Command, frozen=True):
    """Unlink the shared memory of a rank that is gone."""

    paths: tuple[str, ...]


class SetTimer(Command, frozen=True):
    """Fire TimerFired at this instant; a timer of that name that is set already is moved."""

    timer: str
    at_ns: int


class ClearTimer(Command, frozen=True):
    """Forget the timer."""

    timer: str


LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class Log(Command, frozen=True):
    """Write a log line; `event` is a dotted name, noun first."""

    level: LogLevel
    event: str
    save: SaveRef | None = None
    cause: Cause | None = None
    fields: dict[str, str | int | float] = {}


class Halt(Command, frozen=True):
    """End the daemon: nothing is pending."""

    reason: str


SlowCommand: TypeAlias = (
    WriteImage | WriteFragment | MakePlan | BuildIndex | Publish | GiveUp | Discard | Retain
)
"""Each ends in exactly one event."""

AnyCommand: TypeAlias = (
    Reply
    | Send
    | MeetPeers
    | StartPlanner
    | WarmPlanner
    | AbandonWrite
    | KeepJournal
    | ForgetJournal
    | SweepArenas
    | RemoveArenas
    | SetTimer
    | ClearTimer
    | Log
    | Halt
    | SlowCommand
)
