"""The demonstration's story: two nodes train, one rank is killed, the run resumes, judges compare.

Ends every process that it started, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from milepost.demo.attempts import STEPS, Attempts
from milepost.demo.checking import (
    check_losses,
    check_resume,
    check_saves,
    committed_steps,
    mean_loss,
)
from milepost.demo.daemons import Daemons
from milepost.demo.folder import make_afresh
from milepost.demo.judging import Judges
from milepost.demo.processes import DemoFailed, Interrupted, Watch
from milepost.demo.telling import Telling, tell_failure

VICTIM: Final = 2
"""The rank that is killed. It is on the node that does not coordinate, so that the coordinator has
to be told."""

KILL_AFTER_STEP: Final = 33
"""Between two saves, so that steps are lost."""


def run_demo(folder: Path) -> int:
    """Run the demonstration in `folder`, which is made, or emptied if a demonstration made it.

    Returns 0 if everything compared was equal, 1 if not or if a process failed, and 128 plus the
    signal's number if a signal ended it. Raises the same UsageError as `make_afresh`.
    """
    with make_afresh(folder), _noted_signals() as noted:
        demo = Demo(folder, noted)
        try:
            demo.show()
        except Interrupted:
            print(f"interrupted by {signal.Signals(noted[0]).name}", file=sys.stderr)
            return 128 + noted[0]
        except DemoFailed as failure:
            tell_failure(str(failure), failure.logs)
            return 1
        finally:
            demo.end_all()
    return 0


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect signals that would end the process, instead of ending."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield noted
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Demo:
    """One demonstration.

    Args:
        folder: its own, and empty.
        noted: signals that arrived.
    """

    def __init__(self, folder: Path, noted: list[int]) -> None:
        self.root = folder / "checkpoints"
        logs, records = folder / "logs", folder / "records"
        for path in (self.root, logs, records):
            path.mkdir()
        self._telling = Telling()
        watch = Watch(self._telling, noted)
        self._daemons = Daemons(folder, self.root, logs, self._telling, watch)
        self._attempts = Attempts(self.root, records, logs, self._daemons, self._telling, watch)
        self._judges = Judges(folder, self.root, logs, self._telling, watch)

    def show(self) -> None:
        """Run it. Raises DemoFailed, Interrupted."""
        with self._telling:
            self._daemons.start()
            self._train_and_lose()
            self._train_to_the_end()
            self._daemons.drain()
            compared, checkpoints = self._judges.judge(self._attempts.records())
        self._telling.show_figures(self._attempts.records())
        self._telling.say(f"{compared} values of {checkpoints} checkpoints are equal bit for bit")
        self._telling.say(f"the checkpoints are in {self.root}")

    def end_all(self) -> None:
        """End every process that is left, trainers and judges before the daemons."""
        self._attempts.end()
        self._judges.end()
        self._daemons.end()

    def _train_and_lose(self) -> None:
        self._attempts.start()
        self._attempts.train_until_step(KILL_AFTER_STEP, VICTIM)
        self._attempts.lose(VICTIM)
        self._check_saves(may_be_open=True)

    def _train_to_the_end(self) -> None:
        (before,) = self._attempts.records()
        committed = committed_steps(before)
        if not committed:
            raise DemoFailed("nothing was committed before the kill", self._attempts.logs)
        self._attempts.start()
        self._attempts.await_resume()
        after = self._attempts.records()[1]
        step, count = check_resume(before, after, max(committed), self._attempts.logs)
        self._telling.say(
            f"resumed from step {step} in a new attempt on the same daemons; {count} values, over "
            f"all ranks, are what was saved"
        )
        self._attempts.train_to_the_end()
        self._check_saves(may_be_open=False)
        first, second = self._attempts.records()
        self._telling.say(check_losses(before, second, step))
        begun, ended = mean_loss(first, 1), mean_loss(second, STEPS)
        self._telling.say(
            f"finished step {STEPS}; loss {begun:.2f} at step 1, {ended:.2f} now, nats a byte"
        )
        if os.readlink(self.root / "latest") != f"step_{STEPS}":
            raise DemoFailed(f"latest points at {os.readlink(self.root / 'latest')}")

    def _check_saves(self, *, may_be_open: bool) -> None:
        newest = self._attempts.records()[-1]
        check_saves(self._attempts.count, newest, self._attempts.logs, may_be_open=may_be_open)
