"""All ranks take the attempt that rank 0 claims, or none does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from milepost.errors import MilepostError, Rejected
from milepost.link.rendezvous import Group
from milepost.saving.access import RootAccess
from milepost.saving.attempts import JobAttempts

END_S = 20.0


class Ranks:
    """Two ranks of one job, in threads, over a store in memory."""

    def __init__(self, root: Path) -> None:
        store = dist.HashStore()
        self.access = RootAccess(root, is_first=True, overwrite=False)
        others = RootAccess(root, is_first=False, overwrite=False)
        self.attempts = [
            JobAttempts("run", Group(rank, 2, store), self.access if rank == 0 else others, END_S)
            for rank in range(2)
        ]

    def both(self, call: Any) -> list[Any]:
        """Let both ranks call; return what each returned or raised."""
        found: list[Any] = [None, None]

        def run(rank: int) -> None:
            try:
                found[rank] = call(self.attempts[rank])
            except MilepostError as error:
                found[rank] = error

        other = threading.Thread(target=run, args=(1,))
        other.start()
        run(0)
        other.join(END_S)
        return found

    @property
    def numbers(self) -> list[int]:
        return [each.number for each in self.attempts]


def test_an_attempt_that_is_claimed_late_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "root")
    assert [0, 0] == ranks.numbers
    assert [None, None] == ranks.both(JobAttempts.claim_late)
    assert [1, 1] == ranks.numbers
    (job,) = {each.job for each in ranks.attempts}
    assert job.startswith("run@")


def test_a_branch_is_begun_on_all_ranks_if_rank_0_needs_one(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "root")
    ranks.both(JobAttempts.claim_late)
    assert [False, False] == ranks.both(lambda each: each.branch("load/1", is_needed=False))
    assert [True, True] == ranks.both(
        lambda each: each.branch("load/2", is_needed=each is ranks.attempts[0])
    )
    assert [2, 2] == ranks.numbers
    # What the others think changes nothing.
    assert [False, False] == ranks.both(
        lambda each: each.branch("load/3", is_needed=each is ranks.attempts[1])
    )


def test_a_root_that_cannot_be_written_to_is_refused_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(tmp_path / "root")

    def refuse(name: str) -> tuple[str, int]:
        raise Rejected("read-only", f"{name} cannot be written to")

    monkeypatch.setattr(ranks.access, "enter_late", refuse)
    assert ["read-only"] * 2 == [error.code for error in ranks.both(JobAttempts.claim_late)]
    assert [0, 0] == ranks.numbers
