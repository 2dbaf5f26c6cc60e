"""The core's clock: instants in nanoseconds, and the names of timers.

A timer is only a name (in `SetTimer`, `ClearTimer` and `TimerFired`), made of its kind and of the
job or the save that it belongs to. To set a timer again under the same name moves it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

SECOND_NS: Final = 1_000_000_000


class TimerKind(StrEnum):
    """What happens when the timer runs out."""

    DEADLINE = "participant.deadline"
    """A save's participant stops waiting."""
    RESEND = "participant.resend"
    """A save's participant repeats its last message, which may have been lost."""
    VERDICT = "coordinator.deadline"
    """A save's coordinator stops waiting."""
    ASK = "coordinator.ask"
    """A save's coordinator asks the nodes that are silent."""
    PREEMPTION = "preemption"
    """A job's preemption repeats its messages, which may have been lost."""
    RECALL = "recall"
    """A job's trainers that did not come back after a restart of the daemon count as dead."""
    LINGER = "linger"
    """An embedded daemon that no trainer uses ends."""


_KINDS: Final = {str(kind): kind for kind in TimerKind}


def later(at_ns: int, seconds: float) -> int:
    """Return the instant that many seconds after this one."""
    return at_ns + int(seconds * SECOND_NS)


def timer_name(kind: TimerKind, job: str = "", save_id: str = "") -> str:
    """Return the name of a timer: a save's, a job's, or, with neither, the node's."""
    return f"{kind}/{job}/{save_id}" if save_id else f"{kind}/{job}"


def timer_kind(name: str) -> TimerKind | None:
    """Return the kind of a timer; None if no timer has such a name."""
    return _KINDS.get(name.partition("/")[0])


def job_of_timer(name: str) -> str:
    """Return the job that a job's timer belongs to."""
    return name.partition("/")[2]


def save_of_timer(name: str) -> tuple[str, str]:
    """Return the job and the save id that a save's timer belongs to."""
    job, _, save_id = job_of_timer(name).rpartition("/")
    return job, save_id
