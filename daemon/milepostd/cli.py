"""The `milepostd` command: reads the settings, starts the runtime, returns an exit code.

Imports as little as possible before the settings are checked, and never torch: a trainer may be
waiting for an embedded daemon.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.errors import MilepostError, UsageError
from milepost.link.run_dir import make_run_dir
from milepostd.ops.config import FLAGS, Settings, load_settings
from milepostd.ops.logs import emit, setup
from milepostd.ops.placement import DaemonPlacement

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"milepostd {importlib.metadata.version('milepost')}")
        raise typer.Exit


def check_directories(settings: Settings) -> None:
    """Make the run directory. Warn of missing roots only, since a daemon may start before their
    file system is mounted.

    Raises UsageError if the run directory cannot be made or written to, or if a root is a file.
    """
    run_dir = settings.run_dir
    reason = make_run_dir(run_dir)
    if reason:
        raise UsageError(
            "usage", f"run directory {run_dir}: {reason}", "name a directory of yours: --run-dir"
        )
    for root in settings.roots:
        if root.exists() and not root.is_dir():
            raise UsageError("usage", f"root {root} is a file", "name a directory: --root")
        if not root.exists():
            emit(
                "warning", "root.missing", root=str(root),
                hint="is its file system mounted? saves make the directory, wherever it then lies",
            )  # fmt: skip


@app.command()
def milepostd(
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file with settings.")
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option(FLAGS["run_dir"], help="Directory of the local socket.")
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(FLAGS["roots"], help="A directory that may be written under; repeat it."),
    ] = None,
    peer: Annotated[
        str | None, typer.Option(FLAGS["peer"], help="Listen for other nodes: tcp://host:port.")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(FLAGS["advertise"], help="What other nodes are told to connect to."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(FLAGS["http"], help="Status page and metrics: host:port, '' for off."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(FLAGS["log_format"], help="auto, json or text.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(FLAGS["log_level"], help="debug, info, warning or error.")
    ] = None,
    embedded: Annotated[
        bool | None, typer.Option(FLAGS["embedded"], help="Started by a trainer for itself.")
    ] = None,
    linger_s: Annotated[
        float | None,
        typer.Option(FLAGS["linger_s"], help="Embedded: end this long after the last."),
    ] = None,
    drain_s: Annotated[
        float | None,
        typer.Option(FLAGS["drain_s"], help="After SIGTERM: wait this long for saves."),
    ] = None,
    writer_threads: Annotated[
        int | None, typer.Option(FLAGS["writer_threads"], help="Images written at the same time.")
    ] = None,
    write_mbps: Annotated[
        float | None,
        typer.Option(FLAGS["write_mbps"], help="Limit of what is written, MB/s; 0 for none."),
    ] = None,
    nice: Annotated[
        int | None, typer.Option(FLAGS["nice"], help="Niceness of the daemon, 0 to 19.")
    ] = None,
    io_class: Annotated[
        str | None, typer.Option(FLAGS["io_class"], help="best-effort, idle or none.")
    ] = None,
    cpus: Annotated[
        str | None, typer.Option(FLAGS["cpus"], help="Cores: auto, all, or such as 8-11,14.")
    ] = None,
    allow_faults: Annotated[
        bool | None,
        typer.Option(FLAGS["allow_faults"], help="For tests: obey MILEPOSTD_FAULTS."),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version."),
    ] = False,
) -> None:
    """Run this node's checkpoint daemon.

    SIGTERM finishes what was staged and ends; a second one ends at once. Every flag is also a
    setting in --config and in the environment, as MILEPOSTD_<SETTING>: file < environment < flag.
    """
    flags: dict[str, Any] = {
        "run_dir": run_dir,
        "roots": root or None,
        "peer": peer,
        "advertise": advertise,
        "http": http,
        "log_format": log_format,
        "log_level": log_level,
        "embedded": embedded,
        "linger_s": linger_s,
        "drain_s": drain_s,
        "writer_threads": writer_threads,
        "write_mbps": write_mbps,
        "nice": nice,
        "io_class": io_class,
        "cpus": cpus,
        "allow_faults": allow_faults,
    }
    settings = load_settings(flags, os.environ, config)
    setup(settings.log_format, settings.log_level)
    check_directories(settings)
    placement = DaemonPlacement(
        nice=settings.nice,
        io_class=settings.io_class,
        cpus=settings.cpus,
        is_embedded=settings.embedded,
    )
    # Before the long imports, so that they do not slow down a rank that trains on this core.
    placement.settle()

    from milepostd.runtime import run_daemon

    raise typer.Exit(run_daemon(settings, placement))


def main() -> None:
    """Console script. Exit 0 after a clean end, 2 after a usage error, else 1."""
    try:
        app()
    except MilepostError as error:
        sys.stderr.write(f"error: {error.message}\n")
        if error.hint:
            sys.stderr.write(f"hint: {error.hint}\n")
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
