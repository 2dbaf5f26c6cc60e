"""Every order of one small save: all interleavings with one crash and one lost message.

`run` draws one of endlessly many histories; this module walks all histories of a small world. It
clones the small world of `tests.unit.core.core_world` at each choice, and does not enter a state
twice. When nothing is in flight any more, only timers are left, and they run in order. A crash
strikes any daemon at any point; the daemon comes back at once or never.
"""

from __future__ import annotations

import copy
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import msgspec

from milepost.storage.fate import Fate
from milepost.wire.messages import Cause
from milepostd.core.commands import AnyCommand, GiveUp, SlowCommand, WriteImage
from milepostd.core.events import (
    AnyEvent,
    Discarded,
    JobRecalled,
    OutcomeFound,
    PeerSaid,
    Published,
    RankJoined,
    RankLeft,
    RankSaid,
    Retained,
    SessionLost,
    SessionOpened,
    Started,
)
from milepostd.core.invariants import broken_invariants
from milepostd.core.node import Node
from tests.unit.core.core_world import InFlight, World, failed, save_ref

SAVE = save_ref(1)
KEY = (SAVE.job, SAVE.save_id)
OF_A_SESSION = (SessionOpened, RankJoined, RankSaid, RankLeft, SessionLost)


def clone(value: Any, memo: dict[int, Any]) -> Any:
    """Copy everything that can change, and share the rest."""
    kind = type(value)
    if kind in (int, str, bool, float, bytes, tuple, frozenset, type(None)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is dict:
        return {key: clone(each, memo) for key, each in value.items()}
    if kind in (list, deque):
        return kind(clone(each, memo) for each in value)
    if kind is set:
        return set(value)
    if isinstance(value, Enum):
        return value
    if isinstance(value, msgspec.Struct):
        if value.__struct_config__.frozen:
            return value
        made = copy.copy(value)
        memo[id(value)] = made
        for name in value.__struct_fields__:
            setattr(made, name, clone(getattr(value, name), memo))
        return made
    made = object.__new__(kind)
    memo[id(value)] = made
    made.__dict__.update((name, clone(each, memo)) for name, each in vars(value).items())
    return made


class Known:
    """Cached results: how things look, and what a node does with an event."""

    def __init__(self) -> None:
        self._words: dict[int, tuple[object, str]] = {}
        self.moves: dict[tuple[str, str], tuple[Node, tuple[AnyCommand, ...]]] = {}

    def word(self, thing: object, make: Callable[[Any], str] = repr) -> str:
        """Return the text of a thing that does not change."""
        found = self._words.get(id(thing))
        if found is None:
            # Keep the thing, so that no other object gets its id.
            found = self._words[id(thing)] = (thing, make(thing))
        return found[1]

    def picture(self, node: Node) -> str:
        """Return everything that distinguishes one state of a node from another, except its
        clock.
        """
        return self.word(node, _picture)


def _picture(node: Node) -> str:
    roles = [
        (key, name, sorted(value.items()) if isinstance(value, dict) else value)
        for roles in (node.saves.participations, node.saves.coordinations)
        for key, role in roles.items()
        for name, value in vars(role).items()
        if name not in ("job", "opened_at_ns", "elapsed_s")
    ]
    jobs = [(job.seats, job.attempt, job.is_journalled) for job in node.roster.jobs.values()]
    rest = (
        sorted(node.roster.open_sessions),
        sorted(node.roster.joined),
        node.housekeeping,
        list(node.peers.early.kept),
    )
    return repr((node.node_id, roles, jobs, rest))


class SmallWorld(World):
    """A world that can be cloned cheaply, and whose disk refuses writers that come too late."""

    known: Known | None = None
    """Set while only the order of things matters, not their time."""

    def clone(self) -> SmallWorld:
        made = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | list | set):
                setattr(made, name, copy.copy(value))
        made.heard = {rank: list(messages) for rank, messages in self.heard.items()}
        made.commands, made.sent = [], []
        return made

    def new_session(self, rank: int) -> int:
        """Return a number that does not depend on what happened before, so that states can be
        equal.
        """
        return self.session_of.get(rank, 1000 + rank) + 100

    def handle(self, name: str, event: AnyEvent) -> None:
        if name in self.dead or name in self.halted:
            return
        known = self.known
        if known is None:
            self.nodes[name] = clone(self.nodes[name], {})
            super().handle(name, event)
            return
        key = (known.picture(self.nodes[name]), known.word(event))
        if key not in known.moves:
            node = clone(self.nodes[name], {})
            commands = node.handle(event, self.now_ns)
            assert broken_invariants(node) == [], event
            known.moves[key] = (node, commands)
        self.nodes[name], commands = known.moves[key]
        for command in commands:
            self.carry_out(name, command)

    def restart(self, name: str) -> None:
        """Restart as usual, but keep the messages of other daemons that are still on their way."""
        on_its_way = [
            item for item in self.in_flight
            if item.node == name and isinstance(item.event, PeerSaid)
        ]  # fmt: skip
        super().restart(name)
        for item in on_its_way:
            heapq.heappush(self.in_flight, item)
        for item in sorted(self.in_flight):
            if item.node == name and isinstance(item.event, Started | JobRecalled):
                self.in_flight.remove(item)
                self.deliver(item)
        heapq.heapify(self.in_flight)

    def completion(self, name: str, command: SlowCommand) -> AnyEvent:
        if isinstance(command, WriteImage) and self.disk.get(KEY) in ("aborted", "committed"):
            code = "aborted" if self.disk[KEY] == "aborted" else "already-committed"
            return failed(command, Cause(code, "the save has ended"))
        if isinstance(command, GiveUp) and KEY not in self.disk:
            is_proof = command.is_coordinator and not command.was_prepared
            if not is_proof:
                return OutcomeFound(save=command.save, fate=Fate.UNKNOWN, path="")
        event = super().completion(name, command)
        # The time of this event makes no difference.
        return msgspec.structs.replace(event, at_ms=0) if isinstance(event, Published) else event


class Faults(NamedTuple):
    """What may still go wrong."""

    losses: int
    crashes: int


@dataclass
class Walk:
    """The walk over all orders, from where `begin` leaves the world.

    Attributes:
        seen: states that were met.
        steps: choices that were made.
        ends: for each (content of the disk, what ranks and nodes were told), how many ways lead
            there.
    """

    begin: Callable[[], SmallWorld]
    faults: Faults
    seen: set[tuple[object, ...]] = field(default_factory=set)
    steps: int = 0
    ends: dict[tuple[str, frozenset[str]], int] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    def explore(self) -> None:
        """Walk. Raises AssertionError with the path to the first end that is not allowed."""
        start = self.begin()
        start.known = self.known
        stack: list[tuple[SmallWorld, Faults, tuple[str, ...]]] = [(start, self.faults, ())]
        while stack:
            world, faults, path = stack.pop()
            state = (faults, *self._state(world))
            if state in self.seen:
                continue
            self.seen.add(state)
            if not world.in_flight:
                self._end(world, path)
            for name, left, choose in self._choices(world, faults):
                self.steps += 1
                after = world.clone()
                choose(after)
                stack.append((after, left, (*path, name)))

    def _choices(
        self, world: SmallWorld, faults: Faults
    ) -> Iterator[tuple[str, Faults, Callable[[SmallWorld], None]]]:
        spoken: set[int] = set()
        for item in sorted(world.in_flight, key=lambda item: item.number):
            event = item.event
            if isinstance(event, OF_A_SESSION):
                # Messages of one session arrive in order.
                if event.session in spoken:
                    continue
                spoken.add(event.session)
            yield self._label(item), faults, partial(_deliver, item=item)
            if isinstance(event, PeerSaid) and faults.losses:
                left = faults._replace(losses=faults.losses - 1)
                yield (
                    f"lost: {self._label(item)}",
                    left,
                    partial(_lose, item=item),
                )
        if faults.crashes:
            left = faults._replace(crashes=faults.crashes - 1)
            for node in world.nodes:
                yield f"restart {node}", left, partial(_restart, node=node)
                yield f"crash {node}", left, partial(_crash, node=node)

    def _end(self, world: SmallWorld, path: tuple[str, ...]) -> None:
        """Let the timers, which are all that is left, heal what was lost. Then judge the result."""
        rest = world.clone()
        rest.known = None
        rest.run()
        told = {
            outcome
            for rank in range(rest.world)
            if rest.node_of(rank) not in rest.dead
            for message in [rest.concluded(rank, SAVE)]
            for outcome in ["nothing" if message is None else message.outcome]
        }
        told |= rest.verdicts(SAVE)
        found = rest.disk.get(KEY, "nothing")
        end = (found, frozenset(told))
        self.ends[end] = self.ends.get(end, 0) + 1
        allowed = {"committed"} if found == "committed" else {"failed"}
        is_quiet = not [timer for timer in rest.timers if timer[0] not in rest.dead]
        if not told <= allowed | {"outcome-unknown"} or not is_quiet:
            way = "\n  ".join(path)
            raise AssertionError(f"on disk {found}, told {told}, timers {rest.timers}:\n  {way}")

    # --- states

    def _label(self, item: InFlight) -> str:
        return f"{item.node} {self.known.word(item.event)}"

    def _state(self, world: SmallWorld) -> tuple[object, ...]:
        return (
            tuple(map(self.known.picture, world.nodes.values())),
            tuple(sorted(map(self._label, world.in_flight))),
            world.disk.get(KEY),
            tuple(sorted(world.timers)),
            tuple(sorted(world.dead)),
            tuple(sorted(world.slots)),
            tuple(len(messages) for messages in world.heard.values()),
        )


def _deliver(world: SmallWorld, item: InFlight) -> None:
    """Let it happen, and with it what makes no difference when it happens."""
    _lose(world, item)
    world.deliver(item)
    at_once = [
        each for each in world.in_flight
        if isinstance(each.event, Discarded | Retained)
        or (
            isinstance(item.event, SessionOpened)
            and isinstance(each.event, RankJoined)
            and each.event.session == item.event.session
        )
    ]  # fmt: skip
    for each in at_once:
        _lose(world, each)
        world.deliver(each)


def _lose(world: SmallWorld, item: InFlight) -> None:
    world.in_flight.remove(item)
    heapq.heapify(world.in_flight)


def _restart(world: SmallWorld, node: str) -> None:
    world.restart(node)


def _crash(world: SmallWorld, node: str) -> None:
    world.crash(node)
    world.in_flight = [item for item in world.in_flight if item.node != node]
    heapq.heapify(world.in_flight)
    world.timers = {key: at for key, at in world.timers.items() if key[0] != node}


def begin_staged(nodes: int = 3) -> SmallWorld:
    """Let all ranks stage, before any daemon hears of it."""
    world = SmallWorld((1,) * nodes)
    world.stage(SAVE)
    return world
