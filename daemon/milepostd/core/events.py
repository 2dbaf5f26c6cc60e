"""What can happen to a node: facts, in the past tense. The only input of the core.

Each command that takes time ends in exactly one of these, success or failure. All are frozen and
can be written down and read back.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from milepost.storage.fate import Fate as Fate
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
    """The loop turns; the first event of every daemon."""


class JobRecalled(Event, frozen=True):
    """The journal of an earlier life of this daemon knows a job.

    `staged` is what the arenas of its local ranks hold completely, as (rank, word), in the order of
    the saves; `arenas` are all of their arenas, as (rank, path).
    """

    message: Join
    staged: tuple[tuple[int, Staged], ...]
    arenas: tuple[tuple[int, str], ...]


class SessionOpened(Event, frozen=True):
    """A trainer said hello. `session` is drawn by the runtime and never reused."""

    session: int


class RankJoined(Event, frozen=True):
    """A session asked for its place in a job."""

    session: int
    pid: int
    message: Join


class RankSaid(Event, frozen=True):
    """A joined session said something about a save."""

    session: int
    message: RankMessage


class RankSignalled(Event, frozen=True):
    """A joined session was told to go, or says how often it has asked whether anybody was."""

    session: int
    message: SignalMessage


class RankLeft(Event, frozen=True):
    """A session said goodbye; it is answered when nothing of its rank is pending."""

    session: int
    message: Leave


class SessionLost(Event, frozen=True):
    """The trainer's process is gone, or its session was closed for a fault.

    `staged` is what its arenas hold completely: it may have died between staging and saying so.
    `arenas` are the paths of all of them: of one that it has not staged into yet it has said
    nothing.
    """

    session: int
    reason: str
    staged: tuple[Staged, ...] = ()
    arenas: tuple[str, ...] = ()


class PeerSaid(Event, frozen=True):
    """Another node (or this node itself, in its other role) said something."""

    node_id: str
    message: PeerMessage


class BytesWritten(Event, frozen=True):
    """The writer moved on: progress for people, no completion."""

    save: SaveRef
    count: int


class FileDurable(Event, frozen=True):
    """Completion of WriteImage: the file is synced."""

    save: SaveRef
    file: WrittenFile


class FileFailed(Event, frozen=True):
    """Completion of WriteImage: the file is not there."""

    save: SaveRef
    rank: int
    cause: Cause


class FragmentDurable(Event, frozen=True):
    """Completion of WriteFragment: manifest fragment and directory are synced."""

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
    """Completion of BuildIndex: manifest and `.metadata` are durable in the save's directory."""

    save: SaveRef
    checkpoint_bytes: int


class IndexFailed(Event, frozen=True):
    """Completion of BuildIndex: files are missing or do not make a whole."""

    save: SaveRef
    cause: Cause


class Published(Event, frozen=True):
    """Completion of Publish: the checkpoint is there, durably, and `latest` has moved."""

    save: SaveRef
    path: str
    at_ms: int
    """Wall clock, milliseconds since 1970."""


class PublishFailed(Event, frozen=True):
    """Completion of Publish: the rename did not happen, or whether it did is not known."""

    save: SaveRef
    cause: Cause


class OutcomeFound(Event, frozen=True):
    """Completion of GiveUp."""

    save: SaveRef
    fate: Fate
    path: str


class Retained(Event, frozen=True):
    """Completion of Retain: old checkpoints that no rule keeps are gone (or a log line says why
    not).
    """

    job: str
    removed: tuple[str, ...]


class Discarded(Event, frozen=True):
    """Completion of Discard: what a failed save left is gone (or a log line says why not)."""

    save: SaveRef


class TimerFired(Event, frozen=True):
    """A timer set by SetTimer ran out."""

    timer: str


class StopRequested(Event, frozen=True):
    """The daemon shall end: finish what was staged, take nothing new. The second one ends it at
    once.
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
"""What a save's participant is told."""

CoordinatorEvent: TypeAlias = (
    PlanMade | PlanFailed | IndexBuilt | IndexFailed | Published | PublishFailed | OutcomeFound
)
"""What a save's coordinator is told."""

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
