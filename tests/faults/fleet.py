"""A fleet for fault tests: daemons with a supervisor, and ranks that wait for orders.

Builds on `tests.integration.cluster`. The daemons of a fleet obey lists of faults. The fleet starts
a killed daemon again with the faults that are left, and continues a stopped one after a while. The
test releases a save that is held at a point. The ranks keep one Checkpointer over all orders. A
fleet learns of a fault from the daemon's log: `fault.fired`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.integration import cluster
from tests.integration.cluster import Node, Rank

ORDER_S: Final = 120.0
"""How long one order may take; far more than any fault here costs."""

DEADLINE_S: Final = 60.0
"""Deadline of a save, unless a test says otherwise. Only a failing test reaches it."""

SHORT_S: Final = 5.0
"""Deadline that is meant to expire. If the ranks also make saves that must commit, `Crew.hurry`
sets it: after that, a save takes a hundredth of it, and still a fraction on a busy machine."""

SLACK_S: Final = 10.0
"""What a busy machine may take beyond a deadline and what is stated to come after it. Below 15 s
(`RESOLVE_GRACE_S`), after which a node no longer waits for a coordinator that says nothing.
"""

RESOLVE_S: Final = 4.0
"""The value of that limit for tests that wait for it."""

RESOLVING_SOON: Final = (
    sys.executable, "-c",
    "import runpy, sys, milepostd.core.role as role\n"
    f"assert {RESOLVE_S} < role.RESOLVE_GRACE_S\n"
    f"role.RESOLVE_GRACE_S = {RESOLVE_S}\n"
    "sys.argv = sys.argv[3:]\n"
    "runpy.run_module('milepostd', run_name='__main__')",
)  # fmt: skip
"""A prefix for daemons that have this limit; what follows it is `python -m milepostd ...`."""

RESTART_S: Final = 0.05
"""How long a killed daemon stays away."""

STOPPED_S: Final = 0.5
"""How long a daemon stays stopped before it is continued."""

BRANCH: Final = 1_000_000
"""What a branch adds to the numbers, so that its steps differ from those of another branch."""

VALUES: Final = 4096
"""Numbers that each rank holds of the sharded tensor."""


class Fired(NamedTuple):
    """A fault that has fired, according to a daemon's log."""

    point: str
    action: str
    step: int


until = partial(cluster.until, timeout_s=60.0)
"""Returns once the condition holds; fails with what it waits for if that is not in time."""


def log_lines(node: Node) -> list[dict[str, Any]]:
    """Return the log lines of a daemon, over all its lives."""
    lines = []
    for line in node.log.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict)]


def fired(node: Node) -> list[Fired]:
    """Return the faults that have fired at a node, in their order."""
    return [
        Fired(line["point"], line["action"], line["step"])
        for line in log_lines(node)
        if line.get("event") == "fault.fired"
    ]


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    with contextlib.suppress(OSError):
        return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()
    return False


class Member:
    """One daemon of a fleet and its supervisor.

    Args:
        run_dir: its run directory.
        root: what it may write.
        faults: the faults, each with a step. `point:hold@step` holds a save until `release`.
        prefix: as for `start_node`.
        environment: additional variables.
    """

    def __init__(
        self,
        run_dir: Path,
        root: Path,
        faults: Sequence[str] = (),
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str],
    ) -> None:
        self.lives = 0
        """How often it was started."""
        self._run_dir, self._root = run_dir, root
        self._faults = list(map(self._with_file, faults))
        self._prefix = prefix
        self._environment = environment
        self._is_ending = threading.Event()
        self.holds_stopped = False
        """While True, a stopped daemon stays stopped."""
        self.node = self._start()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)
        self._supervisor.start()

    @property
    def pid(self) -> int:
        return self.node.process.pid

    def _start(self) -> Node:
        self.lives += 1
        environment = dict(self._environment)
        flags = ["--log-format", "json"]
        if self._faults:
            environment["MILEPOSTD_FAULTS"] = ",".join(self._faults)
            flags.append("--allow-faults")
        return cluster.start_node(
            self._run_dir, self._root, flags, prefix=self._prefix, **environment
        )

    def _supervise(self) -> None:
        while not self._is_ending.wait(0.02):
            process = self.node.process
            if process.poll() is not None:
                # In the next life a fault of the same step would fire again, since nothing is kept.
                gone = {f"{each.point}:{each.action}@{each.step}" for each in fired(self.node)}
                self._faults = [each for each in self._faults if _plain(each) not in gone]
                if self._is_ending.wait(RESTART_S):
                    return
                self.node = self._start()
            elif is_stopped(process.pid) and not self.holds_stopped:
                self._is_ending.wait(STOPPED_S)
                process.send_signal(signal.SIGCONT)

    def _file(self, point: str, step: int | str) -> Path:
        return self._run_dir / f"release-{point}-{step}"

    def _with_file(self, fault: str) -> str:
        what, _, step = fault.partition("@")
        point, _, action = what.partition(":")
        return f"{what}:{self._file(point, step)}@{step}" if action == "hold" else fault

    def await_held(self, point: str, step: int) -> None:
        """Return once the save of a step is held at a point."""
        until(lambda: Fired(point, "hold", step) in fired(self.node), f"{point} holds step {step}")

    def release(self, point: str, step: int) -> None:
        """Release a save that is held at a point, or will be."""
        self._file(point, step).touch()

    def kill(self) -> None:
        """Kill the daemon; the supervisor starts it again."""
        self.node.process.kill()

    def end(self) -> int:
        """End the daemon as a service manager would; return its exit code."""
        self._is_ending.set()
        self._supervisor.join(10)
        if is_stopped(self.pid):
            self.node.process.send_signal(signal.SIGCONT)
        return self.node.stop()

    def destroy(self) -> None:
        """End all processes that are left of it."""
        self._is_ending.set()
        self._supervisor.join(10)
        if self.node.process.poll() is None:
            self.node.process.kill()
            self.node.process.wait(5)


def _plain(fault: str) -> str:
    """Return a fault without the argument of its action."""
    what, _, step = fault.partition("@")
    return ":".join(what.split(":")[:2]) + f"@{step}"


_crews: list[Crew] = []
"""Crews whose ranks have not ended."""


@contextlib.contextmanager
def abandoning() -> Iterator[None]:
    """Leave no ranks behind, whatever happens."""
    before = list(_crews)
    try:
        yield
    finally:
        for crew in [crew for crew in _crews if crew not in before]:
            crew.abandon()


class Crew:
    """Ranks that wait for orders: each is the name of a `Trainer` method, with arguments."""

    def __init__(
        self,
        root: Path,
        nodes_of_ranks: Sequence[Node | None],
        *,
        expect_death: Sequence[int] = (),
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        pairs = [cluster.duplex_pipe() for _ in nodes_of_ranks]
        self._channels = [ours for ours, _ in pairs]
        theirs = [end for _, end in pairs]
        self._failure: BaseException | None = None
        options.setdefault("deadline_s", DEADLINE_S)

        def run() -> None:
            try:
                cluster.run_ranks(
                    obey, root, nodes_of_ranks, timeout_s=600, expect_death=expect_death,
                    environment=environment, channels=theirs, options=options,
                )  # fmt: skip
            except BaseException as error:
                self._failure = error

        self._runner = threading.Thread(target=run, daemon=True)
        self._runner.start()
        _crews.append(self)
        # Each rank sends its pid once it has its Checkpointer. From then on, only the ranks use the
        # pipe ends that were passed to them.
        self.pids = [self.hear(rank) for rank in range(len(pairs))]
        for end in theirs:
            end.close()

    def tell(self, rank: int, order: str, **arguments: Any) -> None:
        """Give one rank an order without waiting for its answer."""
        self._channels[rank].send((order, arguments))

    def hear(self, rank: int, timeout_s: float = ORDER_S) -> Any:
        """Return a rank's answer to its oldest open order."""
        channel = self._channels[rank]
        until_s = time.monotonic() + timeout_s
        while not channel.poll(0.5):
            if self._failure is not None or time.monotonic() > until_s:
                text = f"rank {rank} did not answer within {timeout_s:g} s: {self._failure}"
                raise AssertionError(text)
        try:
            is_well, answer = channel.recv()
        except EOFError:
            self._runner.join(5)
            raise AssertionError(f"rank {rank} has ended: {self._failure}") from None
        assert is_well, f"rank {rank}: {answer}"
        return answer

    def all(self, order: str, timeout_s: float = ORDER_S, **arguments: Any) -> list[Any]:
        """Give all ranks the same order; return their answers."""
        for rank in range(len(self._channels)):
            self.tell(rank, order, **arguments)
        return [self.hear(rank, timeout_s) for rank in range(len(self._channels))]

    def hurry(self) -> None:
        """Let the ranks open new Checkpointers, as another attempt whose saves have the deadline
        `SHORT_S`. The extra cost of a first save is paid before.
        """
        self.all("reopen", deadline_s=SHORT_S)

    def lasted_s(self, step: int) -> list[float]:
        """Return how long after the first rank's call a save has ended on each rank."""
        spans = self.all("span", step=step)
        return [ended - min(called for called, _ in spans) for _, ended in spans]

    def has_answered(self, rank: int) -> bool:
        """Whether an answer of this rank has arrived."""
        return self._channels[rank].poll()

    def dismiss(self) -> None:
        """Let the ranks close their Checkpointers and end. Dead ranks are ignored."""
        for channel in self._channels:
            with contextlib.suppress(OSError):
                channel.send(("end", {}))
        self._runner.join(ORDER_S)
        self.abandon()
        assert not self._runner.is_alive(), "the ranks do not end"
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Abandon the ranks. They end at once if they still wait for orders."""
        if self in _crews:
            _crews.remove(self)
        for channel in self._channels:
            channel.close()


def obey(rank: Rank) -> None:
    """Carry out orders until told to end. The ranks of a crew run this function."""
    import traceback

    channels: list[Connection] = rank.arguments["channels"]
    mine = channels[rank.rank]
    for number, channel in enumerate(channels):
        if number != rank.rank:
            channel.close()
    trainer = Trainer(rank, **rank.arguments["options"])
    mine.send((True, os.getpid()))
    while True:
        try:
            order, arguments = mine.recv()
        except EOFError:
            os._exit(1)
        if order == "end":
            trainer.close()
            return
        try:
            answer = (True, getattr(trainer, order)(**arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        mine.send(answer)


def warm_up(root: Path, nodes_of_ranks: Sequence[Node | None], environment: dict[str, str]) -> None:
    """Commit step 1 with separate ranks, so that later saves find the planner running."""
    crew = Crew(root, nodes_of_ranks, environment=environment)
    assert ["committed"] * len(nodes_of_ranks) == [
        told["phase"] for told in crew.all("save", step=1)
    ]
    crew.dismiss()


class Fatal:
    """An object that kills the process that pickles it, once it is `armed`."""

    armed = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fatal)

    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[Fatal], tuple[()]]:
        if self.armed:
            os.kill(os.getpid(), signal.SIGKILL)
        return (Fatal, ())


class Trainer:
    """A rank's side: one Checkpointer, and saves of a state that depends only on the step.

    Args:
        rank: this rank.
        limits: values for module-level limits, by "module:name", so that a test waits less.
        options: for the Checkpointer.
    """

    def __init__(self, rank: Rank, limits: dict[str, float] | None = None, **options: Any) -> None:
        import importlib

        from milepost import Checkpointer

        for place, value in (limits or {}).items():
            module, _, name = place.partition(":")
            setattr(importlib.import_module(module), name, value)
        self.rank = rank
        self.options = options
        self.ck = Checkpointer(rank.root, **options)
        self.saves: dict[int, Any] = {}
        self.spans: dict[int, list[float]] = {}
        """When each save was called and when it ended, by step, on a clock that all ranks share."""
        self.own = Fatal()
        self.branch = 0

    def state(
        self, step: int, width: int = 0, values: int = VALUES, many: int = 0
    ) -> dict[str, Any]:
        """Return what this rank saves at a step. Another width is another structure. `many`: how
        many small tensors to add.
        """
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        rank, world = self.rank.rank, self.rank.world
        local = torch.arange(rank * values, (rank + 1) * values, dtype=torch.float64) + step
        local += self.branch * BRANCH
        state: dict[str, Any] = {"step": step, "replica": torch.full((16 + width,), float(step))}
        state[f"own/{rank}"] = self.own
        state |= {f"small/{number}": torch.full((4,), float(step)) for number in range(many)}
        if world == 1:
            return state | {"w": local}
        mesh = init_device_mesh("cpu", (world,))
        return state | {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}

    def reopen(self, **options: Any) -> None:
        """Close the Checkpointer and open another one, with some options changed."""
        from milepost import Checkpointer

        self.ck.close()
        self.ck = Checkpointer(self.rank.root, **(self.options | options))
        self.prepare()

    def prepare(self, step: int = 0, **shape: int) -> None:
        self.ck.prepare(self.state(step, **shape))

    def save(self, step: int, timeout_s: float = 100.0, **shape: int) -> dict[str, Any]:
        """Save and wait for the end; return how it ended."""
        self.begin(step, **shape)
        return self.finish(step, timeout_s)

    def begin(self, step: int, **shape: int) -> float:
        """Start a save; return how long that took."""
        state = self.state(step, **shape)
        started_s = time.monotonic()
        span = self.spans[step] = [started_s]
        save = self.saves[step] = self.ck.save(step, state)
        stalled_s = time.monotonic() - started_s
        save.add_done_callback(lambda _: span.append(time.monotonic()))
        return stalled_s

    def finish(self, step: int, timeout_s: float = 100.0) -> dict[str, Any]:
        """Wait for a save's end; return how it ended. If it has not ended, call this again."""
        from milepost import SaveFailed

        save = self.saves[step]
        started_s = time.monotonic()
        try:
            save.wait(timeout_s)
        except SaveFailed as error:
            told = {"code": error.code, "message": error.message}
        except TimeoutError as error:
            told = {"code": "test-timeout", "message": str(error)}
        else:
            told = {"code": "", "message": ""}
        if save.done():
            del self.saves[step]
        return told | {"phase": save.phase, "waited_s": time.monotonic() - started_s}

    def span(self, step: int) -> list[float]:
        """Return when a save that has ended was called, and when it had ended."""
        cluster.until(lambda: 2 == len(self.spans[step]), "its end is noted")
        return self.spans[step]

    def take_branch(self, branch: int) -> None:
        """From now on, save other values."""
        self.branch = branch

    def wait_staged(self, step: int) -> None:
        self.saves[step].wait_staged(ORDER_S)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def exit(self) -> None:
        os._exit(0)

    def die_staging(self, step: int) -> None:
        """Die in the middle of `save`."""
        self.own.armed = True
        self.save(step)

    def abort(self, step: int) -> None:
        self.saves[step].abort()

    def train(self, rounds: int) -> float:
        """Do a training loop's collectives; return the sum they make."""
        import torch
        import torch.distributed as dist

        total = torch.zeros(1)
        for number in range(rounds):
            part = torch.full((1,), float(number))
            dist.all_reduce(part)
            total += part
        return float(total)

    def load(self, step: int | None = None, **shape: int) -> int:
        """Load into a state of zeros; check every value, and return the loaded step."""
        import torch

        state = self.state(0, **shape)
        report = self.ck.load(state, step=step, allow_pickle=True)
        wanted = self.state(report.step, **shape)
        for key, value in wanted.items():
            got = state[key]
            if hasattr(value, "to_local"):
                value, got = value.to_local(), got.to_local()
            same = torch.equal(value, got) if isinstance(value, torch.Tensor) else value == got
            assert same, f"{key} of step {report.step}: {got} is not {value}"
        return report.step

    def steps(self) -> list[int]:
        return self.ck.steps()

    def latest(self) -> int | None:
        return self.ck.latest()

    def limit_descriptors(self, count: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))

    def resources(self) -> dict[str, int]:
        """Count what a process can leak."""
        return resources(os.getpid())

    def close_now(self) -> float:
        """Close; return how long it took."""
        started_s = time.monotonic()
        self.ck.close()
        return time.monotonic() - started_s

    def close(self) -> None:
        self.ck.close()


def resources(pid: int) -> dict[str, int]:
    """Count what a process can leak: bytes of memory that are its own, descriptors, threads,
    sockets.
    """
    descriptors = os.listdir(f"/proc/{pid}/fd")
    targets = []
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        # Arenas are shared memory, and are counted there.
        "rss": int(status["RssAnon"].split()[0]) * 1024,
        "descriptors": len(targets),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "sockets": sum(target.startswith("socket:") for target in targets),
    }


@contextlib.contextmanager
def members(
    folder: Path,
    root: Path,
    faults: Sequence[Sequence[str]],
    *,
    prefix: Sequence[str] = (),
    **environment: str,
) -> Iterator[list[Member]]:
    """Run a supervised daemon for each list of faults; at the end each drains, or it fails."""
    started: list[Member] = []
    try:
        for index, each in enumerate(faults):
            started.append(
                Member(folder / f"n{index}", root, each, prefix=prefix, environment=environment)
            )
        for member in started:
            cluster.await_answer(member.node)
        with abandoning():
            yield started
        codes = [member.end() for member in started]
        assert [0] * len(started) == codes, "\n".join(member.node.tail() for member in started)
    finally:
        for member in started:
            member.destroy()
