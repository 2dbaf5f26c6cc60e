"""The judgement: what each checkpoint must hold, and the ranks of stock torch that compare it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from milepost.demo import judge
from milepost.demo.attempts import EVERY, STEPS
from milepost.demo.checking import WRONG_SHOWN_MAX, saved_parts
from milepost.demo.processes import DemoFailed, DemoProcess, Watch, end_processes, start_python
from milepost.demo.records import RecordedPart
from milepost.demo.report import Attempt
from milepost.demo.telling import Telling

JUDGES: Final = 3


class Judgement(msgspec.Struct, frozen=True):
    """What the judges found of one checkpoint."""

    equal: int
    wrong: tuple[str, ...]


class Judges:
    """The processes that judge. See `judge` for what each of them does.

    Args:
        folder: the demonstration's.
        root: where the checkpoints are.
        logs: where the judges' logs go.
        telling: tells people what happens.
        watch: looks at the judges.
    """

    def __init__(
        self, folder: Path, root: Path, logs: Path, telling: Telling, watch: Watch
    ) -> None:
        self._folder = folder
        self._root = root
        self._logs = logs
        self._telling = telling
        self._watch = watch
        self._processes: list[DemoProcess] = []

    def judge(self, attempts: Sequence[Attempt]) -> tuple[int, int]:
        """Compare all checkpoints with what the ranks recorded; return how many values of how many
        checkpoints are equal. Raises DemoFailed if a value differs or is missing.
        """
        expected = self._expected(attempts)
        self._telling.say(
            f"{JUDGES} ranks of stock torch, without milepost, read all {len(expected)} checkpoints"
        )
        given, verdict = self._folder / "expected.json", self._folder / "verdict.json"
        given.write_bytes(msgspec.json.encode(expected))
        for rank in range(JUDGES):
            command = [str(Path(judge.__file__)), str(self._root), str(given), str(verdict),
                       str(self._folder / "rendezvous"), str(rank), str(JUDGES)]  # fmt: skip
            name = f"judge{rank}"
            self._processes.append(start_python(name, command, self._logs / f"{name}.log"))
        self._watch.until(
            lambda: all(child.exit_code == 0 for child in self._processes),
            "comparing",
            self._processes,
        )
        found = msgspec.json.decode(verdict.read_bytes(), type=dict[str, Judgement])
        return sum_up(expected, found), len(found)

    def end(self) -> None:
        """End the judges that still run."""
        end_processes(self._processes)

    def _expected(self, attempts: Sequence[Attempt]) -> dict[str, dict[str, list[RecordedPart]]]:
        """Return what each checkpoint must hold. Raises DemoFailed if a checkpoint is missing, or
        if a save has left files.
        """
        names = [path.name for path in self._root.glob("step_*")]
        there = sorted(names, key=lambda name: int(name.removeprefix("step_")))
        steps = range(EVERY, STEPS + 1, EVERY)
        wanted = [f"step_{step}" for step in steps]
        if there != wanted:
            raise DemoFailed(f"there are {', '.join(there)}; saved were {', '.join(wanted)}")
        left = [path.name for path in (self._root / ".partial").iterdir()]
        if left:
            raise DemoFailed(f"left over in {self._root / '.partial'}: {', '.join(left)}")
        return {f"step_{step}": saved_parts(step, attempts) for step in steps}


def sum_up(expected: dict[str, dict[str, list[RecordedPart]]], found: dict[str, Judgement]) -> int:
    """Return how many values are equal. Raises DemoFailed if a value of a checkpoint differs or was
    not compared.
    """
    wrong = [f"{name}: {text}" for name in found for text in found[name].wrong]
    if wrong or found.keys() != expected.keys():
        shown = "\n  ".join(wrong[:WRONG_SHOWN_MAX])
        raise DemoFailed(f"{len(wrong)} values differ from what was saved:\n  {shown}")
    counts = {name: found[name].equal for name in found}
    if any(counts[name] != len(expected[name]) for name in expected):
        raise DemoFailed(f"not everything was compared: {counts}")
    return sum(counts.values())
