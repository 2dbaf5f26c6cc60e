"""The daemon's HTTP side: status for people and programs, metrics, probes. Read only.

Owns routes, the page, who may read, and the server's life inside the daemon's loop. It knows the
status only as a dictionary and never touches the core. Anybody who can connect to a loopback
address may read; other addresses need a token. Sources: HTML Living Standard, "Server-sent events";
Kubernetes, "Configure Liveness, Readiness and Startup Probes".
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import hmac
import json
import re
import socket
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.middleware import Middleware
from starlette.requests import Request, cookie_parser
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from milepost.errors import UsageError
from milepostd.ops.config import HTTP_ADDRESS, check_http, is_loopback
from milepostd.ops.logs import emit
from milepostd.ops.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from milepostd.ops.config import Settings

LOOK_S: Final = 0.5
"""How often a listener's stream looks for a change: faster than anybody reads."""

HEARTBEAT_S: Final = 5.0
"""A stream is never silent for longer, so that proxies keep it and the page sees a dead daemon."""

LISTENERS_MAX: Final = 32
"""Streams open at the same time: dashboards and people, each costing two looks a second."""

CONNECTIONS_MAX: Final = 128
"""Connections of all kinds; beyond it the answer is 503. Keeps a runaway scraper from the fds."""

GRACE_S: Final = 2
"""How long answers under way may take when the daemon ends."""

_COOKIE: Final = "milepostd_token"
_OPEN_PATHS: Final = ("/healthz", "/readyz")
_CLOCKS: Final = frozenset({"age_s", "last_heard_s", "uptime_s"})
"""Fields that change without anything having happened."""


def make_app(
    status: Callable[[], dict[str, Any]],
    healthy: Callable[[], bool],
    metrics: Callable[[], bytes],
    token: str,
) -> Starlette:
    """Return the application. All three functions are called in the loop and have to be quick.

    Args:
        status: the status of version 1; its `accepting` decides `/readyz`.
        healthy: whether the loop turns as it should.
        metrics: Prometheus text.
        token: what requests have to bring; empty: nothing, and then only names of this host are
            taken as `Host`, so that no web page can read the status through a name of its own.
    """
    page = (files("milepostd.ops") / "page.html").read_text(encoding="utf-8")
    stopping = asyncio.Event()
    listeners = 0

    async def show_page(_: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _policy(page)})

    async def show_status(_: Request) -> Response:
        return JSONResponse(status())

    async def show_metrics(_: Request) -> Response:
        return Response(metrics(), media_type=CONTENT_TYPE)

    async def show_health(_: Request) -> Response:
        if healthy():
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the event loop does not turn as it should\n", 503)

    async def show_readiness(_: Request) -> Response:
        if not healthy():
            return PlainTextResponse("the event loop does not turn as it should\n", 503)
        if not status()["accepting"]:
            return PlainTextResponse("new saves are not accepted: the daemon is draining\n", 503)
        return PlainTextResponse("ready\n")

    async def stream() -> AsyncIterator[str]:
        nonlocal listeners
        listeners += 1
        try:
            loop = asyncio.get_running_loop()
            seen: object = None
            sent_at = 0.0
            while not stopping.is_set():
                now = status()
                essence = _without_clocks(now)
                if essence != seen or loop.time() - sent_at >= HEARTBEAT_S:
                    seen, sent_at = essence, loop.time()
                    yield f"event: status\ndata: {json.dumps(now)}\n\n"
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), LOOK_S)
        finally:
            listeners -= 1

    async def show_events(_: Request) -> Response:
        if listeners >= LISTENERS_MAX:
            text = f"{LISTENERS_MAX} listeners are connected already\n"
            return PlainTextResponse(text, 503, headers={"Retry-After": "10"})
        return StreamingResponse(
            stream(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/status", show_status),
            Route("/events", show_events),
            Route("/metrics", show_metrics),
            Route("/healthz", show_health),
            Route("/readyz", show_readiness),
        ],
        middleware=[Middleware(_Guard, token=token)],
    )
    app.state.stopping = stopping
    return app


def _without_clocks(status: Any) -> Any:
    if isinstance(status, dict):
        return {
            name: _without_clocks(value) for name, value in status.items() if name not in _CLOCKS
        }
    if isinstance(status, list):
        return [_without_clocks(value) for value in status]
    return status


def _policy(page: str) -> str:
    """Allow exactly the script and the style that the page contains."""

    def digest(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert found is not None, f"the page has no {tag}"
        return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; "
        f"style-src 'sha256-{digest('style')}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Guard:
    """Lets in who may read, and marks every answer as private to its reader.

    A browser cannot send a header with its first request or its event stream: `/?token=` sets a
    cookie and goes on to `/`, so that the token does not stay in the address bar.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Cache-Control"] = "no-store"
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        answer = self._refusal(scope)
        await (answer or self._app)(scope, receive, send_marked)

    def _refusal(self, scope: Scope) -> Response | None:
        path = scope["path"]
        headers = Headers(scope=scope)
        if path in _OPEN_PATHS:
            return None
        if not self._token:
            host = _host_name(headers.get("host", ""))
            if host is not None and is_loopback(host):
                return None
            return PlainTextResponse(f"unknown host {host!r}: use localhost or set a token\n", 421)
        given = QueryParams(scope["query_string"]).get("token")
        if path == "/" and given is not None and self._is_token(given):
            redirect = RedirectResponse("/", 303)
            redirect.set_cookie(_COOKIE, given, httponly=True, samesite="strict")
            return redirect
        bearer = headers.get("authorization", "")
        cookie = cookie_parser(headers.get("cookie", "")).get(_COOKIE, "")
        if bearer[:7].lower() == "bearer " and self._is_token(bearer[7:].strip()):
            return None
        if self._is_token(cookie):
            return None
        text = "a token is needed: Authorization: Bearer <http_token>, or /?token= in a browser\n"
        return PlainTextResponse(text, 401, headers={"WWW-Authenticate": "Bearer"})

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _host_name(header: str) -> str | None:
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def bind(address: str, token: str) -> socket.socket:
    """Return a listening-ready socket for `host:port`; the caller owns it, `serve` closes it.

    Port 0 takes a free port. Call it before anything else is started, so that a taken port ends the
    start early.

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
    """Return the socket that the settings ask for, or None where HTTP is off or the default is
    taken.

    Raises:
        UsageError: the address was asked for and cannot be had.
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


class _Server(uvicorn.Server):
    """A server that leaves the process's signals to the daemon."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve until cancelled; then end open streams, answer what is under way, close the socket."""
    server = _Server(
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
