"""The demonstration's nodes: two daemons on this host, each with a run directory of its own."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Final

from milepost.demo.processes import DemoFailed, DemoProcess, Watch, end_processes, start_python
from milepost.demo.telling import Telling
from milepost.errors import Unavailable
from milepost.link.connection import fetch_status
from milepost.link.run_dir import SOCKET_PATH_BYTES_MAX, socket_path

NODES: Final = 2

DRAIN_S: Final = 20.0
"""How long a daemon that has nothing to do may take to end after SIGTERM."""


class Daemons:
    """The daemons, started and ended as a service manager would.

    Args:
        folder: the demonstration's; run directories are in it.
        root: where the daemons may write checkpoints.
        logs: where their logs go.
        telling: tells people what happens.
        watch: looks after the daemons.
    """

    def __init__(
        self, folder: Path, root: Path, logs: Path, telling: Telling, watch: Watch
    ) -> None:
        self._folder = folder
        self._root = root
        self._logs = logs
        self._telling = telling
        self._watch = watch
        self._link: Path | None = None
        """A short path to the folder, where the folder's own is too long for a socket."""
        watch.waits = self._waits

    @property
    def processes(self) -> list[DemoProcess]:
        """The daemons that run."""
        return self._watch.steady

    def start(self) -> None:
        """Start all nodes; return when they answer."""
        self._telling.say("starting two nodes")
        for number in range(NODES):
            run_dir = self.run_dir(number)
            run_dir.mkdir(mode=0o700)
            command = ["-m", "milepostd", "--run-dir", str(run_dir), "--root", str(self._root),
                       "--http", ""]  # fmt: skip
            name = f"node{number}"
            self.processes.append(start_python(name, command, self._logs / f"{name}.log"))
        for number in range(NODES):
            self._watch.until(partial(self._answers, number), "starting", [])
        names = " and ".join(f"{child.name} (pid {child.pid})" for child in self.processes)
        self._telling.say(f"two nodes run: {names}")

    def run_dir(self, node: int) -> Path:
        """Return a node's run directory, through a link if its socket's path would be too long."""
        run_dir = self._folder / f"node{node}"
        if len(os.fsencode(socket_path(run_dir))) <= SOCKET_PATH_BYTES_MAX:
            return run_dir
        if self._link is None:
            self._link = Path(tempfile.mkdtemp(prefix="milepost-demo-")) / "run"
            self._link.symlink_to(self._folder)
        return self._link / run_dir.name

    def drain(self) -> None:
        """End all nodes by SIGTERM. Raises DemoFailed if one does not end well."""
        for child in self.processes:
            child.ask_to_end()
        codes = [child.end(DRAIN_S) for child in self.processes]
        for child, code in zip(self.processes, codes, strict=True):
            if code != 0:
                raise DemoFailed(f"{child.name} ended with {code}", [child.log])
        self._watch.steady = []

    def end(self) -> None:
        """End the nodes that still run, and remove what lies outside the folder."""
        end_processes(self.processes)
        if self._link is not None:
            self._link.unlink()
            self._link.parent.rmdir()
            self._link = None

    def _answers(self, node: int) -> bool:
        try:
            fetch_status(self.run_dir(node), 0.2)
        except Unavailable:
            return False
        return True

    def _waits(self) -> list[str]:
        """Return what saves wait for, according to the daemons."""
        waits = []
        for number, child in enumerate(self.processes):
            try:
                saves = fetch_status(self.run_dir(number), 1.0)["saves"]
            except Unavailable as error:
                waits.append(f"{child.name}: {error}")
            else:
                waits += [
                    f"{child.name}, step {each['step']}: {each['waits_for']}" for each in saves
                ]
        return waits
