"""One rank of one attempt: what `Checkpointer` does, around the client's own ledger of saves.

A `Trainer` is a process that opens, stages and ends saves as the client does. It keeps its
knowledge in `milepost.ledger`, the same object that the client uses, which also makes its
decisions.

Sources: `client/milepost/checkpointer.py`, `saving/`, `staging/slots.py`. How a trainer is
preempted and goes back a step is in `preemption.py` and `branches.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from milepost.errors import MilepostError, Rejected, SaveFailed, Unavailable
from milepost.ledger import (
    ENDED,
    Advance,
    Decision,
    EndCommitted,
    EndUncommitted,
    ForgetWords,
    FreeSlot,
    KnownPlan,
    Ledger,
    LoseArena,
)
from milepost.link.session import JOIN_S
from milepost.wire.messages import (
    AbortWanted,
    Cause,
    DaemonMessage,
    Offered,
    Preempted,
    ReadsWanted,
    SaveRef,
    Skipped,
    Staged,
    Unable,
)
from tests.simulation.branches import load
from tests.simulation.disk import Image, Root
from tests.simulation.machine import Arena, Machine, Slot
from tests.simulation.preemption import Flag
from tests.simulation.session import Session
from tests.simulation.world import Life, Sleep, Steps, Until, World

if TYPE_CHECKING:
    from tests.simulation.oracle import Oracle
    from tests.simulation.workload import Attempt

ROOT: Final = "/data/run"
JOB: Final = "job"


@dataclass(eq=False)
class Handle:
    """What the user holds: ends exactly once."""

    save: SaveRef
    rank: int
    opened_at_ns: int
    phase: str = "staging"
    cause: Cause | None = None

    @property
    def is_done(self) -> bool:
        return self.phase in ENDED


class Trainer(Life):
    """See the module's docstring."""

    def __init__(self, attempt: Attempt, rank: int, machine: Machine) -> None:
        super().__init__(machine.ref.node_id)
        self.attempt = attempt
        self.rank = rank
        self.number = attempt.number
        """The number of the attempt, as far as this rank knows."""
        self.base = attempt.first_step
        """The step from which its saves are counted."""
        self.machine = machine
        self.world: World = attempt.launcher.world
        self.rng = random.Random(f"{self.world.seed}/trainer/{attempt.number}/{rank}")
        self.work = attempt.work
        self.session = Session(self.world, self, machine, self._heard, self._gone)
        self.ledger: Ledger[Handle] = Ledger()
        self.ledger.begin(JOB, self.number)
        self.held: dict[str, Slot] = {}
        self.layout_id = ""
        self.arena: Arena | None = None
        self.is_arena_lost = False
        self.retired: list[Arena] = []
        self.generation = 0
        self.structure = "s0"
        self.flag = Flag(self)
        machine.trainers[self] = None

    @property
    def oracle(self) -> Oracle:
        return self.attempt.launcher.oracle

    def begin(self, number: int) -> None:
        """Go on as another attempt. No save is under way."""
        self.number = number
        self._carry_out(self.ledger.begin(JOB, number))
        self.held.clear()
        self.close_arenas()

    # --- the daemon

    def ensure(self) -> Steps:
        yield from self.session.ensure(self.attempt.join(self.rank, self.number))

    def _heard(self, message: DaemonMessage) -> None:
        match message:
            case ReadsWanted():
                self.flag.hold()
            case Preempted():
                self.flag.decide(message.at_read)
            case _:
                self._carry_out(self.ledger.heard(message))

    def _gone(self, cause: Cause) -> None:
        placed = Cause(cause.code, cause.message, cause.hint, self.node, self.rank)
        self._carry_out(self.ledger.gone(placed), is_forced=True)
        self.notify()

    def _carry_out(self, decisions: Sequence[Decision[Handle]], *, is_forced: bool = False) -> None:
        for decision in decisions:
            match decision:
                case EndCommitted(handle):
                    self._end(handle, "committed", None)
                case EndUncommitted(handle, _, outcome, cause):
                    self._end(handle, outcome, cause)
                case Advance(handle, phase):
                    handle.phase = phase
                case FreeSlot(save_id):
                    self._free_slot(save_id, is_forced=is_forced)
                case LoseArena():
                    self.is_arena_lost = True
                case ForgetWords(save_id):
                    self.session.settle(save_id)

    def _end(self, handle: Handle, phase: str, cause: Cause | None) -> None:
        if handle.is_done:
            self.oracle.fail(f"the handle of rank {self.rank} for {handle.save.save_id} ends twice")
        handle.phase, handle.cause = phase, cause
        self.oracle.ended(handle)
        self.oracle.watch_slot(self, handle.save)

    def _free_slot(self, save_id: str, *, is_forced: bool) -> None:
        slot = self.held.pop(save_id, None)
        if slot is not None:
            if not is_forced:
                self.oracle.freed(slot, self, save_id)
            slot.release()

    # --- saving

    def save(self, step: int, *, is_last: bool = False) -> Steps:
        name = f"step_{step}"
        if self.ledger.in_hand:
            self.oracle.fail(f"rank {self.rank} has left {self.ledger.in_hand} to nobody")
        taken_by = self.ledger.taken_by(name)
        if taken_by is not None:
            self.oracle.fail(f"rank {self.rank} is refused {name}, which is taken by {taken_by}")
        ref = self.ledger.name_save(step, name)
        handle = Handle(ref, self.rank, self.world.now_ns)
        if self.rank == 0:
            self.attempt.line.append(handle)
        self.oracle.opened(handle, self)
        self._carry_out(self.ledger.open(ref, handle))
        if handle.is_done:
            self.oracle.mark("early end")
        try:
            yield from self.ensure()
            if (yield from self._take_turn(ref)):
                yield from self._stage(ref)
        except MilepostError as error:
            self._give_up(ref, error)
        if not handle.is_done and self.rng.random() < self.work.aborts:
            self.session.send(AbortWanted(save=ref))
        return handle

    def prepare(self) -> Steps:
        """Ask for layouts; a failure costs nothing."""
        ref = self.ledger.name_save(0, "prepare", is_plan_only=True)
        self._carry_out(self.ledger.open(ref, Handle(ref, self.rank, self.world.now_ns)))
        try:
            yield from self.ensure()
            yield from self._ask(ref)
        except MilepostError as error:
            self._give_up(ref, error)
        self.session.settle(ref.save_id)
        # Nobody watches the end of this handle.
        self.ledger.close_plan(ref.save_id)

    def _is_over(self, ref: SaveRef) -> bool:
        return not self.ledger.is_open(ref.save_id)

    def _take_turn(self, ref: SaveRef) -> Steps:
        if len(self.held) >= self.work.slots and self.work.skips:
            reason = f"rank {self.rank} has all slots in use"
            self.ledger.skip(ref.save_id)
            self.session.say(Skipped(save=ref, reason=reason))
            return False
        has_room = yield Until(
            lambda: len(self.held) < self.work.slots or self._is_over(ref), self.work.deadline_s
        )
        if self._is_over(ref):
            return False
        if not has_room:
            raise Rejected("busy", f"no slot became free within {self.work.deadline_s:g} s")
        return True

    def _stage(self, ref: SaveRef) -> Steps:
        if self.is_arena_lost:
            self.is_arena_lost = False
            self._renew()
        plan = self.ledger.plan_of(self.structure)
        if plan is None:
            yield from self._ask(ref)
        else:
            self._lay_out(plan.layout_id)
        if self._is_over(ref):
            return
        assert self.arena is not None
        index = next(i for i, slot in enumerate(self.arena.slots) if slot.is_free)
        slot, layout_id = self.arena.slots[index], self.layout_id
        self.oracle.filling(slot, self)
        slot.is_staging = True
        yield Sleep(self.work.copy_s)
        slot.is_staging = False
        slot.image = Image(ref.job, ref.save_id, ref.step, ref.name, self.rank, layout_id)
        if self.attempt.launcher.is_dying_when_staged(self):
            return
        decisions = self.ledger.stage(ref.save_id)
        if not decisions:
            slot.release()
            return
        self.held[ref.save_id] = slot
        self._carry_out(decisions)
        path = self.arena.path
        self.session.say(
            Staged(save=ref, layout_id=layout_id, arena=path, slot=index, image_bytes=4096)
        )

    def _ask(self, ref: SaveRef) -> Steps:
        """Offer the structure, and put the answered layout in force unless the save ends."""
        ledger, structure = self.ledger, self.structure
        self.session.say(Offered(save=ref, fingerprint=structure, offer=b"offer"))
        yield Until(
            lambda: ledger.layout_of(ref.save_id) is not None or self._is_over(ref),
            self.work.deadline_s + JOIN_S,
        )
        ready = ledger.layout_of(ref.save_id)
        if ready is None:
            if not self._is_over(ref):
                raise Unavailable("timeout", f"no layout came within {self.work.deadline_s:g} s")
            if ref.is_plan_only:
                raise SaveFailed("aborted", "it has ended meanwhile")
            return
        self._lay_out(ready.layout_id)
        ledger.keep_plan(structure, KnownPlan(ready.layout_id, ()))

    def _give_up(self, ref: SaveRef, error: MilepostError) -> None:
        cause = Cause(error.code, error.message, error.hint, self.node, self.rank)
        self.session.say(Unable(save=ref, cause=cause))
        self._carry_out(self.ledger.give_up(ref.save_id, cause))
        self.notify()

    # --- arenas

    def _lay_out(self, layout_id: str) -> None:
        if self.layout_id == layout_id and self.arena is not None:
            return
        self._drop_retired()
        path = f"/shm/{JOB}-{self.number}-r{self.rank}-g{self.generation}"
        self.generation += 1
        slots = tuple(Slot() for _ in range(self.work.slots))
        arena = Arena(path, JOB, self.number, self.rank, layout_id, slots)
        self.machine.arenas[path] = arena
        self._renew()
        self.arena, self.layout_id = arena, layout_id
        self._drop_retired()

    def _renew(self) -> None:
        """Have the next layout get a new arena; the present one goes when its slots are free."""
        if self.arena is not None:
            self.retired.append(self.arena)
        self.arena, self.layout_id = None, ""

    def _drop_retired(self) -> None:
        kept = []
        for arena in self.retired:
            if all(slot.is_free for slot in arena.slots):
                self.machine.arenas.pop(arena.path, None)
            else:
                kept.append(arena)
        self.retired = kept

    def close_arenas(self) -> None:
        """Unlink the shared memory; a writer that has it open goes on."""
        for arena in [*self.retired, *([] if self.arena is None else [self.arena])]:
            self.machine.arenas.pop(arena.path, None)
        self.retired, self.arena, self.layout_id = [], None, ""

    # --- the loop

    def train(self) -> Steps:
        """Train and save until the attempt is over."""
        work, attempt = self.work, self.attempt
        try:
            yield from self.session.open()
        except MilepostError:
            attempt.launcher.broken(attempt)
            return
        if work.prepares:
            yield from self.prepare()
        for number in range(1, work.saves + 1):
            if (yield from self._step_until_save(number)):
                break
            self.structure = attempt.structure_of(number, self.rank)
            yield from self.save(self.base + number * 10, is_last=number == work.saves)
            # The next step's collective: no rank goes on before all have called save.
            yield from attempt.meet(number)
            if attempt.is_going_back(number):
                root = Root(self.machine.disk, self.node, self.rng, ROOT)
                yield from load(self, number, root)
        if self.rng.random() >= work.leaves_early:
            yield from self.close()
        self.world.after(0, None, attempt.launcher.ended, self)

    def _step_until_save(self, number: int) -> Steps:
        """Train up to a save; return whether the rank has to go and has saved its state."""
        work, attempt = self.work, self.attempt
        train_s = work.interval_s * (0.5 + self.rng.random() / 10)
        if not work.reads:
            yield Sleep(train_s)
            return False
        for step in range(1, work.reads + 1):
            yield Sleep(train_s / work.reads)
            if (yield from self.flag.read()):
                yield from self.save(self.base + (number - 1) * 10 + step)
                return True
            yield from attempt.meet((number, step))
        return False

    def close(self) -> Steps:
        self.flag.is_closed = True
        is_quiet = yield Until(lambda: not self.ledger.open_saves, self.work.deadline_s + JOIN_S)
        if is_quiet:
            yield from self.session.leave()
        self.session.close()
        if is_quiet:
            self.close_arenas()
