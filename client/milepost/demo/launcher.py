"""Runs the demonstration: starts its processes, kills one, compares, and ends them all.

Does for the trainers what torchrun does: holds the key-value store they meet at, gives each its
place in the environment, and ends the others when one is lost. Every process is a child of this one
and is ended by its own pid, whatever happens; signals are only noted where they arrive, and looked
at between two looks at the children, so that none can be started and forgotten. Children are in
process groups of their own, since Ctrl-C is the launcher's to handle.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from milepost.demo import judge
from milepost.demo.records import (
    Called,
    Ended,
    Finished,
    Part,
    Reader,
    Record,
    Recorded,
    Stepped,
    file_of,
)
from milepost.demo.report import Attempt, explain, figures_of, make_table
from milepost.errors import Unavailable, UsageError
from milepost.link.connection import fetch_status
from milepost.link.run_dir import SOCKET_PATH_BYTES_MAX, socket_path

NODES: Final = 2
RANKS_PER_NODE: Final = 2
WORLD: Final = NODES * RANKS_PER_NODE
JUDGES: Final = 3

STEPS: Final = 48
EVERY: Final = 6
"""Steps from one save to the next."""

VICTIM: Final = 2
"""The rank that is killed: on the node that does not coordinate, so that word has to travel."""

KILL_AFTER_STEP: Final = 33
"""Between two saves, so that steps are lost."""

LOSS_TOLERANCE: Final = 1e-3
"""Relative difference of the losses of a step done twice. They are equal bit for bit as a rule; but
torch does not promise the same order of additions in every process."""

DEMO_S: Final = 300.0
"""After this the demonstration has failed: several times what it takes on two cores."""

GRACE_S: Final = 5.0
"""What a trainer has to end by SIGTERM, as with torchrun; then it is killed."""

DRAIN_S: Final = 20.0
"""What a daemon has to end by SIGTERM with nothing to do."""

LOOK_S: Final = 0.02
"""How often the children are looked at."""

LOG_LINES: Final = 15
"""What is shown of the log of a process that failed."""

WRONG_SHOWN_MAX: Final = 10

MARKER: Final = ".milepost-demo"
"""In a folder that a demonstration made; locked while one runs."""

WIDTH_PIPED: Final = 120


class DemoFailed(Exception):
    """The demonstration did not show what it should.

    Attributes:
        logs: of the processes that had a part in it.
    """

    def __init__(self, text: str, logs: Sequence[Path] = ()) -> None:
        super().__init__(text)
        self.logs = logs


class Interrupted(Exception):
    """A signal asks for the end."""


class Judgement(msgspec.Struct, frozen=True):
    """What the judges found of one checkpoint."""

    equal: int
    wrong: tuple[str, ...]


class Child:
    """A process that the demonstration started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, grace_s: float) -> int:
        """Ask it to end, then make it; return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(grace_s)
            self.process.kill()
        return self.process.wait()


def run(folder: Path) -> int:
    """Run the demonstration in `folder`, which is made, or emptied if a demonstration made it.

    Returns 0 if all that was compared was equal, 1 if not or if a process failed, 128 and the
    number of the signal that ended it. Raises UsageError as `make_afresh` does.
    """
    with make_afresh(folder), _noted_signals() as noted:
        demo = Demo(folder, noted)
        try:
            demo.show()
        except Interrupted:
            print(f"interrupted by {signal.Signals(noted[0]).name}", file=sys.stderr)
            return 128 + noted[0]
        except DemoFailed as failure:
            _complain(failure)
            return 1
        finally:
            demo.end_all()
    return 0


def _complain(failure: DemoFailed) -> None:
    for log in failure.logs:
        print(f"--- the last lines of {log}:", file=sys.stderr)
        with contextlib.suppress(OSError):
            for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
                print(line, file=sys.stderr)
    print(f"the demonstration failed: {failure}", file=sys.stderr)


@contextlib.contextmanager
def make_afresh(folder: Path) -> Iterator[None]:
    """Make the folder, or empty it if a demonstration made it; it is ours alone until the end.

    Raises UsageError if it holds something that no demonstration made, or one is using it.
    """
    marker = folder / MARKER
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError("usage", f"{folder} is not a directory", "move it away")
    if folder.exists() and not marker.is_file() and any(folder.iterdir()):
        raise UsageError(
            "usage",
            f"{folder} holds files, but no {MARKER}: no demonstration made it",
            "move it away, or run the demonstration in another directory",
        )
    folder.mkdir(exist_ok=True)
    with marker.open("a") as lock:
        _take(lock, folder)
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
        yield


def _take(lock: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            "usage", f"a demonstration is running in {folder}", "let it end first"
        ) from None


@contextlib.contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect what asks for the end, instead of ending."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, note) for number in numbers]
    try:
        yield noted
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Demo:
    """One demonstration.

    Args:
        folder: its own, and empty.
        noted: signals that arrived.
    """

    def __init__(self, folder: Path, noted: list[int]) -> None:
        self.folder = folder
        self.root = folder / "checkpoints"
        self._logs = folder / "logs"
        self._records = folder / "records"
        self._noted = noted
        self._daemons: list[Child] = []
        self._trainers: list[Child] = []
        self._judges: list[Child] = []
        self._attempts: list[list[Reader]] = []
        self._link: Path | None = None
        self._store: Any = None
        self._started_s = time.monotonic()
        piped = None if sys.stdout.isatty() else WIDTH_PIPED
        self._console = Console(highlight=False, width=piped)
        self._progress = self._console.status("")

    # --- the story

    def show(self) -> None:
        """Run it. Raises DemoFailed, Interrupted."""
        for path in (self.root, self._logs, self._records):
            path.mkdir()
        with self._progress:
            self._start_daemons()
            self._train_and_lose()
            self._train_to_the_end()
            self._end_daemons()
            compared, checkpoints = self._judge()
        attempts = self._all_records()
        figures = figures_of(attempts)
        self._console.print()
        self._console.print(make_table(figures))
        for line in explain(figures, attempts, len(os.sched_getaffinity(0))):
            self._console.print(Text(f"  {line}"), soft_wrap=True)
        self._console.print()
        self._say(f"{compared} values of {checkpoints} checkpoints are equal bit for bit")
        self._say(f"the checkpoints are in {self.root}")

    def _train_and_lose(self) -> None:
        self._start_trainers()
        victim = self._trainers[VICTIM]
        self._until(lambda: self._step_of(VICTIM) >= KILL_AFTER_STEP, "training", self._trainers)
        victim.process.kill()
        code = victim.process.wait()
        if code != -signal.SIGKILL:
            raise DemoFailed(f"rank {VICTIM} ended with {code} before it was killed", [victim.log])
        step = self._step_of(VICTIM)
        self._say(f"killed rank {VICTIM}, pid {victim.pid}, by SIGKILL after step {step}")
        others = [child for child in self._trainers if child is not victim]
        for child in others:
            if child.process.poll() is None:
                child.process.terminate()
        codes = [child.end(GRACE_S) for child in others]
        names = ", ".join(child.name for child in others)
        self._say(f"ended {names}, as torchrun does (exit codes {', '.join(map(str, codes))})")
        self._check_saves(self._trainers, may_be_open=True)

    def _train_to_the_end(self) -> None:
        before = self._all_records()[0]
        committed = [
            record.step
            for records in before
            for record in records
            if isinstance(record, Ended) and record.phase == "committed"
        ]
        if not committed:
            raise DemoFailed("nothing was committed before the kill", self._every_log())
        self._start_trainers()
        self._until(self._have_resumed, "resuming", self._trainers)
        step = self._check_resume(before, self._all_records()[1], max(committed))
        self._until(
            lambda: all(child.process.poll() == 0 for child in self._trainers),
            "training",
            self._trainers,
        )
        records = self._all_records()
        self._check_saves(self._trainers, may_be_open=False)
        self._check_losses(before, records[1], step)
        first, last = _mean_loss(records[0], 1), _mean_loss(records[1], STEPS)
        self._say(f"finished step {STEPS}; loss {first:.2f} at step 1, {last:.2f} now, nats a byte")
        if os.readlink(self.root / "latest") != f"step_{STEPS}":
            raise DemoFailed(f"latest points at {os.readlink(self.root / 'latest')}")

    def _have_resumed(self) -> bool:
        """Return whether every rank has trained again, and so recorded before what it resumed."""
        return all(_losses(records) for records in self._all_records()[-1])

    def _check_resume(self, before: Attempt, after: Attempt, committed: int) -> int:
        """Compare what was read back with what was saved; return the step."""
        resumed = [_recorded(records, is_resumed=True) for records in after]
        steps = {step for each in resumed for step in each}
        if len(steps) != 1 or any(len(each) != 1 for each in resumed):
            raise DemoFailed(f"ranks resumed from steps {sorted(steps)}", self._every_log())
        step = steps.pop()
        if step < committed:
            raise DemoFailed(f"resumed from step {step}, but {committed} was committed")
        count = 0
        for rank, records in enumerate(before):
            saved = _recorded(records, is_resumed=False)[step].parts
            found = resumed[rank][step].parts
            wrong = [key for key in saved | found if saved.get(key) != found.get(key)]
            if wrong:
                named = ", ".join(wrong[:WRONG_SHOWN_MAX])
                raise DemoFailed(
                    f"rank {rank} resumed from step {step} with {len(wrong)} values that are not "
                    f"what it saved: {named}",
                    self._every_log(),
                )
            count += len(saved)
        self._say(
            f"resumed from step {step} in a new attempt on the same daemons; {count} values, over "
            f"all ranks, are what was saved"
        )
        return step

    def _check_losses(self, before: Attempt, after: Attempt, step: int) -> None:
        """Compare the losses of the steps that were done twice."""
        pairs = [
            (rank, number, losses[number], again[number])
            for rank, (losses, again) in enumerate(
                zip(map(_losses, before), map(_losses, after), strict=True)
            )
            for number in losses.keys() & again.keys()
        ]
        steps = {number for _, number, _, _ in pairs}
        if steps != set(range(step + 1, max(steps, default=step) + 1)) or not steps:
            raise DemoFailed(f"after step {step} these steps were done again: {sorted(steps)}")
        for rank, number, was, now in pairs:
            if abs(now - was) > LOSS_TOLERANCE * abs(was):
                raise DemoFailed(
                    f"rank {rank} had loss {was!r} at step {number}, and {now!r} after the resume"
                )
        equal = sum(was == now for _, _, was, now in pairs)
        worst = max(abs(now - was) / abs(was) for _, _, was, now in pairs)
        how = (
            "the same losses, bit for bit, on every rank"
            if equal == len(pairs)
            else f"{equal} of {len(pairs)} losses the same bit for bit, the others to {worst:.0e}"
        )
        self._say(f"did steps {min(steps)} to {max(steps)} again: {how}")

    def _check_saves(self, trainers: Sequence[Child], *, may_be_open: bool) -> None:
        """Look whether each save of the newest attempt was committed.

        Args:
            trainers: for their logs.
            may_be_open: how a save ended need not be known: trainers were killed.
        """
        number = len(self._attempts)
        logs = [child.log for child in [*trainers, *self._daemons]]
        for rank, records in enumerate(self._all_records()[-1]):
            ended = {each.step: each.phase for each in records if isinstance(each, Ended)}
            for save in (each for each in records if isinstance(each, Called)):
                phase = ended.get(save.step, "not known")
                is_fine = phase == "committed" or (may_be_open and save.step == _last_save(records))
                if not is_fine:
                    raise DemoFailed(
                        f"attempt {number}, rank {rank}: the save of step {save.step} is {phase}",
                        logs,
                    )
            if not may_be_open and not any(isinstance(each, Finished) for each in records):
                raise DemoFailed(f"rank {rank} ended without being finished", logs)

    def _judge(self) -> tuple[int, int]:
        """Let stock torch compare; return how many values of how many checkpoints were equal."""
        expected = self._expected()
        self._say(
            f"{JUDGES} ranks of stock torch, without milepost, read all {len(expected)} checkpoints"
        )
        given, verdict = self.folder / "expected.json", self.folder / "verdict.json"
        given.write_bytes(msgspec.json.encode(expected))
        for rank in range(JUDGES):
            command = [str(Path(judge.__file__)), str(self.root), str(given), str(verdict),
                       str(self.folder / "rendezvous"), str(rank), str(JUDGES)]  # fmt: skip
            self._judges.append(self._start(f"judge{rank}", command, {}))
        self._until(
            lambda: all(child.process.poll() == 0 for child in self._judges),
            "comparing",
            self._judges,
        )
        found = msgspec.json.decode(verdict.read_bytes(), type=dict[str, Judgement])
        wrong = [f"{name}: {text}" for name in found for text in found[name].wrong]
        if wrong or found.keys() != expected.keys():
            shown = "\n  ".join(wrong[:WRONG_SHOWN_MAX])
            raise DemoFailed(f"{len(wrong)} values differ from what was saved:\n  {shown}")
        counts = {name: found[name].equal for name in found}
        if any(counts[name] != len(expected[name]) for name in expected):
            raise DemoFailed(f"not everything was compared: {counts}")
        return sum(counts.values()), len(counts)

    def _expected(self) -> dict[str, dict[str, list[Part]]]:
        """Return what each checkpoint is to hold: every key's parts, in the order of their rows."""
        there = sorted(
            (path.name for path in self.root.glob("step_*")), key=lambda name: int(name[5:])
        )
        wanted = [f"step_{step}" for step in range(EVERY, STEPS + 1, EVERY)]
        if there != wanted:
            raise DemoFailed(f"there are {', '.join(there)}; saved were {', '.join(wanted)}")
        left = [path.name for path in (self.root / ".partial").iterdir()]
        if left:
            raise DemoFailed(f"left over in {self.root / '.partial'}: {', '.join(left)}")
        expected = {}
        for name in there:
            # A step that was saved again belongs to the later attempt.
            by_rank: list[Recorded] = []
            for ranks in self._all_records():
                found = [_recorded(records, is_resumed=False) for records in ranks]
                if all(int(name[5:]) in each for each in found):
                    by_rank = [each[int(name[5:])] for each in found]
            expected[name] = _join(name, by_rank)
        return expected

    # --- processes

    def _start_daemons(self) -> None:
        self._say("starting two nodes")
        for number in range(NODES):
            run_dir = self._run_dir(number)
            run_dir.mkdir(mode=0o700)
            command = ["-m", "milepostd", "--run-dir", str(run_dir), "--root", str(self.root),
                       "--http", ""]  # fmt: skip
            self._daemons.append(self._start(f"node{number}", command, {}))
        for number in range(NODES):
            self._until(partial(self._answers, number), "starting", self._daemons)
        names = " and ".join(f"{child.name} (pid {child.pid})" for child in self._daemons)
        self._say(f"two nodes run: {names}")

    def _run_dir(self, node: int) -> Path:
        """Return a node's run directory, by a link where its socket's path would be too long."""
        run_dir = self.folder / f"node{node}"
        if len(os.fsencode(socket_path(run_dir))) <= SOCKET_PATH_BYTES_MAX:
            return run_dir
        if self._link is None:
            self._link = Path(tempfile.mkdtemp(prefix="milepost-demo-")) / "run"
            self._link.symlink_to(self.folder)
        return self._link / run_dir.name

    def _answers(self, node: int) -> bool:
        try:
            fetch_status(self._run_dir(node), 0.2)
        except Unavailable:
            return False
        return True

    def _waits(self) -> list[str]:
        """Return what the daemons say that saves are waiting for."""
        waits = []
        for number, child in enumerate(self._daemons):
            try:
                saves = fetch_status(self._run_dir(number), 1.0)["saves"]
            except Unavailable as error:
                waits.append(f"{child.name}: {error}")
            else:
                waits += [
                    f"{child.name}, step {each['step']}: {each['waits_for']}" for each in saves
                ]
        return waits

    def _start_trainers(self) -> None:
        """Start the ranks of the next attempt, with a new store to meet at, as torchrun does."""
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        attempt = len(self._attempts) + 1
        self._trainers = []
        self._attempts.append(
            [Reader(file_of(self._records, attempt, rank)) for rank in range(WORLD)]
        )
        for rank in range(WORLD):
            node, local = divmod(rank, RANKS_PER_NODE)
            command = ["-m", "milepost.demo.trainer", str(self.root), str(self._records),
                       str(attempt), str(STEPS), str(EVERY)]  # fmt: skip
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "MILEPOST_RUN_DIR": str(self._run_dir(node)),
                "MILEPOST_JOB": "demo",
            }
            name = f"rank {rank}"
            self._trainers.append(self._start(name, command, variables, f"attempt{attempt}-"))
        pids = ", ".join(str(child.pid) for child in self._trainers)
        self._say(
            f"attempt {attempt}: {WORLD} ranks on {NODES} nodes, pids {pids}; importing torch"
        )

    def _start(
        self, name: str, arguments: Sequence[str], variables: dict[str, str], prefix: str = ""
    ) -> Child:
        """Start Python with these arguments."""
        log = self._logs / f"{prefix}{name.replace(' ', '')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                # -P: modules come from where they are installed, never from the current directory.
                [sys.executable, "-P", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment() | variables,
                process_group=0,
            )
        return Child(name, process, log)

    def _until(self, has_come: Callable[[], bool], what: str, children: Sequence[Child]) -> None:
        """Return once it has come. Raises DemoFailed if one of the children fails, or a daemon ends
        or time runs out; Interrupted if a signal has come.
        """
        while not has_come():
            self._look(what, children)
            time.sleep(LOOK_S)

    def _look(self, what: str, children: Sequence[Child]) -> None:
        if self._noted:
            raise Interrupted
        failed = [child for child in children if child.process.poll() not in (None, 0)]
        failed += [child for child in self._daemons if child.process.poll() is not None]
        if failed:
            # Those that fail because another one did follow within moments: show them all.
            time.sleep(0.5)
            failed = [
                child
                for child in [*children, *self._daemons]
                if child.process.poll() not in (None, 0) or child in failed
            ]
            codes = ", ".join(f"{child.name} ({child.process.returncode})" for child in failed)
            raise DemoFailed(f"ended while {what}: {codes}", [child.log for child in failed])
        elapsed_s = time.monotonic() - self._started_s
        if elapsed_s > DEMO_S:
            text = "; ".join([f"still {what} after {elapsed_s:.0f} s", *self._waits()])
            raise DemoFailed(text, self._every_log())
        step = self._step_of(0) if self._attempts else 0
        of = f", step {step} of {STEPS}" if what == "training" else ""
        self._progress.update(f"{what}{of} ({elapsed_s:.0f} s)")

    def _end_daemons(self) -> None:
        """End the daemons as a service manager would, and look how they end."""
        for child in self._daemons:
            child.process.terminate()
        for child in self._daemons:
            code = child.end(DRAIN_S)
            if code != 0:
                raise DemoFailed(f"{child.name} ended with {code}", [child.log])
        self._daemons = []

    def end_all(self) -> None:
        """End every process that is left, trainers and judges first, and remove what lies outside
        the folder.
        """
        for children, grace_s in (
            ([*self._trainers, *self._judges], GRACE_S),
            (self._daemons, GRACE_S),
        ):
            for child in children:
                if child.process.poll() is None:
                    child.process.terminate()
            for child in children:
                child.end(grace_s)
        if self._link is not None:
            self._link.unlink()
            self._link.parent.rmdir()
            self._link = None

    # --- what is known

    def _all_records(self) -> list[list[list[Record]]]:
        """Return all records, by attempt and rank."""
        return [[reader.refresh() for reader in ranks] for ranks in self._attempts]

    def _step_of(self, rank: int) -> int:
        """Return the step that a rank of the newest attempt has done last; 0 before that."""
        return max(_losses(self._attempts[-1][rank].refresh()), default=0)

    def _every_log(self) -> list[Path]:
        return [child.log for child in [*self._trainers, *self._daemons]]

    def _say(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self._console.print(Text(f"{elapsed_s:5.1f} s  {text}"), soft_wrap=True)


def _environment() -> dict[str, str]:
    """Return our environment without what would have children run differently, by accident."""
    kept = ("MILEPOST_SHM_DIR", "MILEPOST_LOG")
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MILEPOST") or name in kept
    }
    # All ranks are on this host, whatever its name resolves to, and share its few cores.
    return environment | {
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _recorded(records: Sequence[Record], *, is_resumed: bool) -> dict[int, Recorded]:
    """Return what a rank recorded of its state, by step."""
    return {
        record.step: record
        for record in records
        if isinstance(record, Recorded) and record.is_resumed == is_resumed
    }


def _losses(records: Sequence[Record]) -> dict[int, float]:
    return {record.step: record.loss for record in records if isinstance(record, Stepped)}


def _mean_loss(ranks: Attempt, step: int) -> float:
    return sum(_losses(records)[step] for records in ranks) / len(ranks)


def _last_save(records: Sequence[Record]) -> int:
    return max((record.step for record in records if isinstance(record, Called)), default=0)


def _join(name: str, by_rank: Sequence[Recorded]) -> dict[str, list[Part]]:
    """Return every key's parts in rank order; one part for what every rank has whole.

    Raises DemoFailed if ranks that have the whole of a value do not have the same.
    """
    parts: dict[str, list[Part]] = {}
    for recorded in by_rank:
        for key, part in recorded.parts.items():
            parts.setdefault(key, []).append(part)
    for key, found in parts.items():
        if found[0].rows < 0:
            if len(set(found)) > 1:
                raise DemoFailed(f"{name}: ranks saved different values of {key}")
            parts[key] = found[:1]
    return parts
