"""`python -m benchmarks`: run them, or show what a run found.

The table goes to stdout, progress to stderr. Exit codes: 0 done; 1 something could not be measured
that should; 2 a usage error.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks import plot, report
from benchmarks.campaign import WORLDS, run
from benchmarks.results import OURS, SYSTEMS, Options, Results, read_results, write_results

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PLANNING = "planning"
QUICK_SIZE = 1 / 16
WIDTH_PIPED = 240

BEGIN, END = "<!-- results -->", "<!-- end of results -->"
"""Between these lines a page holds what `--page` prints."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _chosen(only: list[str]) -> tuple[list[str], list[str], bool]:
    """Return workloads, systems, and whether the planner is measured."""
    unknown = sorted(set(only) - {*WORLDS, *SYSTEMS, PLANNING})
    if unknown:
        known = ", ".join((*WORLDS, PLANNING, *SYSTEMS))
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {known}", param_hint="--only")
    systems = [system for system in SYSTEMS if system in only] or list(SYSTEMS)
    named = [name for name in (*WORLDS, PLANNING) if name in only] or [*WORLDS, PLANNING]
    return [name for name in named if name != PLANNING], systems, PLANNING in named


def _read(path: Path) -> Results:
    try:
        return read_results(path)
    except (OSError, msgspec.DecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error


def _fill(page: Path, text: str) -> None:
    """Put the text between the marks of a page."""
    before, mark, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise typer.BadParameter(f"{page} has no lines {BEGIN!r} and {END!r}", param_hint="--into")
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}")


def _draw(results: Results, image: Path) -> None:
    if not plot.can_draw():
        _say("no picture: matplotlib is not installed (pip install -e '.[bench]')")
    elif plot.draw(results, image):
        _say(f"picture: {image}")


@app.command()
def main(
    folder: Annotated[
        Path, typer.Option(help="Where checkpoints go: on the storage to be measured.")
    ] = Path("bench-run"),
    output: Annotated[Path, typer.Option(help="The results.")] = Path("bench-results.json"),
    image: Annotated[
        Path | None, typer.Option(help="The picture; default: beside the results.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A workload (large, small, ranks), planning, or a system; repeatable."),
    ] = None,
    size: Annotated[float, typer.Option(min=1e-4, max=1, help="Factor on all sizes.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all systems.")] = 3,
    saves: Annotated[int, typer.Option(min=1, help="Saves a process, after the first.")] = 4,
    idle_saves: Annotated[int, typer.Option(min=1, help="Saves without training steps.")] = 3,
    quiet_steps: Annotated[int, typer.Option(min=1, help="Steps between saves.")] = 6,
    device: Annotated[str, typer.Option(help="Where the state lies: cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option(help="A sixteenth of the size, one round.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Print these results as Markdown; run nothing.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help=f"With --page: put it there, between {BEGIN} and {END}.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw these results to --image; run nothing.")
    ] = None,
) -> None:
    """What a save costs, beside other systems and the machine's floors."""
    if page is not None:
        text = report.page(_read(page))
        if into is None:
            print(text, end="")
        else:
            _fill(into, text)
    if picture is not None:
        _draw(_read(picture), image or picture.with_suffix(".png"))
    if page is not None or picture is not None:
        return
    workloads, systems, with_planning = _chosen(only or [])
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    options = Options(
        size=size * QUICK_SIZE if quick else size,
        repeats=1 if quick else repeats,
        saves=2 if quick else saves,
        idle_saves=2 if quick else idle_saves,
        quiet_steps=quiet_steps,
    )
    # Whoever ends it gets back what it holds: processes, shared memory, folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = run(
        folder,
        options,
        device=device,
        workloads=workloads,
        systems=systems,
        with_planning=with_planning,
        say=_say,
    )
    write_results(output, results)
    _draw(results, image or output.with_suffix(".png"))
    Console(width=None if sys.stdout.isatty() else WIDTH_PIPED).print(report.table(results))
    ours = [
        system in measured.failures for measured in results.workloads.values() for system in OURS
    ]
    if results.failures or any(ours):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
