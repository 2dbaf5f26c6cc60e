"""One run under a seed: options drawn, faults, healing, and the two judgements.

Ties the parts together and knows them all; `__main__` and the tests call it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from milepost.wire.messages import Keep, NodeRef
from tests.simulation import preemption, readers
from tests.simulation.disk import Disk, Folder
from tests.simulation.faults import FaultOptions, Faults, draw
from tests.simulation.machine import Machine
from tests.simulation.network import Network
from tests.simulation.oracle import LivenessViolation, Oracle
from tests.simulation.preemption import SignalOptions, Signals
from tests.simulation.readers import ReaderOptions, Readers
from tests.simulation.trainer import ROOT
from tests.simulation.workload import Attempt, Launcher, Work
from tests.simulation.world import SECOND_NS, World

LARGE_NODES: Final = 64
"""From this many nodes on, a process makes several system calls at once, and invariants are checked
only now and then: the work per event must not grow with the number of nodes."""

TURNS_MAX: Final = 60_000_000


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything that a run depends on."""

    seed: int
    nodes: int
    is_nodes_given: bool
    """If False, the number was drawn first of all. To draw the same again, do not give it."""
    ranks_per_node: int
    is_embedded: bool
    work: Work
    faults: FaultOptions
    signals: SignalOptions
    readers: ReaderOptions

    def words(self) -> dict[str, Any]:
        found = {"seed": self.seed, "nodes": self.nodes, "ranks_per_node_max": self.ranks_per_node}
        found["embedded"] = self.is_embedded
        for part in ("work", "faults", "signals", "readers"):
            words = asdict(getattr(self, part))
            found |= {f"{part}.{name}": value for name, value in words.items()}
        return found


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    commits: int
    trace_hash: str
    events: int
    virtual_s: float
    attempts: int
    fired: dict[str, int]
    marks: dict[str, int]


def draw_options(seed: int, nodes: int = 0) -> Options:
    """Draw everything from the seed; with `nodes` 0, the number of nodes, too."""
    world = World(seed)
    rng = world.rng("options")
    count = nodes or rng.choice([1, 1, 2, 2, 3, 3, 4, 5, 8])
    is_large = count >= LARGE_NODES
    deadline_s = rng.choice([5.0, 20.0, 60.0])
    work = Work(
        saves=rng.choice([3, 6, 12]) if not is_large else 3,
        interval_s=rng.choice([0.05, 1.0, 8.0]),
        copy_s=rng.choice([0.001, 0.05, 0.5]),
        slots=rng.choice([1, 2, 2, 3]),
        deadline_s=deadline_s,
        skips=rng.random() < 0.4,
        keep=rng.choice(
            [Keep(), Keep(last=1), Keep(last=2, every=(50,)), Keep(last=3, protect=(20,))]
        ),
        aborts=rng.choice([0.0, 0.0, 0.05]),
        reshapes=rng.choice([0.0, 0.1, 0.5]),
        strays=rng.choice([0.0, 0.0, 0.1]),
        rewinds=rng.choice([0.0, 0.3]),
        prepares=rng.random() < 0.4,
        leaves_early=rng.choice([0.0, 0.5]),
    )
    faults = draw(rng, world.rng("ambush options"))
    if is_large:
        # A handful of attempts: each costs the square of the number of nodes.
        work = replace(work, interval_s=max(work.interval_s, 1.0))
        faults = replace(faults, lasts_s=20.0, interval_s=max(faults.interval_s, 8.0))
    # These have streams of their own, so that the draws above do not change.
    signals = preemption.draw(world, is_large=is_large)
    loads = world.rng("loads").choice([0.0, 0.0, 0.1, 0.4])
    work = replace(work, reads=signals.reads, loads=loads)
    return Options(
        seed=seed,
        nodes=count,
        is_nodes_given=bool(nodes),
        ranks_per_node=1 if is_large else rng.choice([1, 2, 3]),
        is_embedded=rng.random() < 0.5,
        work=work,
        faults=faults,
        signals=signals,
        readers=readers.draw(world),
    )


class Run:
    """A world with everything in it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        is_large = options.nodes >= LARGE_NODES
        world = World(options.seed, grain=16 if is_large else 1)
        self.world = world
        self.disk = Disk()
        self.disk.clock = lambda: world.now_ns
        self.oracle = Oracle(
            world, self.disk, options.work.deadline_s, checks_every=1000 if is_large else 1
        )
        self.network = Network(world.rng("network"))
        self.machines: dict[str, Machine] = {}
        tokens = world.rng("tokens")
        for index in range(options.nodes):
            name = f"n{index}"
            self.machines[name] = Machine(
                world=world,
                ref=NodeRef(name, f"tcp://{name}:1", f"key-{name}"),
                disk=self.disk,
                network=self.network,
                oracle=self.oracle,
                rng=tokens,
                peers=self.machines,
                is_embedded=options.is_embedded,
            )
        machines = list(self.machines.values())
        self.launcher = Launcher(world, machines, self.oracle, options.work, options.ranks_per_node)
        self.faults = Faults(
            world, options.faults, machines, self.network, self.disk, self.launcher, self.oracle
        )
        self.signals = Signals(world, options.signals, self.launcher, self.oracle)
        self.readers = Readers(world, options.readers, machines, self.oracle, ROOT)

    def until(self, at_s: float) -> None:
        """Let everything happen up to this instant."""
        at_ns = int(at_s * SECOND_NS)
        world, oracle = self.world, self.oracle
        checked_at_ns = world.now_ns
        while world.heap and world.heap[0][0] <= at_ns:
            world.turn()
            if world.now_ns - checked_at_ns > 5 * SECOND_NS:
                checked_at_ns = world.now_ns
                oracle.check_handles()
            if world.events > TURNS_MAX:
                raise LivenessViolation("the world never comes to rest")
        world.now_ns = at_ns

    @property
    def next_save_s(self) -> float:
        """How long after the healing the next save may take until it is committed. In this time,
        saves in flight end within the bound of their handles, a launcher starts anew, and another
        save may follow an unlucky one.
        """
        return self.oracle.handle_s_max + 120

    def go(self) -> Result:
        """Faults, healing, judgement. Raises SafetyViolation, LivenessViolation."""
        for machine in self.machines.values():
            machine.start_daemon()
        self.launcher.start()
        self.until(self.options.faults.lasts_s)
        self.faults.heal()
        self.signals.heal()
        self.readers.heal()
        self.oracle.preemptions.healed_at_ns = self.world.now_ns
        healed_at_s = self.world.now_s
        # Let everything that was under way end, or reach its deadline.
        self.launcher.is_stopping = True
        self.until(healed_at_s + self.oracle.handle_s_max + 5)
        self.oracle.check_handles()
        self.oracle.preemptions.check_turned(self.launcher.attempt)
        attempt = self.launcher.attempt
        if attempt is not None and not attempt.is_over:
            self.launcher.broken(attempt)
            self.until(self.world.now_s + 41)
        if self.options.work.reads:
            self._check_preemption()
        if self.options.work.loads:
            self._check_branch()
        self._check_end(self._check_next_save())
        return self._result()

    def _judged(self, work: Work) -> Attempt:
        """Start an attempt on all nodes, in which all must go well."""
        started = self.launcher.attempts
        self.launcher.start(on_all=True, work=work)
        until_s = self.world.now_s + NEXT_SAVE_S
        while self.launcher.attempts == started:
            if self.world.now_s > until_s:
                raise LivenessViolation("after the healing no attempt could start")
            self.until(self.world.now_s + 0.1)
        assert self.launcher.attempt is not None
        return self.launcher.attempt

    def _finish(self, attempt: Attempt) -> None:
        """Let an attempt come to its end; all its saves must be committed."""
        until_s = self.world.now_s + NEXT_SAVE_S + 2 * self.options.work.deadline_s
        ended: dict[str, dict[str, str]] = {}
        while self.world.now_s < until_s:
            self.until(self.world.now_s + 1)
            saves = [handle.save.save_id for handle in attempt.line]
            ended = {save_id: self.oracle.outcomes.get(save_id, {}) for save_id in saves}
            if attempt.is_over and all(ended.values()):
                break
        is_well = all(set(told) == {"committed"} for told in ended.values())
        if not (attempt.is_over and ended and is_well):
            self.oracle.be_late(
                f"after the healing, the saves of attempt {attempt.number} ended as {ended}"
            )

    def _check_next_save(self) -> Attempt:
        """Start a new attempt on all nodes: its saves must become checkpoints, soon."""
        attempt = self._judged(self.options.work.quiet(2))
        self._finish(attempt)
        if len(attempt.line) != 2:
            self.oracle.be_late(f"after the healing {len(attempt.line)} saves were made, not 2")
        return attempt

    def _check_preemption(self) -> None:
        """Tell one rank to go: all must go at one read, in time, and what they save then must
        become a checkpoint.
        """
        work = self.options.work
        work = replace(work.quiet(4), reads=work.reads, interval_s=max(1.0, work.interval_s))
        attempt = self._judged(work)
        rng = self.signals.rng
        until_s = self.world.now_s + NEXT_SAVE_S
        while not all(trainer.flag.reads for trainer in attempt.trainers):
            if self.world.now_s > until_s:
                raise LivenessViolation("after the healing training does not begin")
            self.until(self.world.now_s + 0.01)
        self.until(self.world.now_s + rng.random() * work.interval_s)
        if not attempt.is_over:
            self.signals.signal(attempt, [rng.choice(attempt.trainers)])
        self._finish(attempt)
        staying = [trainer.rank for trainer in attempt.trainers if not trainer.flag.is_true]
        if staying:
            self.oracle.be_late(f"ranks {staying} were never told to go")

    def _check_branch(self) -> None:
        """Go back a step after each save except the last; `latest` must follow every new branch."""
        attempt = self._judged(replace(self.options.work.quiet(4), loads=1.0))
        self._finish(attempt)
        self._check_end(attempt)

    def _check_end(self, attempt: Attempt) -> None:
        # Retention comes after the commit, and removes one after another.
        self.until(self.world.now_s + 5)
        daemons = [machine.daemon for machine in self.machines.values()]
        self.oracle.check_end(
            attempt.line,
            self.options.work.keep,
            is_following=any(daemon is not None and daemon.following for daemon in daemons),
        )
        names = [n for n, i in self.disk.root.entries.items() if isinstance(i, Folder)]
        self.world.note("names", sorted(names))

    def _result(self) -> Result:
        return Result(
            commits=self.oracle.commits,
            trace_hash=self.world.digest.hexdigest(),
            events=self.world.events,
            virtual_s=self.world.now_s,
            attempts=self.launcher.attempts,
            fired=self.faults.fired | self.signals.fired | self.readers.fired,
            marks=dict(sorted(self.oracle.marks.items())),
        )


NEXT_SAVE_S: Final = 60.0
"""After the healing: how long it may take from the start of an attempt until its saves are
committed, in addition to the saves' own deadlines."""
