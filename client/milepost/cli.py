"""The `milepost` command: what can be done with checkpoints and daemons from a shell.

Owns arguments, output and exit codes; the work is in `milepost.tools`. Data goes to stdout,
everything else to stderr. Exit codes: 0 done; 1 damage was found, or the work failed; 2 a usage
error, which includes a path that is not a checkpoint; 3 no daemon answers.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import time
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from milepost.errors import MilepostError, Unavailable, UsageError, listed
from milepost.link.run_dir import default_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from milepost.reading.verification import Damage, Verification
    from milepost.tools.diff import Comparison, Entry

EXIT_DAMAGED = 1
EXIT_DIFFERENT = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3

ANSWER_S = 5.0
"""How long to wait for a daemon's answer. It answers within milliseconds unless its node is
stuck.
"""

WATCH_S = 1.0
"""How often `--watch` asks."""

DAMAGES_SHOWN_MAX = 50
"""How many damages are shown. The rest is only counted; `--json` has all."""

WIDTH_PIPED = 100_000
"""Columns if stdout is not a terminal. Lines are never broken then, so that `grep` finds them."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

CheckpointPath = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Its directory.")]
RootPath = Annotated[Path, typer.Argument(metavar="ROOT", help="A directory of checkpoints.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Unpickle any class, which runs its code.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


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
    """Look at, check and remove checkpoints; see what a node's daemon is doing."""


@app.command()
def status(
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            help="The daemon's run directory; default: $MILEPOST_RUN_DIR, else the user's.",
        ),
    ] = None,
    url: Annotated[
        str, typer.Option("--url", help="Ask over HTTP instead: host:port or a URL.")
    ] = "",
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Ask again every second.")] = False,
) -> None:
    """Show what is saved, running or stuck, and why. Exit 3: no daemon answers."""
    from milepost.tools.status import fetch, render

    if run_dir is not None and url:
        raise UsageError("usage", "--run-dir and --url name two daemons; give only one")
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
    """Show the status until interrupted. Goes on while the daemon is away, since it may come
    back.
    """
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
    """List committed checkpoints, newest first, and apart from them unfinished saves."""
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
            _text(entry.name),
            moment(entry.modified_at_ms) if entry.modified_at_ms else "",
            str(entry.step) if entry.step >= 0 else "",
            decimal(entry.bytes),
            str(entry.files),
            _text(f"milepost, save {entry.save_id}") if entry.save_id else "another program",
            "latest" if entry.is_latest else "",
        )
    if found.checkpoints:
        out.print(table)
    else:
        out.print(_text(f"no checkpoint under {found.root}"))
    if found.partials:
        table = new_table("not checkpoints", "name", "state")
        table.add_column("size", justify="right")
        for partial in found.partials:
            table.add_row(_text(partial.name), partial.state, decimal(partial.bytes))
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
            f"{_shown(found.checkpoint)}: {counted(len(found.tensors), 'tensor')} of "
            f"{decimal(total)}, {counted(len(found.objects), 'object')}, "
            f"{counted(len(found.files), 'file')}"
        )
        if found.save_id:
            head.append(
                f"\nstep {found.step}, job {_shown(found.job)}, save {_shown(found.save_id)}, "
                f"{counted(found.world, 'rank')}, "
                f"torch {_shown(found.torch_version)}, committed {moment(found.committed_at_ms)}"
            )
        out.print(head)
        table = new_table("", "key", "dtype", "size")
        table.add_column("bytes", justify="right")
        table.add_column("shards", justify="right")
        table.add_column("files", overflow="fold")
        for tensor in found.tensors:
            size = str(list(tensor.size))
            count = str(tensor.shards)
            files = _text(" ".join(tensor.files))
            table.add_row(
                _text(tensor.key), tensor.dtype, Text(size), decimal(tensor.bytes), count, files
            )
        for entry in found.objects:
            table.add_row(
                _text(entry.key), "object", "", decimal(entry.bytes), "", _text(entry.file)
            )
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
    """Check every length and checksum, also of checkpoints that stock torch wrote.

    Damage goes to stderr, the verdict to stdout. Exit 0: whole; 1: damaged; 2: not a checkpoint.
    """
    from milepost.tools.listing import require_directory
    from milepost.tools.status import counted

    found = _verify_with_progress(require_directory(checkpoint))
    # The verdict comes last, where people look first in a terminal.
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
        _out().print(_text(f"{found.checkpoint}: {word}; checked {checked} by {how}"))
    if found.damages:
        raise typer.Exit(EXIT_DAMAGED)


def _verify_with_progress(checkpoint: Path) -> Verification:
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
        # A missing file damages each of its tensors.
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be removed.")
    ] = False,
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
        out.print(_text(name))
    verb = "would be removed" if dry_run else "removed"
    out.print(Text(f"{len(found.kept)} kept, {len(found.removed)} {verb}"))
    if found.foreign:
        _complain(f"{len(found.foreign)} left alone, because milepost did not write them")
    if found.left:
        stays = "would stay" if dry_run else "stays"
        _complain(f"what people have put there {stays}: {listed(found.left)}")


@app.command(epilog="Example: milepost export ROOT/step_1000 model.pt --to torch")
def export(
    checkpoint: CheckpointPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A file; of safetensors, a directory "
                                        "or a *.safetensors file.")],
    to: Annotated[str, typer.Option("--to", metavar="torch|safetensors", help="The format.")],
    prefix: Annotated[str, typer.Option(
        "--prefix", help="Only keys with this prefix (`model.`), written without it.")] = "",
    max_shard_size: Annotated[str, typer.Option(
        "--max-shard-size", help="Of one safetensors file, such as 500MB or 2GiB.")] = "5GB",
    tensors_only: Annotated[bool, typer.Option(
        "--tensors-only", help="Leave objects out, and list them.")] = False,
    tied_copies: Annotated[bool, typer.Option(
        "--tied-copies", help="Write tied tensors under each of their names.")] = False,
    overwrite: Overwrite = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write a checkpoint as one torch.save file, or as Hugging Face safetensors with their index.

    Compares every byte with its checksum on the way. OUT appears whole or not at all. Paths of the
    files go to stdout. Exit 1: damage, or the work failed.
    """
    from milepost.tools.export import Options, size_of
    from milepost.tools.export import export as export_checkpoint
    from milepost.tools.status import counted

    options = Options(
        to=to,
        prefix=prefix,
        max_shard_bytes=size_of(max_shard_size),
        tensors_only=tensors_only,
        tied_copies=tied_copies,
        overwrite=overwrite,
        allow_pickle=allow_pickle,
    )
    with _progress("export") as (on_more, on_bytes):
        found = export_checkpoint(checkpoint, out, options, on_more, on_bytes)
    for alias, kept in found.tied.items():
        _complain(f"{alias} is tied to {kept}; only {kept} is written")
    if found.left_out:
        _complain(f"left out: {counted(len(found.left_out), 'object')}: {listed(found.left_out)}")
    _say_unchecked(found.unchecked)
    if as_json:
        _print_json(found)
        return
    objects = f", {counted(found.objects, 'object')}" if found.objects else ""
    _complain(f"{counted(found.tensors, 'tensor')} of {decimal(found.bytes)}{objects}")
    for file in found.files:
        _out().print(_text(file))


@app.command("import", epilog="Example: milepost import model.safetensors ROOT/step_0")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A torch.save file, a safetensors "
                                         "file, an index of sharded ones, or their directory.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The checkpoint's directory.")],
    prefix: Annotated[str, typer.Option(
        "--prefix", help="Put before every key: `model.` for the state {'model': ...}.")] = "",
    tied: Annotated[list[str] | None, typer.Option(
        "--tied", metavar="NAME=KEY", help="Another name for a tensor; may be repeated.")] = None,
    overwrite: Overwrite = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Write a torch.save file or safetensors as a checkpoint, which `dcp.load` reads.

    OUT appears whole or not at all; its path goes to stdout. Exit 1: damage, or the work failed.
    """
    from milepost.tools.importing import import_file
    from milepost.tools.status import counted

    with _progress("import") as (on_more, on_bytes):
        found = import_file(
            file,
            out,
            prefix=prefix,
            tied=tied or (),
            overwrite=overwrite,
            allow_pickle=allow_pickle,
            on_more=on_more,
            on_bytes=on_bytes,
        )
    _say_unchecked(found.unchecked)
    if as_json:
        _print_json(found)
        return
    tensors, objects = counted(found.tensors, "tensor"), counted(found.objects, "object")
    _complain(f"{tensors}, {objects}, {decimal(found.bytes)}")
    _out().print(_text(found.checkpoint))


@app.command(epilog="Example: milepost diff ROOT/step_1000 ROOT/step_2000")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, or what import reads.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other one.")],
    quick: Annotated[bool, typer.Option(
        "--quick", help="Trust the manifests if they say that bytes are equal.")] = False,
    allow_pickle: AllowPickle = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Compare keys, shapes, dtypes and every byte, however either side is sharded.

    Exit 0: equal; 1: different, or one of them is damaged.
    """
    from milepost.tools.diff import diff as compare

    with _progress("diff") as (on_more, on_bytes):
        found = compare(
            a, b, quick=quick, allow_pickle=allow_pickle, on_more=on_more, on_bytes=on_bytes
        )
    if as_json:
        _print_json(found)
    else:
        out = _out()
        for line in _differences(found):
            out.print(Text(line))
    if not found.equal:
        raise typer.Exit(EXIT_DIFFERENT)


def _differences(found: Comparison) -> Iterator[str]:
    """Yield a line for each difference, and the verdict last."""
    from milepost.tools.status import counted

    def form(entry: Entry) -> str:
        return f"{entry.dtype} {list(entry.size)}" if entry.dtype else "an object"

    for side, entries in (("A", found.only_in_a), ("B", found.only_in_b)):
        for entry in entries:
            yield f"only in {side}: {_shown(entry.key)}, {form(entry)}"
    for each in found.forms:
        yield f"{_shown(each.key)}: {form(each.a)} in A, {form(each.b)} in B"
    for value in found.values:
        if not value.elements:
            yield f"{_shown(value.key)}: another object"
            continue
        largest = "" if value.largest is None else f", by at most {value.largest:g}"
        verb = "differs" if value.differing == 1 else "differ"
        yield (
            f"{_shown(value.key)}: {value.differing} of {counted(value.elements, 'element')} {verb}"
            f"{largest} (CRC-32 {value.crc_a:08x} in A, {value.crc_b:08x} in B)"
        )
    unread = f", {found.unread} of them by their manifests" if found.unread else ""
    verdict = "equal" if found.equal else "different"
    yield f"{verdict}: {counted(found.same, 'key')} the same{unread}"


def _shown(text: str) -> str:
    """Return a name from a file in a form that fits on a line and cannot control the terminal."""
    return text if text.isprintable() else repr(text)


def _text(name: str) -> Text:
    return Text(_shown(name))


def _say_unchecked(keys: Sequence[str]) -> None:
    if keys:
        from milepost.tools.status import counted

        _complain(f"without a checksum: {counted(len(keys), 'key')}, such as {_shown(keys[0])}")


@contextmanager
def _progress(
    what: str,
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show a bar on a terminal. Yields two functions: one adds to the bytes to do, the other to the
    bytes done. SIGTERM, and a terminal that is closed, end the block like an interrupt, so that no
    file is left behind; what ignores the latter, as under nohup, goes on.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    ending = (signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in ending if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, _end) for number in heard]
    try:
        with Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task(what, total=0)
            total = 0

            def on_more(count: int) -> None:
                nonlocal total
                total += count
                progress.update(task, total=total)

            yield on_more, lambda count: progress.advance(task, count)
    finally:
        for number, handler in zip(heard, before, strict=True):
            signal.signal(number, handler)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


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
    """Write to stderr. The text may contain names from files; see `_shown`."""
    shown = (c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)
    sys.stderr.write("".join(shown) + "\n")


def main() -> None:
    """Console script."""
    # torch does without numpy, and says so; nothing here needs it.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        # Whoever has closed one of the two wants nothing to be told there.
        redirect_stdout(sys.stdout or nowhere),
        redirect_stderr(sys.stderr or nowhere),
    ):
        try:
            app()
        except OSError as error:
            # On a full disk, say: what is left for stdout is not to be tried again.
            with suppress(OSError, ValueError):
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            _complain(f"error: {error}")
            raise SystemExit(EXIT_DAMAGED) from None
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
