"""The figures that the demonstration shows."""

from __future__ import annotations

from milepost.demo.records import Called, Ended, Record, Stepped
from milepost.demo.report import figures_of


def test_steps_that_a_save_overlaps_are_compared_with_those_that_none_does() -> None:
    rank0: list[Record] = [Stepped(n, 1.0, 10.0 * n, 10.0 * n + 8) for n in range(1, 9)]
    rank0 += [Called(5, "1-1", 58.5, 0.5, 0.0), Ended(5, "1-1", "committed", 71.0)]
    rank1: list[Record] = [Called(5, "1-1", 58.0, 1.5, 0.0), Ended(5, "1-1", "committed", 73.0)]
    figures = figures_of([[rank0, rank1]])
    (row,) = figures.rows
    assert (5, "committed", 1.5, 15.0) == (row.step, row.outcome, row.stall_s, row.commit_s)
    assert [8.0, 8.0] == row.during_s
    assert [[8.0] * 3] == figures.without_s
