"""The socket that HTTP is served on, and the server's life inside the daemon's loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.applications import Starlette

from milepost.errors import UsageError
from milepostd.ops.addresses import check_http
from milepostd.ops.config import HTTP_ADDRESS, Settings
from milepostd.ops.logs import emit

CONNECTIONS_MAX: Final = 128
"""Connections of all kinds. Further ones are answered with 503, so that a scraper that runs wild
does not use up the file descriptors."""

GRACE_S: Final = 2
"""How long answers under way may take when the daemon ends."""


def bind(address: str, token: str) -> socket.socket:
    """Return a socket that listens on `host:port`. The caller owns it; `serve_http` closes it.

    Port 0 takes a free port. Call this before anything else is started, so that a taken port ends
    the start early.

    Raises:
        UsageError: no such address, or one beyond loopback without a token.
        OSError: the port is taken or not allowed.
    """
    host, port = check_http(address, token)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError("usage", f"cannot resolve {host!r} for http: {error.strerror}") from error
    family, kind, protocol, _, target = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
        listener.listen(CONNECTIONS_MAX)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def bind_as_set(settings: Settings) -> socket.socket | None:
    """Return the socket that the settings ask for. None if HTTP is off, or if the default address
    is taken.

    Raises:
        UsageError: an address was asked for, and it cannot be used.
    """
    if not settings.http_address:
        return None
    try:
        return bind(settings.http_address, settings.http_token)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        if settings.is_http_required:
            raise UsageError(
                "usage",
                f"cannot serve http on {settings.http_address}: {error.strerror}",
                "another daemon or program has the port; choose another with --http, or none "
                "with --http ''"
                if taken
                else "",
            ) from error
        hint = f"name another address with --http; {HTTP_ADDRESS} is only the default"
        emit("warning", "http.refused", address=HTTP_ADDRESS, reason=error.strerror, hint=hint)
        return None


def url_of(listener: socket.socket) -> str:
    """Return `http://host:port` of a bound socket, for status and log."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _SignallessServer(uvicorn.Server):
    """A server that leaves the process's signals to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(app: Starlette, listener: socket.socket) -> None:
    """Serve until cancelled; then end open streams, finish answers under way, close the socket."""
    server = _SignallessServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        app.state.stopping.set()
        server.should_exit = True
        await serving
        raise
    finally:
        listener.close()
