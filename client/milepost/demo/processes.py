"""The processes that the demonstration starts, and how it waits without losing sight of them.

Every process is a child of the launcher and is ended by its own pid, whatever happens. Each is in a
process group of its own, since Ctrl-C is the launcher's to handle. A signal is only noted when it
arrives, and acted upon between two looks at the children, so that no child is started and then
forgotten.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from milepost.demo.telling import Telling

DEMO_S: Final = 300.0
"""After this time the demonstration has failed. It usually takes a fraction of it on two cores."""

GRACE_S: Final = 5.0
"""How long a trainer may take to end after SIGTERM, as with torchrun; then it is killed."""

LOOK_S: Final = 0.02
"""How often to look at the children."""

FOLLOW_S: Final = 0.5
"""If a process fails because another one failed, it does so within this time."""


class DemoFailed(Exception):
    """The demonstration did not show what it should.

    Attributes:
        logs: the logs of the processes that took part.
    """

    def __init__(self, text: str, logs: Sequence[Path] = ()) -> None:
        super().__init__(text)
        self.logs = logs


class Interrupted(Exception):
    """A signal asks for the end."""


class DemoProcess:
    """A process that the demonstration started."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def ask_to_end(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.exit_code is None:
            self.process.terminate()

    def end(self, grace_s: float) -> int:
        """Send SIGTERM, after the grace SIGKILL; return the exit code."""
        if self.exit_code is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(grace_s)
            self.process.kill()
        return self.process.wait()


def start_python(
    name: str, arguments: Sequence[str], log: Path, variables: dict[str, str] | None = None
) -> DemoProcess:
    """Start Python with these arguments; `variables` are added to its environment."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            # -P: modules come from where they are installed, never from the current directory.
            [sys.executable, "-P", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_child_environment() | (variables or {}),
            process_group=0,
        )
    return DemoProcess(name, process, log)


def end_processes(processes: Sequence[DemoProcess]) -> None:
    """End all processes: ask all of them to end before waiting for the first."""
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.end(GRACE_S)


def logs_of(processes: Sequence[DemoProcess]) -> list[Path]:
    return [process.log for process in processes]


def _child_environment() -> dict[str, str]:
    """Return our environment without what would change how the children run."""
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


class Watch:
    """Waits, and meanwhile looks at the children, at the clock and at signals.

    Args:
        telling: shows what the demonstration waits for.
        noted: the signals that have arrived.

    Attributes:
        steady: processes that must not end as long as they are in this list: the daemons.
        waits: returns what saves are waiting for, a sentence each; asked when time runs out.
    """

    def __init__(self, telling: Telling, noted: Sequence[int]) -> None:
        self.steady: list[DemoProcess] = []
        self.waits: Callable[[], list[str]] = list
        self._telling = telling
        self._noted = noted

    def until(
        self,
        has_come: Callable[[], bool],
        what: str,
        children: Sequence[DemoProcess],
        detail: Callable[[], str] = str,
    ) -> None:
        """Return once `has_come()`.

        Args:
            has_come: called again and again.
            what: what goes on meanwhile, as a participle.
            children: processes that may end only with exit code 0.
            detail: returns what the progress line adds.

        Raises:
            DemoFailed: a process failed, or time ran out.
            Interrupted: a signal has come.
        """
        while not has_come():
            self._look(what, children)
            self._telling.show_progress(what + detail())
            time.sleep(LOOK_S)

    def _look(self, what: str, children: Sequence[DemoProcess]) -> None:
        if self._noted:
            raise Interrupted
        failed = [child for child in children if child.exit_code not in (None, 0)]
        failed += [child for child in self.steady if child.exit_code is not None]
        if failed:
            time.sleep(FOLLOW_S)
            failed = [
                child
                for child in [*children, *self.steady]
                if child.exit_code not in (None, 0) or child in failed
            ]
            codes = ", ".join(f"{child.name} ({child.exit_code})" for child in failed)
            raise DemoFailed(f"ended while {what}: {codes}", logs_of(failed))
        if self._telling.elapsed_s > DEMO_S:
            waited = f"still {what} after {self._telling.elapsed_s:.0f} s"
            everybody = [*children, *self.steady]
            raise DemoFailed("; ".join([waited, *self.waits()]), logs_of(everybody))
