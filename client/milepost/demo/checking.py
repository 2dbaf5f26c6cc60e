"""What the trainers' records must show. Pure: records in, sentences out, DemoFailed if not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from milepost.demo.processes import DemoFailed
from milepost.demo.records import Called, Ended, Finished, Record, Recorded, RecordedPart, Stepped
from milepost.demo.report import Attempt

LOSS_TOLERANCE: Final = 1e-3
"""Largest relative difference between the losses of a step that was done twice. Usually they are
equal bit for bit, but torch does not promise the same order of additions in every process."""

WRONG_SHOWN_MAX: Final = 10


def recorded_by_step(records: Sequence[Record], *, is_resumed: bool) -> dict[int, Recorded]:
    """Return what a rank recorded of its state, by step."""
    return {
        record.step: record
        for record in records
        if isinstance(record, Recorded) and record.is_resumed == is_resumed
    }


def losses_of(records: Sequence[Record]) -> dict[int, float]:
    """Return a rank's losses, by step."""
    return {record.step: record.loss for record in records if isinstance(record, Stepped)}


def mean_loss(ranks: Attempt, step: int) -> float:
    """Return the mean of the ranks' losses at a step."""
    return sum(losses_of(records)[step] for records in ranks) / len(ranks)


def committed_steps(ranks: Attempt) -> set[int]:
    """Return the steps whose commit at least one rank has heard of."""
    return {
        record.step
        for records in ranks
        for record in records
        if isinstance(record, Ended) and record.phase == "committed"
    }


def check_saves(number: int, ranks: Attempt, logs: Sequence[Path], *, may_be_open: bool) -> None:
    """Check that each save of an attempt was committed.

    Args:
        number: of the attempt.
        ranks: its records.
        logs: shown if the check fails.
        may_be_open: the end of the last save may be unknown, since trainers were killed.
    """
    for rank, records in enumerate(ranks):
        ended = {each.step: each.phase for each in records if isinstance(each, Ended)}
        called = [each.step for each in records if isinstance(each, Called)]
        for step in called:
            phase = ended.get(step, "not known")
            if phase != "committed" and not (may_be_open and step == max(called)):
                raise DemoFailed(
                    f"attempt {number}, rank {rank}: the save of step {step} is {phase}", logs
                )
        if not may_be_open and not any(isinstance(each, Finished) for each in records):
            raise DemoFailed(f"rank {rank} ended without being finished", logs)


def check_resume(
    before: Attempt, after: Attempt, committed: int, logs: Sequence[Path]
) -> tuple[int, int]:
    """Check that every rank read back what it had saved; return the step and how many values.

    Args:
        before: records of the attempt that was lost.
        after: records of the attempt that resumed.
        committed: the newest step that was committed before the loss.
        logs: shown if it is not so.
    """
    resumed = [recorded_by_step(records, is_resumed=True) for records in after]
    steps = {step for each in resumed for step in each}
    if len(steps) != 1 or any(len(each) != 1 for each in resumed):
        raise DemoFailed(f"ranks resumed from steps {sorted(steps)}", logs)
    step = steps.pop()
    if step < committed:
        raise DemoFailed(f"resumed from step {step}, but {committed} was committed")
    count = 0
    for rank, records in enumerate(before):
        saved = recorded_by_step(records, is_resumed=False)[step].parts
        found = resumed[rank][step].parts
        wrong = [key for key in saved | found if saved.get(key) != found.get(key)]
        if wrong:
            shown = ", ".join(wrong[:WRONG_SHOWN_MAX])
            raise DemoFailed(
                f"rank {rank} resumed from step {step} with {len(wrong)} values that are not "
                f"what it saved: {shown}",
                logs,
            )
        count += len(saved)
    return step, count


def check_losses(before: Attempt, after: Attempt, step: int) -> str:
    """Check the losses of the steps after `step`, which were done twice; return what was found."""
    pairs = [
        (rank, number, losses[number], again[number])
        for rank, (losses, again) in enumerate(
            zip(map(losses_of, before), map(losses_of, after), strict=True)
        )
        for number in losses.keys() & again.keys()
    ]
    steps = {number for _, number, _, _ in pairs}
    if steps != set(range(step + 1, max(steps, default=step) + 1)) or not steps:
        raise DemoFailed(f"after step {step} these steps were done again: {sorted(steps)}")
    for rank, number, was, now in pairs:
        if abs(now - was) > LOSS_TOLERANCE * abs(was):
            raise DemoFailed(
                f"rank {rank} had loss {was!r} at step {number}, and {now!r} after the resume"
            )
    equal = sum(was == now for _, _, was, now in pairs)
    worst = max(abs(now - was) / abs(was) for _, _, was, now in pairs)
    how = (
        "the same losses, bit for bit, on every rank"
        if equal == len(pairs)
        else f"{equal} of {len(pairs)} losses the same bit for bit, the others to {worst:.0e}"
    )
    return f"did steps {min(steps)} to {max(steps)} again: {how}"


def saved_parts(step: int, attempts: Sequence[Attempt]) -> dict[str, list[RecordedPart]]:
    """Return what the checkpoint of a step must hold: each key's parts in rank order, or one part
    if every rank has the whole value.

    A step that was saved again belongs to the later attempt. Raises DemoFailed if ranks have
    different whole values.
    """
    by_rank: list[Recorded] = []
    for ranks in attempts:
        found = [recorded_by_step(records, is_resumed=False) for records in ranks]
        if all(step in each for each in found):
            by_rank = [each[step] for each in found]
    parts: dict[str, list[RecordedPart]] = {}
    for recorded in by_rank:
        for key, part in recorded.parts.items():
            parts.setdefault(key, []).append(part)
    for key, copies in parts.items():
        if copies[0].rows < 0:
            if len(set(copies)) > 1:
                raise DemoFailed(f"step_{step}: ranks saved different values of {key}")
            parts[key] = copies[:1]
    return parts
