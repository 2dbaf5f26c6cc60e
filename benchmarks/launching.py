"""The processes of one trial: one a rank, with an environment of their own, and what they leave
behind removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
import psutil

from benchmarks.results import RankTask
from milepost.link.connection import fetch_status
from milepost.link.embedded import is_running
from milepost.link.run_dir import default_run_dir

TRIAL_S_MAX: Final = 1200.0
"""How long one trial may take."""

DAEMON_S_MAX: Final = 20.0
"""How long a trial's embedded daemon may take to end."""

_Answer = TypeVar("_Answer")


class Failed(Exception):
    """A trial did not answer; the text holds its last lines."""


class Rank(NamedTuple):
    """Which process of a trial a task is for, and the files it is given."""

    rank: int
    world: int
    rendezvous: str
    answer: str


def launch(
    module: str, world: int, task: Callable[[Rank], RankTask], kind: type[_Answer]
) -> list[_Answer]:
    """Run `python -m MODULE TASK` once a rank; return what they answer, by rank. Raises Failed."""
    # A socket's path must be short, and a daemon of an earlier trial must not be met.
    short = Path(tempfile.mkdtemp(prefix="bench-"))
    # A daemon that is ended leaves what is staged, for its next life: here there is none.
    memory = tempfile.mkdtemp(prefix="bench-", dir="/dev/shm")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("MILEPOST")},
        "XDG_RUNTIME_DIR": str(short),
        "MILEPOST_SHM_DIR": memory,
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
        ),
    }
    rendezvous = str(short / "rendezvous")
    tasks = [
        task(Rank(rank, world, rendezvous, str(short / f"answer{rank}"))) for rank in range(world)
    ]
    log = short / "log"
    running: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("ab") as output:
            for each in tasks:
                ranks = {"RANK": each.rank, "LOCAL_RANK": each.rank, "WORLD_SIZE": world,
                         "LOCAL_WORLD_SIZE": world}  # fmt: skip
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, msgspec.json.encode(each)],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        env={**environment, **{key: str(value) for key, value in ranks.items()}},
                    )
                )
        _await(running)
        if any(process.returncode for process in running):
            codes = [process.returncode for process in running]
            raise Failed(f"exit codes {codes}: {said(log.read_text(errors='replace'))}")
        return [msgspec.json.decode(Path(each.answer).read_bytes(), type=kind) for each in tasks]
    finally:
        for process in running:
            process.kill()
            process.wait()
        _stop_daemon(default_run_dir(environment))
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(short, ignore_errors=True)


_ERROR: Final = re.compile(
    r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w+(?:Error|Exception)\b.*)$", re.MULTILINE
)


def said(log: str) -> str:
    """Return what a process ended with: the errors of its tracebacks, each once, else its last
    lines.
    """
    errors = list(dict.fromkeys(_ERROR.findall(log)))
    return "; ".join(errors[-3:]) if errors else " | ".join(log.splitlines()[-3:])


def _await(running: Sequence[subprocess.Popen[bytes]]) -> None:
    """Return once all have ended, or one has failed, or time is up."""
    until_s = time.monotonic() + TRIAL_S_MAX
    while any(process.poll() is None for process in running) and time.monotonic() < until_s:
        if any(process.returncode for process in running):
            return
        time.sleep(0.2)


def _stop_daemon(run_dir: Path) -> None:
    """End the embedded daemon that a trial started, if there is one."""
    if not is_running(run_dir):
        return
    process = psutil.Process(int(fetch_status(run_dir, DAEMON_S_MAX)["node"]["pid"]))
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        _, alive = psutil.wait_procs([process], timeout=DAEMON_S_MAX)
        if not alive:
            return
