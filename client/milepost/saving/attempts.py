"""The job and the attempt of this rank's saves: rank 0 claims a number, and all ranks take it.

Owns the number. It must not know of saves or slots. One thread at a time; any thread may read `job`
and `number`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from milepost.link.rendezvous import Group, Introduction, meet, tell_all

if TYPE_CHECKING:
    from milepost.link.rendezvous import Meeting
    from milepost.saving.access import RootAccess


class JobAttempts:
    """The attempts of one rank, one after another.

    Args:
        name: the job's name, as the user knows it.
        group: this rank's place among the others.
        access: how rank 0 gets into the root.
        timeout_s: how long to wait for the other ranks.

    Attributes:
        job: its name on the wire.
        number: the present attempt; 0: none was claimed, since the root can only be read.
    """

    def __init__(self, name: str, group: Group, access: RootAccess, timeout_s: float) -> None:
        self._name = name
        self._group = group
        self._access = access
        self._timeout_s = timeout_s
        self._claims = 0
        """How often `claim_late` was called."""
        self.job = name
        self.number = 0

    def meet(self, introduction: Introduction) -> Meeting:
        """Meet the other ranks, and begin the first attempt. Raises as `rendezvous.meet`."""
        meeting = meet(self._group, introduction, lambda: self._access.enter_or_read(self._name))
        self.job, self.number = meeting.job, meeting.attempt
        return meeting

    def claim_late(self) -> None:
        """Begin an attempt if there is none yet. Raises Rejected, on all ranks, if that fails."""

        def claim() -> bytes:
            return json.dumps(self._access.enter_late(self._name)).encode()

        self._claims += 1
        told = tell_all(self._group, f"claim/{self._claims}", claim, self._timeout_s)
        self.job, self.number = json.loads(told)

    def branch(self, topic: str, *, is_needed: bool) -> bool:
        """Begin another attempt if rank 0 needs one. Return, on all ranks, whether one has begun.

        topic: identifies this call; the same on all ranks.
        """
        before = self.number

        def claim() -> bytes:
            number = self._access.claim_attempt(self.job) if is_needed else before
            return str(number).encode()

        self.number = int(tell_all(self._group, topic, claim, self._timeout_s))
        return self.number != before
