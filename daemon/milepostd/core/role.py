"""What both roles of a save share: a phase that only its table moves, a clock, and timers.

An event that the phase does not allow changes nothing. Time comes as an argument in nanoseconds.
Methods return commands; nothing here does anything by itself.
"""

from __future__ import annotations

from typing import Final

from milepost.wire.messages import SILENCE_S, SaveRef
from milepostd.core.commands import ClearTimer, Command, SetTimer
from milepostd.core.job import Job
from milepostd.core.phases import Phase, Trigger

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
    timer_prefix: str

    def __init__(self, job: Job, save: SaveRef, now_ns: int) -> None:
        self.job = job
        self.save = save
        self.phase = Phase.GATHERING
        self.opened_at_ns = now_ns

    def move(self, trigger: Trigger) -> bool:
        """Take the transition if the phase allows it; say whether it did."""
        target = self.table.get((self.phase, trigger))
        if target is None:
            return False
        self.phase = target
        return True

    @property
    def is_concluded(self) -> bool:
        return self.phase is Phase.CONCLUDED

    def timer(self, kind: str) -> str:
        """Name a timer of this role and save."""
        return f"{self.timer_prefix}.{kind}/{self.save.job}/{self.save.save_id}"

    def set_timer(self, kind: str, at_ns: int) -> SetTimer:
        return SetTimer(timer=self.timer(kind), at_ns=at_ns)

    def clear_timers(self, *kinds: str) -> list[Command]:
        return [ClearTimer(timer=self.timer(kind)) for kind in kinds]

    def deadline_at_ns(self) -> int:
        return self.opened_at_ns + int(self.job.deadline_s * SECOND_NS)
