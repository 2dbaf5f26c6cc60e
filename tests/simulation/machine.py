"""One host: its shared memory, its daemon's journal, and the daemon that runs there or does not.

Owns what `milepostd.runtime` owns in the real system: it gives events to the real `Node`, and
carries out its commands on the model of disk and network. A daemon's life is a `Life`; shared
memory and the run directory survive it. Does not know why trainers do what they do.

Sources: `daemon/milepostd/runtime.py`, `journal.py`, `executors/`.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from milepost.errors import MilepostError, Rejected, StorageError
from milepost.storage.fate import Fate
from milepost.storage.refusals import storage_error
from milepost.wire.messages import (
    Cause,
    DaemonMessage,
    Join,
    Leave,
    NodeRef,
    PeerMessage,
    RankMessage,
    SaveRef,
    SignalMessage,
    Staged,
    WrittenFile,
)
from milepostd.core.commands import (
    AnyCommand,
    BuildIndex,
    ClearTimer,
    Discard,
    ForgetJournal,
    GiveUp,
    Halt,
    KeepJournal,
    Log,
    MakePlan,
    Publish,
    RemoveArenas,
    Reply,
    Retain,
    Send,
    SetTimer,
    SweepArenas,
    WriteFragment,
    WriteImage,
)
from milepostd.core.events import (
    AnyEvent,
    Discarded,
    FileDurable,
    FileFailed,
    FragmentDurable,
    FragmentFailed,
    IndexBuilt,
    IndexFailed,
    JobRecalled,
    OutcomeFound,
    PeerSaid,
    PlanFailed,
    PlanMade,
    Published,
    PublishFailed,
    RankJoined,
    RankLeft,
    RankSaid,
    RankSignalled,
    Retained,
    SessionLost,
    SessionOpened,
    Started,
    StopRequested,
    TimerFired,
)
from milepostd.core.node import Node, NodeSettings
from milepostd.executors.latest import FOLLOW_PAUSES_S
from tests.simulation.disk import Image, Root
from tests.simulation.world import SECOND_NS, Life, Sleep, Steps, World

if TYPE_CHECKING:
    from tests.simulation.network import Network
    from tests.simulation.oracle import Oracle

IPC_S: Final = 0.0002
RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 10.0


@dataclass(eq=False)
class Slot:
    """One buffer: free, being filled, or complete with what it holds."""

    image: Image | None = None
    is_staging: bool = False
    readers: int = 0
    """How many writers read it at this moment."""

    @property
    def is_free(self) -> bool:
        return self.image is None and not self.is_staging

    def release(self) -> None:
        self.image = None
        self.is_staging = False


@dataclass(eq=False)
class Arena:
    """A rank's shared memory for one layout."""

    path: str
    job: str
    attempt: int
    rank: int
    layout_id: str
    slots: tuple[Slot, ...]


class Link:
    """One session: the socket between a trainer and a daemon. It keeps the order of messages, and
    ends when either end dies.
    """

    def __init__(
        self, daemon: Daemon, trainer: Life, number: int, on_message: Callable[[Any], None]
    ) -> None:
        self.daemon = daemon
        self.trainer = trainer
        self.number = number
        self.on_message = on_message
        self.is_open = True

    def to_daemon(self, event: AnyEvent) -> None:
        # All messages have the same delay, which keeps their order.
        self.daemon.world.after(IPC_S, self.daemon, self.daemon.take, event)

    def to_trainer(self, message: DaemonMessage) -> None:
        self.daemon.world.after(IPC_S, self.trainer, self._heard, message)

    def _heard(self, message: DaemonMessage) -> None:
        if self.is_open:
            self.on_message(message)


class Daemon(Life):
    """One life of a node's daemon: the real core, and its executors."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine.ref.node_id)
        self.machine = machine
        self.world = machine.world
        self.node_core = Node(
            NodeSettings(node=machine.ref, is_embedded=machine.is_embedded, linger_s=10.0)
        )
        self.timers: dict[str, int] = {}
        self.links: dict[int, Link] = {}
        self.fragments: dict[tuple[str, str], dict[int, WrittenFile]] = {}
        self.following = 0
        """How many commits `latest` has not followed yet."""
        self.reading: dict[Slot, int] = {}
        self.sessions = 0

    # --- events in, commands out

    def take(self, event: AnyEvent) -> None:
        machine, world = self.machine, self.world
        commands = self.node_core.handle(event, world.now_ns)
        world.note(self.node, type(event).__name__, _id_of(event), *map(_name_of, commands))
        machine.oracle.handled(self, event, commands)
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: AnyCommand) -> None:
        machine = self.machine
        match command:
            case Reply():
                link = self.links.get(command.session)
                if link is not None:
                    link.to_trainer(command.message)
            case Send():
                machine.send(command.node.node_id, command.message)
            case SetTimer():
                self.timers[command.timer] = command.at_ns
                delay_s = (command.at_ns - self.world.now_ns) / SECOND_NS
                self.world.after(delay_s, self, self._timer_over, command.timer, command.at_ns)
            case ClearTimer():
                self.timers.pop(command.timer, None)
            case Log():
                machine.oracle.logged(self, command)
            case Halt():
                self.world.note(self.node, "halted", command.reason)
                machine.lose_daemon()
                if not machine.is_embedded:
                    # Its supervisor starts it again.
                    self.world.after(1.0, None, machine.start_daemon)
            case KeepJournal():
                message = command.message
                machine.journal[message.job, message.attempt] = message
            case ForgetJournal():
                machine.journal.pop((command.job, command.attempt), None)
            case SweepArenas():
                for path, arena in list(machine.arenas.items()):
                    is_ours = arena.job == command.job and arena.rank in command.ranks
                    if is_ours and arena.attempt < command.below_attempt:
                        del machine.arenas[path]
            case RemoveArenas():
                for path in command.paths:
                    machine.arenas.pop(path, None)
            case _:
                execute = EXECUTORS.get(type(command))
                if execute is not None:
                    self.world.spawn(self, execute(self, command), self.take)

    def _timer_over(self, timer: str, at_ns: int) -> None:
        if self.timers.get(timer) == at_ns:
            del self.timers[timer]
            self.take(TimerFired(timer=timer))

    # --- trainers

    def hello(self, trainer: Life, on_message: Callable[[Any], None]) -> Link:
        """Take a trainer's hello; the link itself is the answer."""
        self.sessions += 1
        link = Link(self, trainer, self.sessions, on_message)
        self.links[link.number] = link
        self.take(SessionOpened(session=link.number))
        return link

    def joined(self, link: Link, join: Join) -> None:
        link.to_daemon(RankJoined(session=link.number, pid=1000 + join.rank, message=join))

    def said(self, link: Link, message: RankMessage) -> None:
        link.to_daemon(RankSaid(session=link.number, message=message))

    def signalled(self, link: Link, message: SignalMessage) -> None:
        link.to_daemon(RankSignalled(session=link.number, message=message))

    def left(self, link: Link) -> None:
        link.to_daemon(RankLeft(session=link.number, message=Leave()))

    def trainer_ended(self, trainer: Life) -> None:
        """Take the kernel's notice that a trainer's process has ended."""
        for link in [link for link in self.links.values() if link.trainer is trainer]:
            self.world.after(IPC_S, self, self._tell_lost, link.number)

    def _tell_lost(self, number: int) -> None:
        place = self.node_core.roster.joined.get(number)
        staged: tuple[Staged, ...] = ()
        arenas: tuple[str, ...] = ()
        if place is not None:
            whose = (place.job.job, place.job.attempt, (place.rank,))
            staged = tuple(word for _, word in self.machine.find_staged(*whose))
            arenas = tuple(path for _, path in self.machine.arenas_of(*whose))
        self.links.pop(number, None)
        self.take(
            SessionLost(
                session=number, reason="its process has ended", staged=staged, arenas=arenas
            )
        )

    def cause_of(self, error: Exception, rank: int = -1) -> Cause:
        if isinstance(error, MilepostError):
            return Cause(error.code, error.message, error.hint, self.node, rank)
        if isinstance(error, OSError):
            found = storage_error("a file operation", "", error)
            return Cause(found.code, found.message, found.hint, self.node, rank)
        raise error

    # --- executors: each yields its system calls, and returns its one event

    def root(self, path: str) -> Root:
        return Root(self.machine.disk, self.node, self.machine.rng, path)

    def retried(self, make: Callable[[], Iterator[Any]], until_ns: int) -> Steps:
        pause_s = RETRY_S_MIN
        while True:
            try:
                return (yield from make())
            except StorageError as error:
                if not error.transient or self.world.now_ns + pause_s * SECOND_NS > until_ns:
                    raise
            yield Sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    def write_image(self, command: WriteImage) -> Steps:
        save, rank = command.save, command.rank
        try:
            file = yield from self.retried(lambda: self._write_rank(command), command.until_ns)
        except (MilepostError, OSError) as error:
            return FileFailed(save=save, rank=rank, cause=self.cause_of(error, rank))
        self.fragments.setdefault((save.job, save.save_id), {})[rank] = file
        return FileDurable(save=save, file=file)

    def _write_rank(self, command: WriteImage) -> Steps:
        save = command.save
        arena = self.machine.arenas.get(command.arena)
        if arena is None:
            raise storage_error(
                "open", command.arena, FileNotFoundError(errno.ENOENT, "no such file")
            )
        slot = arena.slots[command.slot]
        wanted = (save.job, save.save_id, save.step, save.name, command.rank, command.layout_id)
        if slot.image is None or slot.image[:6] != wanted:
            raise Rejected("arena-invalid", f"arena {arena.path} holds {slot.image}")
        seen = slot.image
        torn = seen._replace(is_torn=True)
        slot.readers += 1
        self.reading[slot] = self.reading.get(slot, 0) + 1
        try:
            name = yield from self.root(command.root).write_image(
                save, command.rank, lambda: seen if slot.image == seen else torn
            )
        finally:
            # Do this also when the process is dropped: a dead daemon reads nothing.
            if self.reading.get(slot):
                self.reading[slot] -= 1
                slot.readers -= 1
        if slot.image != seen:
            raise Rejected("arena-invalid", f"slot {command.slot} was staged anew")
        return WrittenFile(command.rank, command.layout_id, name, 4096)

    def write_fragment(self, command: WriteFragment) -> Steps:
        save = command.save
        files = self.fragments.pop((save.job, save.save_id))
        ordered = tuple(files[rank] for rank in sorted(files))
        root = self.root(command.root)
        try:
            name = yield from self.retried(
                lambda: root.write_fragment(save, self.node, ordered), command.until_ns
            )
        except (MilepostError, OSError) as error:
            return FragmentFailed(save=save, cause=self.cause_of(error))
        return FragmentDurable(save=save, fragment=name)

    def make_plan(self, command: MakePlan) -> Steps:
        yield Sleep(0.01)
        known = self.machine.layouts
        structures = set()
        for report in command.reports:
            if not report.layout_id:
                structures.add(report.fingerprint)
                continue
            if (command.save.job, report.rank, report.layout_id) not in known:
                cause = Cause("structure-changed", f"layout {report.layout_id} is not known")
                return PlanFailed(save=command.save, cause=cause)
            structures.add(report.layout_id.partition("/")[0])
        if len(structures) > 1:
            cause = Cause("structure-changed", f"structures {sorted(structures)}")
            return PlanFailed(save=command.save, cause=cause)
        made = tuple(
            _layout_of(report.rank, report.fingerprint, command.save)
            for report in command.reports
            if not report.layout_id
        )
        for layout in made:
            known[(command.save.job, layout.rank, layout.layout_id)] = None
        return PlanMade(save=command.save, layouts=made, warnings=())

    def build_index(self, command: BuildIndex) -> Steps:
        save = command.save
        known = self.machine.layouts
        try:
            missing = [
                file.rank
                for file in command.files
                if (save.job, file.rank, file.layout_id) not in known
            ]
            if missing:
                cause = Cause("structure-changed", f"layouts of ranks {missing} are not known")
                return IndexFailed(save=save, cause=cause)
            if len({file.layout_id.partition("/")[0] for file in command.files}) > 1:
                cause = Cause("structure-changed", "ranks have staged different structures")
                return IndexFailed(save=save, cause=cause)
            root = self.root(command.root)
            size = yield from self.retried(
                lambda: root.build_index(save, command.files, command.fragments), command.until_ns
            )
        except (MilepostError, OSError) as error:
            return IndexFailed(save=save, cause=self.cause_of(error))
        return IndexBuilt(save=save, checkpoint_bytes=size)

    def publish(self, command: Publish) -> Steps:
        save, root = command.save, self.root(command.root)
        try:
            path = yield from self.retried(lambda: root.publish(save), command.until_ns)
        except (MilepostError, OSError) as error:
            return PublishFailed(save=save, cause=self.cause_of(error))
        yield from self._advance_latest(root, save)
        return Published(save=save, path=path, at_ms=self.world.now_ns // 1_000_000)

    def _advance_latest(self, root: Root, save: SaveRef) -> Steps:
        try:
            yield from root.advance_latest(save)
            self.machine.oracle.followed(save.save_id)
        except (MilepostError, OSError):
            self.machine.oracle.note_unmoved()
            self.following += 1
            self.world.spawn(self, self._follow(root, save))

    def _follow(self, root: Root, save: SaveRef) -> Steps:
        for pause_s in FOLLOW_PAUSES_S:
            yield Sleep(pause_s)
            try:
                yield from root.advance_latest(save)
            except (MilepostError, OSError):
                continue
            break
        self.following -= 1

    def give_up(self, command: GiveUp) -> Steps:
        save, root = command.save, self.root(command.root)
        try:
            is_forestalled = command.is_coordinator and not command.was_prepared
            look = root.forestall if is_forestalled else root.give_up
            found = yield from self.retried(lambda: look(save), command.until_ns)
        except (MilepostError, OSError):
            found = "unknown"
            try:
                if command.is_coordinator and not command.may_take_effect:
                    is_free = yield from root.is_unpublished(save, was_begun=command.was_prepared)
                    found = "aborted" if is_free else "unknown"
            except (MilepostError, OSError):
                pass  # The first failure has been told.
            if found == "aborted":
                self.machine.oracle.mark("given up unmoved")
        if found == "committed" and command.is_coordinator:
            yield from self._advance_latest(root, save)
        return OutcomeFound(save=save, fate=Fate(found), path=f"{command.root}/{save.name}")

    def discard(self, command: Discard) -> Steps:
        save, root = command.save, self.root(command.root)
        self.fragments.pop((save.job, save.save_id), None)
        try:
            yield from root.give_up(save)
            yield from root.discard(save)
        except (MilepostError, OSError):
            pass  # Leftovers are worth no more than a line.
        return Discarded(save=save)

    def retain(self, command: Retain) -> Steps:
        root = self.root(command.root)
        removed: list[str] = []
        if self.following:
            return Retained(job=command.job, removed=())
        try:
            yield "listdir"
            oracle = self.machine.oracle
            there = oracle.shown()
            names = yield from root.removable(command.keep)
            oracle.retaining(names, command.keep, there)
            for name, save_id in names.items():
                oracle.leases.looked_at_ns[name] = self.world.now_ns
                if name in (yield from root.being_read()):
                    continue
                if (yield from root.remove_checkpoint(name, save_id)):
                    removed.append(name)
        except (MilepostError, OSError):
            pass  # A checkpoint too many is no loss.
        return Retained(job=command.job, removed=tuple(removed))


EXECUTORS: Final[dict[type, Callable[[Daemon, Any], Steps]]] = {
    WriteImage: Daemon.write_image,
    WriteFragment: Daemon.write_fragment,
    MakePlan: Daemon.make_plan,
    BuildIndex: Daemon.build_index,
    Publish: Daemon.publish,
    GiveUp: Daemon.give_up,
    Discard: Daemon.discard,
    Retain: Daemon.retain,
}


@dataclass(eq=False)
class Machine:
    """One host. Its arenas and run directory survive its daemon, not its own crash."""

    world: World
    ref: NodeRef
    disk: Any
    network: Network
    oracle: Oracle
    rng: random.Random
    peers: dict[str, Machine]
    is_embedded: bool = False
    is_up: bool = True
    daemon: Daemon | None = None
    arenas: dict[str, Arena] = field(default_factory=dict)
    journal: dict[tuple[str, int], Join] = field(default_factory=dict)
    layouts: dict[tuple[str, int, str], None] = field(default_factory=dict)
    """Layouts that the planner's child keeps in the run directory."""
    trainers: dict[Life, None] = field(default_factory=dict)
    readers: dict[Life, None] = field(default_factory=dict)
    lost_at_ns: int = 0
    """When a daemon last ended here."""

    def start_daemon(self) -> None:
        """Start the daemon, if the machine is up and none is running."""
        if not self.is_up or self.daemon is not None:
            return
        self.daemon = daemon = Daemon(self)
        daemon.take(Started())
        for _, join in sorted(self.journal.items()):
            ranks = [
                rank
                for rank, index in enumerate(join.node_of_rank)
                if join.cohort[index].node_id == self.ref.node_id
            ]
            arenas = self.arenas_of(join.job, join.attempt, ranks)
            staged = tuple(self.find_staged(join.job, join.attempt, ranks))
            daemon.take(JobRecalled(message=join, staged=staged, arenas=arenas))

    def lose_daemon(self) -> None:
        """End the daemon's process, for whatever reason."""
        daemon, self.daemon = self.daemon, None
        if daemon is None:
            return
        daemon.is_alive = False
        self.lost_at_ns = self.world.now_ns
        for slot, count in daemon.reading.items():
            slot.readers -= count
        daemon.reading.clear()
        for link in list(daemon.links.values()):
            link.is_open = False
            self.world.after(IPC_S, link.trainer, link.on_message, None)

    def stop_daemon(self) -> None:
        """Tell the daemon to drain, as its supervisor does."""
        if self.daemon is not None:
            self.world.after(0, self.daemon, self.daemon.take, StopRequested())

    def arenas_of(
        self, job: str, attempt: int, ranks: tuple[int, ...] | list[int]
    ) -> tuple[tuple[int, str], ...]:
        """Return rank and path of each arena of these ranks."""
        return tuple(
            (arena.rank, arena.path)
            for arena in self.arenas.values()
            if (arena.job, arena.attempt) == (job, attempt) and arena.rank in ranks
        )

    def find_staged(
        self, job: str, attempt: int, ranks: tuple[int, ...] | list[int]
    ) -> list[tuple[int, Staged]]:
        """Return the complete images in the arenas of these ranks, in the order of the saves."""
        found = []
        for arena in self.arenas.values():
            if (arena.job, arena.attempt) != (job, attempt) or arena.rank not in ranks:
                continue
            for index, slot in enumerate(arena.slots):
                image = slot.image
                if image is None:
                    continue
                save = SaveRef(
                    job=job,
                    save_id=image.save_id,
                    step=image.step,
                    name=image.name,
                    overwrite=True,
                )
                staged = Staged(
                    save=save,
                    layout_id=image.layout_id,
                    arena=arena.path,
                    slot=index,
                    image_bytes=4096,
                )
                found.append((int(image.save_id.partition("-")[2]), arena.rank, staged))
        return [(rank, staged) for _, rank, staged in sorted(found, key=lambda each: each[:2])]

    # --- between daemons

    def send(self, target: str, message: PeerMessage) -> None:
        for delay_s in self.network.arrivals(self.ref.node_id, target):
            peer = self.peers[target]
            self.world.after(delay_s, None, peer.arrived, self.ref.node_id, message)

    def arrived(self, source: str, message: PeerMessage, tries: int = 40) -> None:
        """Deliver a message. A daemon that is away gets it if it comes back soon."""
        daemon = self.daemon
        if daemon is not None:
            event = PeerSaid(node_id=source, message=message)
            self.world.happen(daemon, daemon.take, (event,))
        elif tries and self.is_up:
            self.world.after(0.25, None, self.arrived, source, message, tries - 1)


def _layout_of(rank: int, structure: str, save: SaveRef) -> Any:
    from milepost.wire.messages import RankLayout

    return RankLayout(rank, f"{structure}/{save.save_id}", b"\1")


def _id_of(value: Any) -> str:
    save = getattr(value, "save", None) or getattr(getattr(value, "message", None), "save", None)
    return save.save_id if isinstance(save, SaveRef) else getattr(value, "timer", "")


def _name_of(command: AnyCommand) -> str:
    if isinstance(command, Send | Reply):
        return f"{type(command).__name__}.{type(command.message).__name__}"
    return type(command).__name__
