"""What a node knows of one job: which ranks are where, and how its saves have ended so far.

Data only. A job's object lives as long as a save refers to it, even if a newer attempt has begun.
"""

from __future__ import annotations

from typing import Final

import msgspec

from milepost.wire.messages import Cause, Ending, Join, Keep, NodeRef, SaveRef

NO_ORDER: Final = (-1, -1)
"""The order of an invalid save id: before every save."""

NO_SESSION: Final = -1
"""The session of a rank that is in the journal and has not come back yet."""

SAVE_ID_CHARACTERS_MAX: Final = 40
"""Longest save id accepted: two counters of 19 digits and a dash."""


class LastCommitted(msgspec.Struct, frozen=True):
    """The newest checkpoint that this node knows of."""

    save: SaveRef
    path: str
    checkpoint_bytes: int
    elapsed_s: float
    at_ms: int


class LastFailed(msgspec.Struct, frozen=True):
    """The newest save that did not become a checkpoint."""

    save: SaveRef
    cause: Cause


class History(msgspec.Struct):
    """How a job's saves have ended at this node. All attempts share one object, since a save of an
    earlier attempt may end after a newer attempt has begun.
    """

    last_committed: LastCommitted | None = None
    last_failed: LastFailed | None = None
    last_skipped: LastFailed | None = None
    outcome_counts: dict[Ending, int] = msgspec.field(default_factory=dict)

    def note_committed(self, committed: LastCommitted) -> None:
        """Remember the checkpoint, unless one of a later save is known."""
        newest = self.last_committed
        if newest is None or save_order(newest.save) <= save_order(committed.save):
            self.last_committed = committed

    def note_failed(self, outcome: Ending, save: SaveRef, cause: Cause) -> None:
        """Remember why a save did not become a checkpoint. Skips are kept apart: the user asked for
        them, and they must not hide a failure.
        """
        found = LastFailed(save=save, cause=cause)
        if outcome is Ending.SKIPPED:
            self.last_skipped = found
        else:
            self.last_failed = found


class Seat(msgspec.Struct):
    """One local rank of the job."""

    session: int
    pid: int
    arenas: set[str] = msgspec.field(default_factory=set)
    is_lost: bool = False
    is_leaving: bool = False
    reason: str = ""
    """Why the rank is lost or leaving."""


class Job:
    """One attempt of one training run, as seen by one node."""

    def __init__(self, join: Join, node_id: str, history: History | None = None) -> None:
        self.job = join.job
        self.attempt = join.attempt
        self.root = join.root
        self.node_of_rank = join.node_of_rank
        self.cohort = join.cohort
        self.keep: Keep = join.keep
        self.deadline_s = join.deadline_s
        self.umask = join.umask
        self.coordinator: NodeRef = join.cohort[join.node_of_rank[0]]
        self.is_coordinator = self.coordinator.node_id == node_id
        own = [index for index, node in enumerate(join.cohort) if node.node_id == node_id]
        self.ranks_here = tuple(
            rank for rank, index in enumerate(join.node_of_rank) if index in own
        )
        self._ranks_of: dict[str, tuple[int, ...]] = {}
        self._nodes: dict[str, NodeRef] = {}
        self.seats: dict[int, Seat] = {}
        self.is_journalled = False
        """Whether the attempt is in the journal, where a restarted daemon finds it."""
        self.history = History() if history is None else history

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.node_of_rank)

    @property
    def ranks_of(self) -> dict[str, tuple[int, ...]]:
        """The ranks of each node that has at least one; these nodes are the cohort of each save.

        Made at the first use, since only the coordinator of a large job needs it.
        """
        if not self._ranks_of:
            ranks: dict[str, list[int]] = {}
            for rank, index in enumerate(self.node_of_rank):
                ranks.setdefault(self.cohort[index].node_id, []).append(rank)
            self._ranks_of = {node: tuple(numbers) for node, numbers in ranks.items()}
        return self._ranks_of

    @property
    def nodes(self) -> dict[str, NodeRef]:
        """The cohort of each save, by node id; made at the first use."""
        if not self._nodes:
            self._nodes = {node.node_id: node for node in self.peers()}
        return self._nodes

    def hears(self, node_id: str) -> bool:
        """Whether this node listens to another: all listen to the coordinator, which listens to the
        whole cohort.
        """
        return node_id == self.coordinator.node_id or (
            self.is_coordinator and node_id in self.nodes
        )

    def peers(self) -> tuple[NodeRef, ...]:
        """Return the nodes that have at least one rank, in the order of the cohort."""
        used = set(self.node_of_rank)
        if len(used) == len(self.cohort):
            return self.cohort
        return tuple(node for index, node in enumerate(self.cohort) if index in used)

    def agrees_with(self, join: Join) -> bool:
        """Whether a rank of the same attempt describes the same job."""
        return (
            join.root == self.root
            and join.node_of_rank == self.node_of_rank
            and join.cohort == self.cohort
        )


def save_order(save: SaveRef) -> tuple[int, int]:
    """Return (attempt, count) of a save id, by which later saves compare greater.

    A trainer or a peer may send an invalid id: NO_ORDER.
    """
    attempt, _, count = save.save_id.partition("-")
    if (
        len(save.save_id) > SAVE_ID_CHARACTERS_MAX
        or not save.save_id.isascii()
        or not (attempt.isdigit() and count.isdigit())
    ):
        return NO_ORDER
    return int(attempt), int(count)
