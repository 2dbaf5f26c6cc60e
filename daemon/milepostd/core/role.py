"""What both roles of a save share: a phase that only its table moves, a clock, and timers.

An event that the phase does not allow changes nothing. Time comes as an argument in nanoseconds.
Methods return commands; nothing here does anything by itself.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from milepost.wire.messages import SILENCE_S, Ending, Fail, Outcome, SaveRef
from milepostd.core.causes import PLAN_VOIDING
from milepostd.core.commands import ClearTimer, Command, SetTimer
from milepostd.core.job import Job
from milepostd.core.phases import ENDED, Phase, Trigger
from milepostd.core.timers import TimerKind, timer_name

SaveKey: TypeAlias = tuple[str, str]
"""Job and save id."""

SECOND_NS: Final = 1_000_000_000

RESEND_S: Final = 2.0
"""How long a node waits for an answer before it repeats itself: peers answer within milliseconds,
so a silence of seconds means that a message was lost or a peer restarts."""

RESOLVE_GRACE_S: Final = 15.0
"""How long beyond the deadline a node that depends on the coordinator waits for its verdict before
it acts for itself, and how long the shared directory then has to answer."""

VERDICT_GRACE_S: Final = 2.0
"""How long beyond the deadline the coordinator waits: a node knows which of its ranks is missing,
the coordinator only which node, so the nodes speak first."""

PEER_LOST_S: Final = SILENCE_S
"""How long nothing may be heard of an awaited node, once this daemon is told to end."""


class Role:
    """What both roles share: a phase that only the table moves, and the save's clock."""

    table: dict[tuple[Phase, Trigger], Phase]
    deadline_timer: TimerKind
    repeat_timer: TimerKind

    def __init__(self, job: Job, save: SaveRef, now_ns: int) -> None:
        self.job = job
        self.save = save
        self.phase = Phase.GATHERING
        self.opened_at_ns = now_ns
        self.verdict: Outcome | None = None
        """How it ended; also None if it only asked for layouts."""

    def move(self, trigger: Trigger) -> bool:
        """Take the transition if the phase allows it; say whether it did."""
        target = self.table.get((self.phase, trigger))
        if target is None:
            return False
        self.phase = target
        return True

    @property
    def key(self) -> SaveKey:
        """Where the node keeps the save."""
        return self.save.job, self.save.save_id

    @property
    def outcome(self) -> Ending | None:
        """How it ended, in a word."""
        return None if self.verdict is None else self.verdict.outcome

    @property
    def has_ended(self) -> bool:
        """Whether the outcome is known, or the layouts that were asked for."""
        return self.phase in ENDED

    def set_timer(self, kind: TimerKind, at_ns: int) -> SetTimer:
        return SetTimer(timer=timer_name(kind, self.save.job, self.save.save_id), at_ns=at_ns)

    def clear_timers(self) -> list[Command]:
        """Clear both timers of this role and save."""
        return [
            ClearTimer(timer=timer_name(kind, self.save.job, self.save.save_id))
            for kind in (self.deadline_timer, self.repeat_timer)
        ]

    def deadline_at_ns(self) -> int:
        return self.opened_at_ns + int(self.job.deadline_s * SECOND_NS)


def failed_outcome(failure: Fail) -> Outcome:
    """Return the outcome of a save that cannot become a checkpoint, for this reason."""
    return Outcome(
        save=failure.save,
        outcome=Ending.SKIPPED if failure.skip else Ending.FAILED,
        cause=failure.cause,
        layout_valid=failure.cause.code not in PLAN_VOIDING,
    )
