"""Commands: all that the core can ask of the runtime, which carries them out. Imperatives by name.

A slow command ends in exactly one event; its docstring names the events.
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
    """Send a message to a trainer."""

    session: int
    message: DaemonMessage


class Send(Command, frozen=True):
    """Send a message to another node; it may be lost. Messages to the node itself never leave the
    core.
    """

    node: NodeRef
    message: PeerMessage


class MeetPeers(Command, frozen=True):
    """Let these nodes connect to this one."""

    nodes: tuple[NodeRef, ...]


class StartPlanner(Command, frozen=True):
    """Start the planner's child process ahead of time: a plan will be needed soon."""


class WarmPlanner(Command, frozen=True):
    """Have the planner's child process import torch ahead of time: an index will be needed soon.
    Given after the plan, since trainers wait for the plan and nobody waits for the index.
    """


class WriteImage(Command, frozen=True):
    """Slow: FileDurable or FileFailed. Write a rank's image to its data file and sync it."""

    save: SaveRef
    root: str
    rank: int
    arena: str
    slot: int
    layout_id: str
    until_ns: int
    """Failures that may pass are tried again until this instant."""
    umask: int = -1
    """Gives the modes of what is made, as in `Join`."""


class AbandonWrite(Command, frozen=True):
    """Stop a WriteImage whose save has ended. It may hang for ever, and must not hold up others."""

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
    umask: int = -1
    """Gives the modes of what is made, as in `Join`."""


class MakePlan(Command, frozen=True):
    """Slow: PlanMade or PlanFailed. Plan for all ranks of the job; each report is an offer, or the
    layout that the rank has staged.
    """

    save: SaveRef
    reports: tuple[RankReport, ...]


class BuildIndex(Command, frozen=True):
    """Slow: IndexBuilt or IndexFailed. Read all fragments, then write and sync the manifest and
    `.metadata`.
    """

    save: SaveRef
    root: str
    files: tuple[WrittenFile, ...]
    fragments: tuple[str, ...]
    until_ns: int
    """Failures that may pass are tried again until this instant."""
    umask: int = -1
    """Gives the modes of what is made, as in `Join`."""


class Publish(Command, frozen=True):
    """Slow: Published or PublishFailed. Rename the save's directory to its final name, then move
    `latest` unless it names a newer checkpoint.
    """

    save: SaveRef
    root: str
    until_ns: int
    """Failures that may pass are tried again until this instant."""


class GiveUp(Command, frozen=True):
    """Slow: OutcomeFound. Rename the save's directory so that it can never be published, or see
    that it was published.
    """

    save: SaveRef
    root: str
    is_coordinator: bool
    """Only the coordinator publishes. So to the coordinator a directory that was never made means
    aborted, and so does one that stays where it was because it cannot be renamed."""
    until_ns: int = 0
    """Failures that may pass are tried again until this instant; 0: not at all, since the
    participant asks again."""
    was_prepared: bool = False
    """A node was prepared, so there was a directory: to see none proves nothing."""
    may_take_effect: bool = False
    """A publication may still happen, so a directory that stays where it was proves nothing."""


class Discard(Command, frozen=True):
    """Slow: Discarded. Delete what a save left under `.partial`."""

    save: SaveRef
    root: str


class Retain(Command, frozen=True):
    """Slow: Retained. Remove checkpoints that no rule keeps."""

    job: str
    root: str
    keep: Keep


class KeepJournal(Command, frozen=True):
    """Note in the journal what a restarted daemon has to know of this job. Done before anything of
    the job is written.
    """

    message: Join


class ForgetJournal(Command, frozen=True):
    """Remove an attempt from the journal: nothing of it is pending, and no rank of it is here."""

    job: str
    attempt: int


class SweepArenas(Command, frozen=True):
    """Unlink the arenas of these ranks' earlier attempts."""

    job: str
    below_attempt: int
    ranks: tuple[int, ...]


class RemoveArenas(Command, frozen=True):
    """Unlink the arenas of a rank that is gone."""

    paths: tuple[str, ...]


class SetTimer(Command, frozen=True):
    """Post TimerFired at this instant. A timer of that name that is set already is moved."""

    timer: str
    at_ns: int


class ClearTimer(Command, frozen=True):
    """Unset a timer."""

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
    """End the daemon."""

    reason: str


SlowCommand: TypeAlias = (
    WriteImage | WriteFragment | MakePlan | BuildIndex | Publish | GiveUp | Discard | Retain
)
"""Commands that end in exactly one event each."""

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
