"""`milepost demo`: the main job on real input, from the first step to the proof.

Two nodes with two gloo ranks each train a small FSDP2-sharded language model and save every few
steps. One rank is killed; the run resumes and finishes. Then stock torch, on another number of
ranks, compares every value of every checkpoint.

`launcher` tells the story. `daemons`, `attempts` (the ranks) and `judging` start and end processes,
by means of `processes`. `trainer` and `judge` run in those processes, `model` is what is trained,
`records` is what the trainers report, `checking` what the reports must show. `telling` and `report`
are what people see, `folder` is where it all happens. Imports nothing until it is run.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER_NAME = "demo-run"
"""Made in the current directory."""


def main() -> int:
    """Run the demonstration; return its exit code: 0 only if every comparison held.

    Raises UsageError if the folder holds something that no demonstration made, or if a
    demonstration is using it.
    """
    # torch's store warns of its clients on a machine that cannot look up their names.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from milepost.demo.launcher import run_demo

    return run_demo(Path.cwd() / FOLDER_NAME)
