"""The demonstration's training: attempts of the job, their ranks, and what the ranks recorded.

Does for the trainers what torchrun does: holds the key-value store at which they meet, tells each
its place by the environment, and ends the others when one is lost.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Final

from milepost.demo.checking import losses_of
from milepost.demo.daemons import NODES, Daemons
from milepost.demo.processes import (
    GRACE_S,
    DemoFailed,
    DemoProcess,
    Watch,
    end_processes,
    logs_of,
    start_python,
)
from milepost.demo.records import Record, RecordReader, file_of
from milepost.demo.telling import Telling

RANKS_PER_NODE: Final = 2
WORLD: Final = NODES * RANKS_PER_NODE

STEPS: Final = 48
EVERY: Final = 6
"""Steps from one save to the next."""


class Attempts:
    """All attempts so far; the processes are those of the newest one.

    Args:
        root: where checkpoints go.
        records: the directory where the ranks write their records.
        logs: the directory for the ranks' logs.
        daemons: the ranks get their run directories.
        telling: tells people what happens.
        watch: looks at the ranks.
    """

    def __init__(
        self,
        root: Path,
        records: Path,
        logs: Path,
        daemons: Daemons,
        telling: Telling,
        watch: Watch,
    ) -> None:
        self.trainers: list[DemoProcess] = []
        self._root = root
        self._records = records
        self._logs = logs
        self._daemons = daemons
        self._telling = telling
        self._watch = watch
        self._readers: list[list[RecordReader]] = []
        self._store: Any = None

    @property
    def logs(self) -> list[Path]:
        """The logs of every trainer and daemon of the newest attempt."""
        return logs_of([*self.trainers, *self._daemons.processes])

    @property
    def count(self) -> int:
        return len(self._readers)

    def start(self) -> None:
        """Start the ranks of the next attempt, with a new store to meet at, as torchrun does."""
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        attempt = self.count + 1
        self.trainers = []
        self._readers.append(
            [RecordReader(file_of(self._records, attempt, rank)) for rank in range(WORLD)]
        )
        for rank in range(WORLD):
            self.trainers.append(self._start_rank(attempt, rank))
        pids = ", ".join(str(child.pid) for child in self.trainers)
        self._telling.say(
            f"attempt {attempt}: {WORLD} ranks on {NODES} nodes, pids {pids}; importing torch"
        )

    def _start_rank(self, attempt: int, rank: int) -> DemoProcess:
        node, local = divmod(rank, RANKS_PER_NODE)
        command = ["-m", "milepost.demo.trainer", str(self._root), str(self._records),
                   str(attempt), str(STEPS), str(EVERY)]  # fmt: skip
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MILEPOST_RUN_DIR": str(self._daemons.run_dir(node)),
            "MILEPOST_JOB": "demo",
        }
        log = self._logs / f"attempt{attempt}-rank{rank}.log"
        return start_python(f"rank {rank}", command, log, variables)

    def train_until_step(self, step: int, rank: int) -> None:
        """Return once this rank has done the step. Raises as `Watch.until` does."""
        self._watch.until(
            lambda: self.step_of(rank) >= step, "training", self.trainers, self._progress
        )

    def train_to_the_end(self) -> None:
        """Return once every rank has ended well. Raises as `Watch.until` does."""
        self._watch.until(
            lambda: all(child.exit_code == 0 for child in self.trainers),
            "training",
            self.trainers,
            self._progress,
        )

    def await_resume(self) -> None:
        """Return once every rank trains again. Before that, it recorded the state that it
        resumed.
        """
        self._watch.until(
            lambda: all(losses_of(records) for records in self.records()[-1]),
            "resuming",
            self.trainers,
        )

    def lose(self, rank: int) -> None:
        """Kill this rank by SIGKILL, then end the others, as torchrun does.

        Raises DemoFailed if it ended before it was killed.
        """
        victim = self.trainers[rank]
        victim.process.kill()
        code = victim.process.wait()
        if code != -signal.SIGKILL:
            raise DemoFailed(f"rank {rank} ended with {code} before it was killed", [victim.log])
        step = self.step_of(rank)
        self._telling.say(f"killed rank {rank}, pid {victim.pid}, by SIGKILL after step {step}")
        others = [child for child in self.trainers if child is not victim]
        for child in others:
            child.ask_to_end()
        codes = [child.end(GRACE_S) for child in others]
        names = ", ".join(child.name for child in others)
        shown = ", ".join(map(str, codes))
        self._telling.say(f"ended {names}, as torchrun does (exit codes {shown})")

    def end(self) -> None:
        """End the ranks that still run."""
        end_processes(self.trainers)

    def records(self) -> list[list[list[Record]]]:
        """Return all records, by attempt and rank."""
        return [[reader.refresh() for reader in ranks] for ranks in self._readers]

    def step_of(self, rank: int) -> int:
        """Return the last step that a rank of the newest attempt has done; 0 before the first."""
        return max(losses_of(self._readers[-1][rank].refresh()), default=0)

    def _progress(self) -> str:
        return f", step {self.step_of(0)} of {STEPS}"
