"""Trainers and the launcher that starts them: what `Checkpointer` and `Session` do, as processes.

A `Trainer` is one rank in one attempt; its methods are twins of the client's. The `Launcher` is
what torchrun and a scheduler are: it starts an attempt, ends it when a rank is gone, and starts the
next one, perhaps with another number of ranks. Knows nothing of what goes wrong, or why.

Sources: `client/milepost/checkpointer.py`, `session.py`, `staging.py`, `save.py`. How a trainer is
preempted and goes back a step is in `preemption.py` and `branches.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from milepost.errors import MilepostError, Rejected, Unavailable
from milepost.link.embedded import START_S
from milepost.link.session import (
    ANSWER_S,
    JOIN_S,
    LEAVE_S,
    MISSING_S,
    RESTORE_S,
    RETRY_S,
    SaveWord,
)
from milepost.wire.messages import (
    SILENCE_S,
    AbortWanted,
    Cause,
    Concluded,
    DaemonMessage,
    Join,
    Joined,
    Keep,
    LayoutReady,
    Left,
    NodeRef,
    Offered,
    Preempted,
    PreemptionNoticed,
    ReadsTold,
    ReadsWanted,
    Refused,
    SaveRef,
    Skipped,
    SlotFreed,
    Staged,
    Unable,
)
from tests.simulation.branches import Choice, load
from tests.simulation.disk import Image, Root
from tests.simulation.machine import Arena, Link, Machine, Slot
from tests.simulation.preemption import Flag
from tests.simulation.world import Life, Sleep, Steps, Until, World

if TYPE_CHECKING:
    from tests.simulation.oracle import Oracle

ROOT: Final = "/data/run"
JOB: Final = "job"

ATTEMPTS_MAX: Final = 25
"""Then the job is done: a run with short attempts shall not be one of endless saves."""


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
        return self.phase in ("committed", "failed", "skipped", "outcome-unknown")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What the trainers do, drawn by the seed."""

    saves: int
    """Saves an attempt makes."""
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
    """Layouts are asked for ahead of the first save."""
    leaves_early: float = 0.0
    """Probability that a rank ends right after it has staged its last save."""
    loads: float = 0.0
    """Probability that all ranks go back to an earlier step after a save."""
    reads: int = 0
    """Steps between two saves, at each of which `preempted` is read; 0: it never is."""

    def quiet(self, saves: int) -> Work:
        """The same, with nothing that ends a save on purpose."""
        return replace(self, saves=saves, aborts=0.0, strays=0.0, skips=False, loads=0.0, reads=0)


class Trainer(Life):
    """One rank of one attempt."""

    def __init__(self, attempt: Attempt, rank: int, machine: Machine) -> None:
        super().__init__(machine.ref.node_id)
        self.attempt = attempt
        self.rank = rank
        self.number = attempt.number
        """The attempt's number as this rank knows it."""
        self.base = attempt.first_step
        """The step that its saves are counted from."""
        self.step_last = -1
        """Greatest step that was committed under this number, or may be yet."""
        self.machine = machine
        self.world: World = attempt.launcher.world
        self.rng = random.Random(f"{self.world.seed}/trainer/{attempt.number}/{rank}")
        self.work = attempt.work
        self.link: Link | None = None
        self.joined: Joined | None = None
        """The place that this link was given last."""
        self.has_left = False
        self.is_closed = False
        self.is_restoring = False
        self.refusal: Cause | None = None
        self.place: Join | None = None
        """The place that was last asked for."""
        self.said: dict[str, SaveWord] = {}
        self.saves: dict[str, Handle] = {}
        self.held: dict[str, Slot] = {}
        self.layouts_ready: dict[str, LayoutReady] = {}
        self.plans: dict[str, str] = {}
        self.layout_id = ""
        self.arena: Arena | None = None
        self.retired: list[Arena] = []
        self.generation = 0
        self.count = 0
        """Saves so far, under all numbers."""
        self.structure = "s0"
        self.flag = Flag(self)
        machine.trainers[self] = None

    # --- the session

    def _hello_once(self) -> Steps:
        """One hello; returns the link, or None if nobody answers."""
        daemon = self.machine.daemon
        if daemon is None and self.machine.is_embedded:
            yield Sleep(0.3)
            self.machine.start_daemon()
            daemon = self.machine.daemon
        if daemon is None:
            yield Sleep(ANSWER_S)
            return None
        answers: list[Link] = []
        self.world.after(0.0002, daemon, self._greeted, daemon, answers)
        yield Until(lambda: bool(answers), ANSWER_S)
        if not answers:
            return None
        return answers[0] if answers[0].daemon.is_alive else None

    def _greeted(self, daemon: Any, answers: list[Link]) -> None:
        if not self.is_alive:
            return
        link: Link = daemon.hello(self, lambda message: self._heard_from(link, message))
        answers.append(link)
        self.notify()

    def _heard_from(self, link: Link, message: DaemonMessage | None) -> None:
        if link is not self.link:
            return
        if message is None:
            self._lost()
        else:
            self.heard(message)

    def open(self) -> Steps:
        until_ns = self.world.now_ns + int(START_S * 1e9)
        while True:
            link = yield from self._hello_once()
            if link is not None:
                self.link = link
                self.joined, self.has_left = None, False
                self.refusal = None
                self.notify()
                self._watch(link)
                return
            if self.world.now_ns > until_ns or self.is_closed:
                raise Unavailable("daemon-lost", f"no daemon on {self.node}")

    def _watch(self, link: Link) -> None:
        """Heartbeats: a daemon that is stopped is taken for lost after a while of silence."""
        self.world.after(SILENCE_S, self, self._check_silence, link)

    def _check_silence(self, link: Link) -> None:
        if link is not self.link:
            return
        if link.daemon.is_stopped:
            link.is_open = False
            self._lost()
        else:
            self._watch(link)

    def _lost(self) -> None:
        self.link = self.joined = None
        self.notify()
        if not self.is_closed:
            self._start_restoring()

    def _start_restoring(self) -> None:
        if not self.is_restoring:
            self.is_restoring = True
            self.world.spawn(self, self._restore())

    def _restore(self) -> Steps:
        cause = yield from self._find_again()
        self.is_restoring = False
        if cause is not None:
            self.said.clear()
        self.notify()
        if cause is not None and not self.is_closed:
            self._gone(cause)

    def _find_again(self) -> Steps:
        until_ns = self.world.now_ns + int(RESTORE_S * 1e9)
        while True:
            place = self.place
            try:
                yield from self.open()
                if place is not None:
                    yield from self._take_place(place)
                for word in list(self.said.values()):
                    self._send(word)
                return None
            except Rejected as error:
                if self.place != place:
                    continue  # The rank goes on as another attempt by now.
                self.refusal = Cause(error.code, error.message, error.hint)
                return self.refusal
            except MilepostError:
                if self.world.now_ns > until_ns or self.is_closed:
                    return Cause("daemon-lost", f"the daemon of {self.node} is away")
                yield Until(lambda: self.is_closed, RETRY_S)

    def _send(self, word: SaveWord | AbortWanted) -> None:
        if self.link is not None:
            self.link.daemon.said(self.link, word)

    def signal(self, message: PreemptionNoticed | ReadsTold) -> None:
        if self.link is not None:
            self.link.daemon.signalled(self.link, message)

    def ensure(self) -> Steps:
        self.place = place = self.attempt.join(self.rank, self.number)
        if self._has_place(place):
            return
        if self.link is None:
            self._start_restoring()
            yield Until(lambda: not self.is_restoring, MISSING_S)
            if self._has_place(place):
                return
            if self.refusal is not None:
                raise Rejected(self.refusal.code, self.refusal.message)
            if self.link is None:
                raise Unavailable("daemon-lost", f"the daemon of {self.node} is away")
        yield from self._take_place(place)

    def _has_place(self, place: Join | None) -> bool:
        """Whether it is this place: one that was restored may be that of an earlier attempt."""
        return (
            self.joined is not None and place is not None and self.joined.attempt == place.attempt
        )

    def _take_place(self, place: Join) -> Steps:
        self.refusal = None
        if self.link is not None:
            self.link.daemon.joined(self.link, place)
        yield Until(
            lambda: self._has_place(place) or self.refusal is not None or self.link is None, JOIN_S
        )
        if self._has_place(place):
            return
        if self.refusal is not None:
            raise Rejected(self.refusal.code, self.refusal.message)
        raise Unavailable("daemon-lost", f"the daemon of {self.node} gave no place")

    def say(self, word: SaveWord) -> None:
        self.said[word.save.save_id] = word
        if self.link is not None and self._has_place(self.place):
            self._send(word)

    def heard(self, message: DaemonMessage) -> None:
        match message:
            case Joined():
                self.joined = message
            case Left():
                self.has_left = True
            case Refused():
                self.refusal = message.cause
            case LayoutReady():
                if message.save_id in self.saves:
                    self.layouts_ready[message.save_id] = message
            case Concluded():
                self._concluded(message)
            case SlotFreed():
                self._free_slot(message.save_id)
            case ReadsWanted():
                self.flag.hold()
            case Preempted():
                self.flag.decide(message.at_read)
            case _:
                pass
        self.notify()

    def _concluded(self, message: Concluded) -> None:
        self.said.pop(message.save_id, None)
        if not message.layout_valid:
            self.plans.clear()
        if message.slot_free:
            self._free_slot(message.save_id)
        self._end(message.save_id, message.outcome, message.cause)

    def _gone(self, cause: Cause) -> None:
        for save_id in list(self.saves):
            # What was staged may still be committed, by a daemon that comes back later.
            phase = "outcome-unknown" if save_id in self.held else "failed"
            self._end(save_id, phase, cause)
            self._free_slot(save_id, is_forced=True)
        self.notify()

    def _end(self, save_id: str, phase: str, cause: Cause | None) -> None:
        handle = self.saves.pop(save_id, None)
        if handle is None:
            return
        handle.phase, handle.cause = phase, cause
        if phase in ("committed", "outcome-unknown"):
            self.step_last = max(self.step_last, handle.save.step)
        self.layouts_ready.pop(save_id, None)
        self.oracle.ended(handle)
        self.notify()

    def _free_slot(self, save_id: str, *, is_forced: bool = False) -> None:
        slot = self.held.pop(save_id, None)
        if slot is not None:
            if not is_forced:
                self.oracle.freed(slot, self, save_id)
            slot.release()

    @property
    def oracle(self) -> Oracle:
        return self.attempt.launcher.oracle

    # --- saving

    def save(self, step: int, *, is_last: bool = False) -> Steps:
        ref = self.ref(step)
        handle = Handle(ref, self.rank, self.world.now_ns)
        self.saves[ref.save_id] = handle
        if self.rank == 0:
            self.attempt.line.append(handle)
        self.oracle.opened(handle, self)
        try:
            yield from self.ensure()
            if (yield from self._take_turn(ref, handle)):
                yield from self._stage(ref, handle)
        except MilepostError as error:
            self._give_up(ref, error)
        if not handle.is_done and self.rng.random() < self.work.aborts:
            self._send(AbortWanted(save=ref))
        return handle

    def ref(self, step: int, *, is_plan_only: bool = False) -> SaveRef:
        self.count += 1
        return SaveRef(
            job=JOB,
            save_id=f"{self.number}-{self.count}",
            step=step,
            name="prepare" if is_plan_only else f"step_{step}",
            overwrite=True,
            is_plan_only=is_plan_only,
        )

    def prepare(self) -> Steps:
        """Ask for layouts, in the background of the real client; a failure costs nothing."""
        ref = self.ref(0, is_plan_only=True)
        handle = Handle(ref, self.rank, self.world.now_ns)
        self.saves[ref.save_id] = handle
        try:
            yield from self.ensure()
            layout_id = yield from self._plan(ref, handle)
            if layout_id is not None:
                self._lay_out(layout_id)
        except MilepostError as error:
            cause = Cause(error.code, error.message, error.hint, self.node, self.rank)
            self.say(Unable(save=ref, cause=cause))
        self.said.pop(ref.save_id, None)
        self.saves.pop(ref.save_id, None)

    def _take_turn(self, ref: SaveRef, handle: Handle) -> Steps:
        if len(self.held) >= self.work.slots and self.work.skips:
            self.say(Skipped(save=ref, reason=f"rank {self.rank} has all slots in use"))
            return False
        has_room = yield Until(
            lambda: len(self.held) < self.work.slots or handle.is_done, self.work.deadline_s
        )
        if handle.is_done:
            return False
        if not has_room:
            raise Rejected("busy", f"no slot became free within {self.work.deadline_s:g} s")
        return True

    def _stage(self, ref: SaveRef, handle: Handle) -> Steps:
        layout_id = self.plans.get(self.structure)
        if layout_id is None:
            layout_id = yield from self._plan(ref, handle)
            if layout_id is None:
                return
        self._lay_out(layout_id)
        if handle.is_done:
            return
        assert self.arena is not None
        index = next(i for i, slot in enumerate(self.arena.slots) if slot.is_free)
        slot = self.arena.slots[index]
        self.oracle.filling(slot, self)
        slot.is_staging = True
        yield Sleep(self.work.copy_s)
        slot.is_staging = False
        slot.image = Image(ref.job, ref.save_id, ref.step, ref.name, self.rank, layout_id)
        if self.attempt.launcher.is_dying_when_staged(self):
            return
        if handle.is_done:
            slot.release()
            return
        self.held[ref.save_id] = slot
        handle.phase = "staged"
        self.say(
            Staged(
                save=ref,
                layout_id=layout_id,
                arena=self.arena.path,
                slot=index,
                image_bytes=4096,
            )
        )

    def _plan(self, ref: SaveRef, handle: Handle) -> Steps:
        structure = self.structure
        self.say(Offered(save=ref, fingerprint=structure, offer=b"offer"))
        yield Until(
            lambda: ref.save_id in self.layouts_ready or handle.is_done,
            self.work.deadline_s + JOIN_S,
        )
        ready = self.layouts_ready.pop(ref.save_id, None)
        if ready is None:
            if not handle.is_done:
                raise Unavailable("timeout", f"no layout came within {self.work.deadline_s:g} s")
            return None
        self.plans[structure] = ready.layout_id
        return ready.layout_id

    def _lay_out(self, layout_id: str) -> None:
        if self.layout_id == layout_id and self.arena is not None:
            return
        self._drop_retired()
        path = f"/shm/{JOB}-{self.number}-r{self.rank}-g{self.generation}"
        self.generation += 1
        slots = tuple(Slot() for _ in range(self.work.slots))
        arena = Arena(path, JOB, self.number, self.rank, layout_id, slots)
        self.machine.arenas[path] = arena
        if self.arena is not None:
            self.retired.append(self.arena)
        self.arena, self.layout_id = arena, layout_id
        self._drop_retired()

    def _drop_retired(self) -> None:
        kept = []
        for arena in self.retired:
            if all(slot.is_free for slot in arena.slots):
                self.machine.arenas.pop(arena.path, None)
            else:
                kept.append(arena)
        self.retired = kept

    def _give_up(self, ref: SaveRef, error: MilepostError) -> None:
        cause = Cause(error.code, error.message, error.hint, self.node, self.rank)
        self.say(Unable(save=ref, cause=cause))
        self._end(ref.save_id, "failed", cause)

    # --- the end

    def close_arenas(self) -> None:
        """Unlink the shared memory; a writer that has it open goes on."""
        for arena in [*self.retired, *([] if self.arena is None else [self.arena])]:
            self.machine.arenas.pop(arena.path, None)
        self.retired, self.arena, self.layout_id = [], None, ""

    def close(self) -> Steps:
        self.is_closed = True
        self.flag.is_closed = True
        is_quiet = yield Until(lambda: not self.saves, self.work.deadline_s + JOIN_S)
        if is_quiet and self.link is not None and self.joined is not None:
            self.link.daemon.left(self.link)
            yield Until(lambda: self.has_left or self.link is None, LEAVE_S)
        self.link = None
        if is_quiet:
            self.close_arenas()

    # --- the loop

    def train(self) -> Steps:
        """Train and save until the attempt is over."""
        work, attempt = self.work, self.attempt
        try:
            yield from self.open()
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
            # The next step's collective: nobody goes on before all have called save.
            yield from attempt.meet(number)
            if attempt.is_going_back(number):
                root = Root(self.machine.disk, self.node, self.rng, ROOT)
                yield from load(self, number, root)
        if self.rng.random() >= work.leaves_early:
            yield from self.close()
        self.world.after(0, None, attempt.launcher.ended, self)

    def _step_until_save(self, number: int) -> Steps:
        """Train up to a save; return whether the rank is to go, its state saved."""
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
    """How many ranks have come to each collective."""
    is_over: bool = False
    ended: int = 0
    """Ranks that came to their end by themselves."""
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
        """A collective: nobody goes on before all have come."""
        self.arrived[what] = self.arrived.get(what, 0) + 1
        if self.arrived[what] == len(self.ranks):
            self.notify()
        yield Until(lambda: self.arrived[what] == len(self.ranks), 1e6)

    def notify(self) -> None:
        """Something has changed that ranks may wait for."""
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
    """Starts attempts, one after another, as long as it is asked to."""

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
        """Told that a rank is told to go, or that all go back a step."""
        self.dying: set[int] = set()
        """Ranks of the present attempt that die as soon as they have staged."""

    def start(
        self, *, after_s: float = 0.0, on_all: bool = False, work: Work | None = None
    ) -> None:
        """Begin an attempt soon, with other work than usual if that is given."""
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
        """The machine is down on which an attempt is being prepared."""
        if self.claimant is not None and self.claimant.node == node and self.claimant.is_alive:
            self.claimant.is_alive = False
            self.is_starting = False
            if not self.is_stopping:
                self.start(after_s=2.0)

    def _claim(self, chosen: Sequence[Machine], ranks: tuple[int, ...], work: Work | None) -> Steps:
        """What rank 0 does first; a disk that fails is tried again."""
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
        """Whether this trainer ends here, between sealing its slot and saying so."""
        if trainer.attempt is self.attempt and trainer.rank in self.dying:
            self.world.after(0, None, self.kill, trainer)
            return True
        return False

    def kill(self, trainer: Trainer) -> None:
        """SIGKILL; the launcher notices, and ends the attempt."""
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
        """A rank has come to its end by itself."""
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
        """A rank is gone: the others are killed some time later, and a new attempt starts."""
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
