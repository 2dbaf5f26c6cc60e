"""What both roles of a save share: the phase, the outcome, and two timers.

Only the role's table moves its phase; an event that the phase does not allow changes nothing.
Methods take the time as an argument, in nanoseconds, and return commands.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from milepost.wire.messages import SILENCE_S, Ending, Fail, Outcome, SaveRef
from milepostd.core.causes import PLAN_VOIDING
from milepostd.core.commands import ClearTimer, Command, SetTimer
from milepostd.core.job import Job
from milepostd.core.phases import ENDED, Phase, Trigger
from milepostd.core.timers import TimerKind, later, timer_name

SaveKey: TypeAlias = tuple[str, str]
"""Job and save id."""

RESEND_S: Final = 2.0
"""How long a node waits for an answer before it repeats its message. Peers answer within
milliseconds, so a silence of seconds means that a message was lost or that a peer restarts."""

RESOLVE_GRACE_S: Final = 15.0
"""How long a participant waits for the coordinator's verdict, beyond the deadline, before it acts
alone; and how long the shared directory then has to answer."""

VERDICT_GRACE_S: Final = 2.0
"""How long the coordinator waits beyond the deadline. The nodes speak first, since they know which
of their ranks is missing; the coordinator knows only which node."""

PEER_LOST_S: Final = SILENCE_S
"""A daemon that was told to end waits no longer for a node that was silent for so long."""


class Role:
    """One node's role in one save."""

    table: dict[tuple[Phase, Trigger], Phase]
    deadline_timer: TimerKind
    repeat_timer: TimerKind

    def __init__(self, job: Job, save: SaveRef, now_ns: int) -> None:
        self.job = job
        self.save = save
        self.phase = Phase.GATHERING
        self.opened_at_ns = now_ns
        self.verdict: Outcome | None = None
        """How the save ended. None while it goes on, and for a save that only asked for layouts."""

    def move(self, trigger: Trigger) -> bool:
        """Move to the next phase if the table has one for this trigger; return whether it has."""
        target = self.table.get((self.phase, trigger))
        if target is None:
            return False
        self.phase = target
        return True

    @property
    def key(self) -> SaveKey:
        """The save's key at its node."""
        return self.save.job, self.save.save_id

    @property
    def outcome(self) -> Ending | None:
        """How the save ended; None as for `verdict`."""
        return None if self.verdict is None else self.verdict.outcome

    @property
    def has_ended(self) -> bool:
        """Whether the outcome is known, or the layouts are there that the save asked for."""
        return self.phase in ENDED

    def set_timer(self, kind: TimerKind, at_ns: int) -> SetTimer:
        return SetTimer(timer=timer_name(kind, self.save.job, self.save.save_id), at_ns=at_ns)

    def clear_timers(self) -> list[Command]:
        """Clear both timers."""
        return [
            ClearTimer(timer=timer_name(kind, self.save.job, self.save.save_id))
            for kind in (self.deadline_timer, self.repeat_timer)
        ]

    def deadline_at_ns(self) -> int:
        return later(self.opened_at_ns, self.job.deadline_s)


def failed_outcome(failure: Fail) -> Outcome:
    """Return the outcome of a save that can never become a checkpoint, for this reason."""
    return Outcome(
        save=failure.save,
        outcome=Ending.SKIPPED if failure.skip else Ending.FAILED,
        cause=failure.cause,
        layout_valid=failure.cause.code not in PLAN_VOIDING,
    )
