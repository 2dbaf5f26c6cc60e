"""The daemon's HTTP side: status for people and programs, metrics, probes. Read only.

Owns the routes, the page, and who may read. It knows the status only as a dictionary and never
touches the core. Anybody who can connect to a loopback address may read; other addresses need a
token. Sources: HTML Living Standard, "Server-sent events"; Kubernetes, "Configure Liveness,
Readiness and Startup Probes".
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

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

from milepostd.ops.addresses import is_loopback
from milepostd.ops.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOK_S: Final = 0.5
"""How often an event stream looks for a change: faster than anybody reads."""

HEARTBEAT_S: Final = 5.0
"""Longest silence of a stream, so that proxies keep it and the page notices a dead daemon."""

LISTENERS_MAX: Final = 32
"""Event streams open at the same time. Each costs two looks at the status per second."""

_COOKIE: Final = "milepostd_token"
_OPEN_PATHS: Final = ("/healthz", "/readyz")
_CLOCKS: Final = frozenset({"age_s", "last_heard_s", "uptime_s"})
"""Fields that change although nothing has happened."""


def make_app(
    status: Callable[[], dict[str, Any]],
    healthy: Callable[[], bool],
    metrics: Callable[[], bytes],
    token: str,
) -> Starlette:
    """Return the application. It calls the three functions on the loop, so they must be quick.

    Args:
        status: returns the status of version 1; its `accepting` decides `/readyz`.
        healthy: returns whether the loop turns as it should.
        metrics: returns Prometheus text.
        token: what requests must carry. If empty, they need none, but `Host` must be a name of this
            host; else a web page could read the status through a DNS name of its own.
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
    """Return a content security policy that allows only the page's own script and style."""

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
    """Refuses requests without the token, and marks every answer as private to its reader.

    A browser cannot send a header with its first request or its event stream. So `/?token=` sets a
    cookie and redirects to `/`, which also takes the token out of the address bar.
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
