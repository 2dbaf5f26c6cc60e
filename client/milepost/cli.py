"""The `milepost` command: what can be done with checkpoints and daemons from a shell.

Owns arguments, output and exit codes; the work is in `milepost.tools`. Data goes to stdout, all
else to stderr. Exit codes: 0 done; 1 damage was found, or the work failed; 2 a usage error, which
includes a path that is no checkpoint; 3 no daemon answers.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from milepost.errors import MilepostError, Unavailable, UsageError
from milepost.link.run_dir import default_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import RenderableType

    from milepost.reading.verification import Damage, Verification

EXIT_DAMAGED = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3

ANSWER_S = 5.0
"""How long a daemon may take to answer; it answers within milliseconds unless its node is stuck."""

WATCH_S = 1.0
"""How often `--watch` asks."""

DAMAGES_SHOWN_MAX = 50
"""More are counted only; `--json` has them all."""

WIDTH_PIPED = 100_000
"""Columns where stdout is no terminal: lines are for `grep` then, and never broken."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

CheckpointPath = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Its directory.")]
RootPath = Annotated[Path, typer.Argument(metavar="ROOT", help="A directory of checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"milepost {importlib.metadata.version('milepost')}")
        raise typer.Exit


@app.callback()
def milepost(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None:
    """Look at, check and thin out checkpoints; see what a node's daemon is doing."""


@app.command()
def status(
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", help="The daemon's; default: $MILEPOST_RUN_DIR, else the user's."
        ),
    ] = None,
    url: Annotated[
        str, typer.Option("--url", help="Ask over HTTP instead: host:port or a URL.")
    ] = "",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Ask again every second.")] = False,
) -> None:
    """Show what is saved, running, stuck, and why. Exit 3: no daemon answers."""
    from milepost.tools.status import fetch, render

    if run_dir is not None and url:
        raise UsageError("usage", "--run-dir and --url name two daemons; give one")
    directory = run_dir or Path(os.environ.get("MILEPOST_RUN_DIR") or default_run_dir(os.environ))
    token = os.environ.get("MILEPOSTD_HTTP_TOKEN", "")

    def ask() -> dict[str, Any]:
        return fetch(directory, url, token, ANSWER_S)

    if not watch:
        found = ask()
        if as_json:
            _print_json(found)
        else:
            _out().print(render(found))
    elif as_json:
        while True:
            _print_json(ask())
            time.sleep(WATCH_S)
    else:
        _watch(ask)


def _watch(ask: Callable[[], dict[str, Any]]) -> None:
    """Show the status until interrupted; a daemon that is away may come back."""
    from rich.live import Live

    from milepost.tools.status import render

    with Live(console=_out(), screen=sys.stdout.isatty(), auto_refresh=False) as live:
        while True:
            shown: RenderableType
            try:
                shown = render(ask())
            except Unavailable as error:
                shown = Text(str(error), style="red")
            live.update(shown, refresh=True)
            time.sleep(WATCH_S)


@app.command("list")
def list_(root: RootPath, as_json: AsJson = False) -> None:
    """List committed checkpoints, newest first, and apart from them what is none (yet)."""
    from milepost.tools.listing import list_root
    from milepost.tools.status import moment, new_table

    found = list_root(root)
    if as_json:
        _print_json(found)
        return
    out = _out()
    table = new_table("", "name", "written at")
    for name in ("step", "size", "files"):
        table.add_column(name, justify="right")
    table.add_column("written by")
    table.add_column("")
    for entry in found.checkpoints:
        table.add_row(
            Text(entry.name),
            moment(entry.modified_at_ms) if entry.modified_at_ms else "",
            str(entry.step) if entry.step >= 0 else "",
            decimal(entry.bytes),
            str(entry.files),
            f"milepost, save {entry.save_id}" if entry.save_id else "another program",
            "latest" if entry.is_latest else "",
        )
    if found.checkpoints:
        out.print(table)
    else:
        out.print(Text(f"no checkpoint under {found.root}"))
    if found.partials:
        table = new_table("not checkpoints", "name", "state")
        table.add_column("size", justify="right")
        for partial in found.partials:
            table.add_row(Text(partial.name), partial.state, decimal(partial.bytes))
        out.print(table)


@app.command()
def inspect(checkpoint: CheckpointPath, as_json: AsJson = False) -> None:
    """Show keys, shapes, dtypes, shards and files. Exit 1: a tensor has a gap or an overlap."""
    from milepost.tools.inspect import inspect as inspect_checkpoint
    from milepost.tools.listing import require_directory
    from milepost.tools.status import counted, moment, new_table

    found = inspect_checkpoint(require_directory(checkpoint))
    if as_json:
        _print_json(found)
    else:
        out = _out()
        total = sum(tensor.bytes for tensor in found.tensors)
        head = Text(
            f"{found.checkpoint}: {counted(len(found.tensors), 'tensor')} of {decimal(total)}, "
            f"{counted(len(found.objects), 'object')}, {counted(len(found.files), 'file')}"
        )
        if found.save_id:
            head.append(
                f"\nstep {found.step}, job {found.job}, save {found.save_id}, "
                f"{counted(found.world, 'rank')}, "
                f"torch {found.torch_version}, committed {moment(found.committed_at_ms)}"
            )
        out.print(head)
        table = new_table("", "key", "dtype", "size")
        table.add_column("bytes", justify="right")
        table.add_column("shards", justify="right")
        table.add_column("files", overflow="fold")
        for tensor in found.tensors:
            size = str(list(tensor.size))
            count = str(tensor.shards)
            files = Text(" ".join(tensor.files))
            table.add_row(
                Text(tensor.key), tensor.dtype, Text(size), decimal(tensor.bytes), count, files
            )
        for entry in found.objects:
            table.add_row(Text(entry.key), "object", "", decimal(entry.bytes), "", Text(entry.file))
        out.print(table)
    for problem in found.problems:
        _complain(f"{problem.key}: {problem.text} [{problem.code}]")
    for file in found.files:
        if file.bytes < 0:
            _complain(f"{file.name}: the file is missing; `milepost verify` checks them all")
    if found.problems:
        raise typer.Exit(EXIT_DAMAGED)


@app.command()
def verify(checkpoint: CheckpointPath, as_json: AsJson = False) -> None:
    """Check every length and checksum, also of checkpoints of stock torch.

    Damages go to stderr, the verdict to stdout. Exit 0: whole; 1: damaged; 2: no checkpoint there.
    """
    from milepost.tools.listing import require_directory
    from milepost.tools.status import counted

    found = _verify(require_directory(checkpoint))
    # What is wrong first, the verdict last, where a terminal's reader looks.
    _report_damages(found.damages)
    if found.unchecked:
        keys = counted(len(found.unchecked), "key")
        _complain(f"without a checksum: {keys}, such as {found.unchecked[0]}")
    if as_json:
        _print_json(found)
    else:
        files, blobs = counted(found.files, "file"), counted(found.blobs, "blob")
        checked = f"{files}, {blobs}, {decimal(found.bytes)}"
        how = "checksums of the manifest" if found.method == "manifest" else "zip checksums"
        damages = counted(len(found.damages), "damage")
        word = f"damaged ({damages})" if found.damages else "whole"
        _out().print(Text(f"{found.checkpoint}: {word}; checked {checked} by {how}"))
    if found.damages:
        raise typer.Exit(EXIT_DAMAGED)


def _verify(checkpoint: Path) -> Verification:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from milepost.reading.verification import verify as verify_checkpoint

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("verify", total=None)
        return verify_checkpoint(
            checkpoint,
            on_total=lambda total: progress.update(task, total=total),
            on_bytes=lambda count: progress.advance(task, count),
        )


def _report_damages(damages: Sequence[Damage]) -> None:
    keys_of: dict[tuple[str, str], list[str]] = {}
    for damage in damages:
        keys_of.setdefault((damage.file, damage.text), []).append(damage.key)
    shown = list(keys_of.items())[:DAMAGES_SHOWN_MAX]
    for (file, text), keys in shown:
        # A file that is missing is one damage to each of its tensors.
        more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
        _complain(f"{file}{', ' if keys[0] else ''}{keys[0]}{more}: {text}")
    left = len(damages) - sum(len(keys) for _, keys in shown)
    if left:
        _complain(f"{left} more; --json has them all")


@app.command()
def prune(
    root: RootPath,
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=1, help="How many of the newest stay.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints that milepost wrote; never the newest, never another program's."""
    from milepost.tools.prune import prune as prune_root

    found = prune_root(root, keep_last, dry_run=dry_run)
    if as_json:
        _print_json(found)
        return
    out = _out()
    for name in found.removed:
        out.print(Text(name))
    verb = "would be removed" if dry_run else "removed"
    out.print(Text(f"{len(found.kept)} kept, {len(found.removed)} {verb}"))
    if found.foreign:
        _complain(f"{len(found.foreign)} left alone, because milepost did not write them")


@app.command()
def demo() -> None:
    """Train a small model on two nodes, lose a trainer, resume, compare every tensor."""
    from milepost.demo import main as run_demo

    raise typer.Exit(run_demo())


def _out() -> Console:
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=WIDTH_PIPED)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main() -> None:
    """Console script."""
    try:
        app()
    except MilepostError as error:
        _complain(f"error: {error.message}")
        if error.hint:
            _complain(f"hint: {error.hint}")
        raise SystemExit(_exit_code(error)) from None


def _exit_code(error: MilepostError) -> int:
    if isinstance(error, Unavailable):
        return EXIT_NO_DAEMON
    if isinstance(error, UsageError) or error.code == "not-found":
        return EXIT_USAGE
    return EXIT_DAMAGED
