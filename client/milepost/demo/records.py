"""What the demonstration's trainers report to its launcher: for each rank and attempt a file, one
JSON object a line.

Each line is written by one system call, after the event it reports. So the file of a killed trainer
ends with the last thing it did. All times are seconds of the monotonic clock, which the processes
of a host share.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec


class Stepped(msgspec.Struct, frozen=True, tag="step"):
    """A training step has ended. Its time does not include a save."""

    step: int
    loss: float
    """Of this rank's batch, in nats a byte, before the step changed the weights."""
    began_s: float
    ended_s: float


class RecordedPart(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has of one value."""

    rows: int
    """How many rows, if the value is a tensor sharded by rows; -1: this is the whole value."""
    digest: str


class Recorded(msgspec.Struct, frozen=True, tag="recorded"):
    """This rank's state, by the keys that torch gives the values in a checkpoint."""

    step: int
    parts: dict[str, RecordedPart]
    is_resumed: bool
    """True: the state after a load. False: the state that is about to be saved."""


class Called(msgspec.Struct, frozen=True, tag="called"):
    """`save()` has returned."""

    step: int
    save_id: str
    began_s: float
    stall_s: float
    state_s: float
    """How long torch took to collect the state, before the call. Any checkpointer needs that."""


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The save has ended, as committed or not."""

    step: int
    save_id: str
    phase: str
    at_s: float


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """The last step is done and its checkpoint committed."""

    at_s: float


Record = Stepped | Recorded | Called | Ended | Finished

_decoder: Final = msgspec.json.Decoder(Record)


def file_of(folder: Path, attempt: int, rank: int) -> Path:
    """Return where a rank's records of one attempt are."""
    return folder / f"attempt{attempt}-rank{rank}.jsonl"


class RecordWriter:
    """Appends records. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: Record) -> None:
        os.write(self._file, msgspec.json.encode(record) + b"\n")


class RecordReader:
    """Follows a file of records while it grows."""

    def __init__(self, path: Path) -> None:
        self.records: list[Record] = []
        """All records read so far."""
        self._path = path
        self._at = 0

    def refresh(self) -> list[Record]:
        """Read what is new, and return all records. An incomplete line is left for the next call; a
        file that does not exist yet counts as empty.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                content = file.read()
        except FileNotFoundError:
            return self.records
        complete = content[: content.rfind(b"\n") + 1]
        self._at += len(complete)
        self.records += [_decoder.decode(line) for line in complete.splitlines()]
        return self.records
