"""Starting a daemon for the node when none is running.

The daemon is a new program, not a fork: a trainer has threads, sockets and perhaps a CUDA context
that do not survive a fork. It gets a session of its own, so that a signal to the trainer's process
group does not reach it, and it outlives the trainer until nothing is pending. All ranks of a node
may try to start it at once; a lock file in the run directory lets one of them do so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from milepost.errors import Unavailable
from milepost.link.run_dir import make_run_dir
from milepost.memory.arena import arena_dir

LOG_NAME: Final = "milepostd.log"
START_S: Final = 30.0
"""How long a start may take: well under a second on an idle machine, more where imports come from a
cold network file system."""


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an exclusive file lock; the kernel frees it with the process."""
    until_s = time.monotonic() + timeout_s
    with path.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise Unavailable(
                        "daemon-unreachable",
                        f"another process has been starting a daemon in {path.parent} for "
                        f"{timeout_s:g} s",
                        f"see {path.parent / LOG_NAME}",
                    ) from None
                time.sleep(0.02)
        yield


def is_running(run_dir: Path) -> bool:
    """Whether a daemon holds the run directory's lock."""
    try:
        with (run_dir / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def peer_flags() -> list[str]:
    """Return the flags that say where an embedded daemon listens for other nodes.

    No flags, that is loopback, unless the launcher says that the job spans hosts; then the
    interface that leads to the rendezvous host.
    """
    ranks, here = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
    if here is None or here == ranks or "MILEPOSTD_PEER" in os.environ:
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: the kernel only chooses a route.
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
        address = probe.getsockname()[0]
    return ["--peer", f"tcp://{address}:0"]


def ensure_daemon(run_dir: Path) -> None:
    """Start an embedded daemon in this run directory unless one is running.

    Returns once a daemon holds the lock; `Connection.open` then waits for its answer. Its log is
    `<run-dir>/milepostd.log`.

    Args:
        run_dir: made with mode 0700 if missing.

    Raises:
        Unavailable: "daemon-unreachable": the directory cannot be used, or the daemon did not
            start; then with the last lines of its log.
    """
    reason = make_run_dir(run_dir)
    if reason:
        raise Unavailable(
            "daemon-unreachable",
            f"no daemon can be started in the run directory {run_dir}: {reason}",
            "set XDG_RUNTIME_DIR to a directory of yours, or MILEPOST_RUN_DIR to a running "
            "daemon's run directory",
        )
    if is_running(run_dir):
        return
    with _locked(run_dir / "start.lock", START_S):
        if is_running(run_dir):
            return
        command = [sys.executable, "-P", "-m", "milepostd", "--embedded", "--run-dir", str(run_dir)]
        command += peer_flags()
        with (run_dir / LOG_NAME).open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
                env=_environment(),
            )
        until_s = time.monotonic() + START_S
        while not is_running(run_dir):
            if process.poll() is not None or time.monotonic() > until_s:
                raise Unavailable(
                    "daemon-unreachable",
                    f"milepostd did not start in {run_dir}: exit code {process.poll()}: "
                    + _last_lines(run_dir / LOG_NAME),
                    f"see {run_dir / LOG_NAME}",
                )
            time.sleep(0.01)
        # The daemon is meant to outlive this object; its exit status belongs to init.
        process.returncode = 0


def _environment() -> dict[str, str]:
    """Return the trainer's environment without what concerns only trainers."""
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
           "MILEPOST_RUN_DIR")  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in own}
    # Absolute, since the daemon runs in another working directory.
    return {**environment, "MILEPOST_SHM_DIR": str(arena_dir())}


def _last_lines(path: Path) -> str:
    with contextlib.suppress(OSError):
        return " | ".join(path.read_text(errors="replace").splitlines()[-3:])
    return "no log"
