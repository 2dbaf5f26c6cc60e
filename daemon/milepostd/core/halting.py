"""When the daemon ends: it was told to, or it is embedded and no trainer uses it; and in both cases
nothing is pending.
"""

from __future__ import annotations

from milepostd.core.commands import ClearTimer, Command, Halt, Log, SetTimer
from milepostd.core.timers import TimerKind, later, timer_name


class Halting:
    """Whether the daemon was told to end, and whether it waits for a trainer to come back.

    Args:
        is_embedded: a trainer started the daemon, so it ends when no trainer uses it.
        linger_s: how long an embedded daemon stays after the last trainer.
    """

    def __init__(self, *, is_embedded: bool, linger_s: float) -> None:
        self.is_embedded = is_embedded
        self.linger_s = linger_s
        self.stops = 0
        """How often the daemon was told to end."""
        self.is_lingering = False

    @property
    def is_draining(self) -> bool:
        """Whether the daemon takes nothing new, and only finishes what was staged."""
        return self.stops > 0

    def stop(self) -> list[Command]:
        """The daemon was told to end. The second time it ends at once."""
        self.stops += 1
        if self.stops > 1:
            return [Halt(reason="told to stop at once")]
        return [Log(level="info", event="daemon.draining")]

    def needs_idle(self, *, has_sessions: bool) -> bool:
        """Whether `check` needs to know if the node is idle. To find out costs a look at every
        save.
        """
        return self.stops == 1 or (self.is_embedded and not has_sessions)

    def check(self, *, is_idle: bool, has_sessions: bool, now_ns: int) -> list[Command]:
        """End the daemon if it may end; start or stop waiting for a trainer."""
        if self.stops == 1 and is_idle:
            return [Halt(reason="drained")]
        may_linger = self.is_embedded and is_idle and not has_sessions
        if may_linger == self.is_lingering:
            return []
        self.is_lingering = may_linger
        timer = timer_name(TimerKind.LINGER)
        if may_linger:
            return [SetTimer(timer=timer, at_ns=later(now_ns, self.linger_s))]
        return [ClearTimer(timer=timer)]

    def linger_over(self, *, is_idle: bool, has_sessions: bool) -> list[Command]:
        """End an embedded daemon to which no trainer has come back."""
        if has_sessions or not is_idle:
            return []
        return [Halt(reason="nothing is pending and no trainer is here")]
