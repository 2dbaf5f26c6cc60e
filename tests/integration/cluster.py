"""Nodes and ranks on one machine: real daemons, real gloo ranks, real files. The only harness.

A node is a daemon with a run directory of its own. Ranks are processes from one fork server that
has imported torch (and nothing of milepost), so that a rank costs a tenth of a second; each runs a
function of a test module and returns what it returned. The judge is such a process too, and checks
that milepost is not imported where it judges.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

RANK_S = 90.0
"""How long a set of ranks may run."""

NOT_NICE = {"MILEPOSTD_NICE": "0"}
"""Daemons of tests run without niceness. On a busy machine, a nice daemon gets a tenth of a core,
and deadlines expire."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([
    "torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    # What those import at their first use: three times the work of all else that a rank does.
    "torch._dynamo", "torch.utils.serialization", "fsspec",
    # What milepost is built on; the judge needs none of it.
    "isal.isal_zlib", "msgpack", "msgspec", "psutil", "zmq",
])  # fmt: skip


@dataclass
class Rank:
    """What a rank's function is given."""

    rank: int
    world: int
    root: Path
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass
class Node:
    """A daemon of a test."""

    run_dir: Path
    process: subprocess.Popen[bytes]
    log: Path

    def status(self) -> dict[str, Any]:
        from milepost.link.connection import fetch_status

        return fetch_status(self.run_dir, 30)

    def stop(self) -> int:
        """End the daemon as a service manager would; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
            raise AssertionError(f"the daemon did not drain:\n{self.tail()}") from None

    def tail(self) -> str:
        """The last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


class RankFailed(AssertionError):
    """A rank raised or died; the text holds its traceback."""


@contextlib.contextmanager
def nodes(
    folder: Path, count: int, root: Path, flags: Sequence[str] = (), **environment: str
) -> Iterator[list[Node]]:
    """Run `count` daemons, and end them by SIGTERM; a daemon that has died early is a failure."""
    started: list[Node] = []
    try:
        for index in range(count):
            node = start_node(folder / f"node{index}", root, flags, **environment)
            started.append(node)
        for node in started:
            await_answer(node)
        yield started
        codes = [node.stop() for node in started]
        assert codes == [0] * count, f"exit codes {codes}\n" + started[0].tail()
    finally:
        for node in started:
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait(5)


def start_node(
    run_dir: Path,
    root: Path,
    flags: Sequence[str] = (),
    *,
    prefix: Sequence[str] = (),
    **environment: str,
) -> Node:
    """Start a daemon without waiting for it. Its socket path must be short: pytest's are not, so
    the run directory is a link target of a short name only where needed. `prefix`: a command that
    executes the one after it, such as one that enters a namespace.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "test.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "milepostd", "--run-dir", str(run_dir),
             "--root", str(root), "--http", "", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **NOT_NICE, **environment},
        )  # fmt: skip
    return Node(run_dir, process, log)


def until(is_so: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Return once the condition holds; fail with `what` if that is not in time."""
    until_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until_s, f"not so within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def await_answer(node: Node, timeout_s: float = 60.0) -> None:
    """Return once the daemon answers."""
    until_s = time.monotonic() + timeout_s
    while True:
        assert node.process.poll() is None, f"the daemon has ended:\n{node.tail()}"
        with contextlib.suppress(Exception):
            node.status()
            return
        assert time.monotonic() < until_s, f"the daemon does not answer:\n{node.tail()}"


def run_ranks(
    function: Callable[[Rank], Any],
    root: Path,
    nodes_of_ranks: Sequence[Node | None],
    *,
    timeout_s: float = RANK_S,
    expect_death: Sequence[int] = (),
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run `function(Rank)` on one process a rank, with gloo set up if there is more than one.

    Args:
        function: module-level, of a module that can be imported.
        root: checkpoints.
        nodes_of_ranks: the node of each rank; None: no daemon is given.
        timeout_s: for all ranks together.
        expect_death: ranks that must die without an answer; their results are None.
        environment: additional variables.
        arguments: what the function finds in `rank.arguments`.

    Returns the result of each rank. Raises RankFailed with the first traceback.
    """
    world = len(nodes_of_ranks)
    rendezvous = root.parent / f"rendezvous-{time.monotonic_ns()}"
    ranks = []
    for number, node in enumerate(nodes_of_ranks):
        receiver, sender = _context.Pipe(duplex=False)
        # The fork server keeps the environment of its own start; a rank gets today's.
        variables = {
            **os.environ,
            **NOT_NICE,
            "RANK": str(number),
            "WORLD_SIZE": str(world),
            **(environment or {}),
        }
        if node is not None:
            variables["MILEPOST_RUN_DIR"] = str(node.run_dir)
        process = _context.Process(
            target=_rank_main,
            args=(sender, function, Rank(number, world, root, arguments), rendezvous, variables),
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    return _collect(ranks, timeout_s, set(expect_death))


def duplex_pipe() -> tuple[Connection, Connection]:
    """Return two ends, one of which may be among the `arguments` of `run_ranks`."""
    return _context.Pipe()


def judge(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Run `function(rank, world, *arguments)` on `world` processes that do not import milepost."""
    rendezvous = Path(f"/tmp/judge-{os.getpid()}-{time.monotonic_ns()}")
    ranks = []
    for number in range(world):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_judge_main, args=(sender, function, number, world, rendezvous, arguments)
        )
        process.start()
        sender.close()
        ranks.append((process, receiver))
    try:
        return _collect(ranks, RANK_S, set())
    finally:
        rendezvous.unlink(missing_ok=True)


def _collect(
    ranks: Sequence[tuple[Any, Connection]], timeout_s: float, may_die: set[int]
) -> list[Any]:
    results: dict[int, Any] = {}
    until_s = time.monotonic() + timeout_s
    failure = ""
    waiting: dict[Any, int] = {receiver: number for number, (_, receiver) in enumerate(ranks)}
    try:
        while waiting and not failure:
            ready: list[Any] = wait(list(waiting), max(0.0, until_s - time.monotonic()))
            if not ready:
                failure = f"ranks {sorted(waiting.values())} did not end within {timeout_s:g} s"
            for receiver in ready:
                number = waiting.pop(receiver)
                try:
                    kind, value = receiver.recv()
                except EOFError:
                    ranks[number][0].join(5)
                    kind, value = "died", f"exit code {ranks[number][0].exitcode}"
                if kind == "returned":
                    results[number] = value
                elif number in may_die:
                    results[number] = None
                else:
                    failure = f"rank {number} {kind}: {value}"
    finally:
        for process, receiver in ranks:
            process.join(10 if not failure else 0.2)
            if process.is_alive():
                process.kill()
                process.join(5)
            receiver.close()
            process.close()
    if failure:
        raise RankFailed(failure)
    return [results[number] for number in range(len(ranks))]


def _set_up(rank: int, world: int, rendezvous: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world
        )


def _rank_main(
    sender: Connection,
    function: Callable[[Rank], Any],
    rank: Rank,
    rendezvous: Path,
    variables: dict[str, str],
) -> None:
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(variables)
    try:
        _set_up(rank.rank, rank.world, rendezvous)
        sender.send(("returned", function(rank)))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        sender.send(("raised", traceback.format_exc()))
        os._exit(1)


def _judge_main(
    sender: Connection,
    function: Callable[..., Any],
    rank: int,
    world: int,
    rendezvous: Path,
    arguments: Sequence[Any],
) -> None:
    import torch.distributed as dist

    try:
        _set_up(rank, world, rendezvous)
        value = function(rank, world, *arguments)
        mine = [name for name in sys.modules if name.split(".")[0] in ("milepost", "milepostd")]
        assert mine == [], f"the judge has imported {mine}"
        sender.send(("returned", value))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        sender.send(("raised", traceback.format_exc()))
        os._exit(1)
