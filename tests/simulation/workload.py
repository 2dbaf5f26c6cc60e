"""What is trained and saved: attempts, and the launcher that starts them.

The `Launcher` acts as torchrun and a scheduler: it starts an attempt, ends it when a rank is gone,
and starts the next one, perhaps with another number of ranks. It does not know what goes wrong, or
why. `trainer.py` has what a rank does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from milepost.errors import MilepostError
from milepost.wire.messages import Join, Keep, NodeRef
from tests.simulation.branches import Choice
from tests.simulation.disk import Root
from tests.simulation.machine import Machine
from tests.simulation.trainer import JOB, ROOT, Handle, Trainer
from tests.simulation.world import Life, Steps, Until, World

if TYPE_CHECKING:
    from tests.simulation.oracle import Oracle

ATTEMPTS_MAX: Final = 25
"""After this many attempts the job is done. Otherwise a run with short attempts would never end."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the trainers do; drawn from the seed."""

    saves: int
    """How many saves an attempt makes."""
    interval_s: float
    """Training between two saves."""
    copy_s: float
    slots: int
    deadline_s: float
    skips: bool
    """on_busy="skip"."""
    keep: Keep
    aborts: float = 0.0
    """Probability that a rank asks for an abort of its save."""
    reshapes: float = 0.0
    """Probability that the structure changes before a save."""
    strays: float = 0.0
    """Probability that it changes on one rank only."""
    rewinds: float = 0.0
    """Probability that an attempt goes back further than to the newest checkpoint."""
    prepares: bool = False
    """Ranks ask for layouts before their first save."""
    leaves_early: float = 0.0
    """Probability that a rank ends right after it has staged its last save."""
    loads: float = 0.0
    """Probability that all ranks go back to an earlier step after a save."""
    reads: int = 0
    """Steps between two saves; each of them reads `preempted`. 0: nothing reads it."""

    def quiet(self, saves: int) -> Work:
        """Return the same work, without anything that ends a save on purpose."""
        return replace(self, saves=saves, aborts=0.0, strays=0.0, skips=False, loads=0.0, reads=0)


@dataclass(eq=False)
class Attempt:
    """One start of the job."""

    launcher: Launcher
    number: int
    work: Work
    machines: Sequence[Machine]
    ranks: tuple[int, ...]
    """Index of each rank's machine."""
    first_step: int
    trainers: list[Trainer] = field(default_factory=list)
    arrived: dict[int | tuple[int, int], int] = field(default_factory=dict)
    """How many ranks have reached each collective."""
    is_over: bool = False
    ended: int = 0
    """How many ranks have ended by themselves."""
    structures: list[tuple[str, int]] = field(default_factory=list)
    line: list[Handle] = field(default_factory=list)
    """Rank 0's saves that were not abandoned, oldest first."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """What rank 0 chose to go back to, by the number of the save before."""

    def __post_init__(self) -> None:
        self.cohort: tuple[NodeRef, ...] = tuple(machine.ref for machine in self.machines)
        rng = random.Random(f"{self.launcher.world.seed}/structure/{self.number}")
        shape = 0
        for _ in range(self.work.saves + 1):
            shape += rng.random() < self.work.reshapes
            stray = rng.randrange(len(self.ranks)) if rng.random() < self.work.strays else -1
            self.structures.append((f"s{shape}", stray))
        self.rng = random.Random(f"{self.launcher.world.seed}/back/{self.number}")
        self.back = [self.rng.random() < self.work.loads for _ in range(self.work.saves)]

    def is_going_back(self, number: int) -> bool:
        """Whether all ranks load an earlier step after this save."""
        return number < self.work.saves and self.back[number]

    def meet(self, what: int | tuple[int, int]) -> Steps:
        """Wait in a collective: no rank goes on before all have reached it."""
        self.arrived[what] = self.arrived.get(what, 0) + 1
        if self.arrived[what] == len(self.ranks):
            self.notify()
        yield Until(lambda: self.arrived[what] == len(self.ranks), 1e6)

    def notify(self) -> None:
        """Wake ranks that may wait for what has changed."""
        for trainer in self.trainers:
            trainer.notify()

    def join(self, rank: int, number: int) -> Join:
        return Join(
            job=JOB,
            attempt=number,
            root=ROOT,
            rank=rank,
            node_of_rank=self.ranks,
            cohort=self.cohort,
            keep=self.work.keep,
            deadline_s=self.work.deadline_s,
        )

    def structure_of(self, number: int, rank: int) -> str:
        structure, stray = self.structures[number]
        return f"{structure}x" if stray == rank else structure


class Launcher:
    """Starts attempts, one after another, until it is told to stop."""

    def __init__(
        self, world: World, machines: Sequence[Machine], oracle: Oracle, work: Work, ranks: int
    ) -> None:
        self.world = world
        self.machines = machines
        self.oracle = oracle
        self.work = work
        self.ranks_per_node_max = ranks
        self.rng = world.rng("launcher")
        self.life = Life("launcher")
        self.attempt: Attempt | None = None
        self.is_stopping = False
        self.is_starting = False
        self.attempts = 0
        self.claimant: Life | None = None
        self.on_moment: Callable[[Attempt], None] = lambda attempt: None
        """Called when a rank is told to go, or when all ranks go back a step."""
        self.dying: set[int] = set()
        """Ranks of the present attempt that die as soon as they have staged."""

    def start(
        self, *, after_s: float = 0.0, on_all: bool = False, work: Work | None = None
    ) -> None:
        """Begin an attempt soon, with the given work instead of the usual one."""
        if not self.is_starting and (work is not None or self.attempts < ATTEMPTS_MAX):
            self.is_starting = True
            self.world.after(after_s, self.life, self._begin, on_all, work)

    def _begin(self, on_all: bool, work: Work | None) -> None:
        up = [machine for machine in self.machines if machine.is_up]
        if not up:
            self.is_starting = False
            self.start(after_s=1.0, on_all=on_all, work=work)
            return
        chosen = up if on_all or self.rng.random() < 0.6 else up[: self.rng.randint(1, len(up))]
        per_node = [self.rng.randint(1, self.ranks_per_node_max) for _ in chosen]
        ranks = tuple(index for index, count in enumerate(per_node) for _ in range(count))
        # Rank 0 of the attempt to be: what it has not synced goes with its machine, and so does it.
        self.claimant = Life(chosen[0].ref.node_id)
        self.world.spawn(self.claimant, self._claim(chosen, ranks, work))

    def lose_claimant(self, node: str) -> None:
        """End the preparation of an attempt: its machine is down."""
        if self.claimant is not None and self.claimant.node == node and self.claimant.is_alive:
            self.claimant.is_alive = False
            self.is_starting = False
            if not self.is_stopping:
                self.start(after_s=2.0)

    def _claim(self, chosen: Sequence[Machine], ranks: tuple[int, ...], work: Work | None) -> Steps:
        """Do what rank 0 does first; try again if the disk fails."""
        root = Root(chosen[0].disk, chosen[0].ref.node_id, self.rng, ROOT)
        try:
            yield from root.prepare()
            number = yield from root.claim_attempt()
        except (MilepostError, OSError):
            self.claimant = None
            self.is_starting = False
            if not self.is_stopping or work is not None:
                self.start(after_s=2.0, work=work)
            return
        there = [(name, step) for name, step, _ in root.checkpoints() if step >= 0]
        back = 1 if self.rng.random() < self.work.rewinds and len(there) > 1 else 0
        step = there[back][1] if there else 0
        attempt = Attempt(self, number, work or self.work, chosen, ranks, step)
        self.oracle.preemptions.begun(attempt, number)
        self.world.note("attempt", number, len(chosen), ranks[:8], step)
        self.attempts += 1
        self.attempt = attempt
        self.is_starting = False
        self.claimant = None
        self.dying.clear()
        for rank, index in enumerate(ranks):
            trainer = Trainer(attempt, rank, chosen[index])
            attempt.trainers.append(trainer)
        for trainer in attempt.trainers:
            self.world.spawn(trainer, trainer.train())

    def is_dying_when_staged(self, trainer: Trainer) -> bool:
        """Whether this trainer ends here, after it sealed its slot and before it says so."""
        if trainer.attempt is self.attempt and trainer.rank in self.dying:
            self.world.after(0, None, self.kill, trainer)
            return True
        return False

    def kill(self, trainer: Trainer) -> None:
        """Send SIGKILL; the launcher notices, and ends the attempt."""
        if trainer.is_alive:
            self._end_process(trainer)
            self.broken(trainer.attempt)

    def _end_process(self, trainer: Trainer) -> None:
        trainer.is_alive = False
        trainer.machine.trainers.pop(trainer, None)
        self.oracle.died(trainer)
        if trainer.machine.daemon is not None:
            trainer.machine.daemon.trainer_ended(trainer)

    def ended(self, trainer: Trainer) -> None:
        """Note that a rank has ended by itself."""
        if not trainer.is_alive:
            return
        self._end_process(trainer)
        attempt = trainer.attempt
        attempt.ended += 1
        if not attempt.is_over and attempt.ended == len(attempt.trainers):
            attempt.is_over = True
            if not self.is_stopping:
                self.start(after_s=self.rng.random())

    def broken(self, attempt: Attempt) -> None:
        """End the attempt of a lost rank: kill the others some time later, and start a new
        attempt.
        """
        if attempt.is_over:
            return
        attempt.is_over = True
        grace_s = self.rng.choice([0.0, 0.1, 5.0, 40.0])
        self.world.after(grace_s, None, self._reap, attempt)

    def _reap(self, attempt: Attempt) -> None:
        for trainer in attempt.trainers:
            if trainer.is_alive:
                self._end_process(trainer)
        if not self.is_stopping:
            self.start(after_s=self.rng.choice([0.0, 0.5, 10.0]))

    @property
    def is_training(self) -> bool:
        return self.attempt is not None and not self.attempt.is_over
