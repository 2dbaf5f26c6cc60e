"""Changes the results of single system calls of a process from outside: strace, attached to it,
puts in errors, delays and a killing signal.

So a fault can strike where there is no fault point: at one call, for one path, in a daemon or its
planner's process, for as long as a test wants.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from tests.integration.tracing import skip_if_forbidden

ATTACH_S: Final = 30.0


class Injection:
    """An attached strace, and its output so far."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def calls(self) -> list[str]:
        """Return the traced calls, each a line without its thread's number."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return [line.partition(" ")[2].strip() for line in lines]

    def has_struck(self) -> bool:
        """Whether a call was changed, delayed or answered by a signal."""
        return any(mark in line for line in self.calls() for mark in ("(INJECTED)", "(DELAYED)"))


@contextlib.contextmanager
def injecting(
    pids: Sequence[int],
    calls: str,
    what: str,
    *,
    log: Path,
    paths: Sequence[Path] = (),
    also_traced: str = "",
) -> Iterator[Injection]:
    """Change the results of system calls of running processes, in all their threads.

    Args:
        pids: ids of running processes.
        calls: names, as strace takes them: `fsync`, `/^rename`.
        what: `error=EIO`, `delay_enter=5s`, `signal=KILL:when=2`; `when` counts by thread.
        log: where the trace goes.
        paths: only calls with one of these paths, as an argument or behind a descriptor.
        also_traced: more calls to see.

    Skips the test if processes may not be traced.
    """
    command = ["strace", "-f", "-y", "-s", "256", "-o", str(log),
               "-e", f"trace={calls}{',' if also_traced else ''}{also_traced}",
               "-e", f"inject={calls}:{what}"]  # fmt: skip
    for path in paths:
        command += ["-P", str(path)]
    for pid in pids:
        command += ["-p", str(pid)]
    tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until_s = time.monotonic() + ATTACH_S
        while not all(_is_traced(pid, tracer.pid) for pid in pids):
            if tracer.poll() is not None:
                assert tracer.stderr is not None
                told = tracer.stderr.read()
                skip_if_forbidden(told)
                raise AssertionError(f"strace has ended: {told}")
            assert time.monotonic() < until_s, f"strace does not attach to {pids}"
            time.sleep(0.02)
        yield Injection(log)
    finally:
        # It lets go of what it traces, and ends.
        tracer.send_signal(signal.SIGINT)
        try:
            tracer.wait(ATTACH_S)
        except subprocess.TimeoutExpired:
            tracer.kill()
            tracer.wait(5)
        if tracer.stderr is not None:
            tracer.stderr.close()


def _is_traced(pid: int, tracer: int) -> bool:
    try:
        tasks = [
            Path(f"/proc/{pid}/task/{task}/status") for task in os.listdir(f"/proc/{pid}/task")
        ]
        return all(f"\nTracerPid:\t{tracer}\n" in task.read_text() for task in tasks)
    except OSError:
        return False


def planner_of(daemon: int) -> int:
    """Return the pid of a daemon's planner, which writes the manifest and `.metadata`."""
    for child in psutil.Process(daemon).children():
        if "milepostd.planner.child" in " ".join(child.cmdline()):
            return child.pid
    raise AssertionError(f"daemon {daemon} has no planner")
