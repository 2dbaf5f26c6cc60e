"""A handful of nodes, their trainers, a network and a disk, in one thread and virtual time.

The nodes are the real core. Messages, slow commands and timers wait in one place, so that a test
decides what is lost, late, doubled or held, and can walk through every order. After each event the
invariants of the node are checked. The disk is a word for each save: `partial`, `aborted` or
`committed`, moved by the same rule as the real one: publishing and giving up take the same source.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, TypeAlias

from milepost.storage.fate import Fate
from milepost.wire.messages import (
    AbortWanted,
    Cause,
    Concluded,
    DaemonMessage,
    Join,
    Keep,
    LayoutReady,
    Leave,
    NodeRef,
    Offered,
    Outcome,
    PeerMessage,
    RankLayout,
    RankMessage,
    SaveRef,
    Skipped,
    SlotFreed,
    Staged,
    Unable,
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
    MakePlan,
    Publish,
    Reply,
    Retain,
    Send,
    SetTimer,
    SlowCommand,
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
    Retained,
    SessionLost,
    SessionOpened,
    Started,
    StopRequested,
    TimerFired,
)
from milepostd.core.invariants import broken_invariants
from milepostd.core.node import Node, NodeSettings
from milepostd.core.participation import Participation
from milepostd.core.timers import SECOND_NS

Network: TypeAlias = Callable[[str, str, PeerMessage], Sequence[float]]
"""From, to, message -> after how many seconds it arrives, once for each; none: it is lost."""

LATENCY_S = 0.001
DISK_S = 0.01
ROOT = "/data/run"
NO_SPACE = Cause("no-space", "the file system is full", "free some space")


def on_time(source: str, target: str, message: PeerMessage) -> Sequence[float]:
    """A network without faults."""
    return (LATENCY_S,)


def save_ref(count: int = 1, *, attempt: int = 1, job: str = "job", **changes: object) -> SaveRef:
    fields: dict[str, object] = {"step": count * 10, "name": f"step_{count * 10}"} | changes
    return SaveRef(job=job, save_id=f"{attempt}-{count}", **fields)  # type: ignore[arg-type]


class InFlight(NamedTuple):
    """Something that is going to happen to a node."""

    at_ns: int
    number: int
    node: str
    event: AnyEvent


class World:
    """Nodes A, B, C ... with the given numbers of ranks, which have all joined."""

    def __init__(
        self,
        ranks_per_node: Sequence[int] = (1,),
        *,
        deadline_s: float = 60.0,
        keep: Keep | None = None,
        is_embedded: bool = False,
        network: Network = on_time,
        joined: bool = True,
    ) -> None:
        names = [chr(ord("A") + index) for index in range(len(ranks_per_node))]
        self.cohort = tuple(NodeRef(name, f"tcp://{name}:1", "key-" + name) for name in names)
        self.node_of_rank = tuple(
            index for index, ranks in enumerate(ranks_per_node) for _ in range(ranks)
        )
        self.world = len(self.node_of_rank)
        self.deadline_s = deadline_s
        self.keep = Keep() if keep is None else keep
        self.network = network
        self.is_embedded = is_embedded
        self.nodes = {ref.node_id: self.new_node(ref) for ref in self.cohort}
        self.now_ns = 0
        self.numbers = count(1)
        self.in_flight: list[InFlight] = []
        self.timers: dict[tuple[str, str], int] = {}
        self.dead: set[str] = set()
        self.halted: dict[str, str] = {}
        self.disk: dict[tuple[str, str], str] = {}
        self.failures: list[tuple[type, str, int, Cause]] = []
        self.holding: set[tuple[type, str]] = set()
        self.held: list[tuple[str, SlowCommand]] = []
        self.commands: list[tuple[str, AnyCommand]] = []
        self.sent: list[tuple[str, str, PeerMessage]] = []
        self.session_of: dict[int, int] = {}
        self.rank_of: dict[int, int] = {}
        self.heard: dict[int, list[DaemonMessage]] = {rank: [] for rank in range(self.world)}
        self.refs: dict[str, SaveRef] = {}
        self.journal: dict[tuple[str, str, int], Join] = {}
        self.joins: dict[int, Join] = {}
        self.slots: dict[tuple[int, str], Staged] = {}
        self.words: dict[tuple[int, str], RankMessage] = {}
        self.killed: set[int] = set()
        self.stages_when_planned = True
        self.is_checked = True
        for name in names:
            self.post(name, Started())
        if joined:
            for rank in range(self.world):
                self.join(rank)
            self.run()

    def new_node(self, ref: NodeRef) -> Node:
        return Node(NodeSettings(node=ref, is_embedded=self.is_embedded))

    # --- trainers

    def node_of(self, rank: int) -> str:
        return self.cohort[self.node_of_rank[rank]].node_id

    def new_session(self, rank: int) -> int:
        return next(self.numbers)

    def join(self, rank: int, *, attempt: int = 1, job: str = "job", **changes: object) -> int:
        """Open a session for the rank and ask for its place; return the session."""
        session = self.new_session(rank)
        self.session_of[rank] = session
        self.rank_of[session] = rank
        fields: dict[str, object] = {
            "root": ROOT,
            "node_of_rank": self.node_of_rank,
            "cohort": self.cohort,
            "keep": self.keep,
            "deadline_s": self.deadline_s,
        } | changes
        join = Join(job=job, attempt=attempt, rank=rank, **fields)  # type: ignore[arg-type]
        self.joins[rank] = join
        self.post(self.node_of(rank), SessionOpened(session=session))
        self.post(self.node_of(rank), RankJoined(session=session, pid=1000 + rank, message=join))
        return session

    def say(self, rank: int, message: RankMessage) -> None:
        self.refs[message.save.save_id] = message.save
        self.words[(rank, message.save.save_id)] = message
        if isinstance(message, Staged):
            self.slots[(rank, message.save.save_id)] = message
        self.post(self.node_of(rank), RankSaid(session=self.session_of[rank], message=message))

    def stage(self, save: SaveRef, *ranks: int, layout: str = "old") -> None:
        """Say `Staged` for these ranks, or for all."""
        for rank in ranks or range(self.world):
            arena = f"/arenas/r{rank}-{layout}"
            self.say(
                rank,
                Staged(save=save, layout_id=layout, arena=arena, slot=0, image_bytes=4096),
            )

    def offer(self, save: SaveRef, *ranks: int) -> None:
        """Say `Offered` for these ranks, or for all; they stage when their layout comes."""
        for rank in ranks or range(self.world):
            self.say(rank, Offered(save=save, fingerprint="f", offer=b"offer of %d" % rank))

    def skip(self, save: SaveRef, rank: int) -> None:
        self.say(rank, Skipped(save=save, reason=f"rank {rank} has all 2 slots in use"))

    def unable(self, save: SaveRef, rank: int, cause: Cause) -> None:
        self.say(rank, Unable(save=save, cause=cause))

    def abort(self, save: SaveRef, rank: int) -> None:
        self.say(rank, AbortWanted(save=save))

    def leave(self, rank: int) -> None:
        self.post(self.node_of(rank), RankLeft(session=self.session_of[rank], message=Leave()))

    def lose(self, rank: int, reason: str = "its process has ended") -> None:
        self.killed.add(rank)
        event = SessionLost(session=self.session_of[rank], reason=reason)
        self.post(self.node_of(rank), event)

    def concluded(self, rank: int, save: SaveRef) -> Concluded | None:
        """What the rank was told first about the save's end."""
        return next(
            (
                message
                for message in self.heard[rank]
                if isinstance(message, Concluded) and message.save_id == save.save_id
            ),
            None,
        )

    def outcomes(self, save: SaveRef) -> set[str]:
        """All the different ends that ranks were told; `none` for a rank that was told nothing."""
        told = (self.concluded(rank, save) for rank in range(self.world))
        return {"none" if message is None else message.outcome for message in told}

    def cause(self, rank: int, save: SaveRef) -> Cause:
        """Why the save did not become a checkpoint, as the rank was told."""
        message = self.concluded(rank, save)
        assert message is not None
        assert message.cause is not None
        return message.cause

    # --- faults

    def fail(self, kind: type, cause: Cause = NO_SPACE, *, node: str = "", rank: int = -1) -> None:
        """Let slow commands of this kind fail, on one node or of one rank if named."""
        self.failures.append((kind, node, rank, cause))

    def hold(self, kind: type, node: str = "") -> None:
        """Let slow commands of this kind take until they are released."""
        self.holding.add((kind, node))

    def release(self) -> None:
        """End all holding; what was held goes on now."""
        self.holding.clear()
        held, self.held = self.held, []
        for node, command in held:
            self.execute(node, command)

    def crash(self, node: str) -> None:
        """The node's daemon is gone for good."""
        self.dead.add(node)

    def restart(self, name: str) -> None:
        """Kill the node's daemon and start it anew: it knows its journal and what the arenas hold,
        and its living trainers come back and repeat their last words.
        """
        self.in_flight = [item for item in self.in_flight if item.node != name]
        heapq.heapify(self.in_flight)
        self.timers = {key: at for key, at in self.timers.items() if key[0] != name}
        self.held = [(node, command) for node, command in self.held if node != name]
        (ref,) = (ref for ref in self.cohort if ref.node_id == name)
        self.nodes[name] = self.new_node(ref)
        ranks = [rank for rank in range(self.world) if self.node_of(rank) == name]
        self.post(name, Started())
        for (node, job, attempt), join in sorted(self.journal.items()):
            if node == name:
                slots = [(rank, staged) for (rank, _), staged in self.slots.items()
                         if rank in ranks and staged.save.job == job
                         and staged.save.save_id.startswith(f"{attempt}-")]  # fmt: skip
                arenas = tuple((rank, staged.arena) for rank, staged in slots)
                self.post(name, JobRecalled(message=join, staged=tuple(slots), arenas=arenas))
        for rank in ranks:
            if rank not in self.killed:
                self.come_back(rank)

    def come_back(self, rank: int) -> None:
        join = self.joins[rank]
        session = self.session_of[rank] = self.new_session(rank)
        self.rank_of[session] = rank
        name = self.node_of(rank)
        self.post(name, SessionOpened(session=session), LATENCY_S)
        self.post(name, RankJoined(session=session, pid=1000 + rank, message=join), LATENCY_S)
        for (owner, _), word in self.words.items():
            if owner == rank:
                self.post(name, RankSaid(session=session, message=word), LATENCY_S)

    def stop(self, node: str) -> None:
        self.post(node, StopRequested())

    # --- time

    @property
    def now_s(self) -> float:
        return self.now_ns / SECOND_NS

    def post(self, node: str, event: AnyEvent, after_s: float = 0.0) -> None:
        at_ns = self.now_ns + int(after_s * SECOND_NS)
        heapq.heappush(self.in_flight, InFlight(at_ns, next(self.numbers), node, event))

    def run(self, for_s: float | None = None) -> None:
        """Let everything happen in its time, until nothing is left or so much time has passed."""
        until_ns = None if for_s is None else self.now_ns + int(for_s * SECOND_NS)
        for _ in range(1_000_000):
            timer = min(self.timers, key=lambda key: (self.timers[key], key), default=None)
            timer_at_ns = None if timer is None else self.timers[timer]
            next_at_ns = self.in_flight[0].at_ns if self.in_flight else None
            due = [at_ns for at_ns in (timer_at_ns, next_at_ns) if at_ns is not None]
            if not due or (until_ns is not None and min(due) > until_ns):
                break
            if next_at_ns is not None and (timer_at_ns is None or next_at_ns <= timer_at_ns):
                self.deliver(heapq.heappop(self.in_flight))
            else:
                assert timer is not None
                self.fire(timer)
        else:
            raise AssertionError("the world never comes to rest")
        if until_ns is not None:
            self.now_ns = until_ns

    def deliver(self, item: InFlight) -> None:
        """Let this happen now, or at its time if that is later."""
        self.now_ns = max(self.now_ns, item.at_ns)
        self.handle(item.node, item.event)

    def fire(self, timer: tuple[str, str]) -> None:
        self.now_ns = max(self.now_ns, self.timers.pop(timer))
        self.handle(timer[0], TimerFired(timer=timer[1]))

    def handle(self, name: str, event: AnyEvent) -> None:
        if name in self.dead or name in self.halted:
            return
        node = self.nodes[name]
        commands = node.handle(event, self.now_ns)
        assert not self.is_checked or broken_invariants(node) == [], event
        for command in commands:
            self.commands.append((name, command))
            self.carry_out(name, command)

    # --- commands

    def carry_out(self, name: str, command: AnyCommand) -> None:
        match command:
            case Reply():
                self.reply(command)
            case Send():
                target = command.node.node_id
                self.sent.append((name, target, command.message))
                for after_s in self.network(name, target, command.message):
                    self.post(target, PeerSaid(node_id=name, message=command.message), after_s)
            case SetTimer():
                self.timers[(name, command.timer)] = command.at_ns
            case ClearTimer():
                self.timers.pop((name, command.timer), None)
            case KeepJournal():
                message = command.message
                self.journal[name, message.job, message.attempt] = message
            case ForgetJournal():
                self.journal.pop((name, command.job, command.attempt), None)
            case Halt():
                self.halted[name] = command.reason
                self.timers = {key: at for key, at in self.timers.items() if key[0] != name}
            case _ if isinstance(command, SlowCommand):
                if (type(command), name) in self.holding or (type(command), "") in self.holding:
                    self.held.append((name, command))
                else:
                    self.execute(name, command)
            case _:
                pass

    def reply(self, command: Reply) -> None:
        rank = self.rank_of.get(command.session)
        if rank is None or self.session_of[rank] != command.session:
            return
        message = command.message
        if isinstance(message, Concluded):
            self.words.pop((rank, message.save_id), None)
        if isinstance(message, SlotFreed) or (isinstance(message, Concluded) and message.slot_free):
            self.slots.pop((rank, message.save_id), None)
        self.heard[rank].append(message)
        if isinstance(message, LayoutReady) and self.stages_when_planned:
            save = self.refs[message.save_id]
            if not save.is_plan_only:
                self.stage(save, rank, layout=message.layout_id)

    def execute(self, name: str, command: SlowCommand) -> None:
        """Carry out a slow command: exactly one event comes back."""
        self.post(name, self.completion(name, command), DISK_S)

    def completion(self, name: str, command: SlowCommand) -> AnyEvent:
        for kind, node, rank, cause in self.failures:
            if (
                type(command) is kind
                and node in ("", name)
                and (rank < 0 or getattr(command, "rank", rank) == rank)
            ):
                return failed(command, cause)
        if isinstance(command, Retain):
            return Retained(job=command.job, removed=())
        save = command.save
        key = (save.job, save.save_id)
        match command:
            case WriteImage():
                self.disk.setdefault(key, "partial")
                file = f"__{command.rank}_0.distcp"
                written = WrittenFile(command.rank, command.layout_id, file, 4096)
                return FileDurable(save=save, file=written)
            case WriteFragment():
                return FragmentDurable(save=save, fragment=f"fragment.{name}")
            case MakePlan():
                layouts = tuple(
                    RankLayout(report.rank, "new", b"\1")
                    for report in command.reports
                    if report.offer
                )
                return PlanMade(save=save, layouts=layouts, warnings=())
            case BuildIndex():
                return IndexBuilt(save=save, checkpoint_bytes=4096 * len(command.files))
            case Publish():
                if self.disk.get(key) != "partial":
                    gone = Cause("io-error", "the save's directory is gone")
                    return PublishFailed(save=save, cause=gone)
                self.disk[key] = "committed"
                at_ms = self.now_ns // 1_000_000
                return Published(save=save, path=f"{command.root}/{save.name}", at_ms=at_ms)
            case GiveUp():
                if self.disk.get(key, "partial") == "partial":
                    self.disk[key] = "aborted"
                found = self.disk[key]
                return OutcomeFound(save=save, fate=Fate(found), path=f"{command.root}/{save.name}")
            case Discard():
                return Discarded(save=save)

    # --- what happened

    def said(self, kind: type) -> list[PeerMessage]:
        """Messages of this type that crossed the network."""
        return [message for _, _, message in self.sent if isinstance(message, kind)]

    def done(self, kind: type, node: str = "") -> list[AnyCommand]:
        """Commands of this type that were given, on one node or on all."""
        return [
            command
            for name, command in self.commands
            if isinstance(command, kind) and node in ("", name)
        ]

    def verdicts(self, save: SaveRef) -> set[str]:
        """How the save ended at each node that still lives and has heard of it."""
        key = (save.job, save.save_id)
        return {
            _verdict(node.saves.participations[key])
            for name, node in self.nodes.items()
            if name not in self.dead and key in node.saves.participations
        }


def failed(command: SlowCommand, cause: Cause) -> AnyEvent:
    """The failing completion of a slow command."""
    match command:
        case WriteImage():
            return FileFailed(save=command.save, rank=command.rank, cause=cause)
        case WriteFragment():
            return FragmentFailed(save=command.save, cause=cause)
        case MakePlan():
            return PlanFailed(save=command.save, cause=cause)
        case BuildIndex():
            return IndexFailed(save=command.save, cause=cause)
        case Publish():
            return PublishFailed(save=command.save, cause=cause)
        case GiveUp():
            return OutcomeFound(save=command.save, fate=Fate.UNKNOWN, path="")
        case Discard():
            return Discarded(save=command.save)
        case Retain():
            return Retained(job=command.job, removed=())


def losing(*kinds: type, first: int = 1) -> Network:
    """A network that loses the first messages of each of these types."""
    left = dict.fromkeys(kinds, first)

    def network(source: str, target: str, message: PeerMessage) -> Sequence[float]:
        if left.get(type(message), 0) > 0:
            left[type(message)] -= 1
            return ()
        return (LATENCY_S,)

    return network


def _verdict(role: Participation) -> str:
    """How a save ended for a node; empty if it has not ended."""
    if role.has_ended and role.verdict is None:
        return "planned"
    return role.outcome or ""


def outcome_of(world: World, save: SaveRef) -> Outcome | None:
    """The coordinator's verdict."""
    role = world.nodes["A"].saves.coordinations.get((save.job, save.save_id))
    return None if role is None else role.verdict
