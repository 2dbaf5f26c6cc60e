"""Readers of checkpoints, their leases, and what retention must not do meanwhile.

A `Reader` is a process on one machine that reads one checkpoint, as `Checkpointer.load` and an
evaluation do. It takes a lease first, then reads the files while a beat touches the lease. It may
be killed, or stopped for longer than a lease lives. `Leases` judges: a checkpoint that somebody was
reading when retention looked is not removed as long as that lease lives.

A lease that is taken after retention has looked comes too late: the reader finds the checkpoint
gone, and says so. Source: `client/milepost/storage/claims.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from milepost.storage.claims import BEAT_S, EXPIRY_S
from tests.simulation.disk import READING, RETIRED, File, Inode, Root, lease_on
from tests.simulation.world import Life, Sleep, Steps, World

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.oracle import Oracle

KINDS: Final = ("kill_reader", "stop_reader")
"""The kinds of faults that strike readers."""


@dataclass(frozen=True, kw_only=True)
class ReaderOptions:
    """Which readers there are; drawn from the seed."""

    pause_s: float = 0.0
    """Mean time between the starts of two readers; 0: there are no readers."""
    read_s: float = 0.0
    """Mean time for which one reads."""
    strikes: float = 0.0
    """Probability that one is killed, or stopped, while it reads."""


def draw(world: World) -> ReaderOptions:
    """Draw from a stream of its own."""
    rng = world.rng("reader options")
    if rng.random() < 0.5:
        return ReaderOptions()
    return ReaderOptions(
        pause_s=rng.choice([1.0, 5.0, 20.0]),
        read_s=rng.choice([2.0, 20.0, 60.0]),
        strikes=rng.choice([0.0, 0.3, 0.8]),
    )


class Reader(Life):
    """One process that reads one checkpoint."""

    def __init__(self, readers: Readers, machine: Machine) -> None:
        super().__init__(machine.ref.node_id)
        self.readers = readers
        self.machine = machine
        self.lease = ""
        machine.readers[self] = None

    def read(self) -> Steps:
        readers, world = self.readers, self.readers.world
        root = Root(self.machine.disk, self.node, readers.rng, readers.root)
        try:
            yield "listdir"
            there = [name for name, step, _ in root.checkpoints() if step >= 0]
            if there:
                # The oldest is the next to go.
                name = there[-1] if readers.rng.random() < 0.7 else readers.rng.choice(there)
                self.lease = yield from root.take_lease(name)
                yield "open"
                if self.lease and root.has_index(name):
                    world.spawn(self, self._beat(root))
                    readers.oracle.mark("read")
                    mean_s = readers.options.read_s
                    yield Sleep(min(2 * mean_s, readers.rng.expovariate(1 / mean_s)))
        except OSError:
            readers.oracle.mark("read failed")
        lease, self.lease = self.lease, ""
        try:
            if lease:
                yield from root.drop_lease(lease)
        except OSError:
            pass  # It expires.
        self.machine.readers.pop(self, None)

    def _beat(self, root: Root) -> Steps:
        while self.lease:
            yield Sleep(BEAT_S)
            if self.lease:
                yield from root.renew_lease(self.lease)


class Readers:
    """Starts readers, and strikes some of them, until everything is healed."""

    def __init__(
        self,
        world: World,
        options: ReaderOptions,
        machines: Sequence[Machine],
        oracle: Oracle,
        root: str,
    ) -> None:
        self.world = world
        self.options = options
        self.machines = machines
        self.oracle = oracle
        self.root = root
        self.rng = world.rng("readers")
        self.fired: dict[str, int] = {}
        self.is_healed = False
        if options.pause_s:
            world.after(self._pause_s(), None, self._begin)

    def _pause_s(self) -> float:
        return self.rng.expovariate(1 / self.options.pause_s)

    def _begin(self) -> None:
        if self.is_healed:
            return
        machine = self.rng.choice(self.machines)
        if machine.is_up:
            reader = Reader(self, machine)
            self.world.spawn(reader, reader.read())
            if self.rng.random() < self.options.strikes:
                after_s = self.rng.expovariate(1 / self.options.read_s)
                self.world.after(after_s, reader, self._strike, reader)
        self.world.after(self._pause_s(), None, self._begin)

    def _strike(self, reader: Reader) -> None:
        if self.is_healed or not reader.lease:
            return
        kind = self.rng.choice(KINDS)
        self.fired[kind] = self.fired.get(kind, 0) + 1
        self.world.note("fault", kind)
        self.oracle.tell("fault", kind, reader.node, reader.lease)
        if kind == "kill_reader":
            reader.is_alive = False
            reader.machine.readers.pop(reader, None)
        else:
            reader.is_stopped = True
            after_s = self.rng.choice([5.0, 1.5 * EXPIRY_S])
            self.world.after(after_s, None, self.world.go_on, reader)

    def heal(self) -> None:
        """Start no more readers; those that read go on."""
        self.is_healed = True


class Leases:
    """Judges retention by the leases that lie on the disk."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.looked_at_ns: dict[str, int] = {}
        """For each checkpoint that retention is about to remove: when it began to look."""
        self.inodes: dict[str, Inode] = {}
        """What lies under each name."""

    def named(self, name: str, inode: Inode | None) -> None:
        """Note that a checkpoint got a name, or lost it."""
        if inode is not None:
            self.inodes[name] = inode
            return
        was, disk = self.inodes.pop(name, None), self.oracle.disk
        is_removed = any(
            inode is was and part.endswith(RETIRED) for part, inode in disk.partial.entries.items()
        )
        if not is_removed or name not in self.looked_at_ns:
            return
        for lease, file in disk.run.entries.items():
            if not lease.startswith(READING) or lease_on(lease) != name:
                continue
            assert isinstance(file, File)
            if disk.age_s(file) >= EXPIRY_S:
                continue
            if file.made_ns >= self.looked_at_ns[name]:
                self.oracle.mark("lease.late")
                continue
            self.oracle.fail(
                f"retention removes {name} beside {lease}, touched {disk.age_s(file):.1f} s ago"
            )
