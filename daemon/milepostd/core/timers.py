"""Names of the timers that the core sets: a kind, and the job or the save that it is for.

The name alone travels (`SetTimer`, `ClearTimer`, `TimerFired`), so that a timer is set, moved and
cleared by whoever knows its save.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class TimerKind(StrEnum):
    """What a timer is for."""

    DEADLINE = "participant.deadline"
    """A participant waits no longer."""
    RESEND = "participant.resend"
    """A participant says again what may have been lost."""
    VERDICT = "coordinator.deadline"
    """The coordinator waits no longer."""
    ASK = "coordinator.ask"
    """The coordinator asks the nodes that say nothing."""
    PREEMPTION = "preemption"
    """Of a job: a word about its preemption may have been lost."""
    RECALL = "recall"
    """Of a job: trainers from before the daemon's restart have not come back."""
    LINGER = "linger"
    """An embedded daemon that nobody uses ends."""


_KINDS: Final = {str(kind): kind for kind in TimerKind}


def timer_name(kind: TimerKind, job: str = "", save_id: str = "") -> str:
    """Name the timer of a save, of a job, or of the node."""
    return f"{kind}/{job}/{save_id}" if save_id else f"{kind}/{job}"


def timer_kind(name: str) -> TimerKind | None:
    """Return the kind of a timer; None for a name that is none."""
    return _KINDS.get(name.partition("/")[0])


def job_of_timer(name: str) -> str:
    """Return the job that a job's timer is for."""
    return name.partition("/")[2]


def save_of_timer(name: str) -> tuple[str, str]:
    """Return the job and the save id that a save's timer is for."""
    job, _, save_id = job_of_timer(name).rpartition("/")
    return job, save_id
