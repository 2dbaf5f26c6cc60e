"""`milepost demo`: the main job on real input, from the first step to the proof.

Two nodes with two gloo ranks each train a small FSDP2-sharded language model, save every few steps,
lose a trainer, resume and finish; then stock torch, on another number of ranks, reads what was
written. `launcher` runs it, `trainer` and `judge` are the processes it starts, `records` is what
they tell it, `report` what people are shown. Imports nothing until it is run.
"""

from __future__ import annotations

from pathlib import Path

FOLDER_NAME = "demo-run"
"""Made in the current directory."""


def main() -> int:
    """Run the demonstration; return its exit code: 0 only if every comparison held.

    Raises UsageError if the folder is there and no demonstration made it, or one is using it.
    """
    from milepost.demo.launcher import run

    return run(Path.cwd() / FOLDER_NAME)
