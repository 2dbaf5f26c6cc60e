"""Going back to an earlier step within a running attempt: `Checkpointer.load`.

All ranks wait for their saves. Rank 0 chooses a checkpoint; if this attempt has saved later steps,
rank 0 claims another attempt number. All ranks go on under that number from the older step. The
later steps are abandoned, and their saves that are still under way must not change anything. The
oracle judges by the attempt's `line`: its saves that were not abandoned.

Source: `client/milepost/checkpointer.py`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

from milepost.errors import MilepostError
from tests.simulation.disk import Root
from tests.simulation.world import Sleep, Steps, Until

if TYPE_CHECKING:
    from tests.simulation.trainer import Trainer


class Choice(NamedTuple):
    """What rank 0 has chosen and tells all ranks."""

    step: int
    """-1: nothing can be loaded; training goes on where it is."""
    number: int


def load(trainer: Trainer, after: int, root: Root) -> Steps:
    """Go back to an earlier checkpoint after the save of this number."""
    attempt = trainer.attempt
    yield Until(lambda: not trainer.ledger.open_saves, 1e6)
    if trainer.rank == 0:
        try:
            attempt.choices[after] = yield from _choose(trainer, root)
        except (MilepostError, OSError):
            attempt.choices[after] = Choice(-1, 0)
        attempt.notify()
    yield Until(lambda: after in attempt.choices, 1e6)
    choice = attempt.choices[after]
    if choice.step < 0:
        return
    if choice.number != trainer.number:
        _begin_branch(trainer, choice.number)
    lease = yield from root.take_lease(f"step_{choice.step}")
    yield Sleep(trainer.work.copy_s)
    if lease:
        # One that stays expires.
        with contextlib.suppress(OSError):
            yield from root.drop_lease(lease)
    trainer.ledger.resume(choice.step, f"step_{choice.step}")
    # The save that comes next is the one after this step.
    trainer.base = choice.step - 10 * after


def _choose(trainer: Trainer, root: Root) -> Steps:
    attempt, oracle = trainer.attempt, trainer.oracle
    yield "listdir"
    there = [step for _, step, _ in root.checkpoints() if step >= 0]
    if not there:
        return Choice(-1, 0)
    step = there[min(attempt.rng.choice([0, 1, 1, 2]), len(there) - 1)]
    number = trainer.number
    if trainer.ledger.last_step > step:
        number = yield from root.claim_attempt()
        oracle.preemptions.begun(attempt, number)
        oracle.mark("branch")
    for handle in attempt.line:
        if handle.save.step > step:
            oracle.abandoned[handle.save.save_id] = oracle.world.now_ns
    attempt.line = [handle for handle in attempt.line if handle.save.step <= step]
    oracle.tell(f"attempt {attempt.number} goes back to step {step} as {number}")
    oracle.world.note("back", attempt.number, step, number)
    attempt.launcher.on_moment(attempt)
    return Choice(step, number)


def _begin_branch(trainer: Trainer, number: int) -> None:
    trainer.begin(number)
