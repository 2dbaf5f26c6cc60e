"""The phases of a save, and one transition table for each role: the whole machine at a glance.

Data only. The roles move along these tables and nowhere else; a pair that is not listed changes
nothing. The tests walk the tables, and `docs/save-machine.md` draws them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """Where a save stands."""

    GATHERING = "gathering"
    """Some ranks have not yet reported what they offer or have staged."""
    PLANNING = "planning"
    """All ranks have reported; some wait for a layout, or are staging under a new one."""
    WRITING = "writing"
    """All ranks are staged; images are being written."""
    SEALING = "sealing"
    """The node's manifest fragment is being written."""
    PREPARED = "prepared"
    """All files of this node are durable; the coordinator decides."""
    FAILING = "failing"
    """This node cannot go on and has told the coordinator, which ends the save."""
    RESOLVING = "resolving"
    """The coordinator is silent past the deadline; the shared directory is being asked."""
    UNDECIDED = "undecided"
    """The shared directory showed neither outcome; it is asked again soon."""
    COLLECTING = "collecting"
    """The coordinator waits until every node is prepared."""
    INDEXING = "indexing"
    """The manifest and `.metadata` are being written."""
    PUBLISHING = "publishing"
    """The save's directory is being renamed to its final name."""
    ABORTING = "aborting"
    """The save's directory is being renamed, so that it can never be published."""
    SHOWING = "showing"
    """This node ended the save without the coordinator, and keeps the aborted directory until its
    peers have seen it."""
    RELEASING = "releasing"
    """The save has ended; a writer still reads an image, whose rank waits for the slot, or still
    writes the manifest fragment."""
    DISCARDING = "discarding"
    """What the save left under `.partial` is being deleted."""
    CONCLUDED = "concluded"
    """The save has ended, and nothing is left to do."""


ENDED: Final = frozenset({Phase.SHOWING, Phase.RELEASING, Phase.DISCARDING, Phase.CONCLUDED})
"""Phases in which the outcome is known, and told."""


class Trigger(StrEnum):
    """What moves a role from phase to phase."""

    ALL_REPORTED = "all ranks reported"
    ALL_STAGED = "all ranks staged"
    ALL_WRITTEN = "all files durable"
    SEALED = "fragment durable"
    CANNOT = "this node cannot go on"
    OUTCOME = "outcome heard"
    OVERDUE = "deadline passed"
    UNSURE = "deadline passed, and an earlier life may have been prepared"
    ABORT_SEEN = "the directory shows an abort"
    COMMIT_SEEN = "the directory shows a commit"
    NEITHER_SEEN = "the directory shows neither"
    LOOK_AGAIN = "time to look again"
    QUIET = "all writers quiet"
    NOTHING_LEFT = "all writers quiet, nothing to delete"
    DISCARDED = "leftovers deleted"
    NEEDS_PLAN = "a rank needs a layout"
    ALL_GATHERED = "all nodes gathered"
    PLAN_MADE = "plan made"
    PLAN_SUFFICES = "plan made, nothing else wanted"
    ALL_PREPARED = "all nodes prepared"
    INDEX_BUILT = "index built"
    PUBLISHED = "published"
    REFUSED = "cannot become a checkpoint"
    GIVEN_UP = "giving up has ended"


PARTICIPANT: Final[dict[tuple[Phase, Trigger], Phase]] = {
    (Phase.GATHERING, Trigger.ALL_REPORTED): Phase.PLANNING,
    (Phase.GATHERING, Trigger.ALL_STAGED): Phase.WRITING,
    (Phase.PLANNING, Trigger.ALL_STAGED): Phase.WRITING,
    (Phase.WRITING, Trigger.ALL_WRITTEN): Phase.SEALING,
    (Phase.SEALING, Trigger.SEALED): Phase.PREPARED,
    **{
        (phase, Trigger.CANNOT): Phase.FAILING
        for phase in (Phase.GATHERING, Phase.PLANNING, Phase.WRITING, Phase.SEALING)
    },
    **{
        (phase, Trigger.OUTCOME): Phase.RELEASING
        for phase in (
            Phase.GATHERING,
            Phase.PLANNING,
            Phase.WRITING,
            Phase.SEALING,
            Phase.PREPARED,
            Phase.FAILING,
            Phase.RESOLVING,
            Phase.UNDECIDED,
        )
    },
    (Phase.PLANNING, Trigger.PLAN_SUFFICES): Phase.CONCLUDED,
    (Phase.PREPARED, Trigger.OVERDUE): Phase.RESOLVING,
    (Phase.FAILING, Trigger.OVERDUE): Phase.SHOWING,
    (Phase.FAILING, Trigger.UNSURE): Phase.RESOLVING,
    (Phase.RESOLVING, Trigger.ABORT_SEEN): Phase.SHOWING,
    (Phase.RESOLVING, Trigger.COMMIT_SEEN): Phase.RELEASING,
    (Phase.RESOLVING, Trigger.NEITHER_SEEN): Phase.UNDECIDED,
    (Phase.UNDECIDED, Trigger.LOOK_AGAIN): Phase.RESOLVING,
    (Phase.RESOLVING, Trigger.OVERDUE): Phase.RELEASING,
    (Phase.UNDECIDED, Trigger.OVERDUE): Phase.RELEASING,
    (Phase.SHOWING, Trigger.OVERDUE): Phase.RELEASING,
    (Phase.RELEASING, Trigger.QUIET): Phase.DISCARDING,
    (Phase.RELEASING, Trigger.NOTHING_LEFT): Phase.CONCLUDED,
    (Phase.DISCARDING, Trigger.DISCARDED): Phase.CONCLUDED,
}
"""What a participant does; pairs not listed change nothing."""

COORDINATOR: Final[dict[tuple[Phase, Trigger], Phase]] = {
    (Phase.GATHERING, Trigger.NEEDS_PLAN): Phase.PLANNING,
    (Phase.GATHERING, Trigger.ALL_GATHERED): Phase.COLLECTING,
    (Phase.PLANNING, Trigger.PLAN_MADE): Phase.COLLECTING,
    (Phase.PLANNING, Trigger.PLAN_SUFFICES): Phase.CONCLUDED,
    (Phase.COLLECTING, Trigger.ALL_PREPARED): Phase.INDEXING,
    (Phase.INDEXING, Trigger.INDEX_BUILT): Phase.PUBLISHING,
    (Phase.PUBLISHING, Trigger.PUBLISHED): Phase.CONCLUDED,
    **{
        (phase, Trigger.REFUSED): Phase.ABORTING
        for phase in (
            Phase.GATHERING,
            Phase.PLANNING,
            Phase.COLLECTING,
            Phase.INDEXING,
            Phase.PUBLISHING,
        )
    },
    (Phase.ABORTING, Trigger.GIVEN_UP): Phase.CONCLUDED,
}
"""What a coordinator does; pairs not listed change nothing."""
