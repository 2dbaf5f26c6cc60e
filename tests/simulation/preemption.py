"""SIGTERM in simulated training: the flag of each rank, the signals, and what must hold.

`Flag` is the twin of the client's flag. `Signals` sends SIGTERM to ranks and, some time later, ends
what still runs, as a scheduler does. `Preemptions` judges from outside, by the answers of
`preempted`: at one read all ranks of a job have the same answer, and no rank is told to go unless
some rank got a signal.

Ranks train in lockstep, so they cannot wait for a rank that is cut off for longer than a grace
time. Two waits may run out by design, and excuse different answers: the coordinator decides without
a rank after `DECIDE_NS`, and a rank decides without the coordinator after `HOLD_S`. Neither may run
out for a signal that comes after the healing, or for any signal once everything has settled.

Sources: `client/milepost/link/preemption.py`, `daemon/milepostd/core/preemption.py`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from milepost.errors import MilepostError
from milepost.link.preemption import HOLD_S, REPEAT_S
from milepost.wire.messages import Preempted, PreemptionDecided, PreemptionNoticed, ReadsTold
from milepostd.core.commands import Reply, Send
from milepostd.core.events import AnyEvent, TimerFired
from tests.simulation.world import SECOND_NS, Steps, Until, World

if TYPE_CHECKING:
    from tests.simulation.machine import Daemon
    from tests.simulation.oracle import Oracle
    from tests.simulation.trainer import Trainer
    from tests.simulation.workload import Attempt, Launcher

KIND: Final = "sigterm"

SETTLED_S: Final = 40.0
"""Time after the healing until every session is restored and no earlier hold is left."""


@dataclass(frozen=True, kw_only=True)
class SignalOptions:
    """Which ranks are told to go; drawn from the seed."""

    reads: int = 0
    """Steps between two saves; each of them reads `preempted`. 0: nothing reads it."""
    interval_s: float = 0.0
    """Mean time between two signals."""


def draw(world: World, *, is_large: bool) -> SignalOptions:
    """Draw from a stream of its own."""
    rng = world.rng("signal options")
    if rng.random() < 0.5:
        return SignalOptions()
    return SignalOptions(
        reads=2 if is_large else rng.choice([1, 3, 6]),
        interval_s=rng.choice([3.0, 10.0, 40.0]),
    )


class Flag:
    """The twin of `PreemptionFlag`."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.reads = 0
        self.is_installed = False
        self.is_held = False
        self.is_signalled = False
        self.is_closed = False
        self.is_true = False
        self.at_read: int | None = None

    def read(self) -> Steps:
        """Return whether this rank has to go now."""
        trainer = self.trainer
        if not self.is_installed:
            # If the rank has not joined, nobody may notice a preemption.
            with contextlib.suppress(MilepostError):
                yield from trainer.ensure()
            self.is_installed = True
        if self.is_held and self.at_read is None:
            yield Until(lambda: self.at_read is not None, HOLD_S)
            if self.at_read is None:
                self.at_read = self.reads + 1
                trainer.oracle.preemptions.excuse(trainer.attempt, "a hold is over")
        self.reads += 1
        self.is_true = self.at_read is not None and self.reads >= self.at_read
        trainer.oracle.preemptions.answered(trainer, self.reads, self.is_true)
        return self.is_true

    def hold(self) -> None:
        self.is_held = True
        reads = self.reads if self.at_read is None else min(self.reads, self.at_read - 1)
        self.trainer.session.signal(ReadsTold(reads=reads))

    def decide(self, at_read: int) -> None:
        if self.at_read is None:
            self.at_read = at_read

    def strike(self) -> None:
        """Send SIGTERM. A rank that has no handler for it ends."""
        if not self.is_installed or self.is_closed:
            self.trainer.attempt.launcher.kill(self.trainer)
        elif not self.is_signalled:
            self.is_signalled = True
            self.trainer.world.spawn(self.trainer, self._tell())

    def _tell(self) -> Steps:
        self.is_held = True
        while True:
            # Without a daemon the other ranks cannot be told yet.
            with contextlib.suppress(MilepostError):
                yield from self.trainer.ensure()
                self.trainer.session.signal(PreemptionNoticed())
            if (yield Until(lambda: self.at_read is not None or self.is_closed, REPEAT_S)):
                return


class Signals:
    """Sends signals to ranks, until everything is healed."""

    def __init__(
        self, world: World, options: SignalOptions, launcher: Launcher, oracle: Oracle
    ) -> None:
        self.world = world
        self.options = options
        self.launcher = launcher
        self.oracle = oracle
        self.rng = world.rng("signals")
        self.fired: dict[str, int] = {}
        self.is_healed = False
        if options.reads:
            world.after(self._pause_s(), None, self._strike)

    def _pause_s(self) -> float:
        return self.rng.expovariate(1 / self.options.interval_s)

    def _strike(self) -> None:
        if self.is_healed:
            return
        attempt = self.launcher.attempt
        if attempt is not None and not attempt.is_over:
            living = [trainer for trainer in attempt.trainers if trainer.is_alive]
            is_all = self.rng.random() < 0.2
            self.signal(attempt, living if is_all else [self.rng.choice(living)])
            # Its patience ends, too.
            self.world.after(self.rng.choice([20.0, 60.0]), None, self._end, attempt)
        self.world.after(self._pause_s(), None, self._strike)

    def signal(self, attempt: Attempt, trainers: list[Trainer]) -> None:
        """Strike these ranks now."""
        self.fired[KIND] = self.fired.get(KIND, 0) + 1
        self.world.note("fault", KIND, attempt.number, [trainer.rank for trainer in trainers])
        for trainer in trainers:
            self.oracle.tell("fault", KIND, f"rank {trainer.rank} of attempt {attempt.number}")
            self.oracle.preemptions.signalled(attempt)
            trainer.flag.strike()
        self.launcher.on_moment(attempt)

    def _end(self, attempt: Attempt) -> None:
        if not self.is_healed:
            self.launcher.broken(attempt)

    def heal(self) -> None:
        """Send no more signals."""
        self.is_healed = True


@dataclass(eq=False)
class Story:
    """What is known of one job's preemption."""

    answers: dict[int, tuple[bool, int]]
    """For each read, the first answer and the rank that got it."""
    is_signalled: bool = False
    is_strict: bool = False
    """The signal came after the healing."""
    excuse: str = ""


class Preemptions:
    """Judges the answers of `preempted`."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.stories: dict[Attempt, Story] = {}
        self.attempts: dict[int, Attempt] = {}
        """By number; an attempt that goes back a step has several numbers."""
        self.healed_at_ns: int | None = None

    def story(self, attempt: Attempt) -> Story:
        return self.stories.setdefault(attempt, Story({}))

    def begun(self, attempt: Attempt, number: int) -> None:
        """Note that an attempt has taken a number."""
        self.attempts[number] = attempt

    def signalled(self, attempt: Attempt) -> None:
        story = self.story(attempt)
        if not story.is_signalled:
            story.is_signalled, story.is_strict = True, self.healed_at_ns is not None

    def answered(self, trainer: Trainer, read: int, is_true: bool) -> None:
        """Judge an answer that a rank got."""
        story = self.story(trainer.attempt)
        first, rank = story.answers.setdefault(read, (is_true, trainer.rank))
        if is_true:
            self.oracle.mark("preempted")
            self.oracle.tell(f"rank {trainer.rank} is to go at read {read}")
            if not story.is_signalled:
                self.oracle.fail(f"rank {trainer.rank} is to go, and nobody was told to")
        if first == is_true:
            return
        if not story.excuse:
            self.oracle.fail(
                f"at read {read} preempted is {is_true} on rank {trainer.rank} of attempt "
                f"{trainer.attempt.number}, and {first} on rank {rank}"
            )
        self.oracle.mark("preemption.split")

    def handled(self, daemon: Daemon, event: AnyEvent, commands: tuple[Any, ...]) -> None:
        """Note that a node's wait has run out: it may decide without a rank."""
        if not isinstance(event, TimerFired) or not event.timer.startswith("preemption/"):
            return
        if any(
            isinstance(command, Send | Reply)
            and isinstance(command.message, PreemptionDecided | Preempted)
            for command in commands
        ):
            number = daemon.node_core.preemptions.by_job[event.timer.partition("/")[2]].job.attempt
            self.excuse(self.attempts[number], "decided without a rank")

    def excuse(self, attempt: Attempt, why: str) -> None:
        story = self.story(attempt)
        story.excuse = story.excuse or why
        self.oracle.mark(f"preemption: {why}")
        self.oracle.tell(f"preemption of attempt {attempt.number}: {why}")
        now_ns, healed_at_ns = self.oracle.world.now_ns, self.healed_at_ns
        is_settled = healed_at_ns is not None and now_ns - healed_at_ns > SETTLED_S * SECOND_NS
        if story.is_strict or is_settled:
            self.oracle.be_late(f"nothing is wrong, and {why}")

    def check_turned(self, attempt: Attempt | None) -> None:
        """Long after the healing: check that all ranks know of each living rank that got a
        signal.
        """
        if attempt is None or attempt.is_over:
            return
        story = self.story(attempt)
        living = [trainer for trainer in attempt.trainers if trainer.is_alive]
        is_owed = any(trainer.flag.is_signalled for trainer in living)
        staying = [trainer.rank for trainer in living if not trainer.flag.is_true]
        if is_owed and staying and not story.excuse:
            self.oracle.be_late(f"ranks {staying} have not heard that one of them is to go")
