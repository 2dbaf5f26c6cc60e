"""Events: all that can happen to a node, and the only input of the core. Past participles by name.

Each slow command ends in exactly one event, for success or failure. Events can be written down and
read back.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from milepost.storage.fate import Fate
from milepost.wire.messages import (
    Cause,
    Join,
    Leave,
    PeerMessage,
    RankLayout,
    RankMessage,
    SaveRef,
    SignalMessage,
    Staged,
    WrittenFile,
)


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all events."""


class Started(Event, frozen=True):
    """The daemon's loop has begun. The first event of each daemon."""


class JobRecalled(Event, frozen=True):
    """A job is in the journal, from an earlier life of this daemon."""

    message: Join
    staged: tuple[tuple[int, Staged], ...]
    """What the arenas of the local ranks hold completely, as (rank, its message), in the order of
    the saves."""
    arenas: tuple[tuple[int, str], ...]
    """All arenas of the local ranks, as (rank, path)."""


class SessionOpened(Event, frozen=True):
    """A trainer said hello."""

    session: int
    """Given by the runtime, and never used again."""


class RankJoined(Event, frozen=True):
    """A session asked to join a job."""

    session: int
    pid: int
    message: Join


class RankSaid(Event, frozen=True):
    """A session that has joined sent a message about a save."""

    session: int
    message: RankMessage


class RankSignalled(Event, frozen=True):
    """A session that has joined sent a message about preemption."""

    session: int
    message: SignalMessage


class RankLeft(Event, frozen=True):
    """A session said goodbye. It is answered when nothing of its job is pending."""

    session: int
    message: Leave


class SessionLost(Event, frozen=True):
    """The trainer's process is gone, or its session was closed for a fault."""

    session: int
    reason: str
    staged: tuple[Staged, ...] = ()
    """What its arenas hold completely: it may have died before it could say so."""
    arenas: tuple[str, ...] = ()
    """The paths of all its arenas, also of those that it has not staged into yet."""


class PeerSaid(Event, frozen=True):
    """Another node sent a message, or this node did in its other role."""

    node_id: str
    message: PeerMessage


class BytesWritten(Event, frozen=True):
    """A writer has written that many bytes more. Progress for people, not a completion."""

    save: SaveRef
    count: int


class FileDurable(Event, frozen=True):
    """Completion of WriteImage: the file is synced."""

    save: SaveRef
    file: WrittenFile


class FileFailed(Event, frozen=True):
    """Completion of WriteImage: there is no complete file."""

    save: SaveRef
    rank: int
    cause: Cause


class FragmentDurable(Event, frozen=True):
    """Completion of WriteFragment: the manifest fragment and the directory are synced."""

    save: SaveRef
    fragment: str


class FragmentFailed(Event, frozen=True):
    """Completion of WriteFragment: it could not be written."""

    save: SaveRef
    cause: Cause


class PlanMade(Event, frozen=True):
    """Completion of MakePlan: layouts for the ranks that offered."""

    save: SaveRef
    layouts: tuple[RankLayout, ...]
    warnings: tuple[Cause, ...]


class PlanFailed(Event, frozen=True):
    """Completion of MakePlan: the offers cannot become a checkpoint."""

    save: SaveRef
    cause: Cause


class IndexBuilt(Event, frozen=True):
    """Completion of BuildIndex: the manifest and `.metadata` are durable, under `.partial`."""

    save: SaveRef
    checkpoint_bytes: int
    warnings: tuple[Cause, ...] = ()


class IndexFailed(Event, frozen=True):
    """Completion of BuildIndex: files are missing, or do not fit together."""

    save: SaveRef
    cause: Cause


class Published(Event, frozen=True):
    """Completion of Publish: the checkpoint is durable under its final name."""

    save: SaveRef
    path: str
    at_ms: int
    """Wall clock, milliseconds since 1970."""


class PublishFailed(Event, frozen=True):
    """Completion of Publish: the rename did not happen, or nobody knows if it did."""

    save: SaveRef
    cause: Cause


class OutcomeFound(Event, frozen=True):
    """Completion of GiveUp."""

    save: SaveRef
    fate: Fate
    path: str


class Retained(Event, frozen=True):
    """Completion of Retain: checkpoints that no rule keeps are removed, or the log says why not."""

    job: str
    removed: tuple[str, ...]


class Discarded(Event, frozen=True):
    """Completion of Discard: what a save left is deleted, or the log says why not."""

    save: SaveRef


class TimerFired(Event, frozen=True):
    """A timer has run out."""

    timer: str


class StopRequested(Event, frozen=True):
    """The daemon was told to end: it finishes what was staged and takes nothing new. The second one
    ends it at once.
    """


ParticipantEvent: TypeAlias = (
    BytesWritten
    | FileDurable
    | FileFailed
    | FragmentDurable
    | FragmentFailed
    | OutcomeFound
    | Discarded
)
"""Events that concern a save's participant."""

CoordinatorEvent: TypeAlias = (
    PlanMade | PlanFailed | IndexBuilt | IndexFailed | Published | PublishFailed | OutcomeFound
)
"""Events that concern a save's coordinator."""

SaveEvent: TypeAlias = ParticipantEvent | CoordinatorEvent

AnyEvent: TypeAlias = (
    Started
    | JobRecalled
    | SessionOpened
    | RankJoined
    | RankSaid
    | RankSignalled
    | RankLeft
    | SessionLost
    | PeerSaid
    | SaveEvent
    | Retained
    | TimerFired
    | StopRequested
)
