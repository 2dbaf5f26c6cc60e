"""What people see: a sentence for each thing that happens, what goes on now, the table at the end.

Sentences and table go to stdout, what went wrong to stderr.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.text import Text

from milepost.demo.report import Attempt, explain, figures_of, make_table

WIDTH_PIPED: Final = 120

LOG_LINES: Final = 15
"""How many lines of a failed process's log are shown."""


class Telling:
    """Tells people how the demonstration goes. As a context manager it shows what goes on now."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        piped = None if sys.stdout.isatty() else WIDTH_PIPED
        self._console = Console(highlight=False, width=piped)
        self._progress = self._console.status("")

    def __enter__(self) -> None:
        self._progress.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """Write a line that stays, with the time."""
        self._console.print(Text(f"{self.elapsed_s:5.1f} s  {text}"), soft_wrap=True)

    def show_progress(self, text: str) -> None:
        """Replace the line that says what goes on now; on a terminal only."""
        self._progress.update(f"{text} ({self.elapsed_s:.0f} s)")

    def show_figures(self, attempts: Sequence[Attempt]) -> None:
        """Write the table of all saves, and what its figures mean."""
        figures = figures_of(attempts)
        self._console.print()
        self._console.print(make_table(figures))
        for line in explain(figures, attempts, len(os.sched_getaffinity(0))):
            self._console.print(Text(f"  {line}"), soft_wrap=True)
        self._console.print()


def tell_failure(text: str, logs: Sequence[Path]) -> None:
    """Write why the demonstration failed, after the last lines of these logs."""
    for log in logs:
        print(f"--- the last lines of {log}:", file=sys.stderr)
        with contextlib.suppress(OSError):
            for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
                print(line, file=sys.stderr)
    print(f"the demonstration failed: {text}", file=sys.stderr)
