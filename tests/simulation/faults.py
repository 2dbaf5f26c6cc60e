"""What goes wrong, when, and how much of it: the fault budget.

What must be survived, at any moment and in any number, one after another and at once:

* messages between daemons lost, late, doubled, reordered; networks cut, also in one direction;
* a daemon killed, also right when a rank is told to go, or stopped and continued; a trainer killed,
  also between sealing its image and saying so; all trainers killed; a new attempt with another
  number of ranks;
* a machine loses its power: its daemon, trainers and shared memory are gone, and so are its
  unsynced changes of the shared directory; its run directory is kept or lost;
* the power of all machines and of the storage gone at once: all that nobody had synced;
* on one node or on all: a file system that is full, that fails, that fails for a passing reason,
  that hangs for a while.

Beyond the budget, and no fault of ours: synced bytes or names that are lost; a storage that
forgets unsynced things while their writer lives and hears nothing of it; a file system whose
rename is not atomic or whose names differ between nodes for ever; a system call that never returns
after everything is healed; clocks of one daemon that run backwards; two jobs under one name.

While faults last, only safety is required. Then everything is healed. After that, within stated
times, every handle must end and the next save must be committed.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tests.simulation.disk import Disk
from tests.simulation.machine import Machine
from tests.simulation.network import Network
from tests.simulation.oracle import Oracle
from tests.simulation.workload import Attempt, Launcher
from tests.simulation.world import Life, Process, World

HUNG_S: Final = 120.0
"""How long a system call hangs at most while faults last."""

KINDS: Final = (
    "kill_daemon", "stop_daemon", "drain_daemon", "kill_trainer", "kill_all_trainers",
    "die_when_staged", "crash_machine", "crash_site", "cut", "cut_one_way", "disk_full",
    "disk_fails", "disk_stale", "disk_hangs",
)  # fmt: skip


AMBUSH: Final = "ambush"
"""The fault that strikes at a chosen moment."""


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """What the seed drew."""

    kinds: tuple[str, ...] = ()
    """The kinds of faults that occur in this run."""
    interval_s: float = 10.0
    """Mean time between two of them."""
    lasts_s: float = 60.0
    """How long faults go on."""
    loss: float = 0.0
    doubling: float = 0.0
    delay: float = 0.0
    delay_s_max: float = 0.0
    calls_fail: float = 0.0
    """Probability that a system call fails while the disk has a fault."""
    ambushes: float = 0.0
    """Probability that a daemon is killed right when a rank is told to go, or all ranks go back."""

    def words(self) -> dict[str, Any]:
        return asdict(self)


def draw(rng: random.Random, ambushes: random.Random) -> FaultOptions:
    """Draw a swarm: each run has other kinds of faults. Kinds that were added later have streams of
    their own.
    """
    some = rng.sample(KINDS, rng.randint(0, 6))
    is_lossy = rng.random() < 0.6
    return FaultOptions(
        kinds=tuple(kind for kind in KINDS if kind in some),
        interval_s=rng.choice([0.3, 2.0, 8.0, 25.0]),
        lasts_s=rng.choice([20.0, 90.0, 240.0]),
        loss=rng.choice([0.0, 0.05, 0.3]) if is_lossy else 0.0,
        doubling=rng.choice([0.0, 0.1, 0.4]) if is_lossy else 0.0,
        delay=rng.choice([0.0, 0.1, 0.5]) if is_lossy else 0.0,
        delay_s_max=rng.choice([0.05, 3.0, 30.0]),
        calls_fail=rng.choice([0.02, 0.3, 1.0]),
        ambushes=ambushes.choice([0.0, 0.3, 1.0]),
    )


class Faults:
    """Makes them happen."""

    def __init__(
        self,
        world: World,
        options: FaultOptions,
        machines: Sequence[Machine],
        network: Network,
        disk: Disk,
        launcher: Launcher,
        oracle: Oracle,
    ) -> None:
        self.world = world
        self.options = options
        self.machines = machines
        self.network = network
        self.disk = disk
        self.launcher = launcher
        self.oracle = oracle
        self.rng = world.rng("faults")
        self.calls = world.rng("calls")
        self.ambushes = world.rng("ambushes")
        self.life = Life("faults")
        self.fired: dict[str, int] = {}
        self.troubles: dict[str, tuple[str, float]] = {}
        """For each node, what is wrong with its view of the disk, and how often it fails."""
        self.hung: dict[Process, None] = {}
        self.count = 0
        self.is_healed = False
        world.on_call = self.on_call
        launcher.on_moment = self._ambush
        network.loss, network.doubling = options.loss, options.doubling
        network.delay, network.delay_s_max = options.delay, options.delay_s_max
        if options.kinds:
            world.after(self._pause_s(), self.life, self._strike)

    def _pause_s(self) -> float:
        return self.rng.expovariate(1 / self.options.interval_s)

    def _strike(self) -> None:
        if self.is_healed:
            return
        kind = self.rng.choice(self.options.kinds)
        self._fires(kind)
        getattr(self, f"_{kind}")()
        self.world.after(self._pause_s(), self.life, self._strike)

    def _fires(self, kind: str) -> None:
        self.fired[kind] = self.fired.get(kind, 0) + 1
        self.world.note("fault", kind)
        self.oracle.tell("fault", kind)

    def _ambush(self, attempt: Attempt) -> None:
        """Strike at a moment that random faults would rarely hit."""
        rng = self.ambushes
        if not self.is_healed and rng.random() < self.options.ambushes:
            machine = attempt.machines[0 if rng.random() < 0.6 else -1]
            after_s = rng.choice([0.001, 0.003, 0.5]) * rng.random()
            self.world.after(after_s, self.life, self._spring, machine)

    def _spring(self, machine: Machine) -> None:
        if not self.is_healed and machine.daemon is not None:
            self._fires(AMBUSH)
            self.oracle.tell("killed:", machine.ref.node_id)
            machine.lose_daemon()
            after_s = self.ambushes.choice([0.0, 0.05, 1.0])
            self.world.after(after_s, self.life, machine.start_daemon)

    def _machine(self) -> Machine:
        # Strike the coordinator more often than chance would.
        return self.machines[0] if self.rng.random() < 0.3 else self.rng.choice(self.machines)

    # --- processes

    def _kill_daemon(self) -> None:
        machine = self._machine()
        self.oracle.tell("killed:", machine.ref.node_id)
        machine.lose_daemon()
        self._restart_later(machine)

    def _restart_later(self, machine: Machine) -> None:
        self.world.after(
            self.rng.choice([0.0, 0.05, 1.0, 15.0, 70.0]), self.life, machine.start_daemon
        )

    def _drain_daemon(self) -> None:
        machine = self._machine()
        self.oracle.tell("told to stop:", machine.ref.node_id)
        machine.stop_daemon()
        # A supervisor's patience ends.
        self.world.after(self.rng.choice([0.05, 29.0]), machine.daemon, machine.stop_daemon)

    def _stop_daemon(self) -> None:
        daemon = self._machine().daemon
        if daemon is not None and not daemon.is_stopped:
            self.oracle.tell("stopped:", daemon.node)
            daemon.is_stopped = True
            after_s = self.rng.choice([0.1, 5.0, 20.0, 100.0])
            self.world.after(after_s, None, self.world.go_on, daemon)

    def _kill_trainer(self) -> None:
        attempt = self.launcher.attempt
        if attempt is not None and not attempt.is_over:
            self.launcher.kill(self.rng.choice(attempt.trainers))

    def _kill_all_trainers(self) -> None:
        attempt = self.launcher.attempt
        if attempt is not None and not attempt.is_over:
            for trainer in attempt.trainers:
                self.launcher.kill(trainer)

    def _die_when_staged(self) -> None:
        attempt = self.launcher.attempt
        if attempt is not None and not attempt.is_over:
            ranks = range(len(attempt.ranks))
            is_all = self.rng.random() < 0.5
            self.launcher.dying.update(ranks if is_all else [self.rng.choice(ranks)])

    def _crash_machine(self) -> None:
        machine = self._machine()
        if machine.is_up:
            self._power_off(machine)
            lost = self.disk.crash(machine.ref.node_id, self.rng)
            self.oracle.crashed(machine.ref.node_id, lost)

    def _power_off(self, machine: Machine) -> None:
        self.oracle.tell("machine down:", machine.ref.node_id)
        machine.is_up = False
        for trainer in list(machine.trainers):
            self.launcher.kill(trainer)  # type: ignore[arg-type]
        for reader in list(machine.readers):
            reader.is_alive = False
        machine.readers.clear()
        self.launcher.lose_claimant(machine.ref.node_id)
        machine.lose_daemon()
        machine.arenas.clear()
        if self.rng.random() < 0.5:
            machine.journal.clear()
            machine.layouts.clear()
        self.world.after(self.rng.choice([2.0, 20.0, 90.0]), self.life, self._boot, machine)

    def _boot(self, machine: Machine) -> None:
        machine.is_up = True
        machine.start_daemon()

    def _crash_site(self) -> None:
        for machine in self.machines:
            if machine.is_up:
                self._power_off(machine)
        self.oracle.crashed(None, self.disk.crash(None, self.rng))

    # --- networks and disks

    def _cut(self) -> None:
        self._cut_between(both_ways=True)

    def _cut_one_way(self) -> None:
        self._cut_between(both_ways=False)

    def _cut_between(self, *, both_ways: bool) -> None:
        names = [machine.ref.node_id for machine in self.machines]
        self.rng.shuffle(names)
        middle = self.rng.randint(0, len(names))
        here, there = frozenset(names[:middle]), frozenset(names[middle:])
        for pair in [(here, there), (there, here)][: 1 + both_ways]:
            self.count += 1
            self.network.cuts[self.count] = pair
            after_s = self.rng.choice([0.5, 10.0, 60.0])
            self.world.after(after_s, self.life, self._mend, self.count)

    def _mend(self, cut: int) -> None:
        self.network.cuts.pop(cut, None)

    def _trouble(self, kind: str, share: float) -> None:
        is_all = self.rng.random() < 0.4
        names = [each.ref.node_id for each in (self.machines if is_all else [self._machine()])]
        for name in names:
            self.troubles[name] = (kind, share)
        self.world.is_cutting = True
        self.world.after(self.rng.choice([0.2, 5.0, 40.0]), self.life, self._untrouble, names)

    def _untrouble(self, names: Sequence[str]) -> None:
        for name in names:
            self.troubles.pop(name, None)
        self.world.is_cutting = bool(self.troubles)

    def _disk_full(self) -> None:
        self._trouble("full", 1.0)

    def _disk_fails(self) -> None:
        self._trouble("fails", self.options.calls_fail)

    def _disk_stale(self) -> None:
        self._trouble("stale", self.options.calls_fail)

    def _disk_hangs(self) -> None:
        self._trouble("hangs", self.options.calls_fail)

    def on_call(self, process: Process, call: str) -> float | OSError | None:
        """Decide what happens to a system call."""
        takes_s = 0.0002 + 0.001 * self.calls.random()
        kind, share = self.troubles.get(process.life.node, ("", 0.0))
        if not kind or self.calls.random() >= share:
            return takes_s
        match kind:
            case "full":
                wants = call in ("write", "open", "mkdir", "symlink")
                return _error(errno.ENOSPC) if wants else takes_s
            case "fails":
                return _error(errno.EIO)
            case "stale":
                return _error(errno.ESTALE)
            case _:
                self.hung[process] = None
                after_s = self.calls.random() * HUNG_S
                self.world.after(after_s, process.life, self._unhang, process)
                return None

    def _unhang(self, process: Process) -> None:
        if process not in self.hung:
            return
        del self.hung[process]
        if self.calls.random() < 0.5:
            process.fail(_error(errno.EIO))
        else:
            process.resume(process.turn)

    # --- the end

    def heal(self) -> None:
        """End all faults; everything that is away comes back."""
        self.is_healed = True
        self.world.note("healed")
        self.oracle.tell("healed")
        self.network.heal()
        self.troubles.clear()
        self.launcher.dying.clear()
        self.world.is_cutting = False
        for process in list(self.hung):
            self.world.after(0, process.life, self._unhang, process)
        for machine in self.machines:
            if machine.daemon is not None and machine.daemon.is_stopped:
                self.world.go_on(machine.daemon)
            machine.is_up = True
            machine.start_daemon()


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
