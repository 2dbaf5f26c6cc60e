"""The HTTP side against a real server on loopback: what is served, to whom, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from milepost.errors import UsageError
from milepostd.ops import http, server
from milepostd.ops.config import load_settings
from milepostd.ops.http import make_app
from milepostd.ops.metrics import Counters, make_exposition
from milepostd.ops.server import bind, bind_as_set, serve_http, url_of
from milepostd.ops.systemd import ServiceManager

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

TOKEN = "a-token-of-enough-characters"

END_S = 20
"""How long a server may take to end."""


class Daemon:
    """A stand-in for the daemon, with the values that the server needs; tests change them."""

    def __init__(self) -> None:
        self.healthy = True
        self.status: dict[str, Any] = {
            "version": 1,
            "accepting": True,
            "node": {
                "node_id": "n1",
                "incarnation": "i1",
                "pid": 1,
                "version": "0.1.0",
                "uptime_s": 1.5,
                "peer_address": "tcp://127.0.0.1:1",
                "embedded": False,
                "run_dir": "/run/milepost",
                "http": "",
            },
            "jobs": [],
            "saves": [
                {
                    "job": "j",
                    "save_id": "1-1",
                    "step": 10,
                    "name": "step_10",
                    "role": "participant",
                    "phase": "writing",
                    "age_s": 0.5,
                    "bytes_total": 100,
                    "bytes_written": 40,
                    "waits_for": "the disk: 60 bytes of rank 0",
                }
            ],
            "peers": [],
            "sessions": [],
        }


@contextlib.asynccontextmanager
async def serving(daemon: Daemon, token: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """Serve on a free port; yield a client for it; stop and insist that stopping works."""
    listener = bind("127.0.0.1:0", token)
    app = make_app(
        lambda: daemon.status,
        lambda: daemon.healthy,
        make_exposition(lambda: daemon.status, Counters()),
        token,
    )
    url = url_of(listener)
    server = asyncio.create_task(serve_http(app, listener))
    try:
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            yield client
    finally:
        server.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(server, END_S)
    assert listener.fileno() == -1


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


def test_the_status_is_served_unchanged() -> None:
    async def main() -> None:
        daemon = Daemon()
        async with serving(daemon) as client:
            answer = await client.get("/status")
            assert daemon.status == answer.json()
            assert "no-store" == answer.headers["cache-control"]

    run(main)


def test_the_page_is_self_contained_and_may_run_only_its_own_script() -> None:
    async def main() -> None:
        async with serving(Daemon()) as client:
            answer = await client.get("/")
            assert "text/html; charset=utf-8" == answer.headers["content-type"]
            assert '<html lang="en">' in answer.text
            for outside in ("http://", "https://", "//cdn", "@import", "url("):
                assert outside not in answer.text
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy

    run(main)


def test_metrics_are_prometheus_text() -> None:
    async def main() -> None:
        async with serving(Daemon()) as client:
            answer = await client.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "milepostd_pending_bytes 60.0" in answer.text

    run(main)


def test_probes_say_why_they_fail() -> None:
    async def main() -> None:
        daemon = Daemon()
        async with serving(daemon) as client:
            assert 200 == (await client.get("/healthz")).status_code
            assert 200 == (await client.get("/readyz")).status_code
            daemon.status["accepting"] = False
            ready = await client.get("/readyz")
            assert (503, True) == (ready.status_code, "draining" in ready.text)
            assert 200 == (await client.get("/healthz")).status_code
            daemon.healthy = False
            health = await client.get("/healthz")
            assert (503, True) == (health.status_code, "loop" in health.text)

    run(main)


def test_it_is_read_only() -> None:
    async def main() -> None:
        async with serving(Daemon()) as client:
            assert 405 == (await client.post("/status", json={})).status_code
            assert 405 == (await client.delete("/")).status_code

    run(main)


def test_events_send_the_status_at_once_and_again_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The event comes because of the change, and not because of the time.
    monkeypatch.setattr(http, "HEARTBEAT_S", 3600.0)

    async def main() -> None:
        daemon = Daemon()
        async with serving(daemon) as client, client.stream("GET", "/events") as answer:
            assert "text/event-stream; charset=utf-8" == answer.headers["content-type"]
            lines = answer.aiter_lines()
            assert "event: status" == await anext(lines)
            first = json.loads((await anext(lines)).removeprefix("data: "))
            assert 40 == first["saves"][0]["bytes_written"]
            daemon.status["node"]["uptime_s"] = 99.0
            daemon.status["saves"][0]["bytes_written"] = 100
            assert "" == await anext(lines)
            assert "event: status" == await anext(lines)
            second = json.loads((await anext(lines)).removeprefix("data: "))
            assert 100 == second["saves"][0]["bytes_written"]

    run(main)


def test_an_open_stream_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server would wait longer for it than `serving` does for the server.
    monkeypatch.setattr(server, "GRACE_S", 60)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            client = await stack.enter_async_context(serving(Daemon()))
            answer = await stack.enter_async_context(client.stream("GET", "/events"))
            lines = answer.aiter_lines()
            await anext(lines)
            stack.push_async_callback(answer.aclose)

    run(main)


def test_without_a_token_only_names_of_this_host_are_served() -> None:
    async def main() -> None:
        async with serving(Daemon()) as client:
            for host in ("evil.example", "evil.example:9470", "127.0.0.1.evil.example", "["):
                answer = await client.get("/status", headers={"Host": host})
                assert 421 == answer.status_code, host
            for host in ("localhost:1", "127.0.0.1", "[::1]:9470"):
                answer = await client.get("/status", headers={"Host": host})
                assert 200 == answer.status_code, host

    run(main)


def test_a_token_is_needed_everywhere_but_at_the_probes() -> None:
    async def main() -> None:
        async with serving(Daemon(), TOKEN) as client:
            for path in ("/", "/status", "/events", "/metrics"):
                assert 401 == (await client.get(path)).status_code, path
                wrong = {"Authorization": f"Bearer {TOKEN}x"}
                assert 401 == (await client.get(path, headers=wrong)).status_code, path
            assert 401 == (await client.get("/?token=wrong")).status_code
            assert 401 == (await client.get(f"/status?token={TOKEN}")).status_code
            assert 200 == (await client.get("/healthz")).status_code
            assert 200 == (await client.get("/readyz")).status_code
            right = {"Authorization": f"Bearer {TOKEN}", "Host": "node-1.example:9470"}
            assert 200 == (await client.get("/metrics", headers=right)).status_code

    run(main)


def test_a_browser_trades_the_token_in_the_address_for_a_cookie() -> None:
    async def main() -> None:
        async with serving(Daemon(), TOKEN) as client:
            answer = await client.get(f"/?token={TOKEN}")
            assert (303, "/") == (answer.status_code, answer.headers["location"])
            assert "HttpOnly" in answer.headers["set-cookie"]
            assert 200 == (await client.get("/")).status_code
            assert 200 == (await client.get("/status")).status_code

    run(main)


def test_serving_leaves_the_signals_of_the_process_alone() -> None:
    async def main() -> None:
        before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        async with serving(Daemon()) as client:
            await client.get("/healthz")
            assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))

    run(main)


def test_an_address_beyond_loopback_without_a_token_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="http_token"):
        bind("0.0.0.0:0", "")
    bind("0.0.0.0:0", TOKEN).close()


def test_a_port_asked_for_and_taken_is_an_error(tmp_path: Path) -> None:
    with bind("127.0.0.1:0", "") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = load_settings({"roots": [str(tmp_path)], "http": address}, {}, None)
        with pytest.raises(UsageError, match=address):
            bind_as_set(settings)


def test_the_default_port_taken_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with bind("127.0.0.1:0", "") as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr("milepostd.ops.config.HTTP_ADDRESS", address)
        settings = load_settings({"roots": [str(tmp_path)]}, {}, None)
        assert bind_as_set(settings) is None
    assert ["http.refused"] == [record.getMessage() for record in caplog.records]


def test_http_is_off_in_an_embedded_daemon_and_where_it_is_empty(tmp_path: Path) -> None:
    settings = load_settings({"roots": [str(tmp_path)], "http": ""}, {}, None)
    assert bind_as_set(settings) is None
    assert bind_as_set(msgspec.structs.replace(settings, http="auto", embedded=True)) is None


def test_systemd_hears_ready_alive_and_stopping(tmp_path: Path) -> None:
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(5)
        manager = ServiceManager({"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "30000000"})
        assert 15.0 == manager.watchdog_s
        manager.ready("accepting\nsaves")
        assert b"READY=1\nSTATUS=accepting saves\nMAINPID=" == systemd.recv(4096).rstrip(
            b"0123456789"
        )
        manager.alive()
        assert b"WATCHDOG=1" == systemd.recv(4096)
        manager.stopping("draining")
        assert b"STOPPING=1\nSTATUS=draining" == systemd.recv(4096)
    manager.alive()


def test_outside_a_unit_systemd_is_told_nothing() -> None:
    manager = ServiceManager({})
    assert manager.watchdog_s is None
    manager.ready("accepting saves")
    assert ServiceManager({"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}).watchdog_s is None


def test_nothing_of_the_daemon_imports_torch() -> None:
    code = (
        "import sys, milepostd.cli, milepostd.ops.server, milepostd.ops.http, milepostd.ops.logs\n"
        "import milepostd.ops.systemd\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_the_command_starts_without_the_http_stack() -> None:
    code = (
        "import sys, milepostd.cli\n"
        "print([name for name in ('starlette', 'uvicorn') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "[]" == found.stdout.strip()


def test_the_command_lists_everything_that_is_wrong_and_exits_2() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "milepostd", "--nice", "40", "--http", "0.0.0.0:1"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert 2 == found.returncode
    assert "" == found.stdout
    for part in ("error: 3 settings are wrong", "--nice", "--http", "roots", "hint: "):
        assert part in found.stderr
