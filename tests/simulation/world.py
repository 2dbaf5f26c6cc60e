"""Virtual time: one heap of future events, and the processes that live in it.

Owns the clock, the order of events and the trace, and runs generators as processes: a process
yields what it waits for. Uses no asyncio, no thread and no sleep, and knows no node, disk or
trainer. Two runs with the same seed do the same, whatever PYTHONHASHSEED is.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

SECOND_NS: Final = 1_000_000_000


class Sleep(NamedTuple):
    """Go on after this many seconds."""

    seconds: float


class Until(NamedTuple):
    """Go on once `has_come()`, or after `timeout_s`; the value sent back says which it was."""

    has_come: Callable[[], bool]
    timeout_s: float


Wish: TypeAlias = Sleep | Until | str
"""What a process waits for; a string is a system call that it is about to make."""

Steps: TypeAlias = Generator[Wish, Any, Any]


class Life:
    """Something that can be killed or stopped: a daemon, a trainer. Its processes end with it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.is_alive = True
        self.is_stopped = False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Events that would have happened to it while it was stopped."""
        self.waiting: dict[Process, None] = {}

    def notify(self) -> None:
        """Wake processes that may wait for what has changed."""
        for process in list(self.waiting):
            process.look()


class Process:
    """A generator that runs in virtual time."""

    def __init__(self, world: World, life: Life, steps: Steps, on_end: Callable[..., None]) -> None:
        self.world = world
        self.life = life
        self.steps = steps
        self.on_end = on_end
        self.wait: Until | None = None
        self.turn = 0
        """Counts resumptions, so that the late end of an earlier wait changes nothing."""

    def look(self) -> None:
        """Go on if what the process waits for has come."""
        if self.wait is not None and self.wait.has_come():
            self.world.after(0, self.life, self.resume, self.turn, True)
            self.wait = None

    def resume(self, turn: int, value: object = None) -> None:
        if turn != self.turn:
            return
        self.turn += 1
        self.wait = None
        self.life.waiting.pop(self, None)
        self.advance(lambda: self.steps.send(value))

    def fail(self, error: BaseException) -> None:
        """Let the awaited call fail."""
        self.turn += 1
        self.advance(lambda: self.steps.throw(error))

    def advance(self, move: Callable[[], Wish]) -> None:
        world = self.world
        grain = world.grain
        while True:
            try:
                wish = move()
            except StopIteration as ended:
                self.on_end(ended.value)
                return
            if isinstance(wish, str):
                grain -= 1
                verdict = world.on_call(self, wish)
                if isinstance(verdict, OSError):
                    error = verdict
                    move = lambda: self.steps.throw(error)  # noqa: B023, E731
                    continue
                if verdict is None:
                    return  # It hangs, until somebody resumes it.
                if grain > 0 and not world.is_cutting:
                    move = lambda: next(self.steps)  # noqa: E731
                    continue
                world.after(verdict, self.life, self.resume, self.turn)
                return
            if isinstance(wish, Sleep):
                world.after(wish.seconds, self.life, self.resume, self.turn)
                return
            if wish.has_come():
                move = lambda: self.steps.send(True)  # noqa: E731
                continue
            self.wait = wish
            self.life.waiting[self] = None
            world.after(wish.timeout_s, self.life, self.resume, self.turn, False)
            return


@dataclass
class World:
    """The heap, the clock and the trace.

    Args:
        seed: draws everything, each concern from its own stream.
        grain: how many system calls a process makes at once. 1 shows every order of calls; more is
            faster.
    """

    seed: int
    grain: int = 1
    now_ns: int = 0
    count: int = 0
    events: int = 0
    is_cutting: bool = False
    """Whether calls fail or hang at present, so that `on_call` is asked for each of them."""
    heap: list[tuple[int, int, Life | None, Callable[..., None], tuple[Any, ...]]] = field(
        default_factory=list
    )
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    on_call: Callable[[Process, str], float | OSError | None] = lambda process, call: 0.001
    """Called before each system call. Returns the seconds that it takes, its error, or None: it
    hangs."""

    @property
    def now_s(self) -> float:
        return self.now_ns / SECOND_NS

    def rng(self, concern: str) -> random.Random:
        """Return a separate random stream, so that one concern does not disturb another."""
        return random.Random(f"{self.seed}/{concern}")

    def after(
        self, seconds: float, life: Life | None, function: Callable[..., None], *args: Any
    ) -> None:
        """Let this happen later, if `life` still lives then (None: in any case)."""
        self.count += 1
        at_ns = self.now_ns + max(0, int(seconds * SECOND_NS))
        heapq.heappush(self.heap, (at_ns, self.count, life, function, args))

    def spawn(
        self, life: Life, steps: Steps, on_end: Callable[..., None] = lambda value: None
    ) -> Process:
        """Start a process; `on_end` is called with what its generator returns."""
        process = Process(self, life, steps, on_end)
        self.after(0, life, process.resume, 0)
        return process

    def turn(self) -> bool:
        """Let the next event happen; False: nothing is left."""
        if not self.heap:
            return False
        at_ns, _, life, function, args = heapq.heappop(self.heap)
        self.now_ns = max(self.now_ns, at_ns)
        self.events += 1
        self.happen(life, function, args)
        return True

    def happen(
        self, life: Life | None, function: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if life is not None:
            if not life.is_alive:
                return
            if life.is_stopped:
                life.backlog.append((function, args))
                return
        function(*args)

    def go_on(self, life: Life) -> None:
        """Continue a stopped life: everything that it missed happens now, in order."""
        life.is_stopped = False
        backlog, life.backlog = life.backlog, []
        for function, args in backlog:
            self.after(0, life, function, *args)

    def note(self, *words: object) -> None:
        """Add to the trace."""
        self.digest.update(f"{self.now_ns} {words}\n".encode())
