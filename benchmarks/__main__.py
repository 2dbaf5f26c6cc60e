"""`python -m benchmarks`: run them, or show what a run found.

The table goes to stdout, progress to stderr. Exit codes: 0 done; 1 something could not be measured
that should; 2 a usage error.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console

from benchmarks import plot, report
from benchmarks.campaign import WORLDS, run
from benchmarks.results import (
    OUR_READERS,
    OURS,
    READERS,
    SYSTEMS,
    Options,
    Results,
    read_results,
    write_results,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PLANNING = "planning"
LOADS = "loads"
QUICK_SIZE = 1 / 16
WIDTH_PIPED = 240

MARKS = {
    "saves": ("<!-- results -->", "<!-- end of results -->"),
    "loads": ("<!-- loads -->", "<!-- end of loads -->"),
}
"""Between such lines a page holds a section of what `--page` prints."""


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Chosen(NamedTuple):
    """What is to be measured."""

    saves: list[str]
    """Workloads of which saves are measured."""
    systems: list[str]
    loads: list[str]
    """Workloads of which loads are."""
    readers: list[str]
    with_planning: bool
    with_index: bool


def _chosen(only: list[str]) -> Chosen:
    """Return what `--only` means.

    It names families (a workload: its saves; with "loads": its loads instead), and systems; all
    families if none, all systems if none.
    """
    families = (*WORLDS, PLANNING, LOADS)
    unknown = sorted(set(only) - {*families, *SYSTEMS, *READERS})
    if unknown:
        known = ", ".join(dict.fromkeys((*families, *SYSTEMS, *READERS)))
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {known}", param_hint="--only")
    has_all = not set(only) & set(families)
    systems = set(only) & {*SYSTEMS, *READERS} or {*SYSTEMS, *READERS}
    workloads = [name for name in WORLDS if name in only]
    with_loads = bool(has_all or LOADS in only) and bool(systems & set(READERS))
    with_saves = has_all or (workloads and LOADS not in only)
    return Chosen(
        # A system that only loads is no reason to measure the floors of saving.
        saves=(workloads or list(WORLDS)) if with_saves and systems & set(SYSTEMS) else [],
        systems=[system for system in SYSTEMS if system in systems],
        loads=(workloads or list(WORLDS)) if with_loads else [],
        readers=[reader for reader in READERS if reader in systems],
        with_planning=has_all or PLANNING in only,
        with_index=with_loads and not workloads,
    )


def _read(path: Path) -> Results:
    try:
        return read_results(path)
    except (OSError, msgspec.DecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error


def _fill(page: Path, sections: Mapping[str, str]) -> None:
    """Put each section between its marks of a page."""
    held = page.read_text()
    for name, text in sections.items():
        begin, end = MARKS[name]
        before, mark, rest = held.partition(begin)
        _, other, after = rest.partition(end)
        if not mark or not other:
            text = f"{page} has no lines {begin!r} and {end!r}"
            raise typer.BadParameter(text, param_hint="--into")
        held = f"{before}{begin}\n{text}{end}{after}"
    page.write_text(held)


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
        typer.Option(
            help="A workload (large, small, ranks), planning, loads, or a system; repeatable."
        ),
    ] = None,
    size: Annotated[float, typer.Option(min=1e-4, max=1, help="Factor on all sizes.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all systems.")] = 3,
    saves: Annotated[int, typer.Option(min=1, help="Saves a process, after the first.")] = 4,
    idle_saves: Annotated[int, typer.Option(min=1, help="Saves without training steps.")] = 3,
    quiet_steps: Annotated[int, typer.Option(min=1, help="Steps between saves.")] = 6,
    loads: Annotated[int, typer.Option(min=1, help="Loads a process, cold and warm each.")] = 3,
    device: Annotated[str, typer.Option(help="Where the state lies: cpu or cuda.")] = "cpu",
    quick: Annotated[bool, typer.Option(help="A sixteenth of the size, one round.")] = False,
    page: Annotated[
        Path | None, typer.Option(help="Print these results as Markdown; run nothing.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="With --page: put it there, between the page's marks.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw these results to --image; run nothing.")
    ] = None,
) -> None:
    """What saves and loads cost, beside other systems and the machine's floors."""
    if page is not None:
        if into is None:
            print(report.page(_read(page)), end="")
        else:
            _fill(into, report.sections(_read(page)))
    if picture is not None:
        _draw(_read(picture), image or picture.with_suffix(".png"))
    if page is not None or picture is not None:
        return
    chosen = _chosen(only or [])
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{device!r} is neither cpu nor cuda", param_hint="--device")
    options = Options(
        size=size * QUICK_SIZE if quick else size,
        repeats=1 if quick else repeats,
        saves=2 if quick else saves,
        idle_saves=2 if quick else idle_saves,
        quiet_steps=quiet_steps,
        loads=2 if quick else loads,
    )
    # Whoever ends it gets back what it holds: processes, shared memory, folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = run(
        folder,
        options,
        device=device,
        workloads=chosen.saves,
        systems=chosen.systems,
        loads=chosen.loads,
        readers=chosen.readers,
        with_planning=chosen.with_planning,
        with_index=chosen.with_index,
        say=_say,
    )
    write_results(output, results)
    _draw(results, image or output.with_suffix(".png"))
    Console(width=None if sys.stdout.isatty() else WIDTH_PIPED).print(report.table(results))
    ours = [
        system in measured.failures for measured in results.workloads.values() for system in OURS
    ]
    ours += [
        reader in loaded.failures for loaded in results.loads.values() for reader in OUR_READERS
    ]
    if results.failures or any(ours):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
