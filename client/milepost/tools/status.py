"""`milepost status`: a daemon's own status, fetched over its local socket or over HTTP, and shown.

The status is the JSON of `GET /status`; this module shows only what the daemon said.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from rich.console import Group
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from milepost.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

STATUS_BYTES_MAX: Final = 64 << 20
"""Largest answer accepted from a URL; a node with a hundred jobs sends less than 1 MB."""


def fetch(run_dir: Path, url: str, token: str, timeout_s: float) -> dict[str, Any]:
    """Return the status of the daemon at `url`, or if that is empty, of the one in `run_dir`.

    Raises:
        Unavailable: no daemon answers there.
        UsageError: the URL is not valid, or the daemon wants a token.
    """
    if url:
        return _fetch_url(url, token, timeout_s)
    from milepost.link.connection import fetch_status
    from milepost.link.embedded import is_running

    # Check this first: a request would wait for the answer of a daemon that does not run.
    if not is_running(run_dir):
        raise Unavailable(
            "daemon-unreachable",
            f"no daemon runs with run directory {run_dir}"
            + ("" if run_dir.is_dir() else ": there is no such directory"),
            "start milepostd, or name its --run-dir; a daemon that a trainer started ends some "
            "seconds after its last trainer",
        )
    status: dict[str, Any] = fetch_status(run_dir, timeout_s)
    return status


def _fetch_url(url: str, token: str, timeout_s: float) -> dict[str, Any]:
    # "localhost:9470" alone would be parsed as a URL of the scheme "localhost".
    address = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address = is_address and (parts.port is None or parts.port > 0) and url.isprintable()
    except ValueError:
        is_address = False
    if not is_address or " " in url:
        raise UsageError("usage", f"expected host:port or http(s)://host:port, got {url!r}")
    address = address if address.endswith("/status") else f"{address}/status"
    request = urllib.request.Request(address)
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    # Use no proxy: a proxy for the outside world cannot reach the node.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            status = json.loads(answer.read(STATUS_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read(200).decode(errors="replace").strip()
        if error.code in (401, 403):
            raise UsageError(
                "usage", f"{address} wants a token", "set MILEPOSTD_HTTP_TOKEN to the daemon's"
            ) from error
        raise Unavailable(
            "daemon-unreachable", f"{address} answers {error.code}: {reason}"
        ) from error
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error)).lower()
        raise Unavailable(
            "daemon-unreachable",
            f"no daemon answers at {address}: {reason}",
            "is it running there, and is its http setting on?",
        ) from error
    if not isinstance(status, dict) or "node" not in status:
        raise Unavailable("daemon-unreachable", f"{address} is not a daemon's status")
    return status


def render(status: dict[str, Any]) -> RenderableType:
    """Return the status for people: node, saves in flight, jobs, peers."""
    parts: list[RenderableType] = [_node(status)]
    if "writer" in status:  # daemons of earlier versions do not say
        parts.append(_writer(status["writer"]))
    if status["saves"]:
        parts.append(_saves(status["saves"]))
    else:
        parts.append(Text("nothing is being saved"))
    if status["jobs"]:
        parts.append(_jobs(status["jobs"]))
    parts += [_failure(job) for job in status["jobs"] if job["last_failed"]]
    parts += [_skip(job) for job in status["jobs"] if job.get("last_skipped")]
    if status["peers"]:
        parts.append(_peers(status["peers"]))
    return Group(*parts)


def _node(status: dict[str, Any]) -> Text:
    node = status["node"]
    state = "accepting saves" if status["accepting"] else "draining: new saves are not accepted"
    line = Text(f"node {node['node_id']}: ")
    line.append(state, style="green" if status["accepting"] else "bold red")
    count = len(status["sessions"])
    line.append(
        f", milepostd {node['version']}, pid {node['pid']}, up {duration(node['uptime_s'])}, "
        f"{counted(count, 'trainer')}, peers at {node['peer_address']}"
    )
    if node.get("http"):
        line.append(f", {node['http']}")
    return line


def _writer(writer: dict[str, Any]) -> Text:
    line = Text(
        f"writes with {counted(writer['threads'], 'thread')}, niceness {writer['nice']}, I/O class "
        f"{writer['io_class']}, on cores {writer['cpus']}"
    )
    line.append(f" ({writer['cpus_reason']})", style="dim")
    if writer["write_mbps"]:
        line.append(f", at most {writer['write_mbps']:g} MB/s")
    return line


def _saves(saves: list[dict[str, Any]]) -> Table:
    table = new_table("saves in flight", "step", "job", "role", "phase", "age", "written")
    table.add_column("waits for", overflow="fold")
    for save in saves:
        written = ""
        if save["bytes_total"]:
            written = f"{decimal(save['bytes_written'])} of {decimal(save['bytes_total'])}"
        table.add_row(
            str(save["step"]),
            Text(save["job"]),
            save["role"],
            save["phase"],
            duration(save["age_s"]),
            written,
            Text(save["waits_for"]),
        )
    return table


def _jobs(jobs: list[dict[str, Any]]) -> Table:
    table = new_table("jobs", "job", "attempt", "ranks here", "last committed", "when", "took")
    for name in ("size", "committed", "failed", "skipped"):
        table.add_column(name, justify="right")
    table.add_column("root", overflow="fold")
    for job in jobs:
        last = job["last_committed"]
        table.add_row(
            Text(job["job"]),
            str(job["attempt"]),
            f"{len(job['ranks_here'])} of {job['world']}",
            f"step {last['step']}" if last else "none yet",
            moment(last["at_ms"]) if last else "",
            duration(last["elapsed_s"]) if last else "",
            decimal(last["bytes"]) if last else "",
            str(job["committed_total"]),
            str(job["failed_total"]),
            str(job["skipped_total"]),
            Text(job["root"]),
        )
    return table


def _failure(job: dict[str, Any]) -> Text:
    failed = job["last_failed"]
    line = Text(f"last failure of {job['job']}: step {failed['step']}, ")
    line.append(f"{failed['message']} [{failed['code']}]", style="red")
    if failed["hint"]:
        line.append(f"\nhint: {failed['hint']}")
    return line


def _skip(job: dict[str, Any]) -> Text:
    skipped = job["last_skipped"]
    return Text(f"last skip of {job['job']}: step {skipped['step']}, {skipped['message']}")


def _peers(peers: list[dict[str, Any]]) -> Table:
    table = new_table("other nodes", "node", "address", "last heard")
    for peer in peers:
        table.add_row(Text(peer["node_id"]), Text(peer["address"]), duration(peer["last_heard_s"]))
    return table


def new_table(title: str, *columns: str) -> Table:
    """Return a table in the form that all commands share; long cells are wrapped, never cut off."""
    table = Table(
        title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def counted(number: int, noun: str) -> str:
    """Write a count with its noun: `1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float | None) -> str:
    """Write a duration as people say it: `1.2 s`, `3 min 4 s`, `2 h 5 min`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60} min"


def moment(at_ms: int) -> str:
    """Write an instant in local time."""
    return datetime.fromtimestamp(at_ms / 1000).astimezone().strftime("%Y-%m-%d %H:%M:%S")
