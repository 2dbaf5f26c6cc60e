"""The figures of the demonstration: one row for each save, and sentences that explain them.

Pure: records in, rows and sentences out.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Final, NamedTuple, TypeVar

from rich.table import Table

from milepost.demo.records import Called, Ended, Record, Stepped

WARM_UP_STEPS: Final = 3
"""The first steps of an attempt allocate and connect; they are left out of all comparisons."""

MIDDLE_MIN: Final = 4
"""With fewer samples the middle half says nothing."""

T = TypeVar("T", Called, Ended)

Attempt = Sequence[Sequence[Record]]
"""One attempt's records, by rank."""


class Row(NamedTuple):
    """One save."""

    attempt: int
    step: int
    outcome: str
    """How it ended on rank 0; "not known" if rank 0 ended first."""
    stall_s: float
    """How long `save()` blocked, on the rank where it blocked longest."""
    commit_s: float | None
    """From the call until the last rank heard of the commit."""
    during_s: list[float]
    """Durations of rank 0's steps that the save overlaps."""


class Figures(NamedTuple):
    """All measured times."""

    rows: list[Row]
    without_s: list[list[float]]
    """By attempt: durations of rank 0's steps that no save overlaps, without the first few."""


def figures_of(attempts: Sequence[Attempt]) -> Figures:
    """Return one row a save, in order, and the steps to compare them with."""
    rows: list[Row] = []
    without_s: list[list[float]] = []
    for number, ranks in enumerate(attempts, 1):
        steps = [record for record in ranks[0] if isinstance(record, Stepped)][WARM_UP_STEPS:]
        saves = [record for record in ranks[0] if isinstance(record, Called)]
        windows = {save.save_id: _window(save, ranks[0]) for save in saves}
        for save in saves:
            during_s = [_took_s(step) for step in steps if _overlaps(step, windows[save.save_id])]
            rows.append(_row(number, save, ranks, during_s))
        without_s.append(
            [
                _took_s(step)
                for step in steps
                if not any(_overlaps(step, window) for window in windows.values())
            ]
        )
    return Figures(rows, without_s)


def _row(number: int, save: Called, ranks: Attempt, during_s: list[float]) -> Row:
    called = _of_save(ranks, Called, save.save_id)
    ended = _of_save(ranks, Ended, save.save_id)
    commits_s = [
        ended[rank].at_s - called[rank].began_s
        for rank in ended
        if rank in called and ended[rank].phase == "committed"
    ]
    return Row(
        number,
        save.step,
        ended[0].phase if 0 in ended else "not known",
        max(each.stall_s for each in called.values()),
        max(commits_s) if commits_s else None,
        during_s,
    )


def _of_save(ranks: Attempt, kind: type[T], save_id: str) -> dict[int, T]:
    return {
        rank: record
        for rank, records in enumerate(ranks)
        for record in records
        if isinstance(record, kind) and record.save_id == save_id
    }


def _window(save: Called, records: Sequence[Record]) -> tuple[float, float]:
    """Return start and end of a save's background part: after `save()` has returned."""
    ends_s = (
        record.at_s
        for record in records
        if isinstance(record, Ended) and record.save_id == save.save_id
    )
    return save.began_s + save.stall_s, next(ends_s, float("inf"))


def _overlaps(step: Stepped, window: tuple[float, float]) -> bool:
    return step.began_s < window[1] and step.ended_s > window[0]


def _took_s(step: Stepped) -> float:
    return step.ended_s - step.began_s


def make_table(figures: Figures) -> Table:
    """Return the saves as a table for people."""
    table = Table(title="saves", title_justify="left")
    for name in ("step", "attempt", "stall (ms)", "time to commit (ms)", "slow-down"):
        table.add_column(name, justify="right")
    table.add_column("outcome")
    for row in figures.rows:
        table.add_row(
            str(row.step),
            str(row.attempt),
            f"{1e3 * row.stall_s:.1f}",
            "" if row.commit_s is None else f"{1e3 * row.commit_s:.0f}",
            _ratio(row.during_s, figures.without_s[row.attempt - 1]),
            row.outcome,
        )
    return table


def _ratio(during_s: Sequence[float], without_s: Sequence[float]) -> str:
    """Return how much longer the steps took beside a save, and how many they were."""
    if not during_s or not without_s:
        return "no step"
    count = f"{len(during_s)} step" + ("s" if len(during_s) > 1 else "")
    return f"{median(during_s) / median(without_s):.2f} ({count})"


def explain(figures: Figures, attempts: Sequence[Attempt], cores: int) -> list[str]:
    """Return sentences that say what the table's figures mean and how far to trust them."""
    during_s = [length_s for row in figures.rows for length_s in row.during_s]
    without_s = [length_s for lengths_s in figures.without_s for length_s in lengths_s]
    state_s = [
        record.state_s
        for ranks in attempts
        for records in ranks
        for record in records
        if isinstance(record, Called)
    ]
    lines = [
        "stall: how long save() kept the trainer, the slowest of the ranks",
        "time to commit: from the call until every rank had heard that the checkpoint is durable",
        "slow-down: median time of the steps that a save overlapped, divided by that of the "
        "attempt's other steps",
    ]
    if during_s and without_s:
        lines.append(
            f"all saves together: {1e3 * median(during_s):.0f} ms (median of {len(during_s)} "
            f"steps) against {1e3 * median(without_s):.0f} ms (median of {len(without_s)}): "
            f"{median(during_s) / median(without_s):.2f}"
        )
    if len(without_s) >= MIDDLE_MIN:
        low_s, middle_s, high_s = quantiles(without_s, n=4)
        lines.append(
            "these are medians of few samples: without any save, half of the steps already lie "
            f"between {low_s / middle_s:.2f} and {high_s / middle_s:.2f} of their median"
        )
    if attempts and len(attempts[0]) > cores:
        lines.append(
            f"{len(attempts[0])} ranks share {cores} cores here, so writing takes time from "
            "training"
        )
    if state_s:
        lines.append(
            f"torch's get_state_dict, which any checkpointer needs, took "
            f"{1e3 * median(state_s):.1f} ms a save (median of {len(state_s)}) and is in none of "
            "these"
        )
    return lines
