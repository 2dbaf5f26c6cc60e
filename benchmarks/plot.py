"""The training steps of a run with saves, one panel a system, as a picture.

Needs matplotlib (`pip install -e '.[bench]'`), which is imported only when a picture is drawn.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any, Final

from benchmarks.results import OURS, Measured, Results, Timeline

SHOWN: Final = (
    "milepost",
    "milepost-overlap",
    "torch-thread",
    "torch-process",
    "torch-process-shm",
    "torch-process-shm-async",
    "torch-checkpointing",
)
HEIGHT_MAX: Final = 5.0
"""Quiet steps; what is longer is cut off and labelled, so that the rest can be seen."""

COLOUR_OURS: Final = "#0b6e4f"
COLOUR_OTHERS: Final = "#8a5a44"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Results, path: Path) -> bool:
    """Write a picture of the first workload as PNG; return False if there is nothing to draw."""
    shown = [
        (name, measured)
        for name, measured in results.workloads.items()
        if any(system in measured.timelines for system in SHOWN)
    ]
    if not shown:
        return False
    name, measured = shown[0]
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure = _figure(pyplot, name, measured)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _figure(pyplot: Any, name: str, measured: Measured) -> Any:
    systems = [system for system in SHOWN if system in measured.timelines]
    figure, axes = pyplot.subplots(
        len(systems), 1, figsize=(9, 1.3 + 1.1 * len(systems)), sharey=True, squeeze=False
    )
    for axis, system in zip(axes[:, 0], systems, strict=True):
        _draw_steps(axis, measured.timelines[system], is_ours=system in OURS)
        axis.set_title(system, fontsize=9, loc="left")
        axis.tick_params(labelsize=7)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0, 0].set_ylim(0, HEIGHT_MAX)
    axes[-1, 0].set_xlabel("training step; dotted: save() was called before it", fontsize=8)
    figure.supylabel("step time / quiet step", fontsize=8)
    title = f"Training with saves: {name}, {measured.world} rank{'s' * (measured.world > 1)}"
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    return figure


def _draw_steps(axis: Any, timeline: Timeline, *, is_ours: bool) -> None:
    heights = [step_s / timeline.quiet_s for step_s in timeline.steps_s]
    axis.bar(
        range(len(heights)), heights, width=0.9, color=COLOUR_OURS if is_ours else COLOUR_OTHERS
    )
    for step, height in enumerate(heights):
        if height > HEIGHT_MAX:
            axis.text(step + 0.6, HEIGHT_MAX * 0.82, f"{height:.0f}x", fontsize=7)
    for step in timeline.saved_at:
        axis.axvline(step - 0.5, color="black", linewidth=0.8, linestyle=":")
    axis.axhline(1, color="black", linewidth=0.5)
    axis.set_xlim(-0.6, len(heights) - 0.4)
