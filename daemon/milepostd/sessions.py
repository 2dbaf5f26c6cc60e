"""The trainers' connections: who may connect, which trainers live, and what they say as events.

Answers what needs no decision of the core (hello, ping, status) and turns the rest into events. A
trainer is lost when its process ends (heard at once by a pidfd, where the process can be seen from
here), or after a long silence. Knows no socket, arena or save. Belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import psutil

from milepost.wire.messages import (
    PROTOCOL_VERSION,
    AbortWanted,
    Cause,
    ClientMessage,
    DaemonMessage,
    Hello,
    Join,
    Leave,
    Left,
    Offered,
    Ping,
    Pong,
    PreemptionNoticed,
    ReadsTold,
    Refused,
    Skipped,
    Staged,
    StatusIs,
    StatusWanted,
    Unable,
    Welcome,
)
from milepostd.core.events import (
    AnyEvent,
    RankJoined,
    RankLeft,
    RankSaid,
    RankSignalled,
    SessionOpened,
)

SILENT_TRAINER_S: Final = 300.0
"""A trainer whose process cannot be seen from here (another PID namespace) is lost after this
silence. It is long because a trainer that compiles holds its interpreter for minutes."""

CREATED_WITHIN_S: Final = 1.0
"""Two start times of one process differ by less: they are computed from ticks since boot."""


class TrainerSession(msgspec.Struct):
    """One trainer's connection."""

    number: int
    route: bytes
    hello: Hello
    heard_at_s: float
    pidfd: int = -1
    """Readable once the process has ended; -1 where the process cannot be seen."""
    is_visible: bool = False


class TrainerSessions:
    """All trainers' connections.

    Args:
        welcome: the answer to a hello that is accepted.
        torch_version: of the daemon's planner.
        reply: sends a message to the trainer behind a route.
        post: gives the core an event.
        status: returns the node's status.
        changed: called when a trainer has come or gone.
        lost: called with a session's number and the reason, when it has ended.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        welcome: Welcome,
        torch_version: str,
        *,
        reply: Callable[[bytes, DaemonMessage], None],
        post: Callable[[AnyEvent], None],
        status: Callable[[], dict[str, Any]],
        changed: Callable[[], None],
        lost: Callable[[int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._welcome = welcome
        self._torch_version = torch_version
        self._reply = reply
        self._post = post
        self._status = status
        self._changed = changed
        self._lost = lost
        self._clock = clock
        self._by_route: dict[bytes, TrainerSession] = {}
        self._by_number: dict[int, TrainerSession] = {}
        self._last_number = 0

    def take(self, route: bytes, message: ClientMessage) -> None:
        """Answer a trainer's message, or turn it into an event."""
        session = self._by_route.get(route)
        if session is not None:
            session.heard_at_s = self._clock()
        match message:
            case StatusWanted():
                self._reply(route, StatusIs(status_json=json.dumps(self._status())))
            case Hello():
                self._take_hello(route, message)
            case _ if session is None:
                cause = Cause(
                    "daemon-lost", "this daemon does not know the session", "say hello again"
                )
                self._reply(route, Refused(cause=cause))
            case Ping():
                self._reply(route, Pong())
            case Join():
                self._post(
                    RankJoined(session=session.number, pid=session.hello.pid, message=message)
                )
            case Leave():
                self._post(RankLeft(session=session.number, message=message))
            case PreemptionNoticed() | ReadsTold():
                self._post(RankSignalled(session=session.number, message=message))
            case Offered() | Staged() | Skipped() | Unable() | AbortWanted():
                self._post(RankSaid(session=session.number, message=message))

    def reply(self, number: int, message: DaemonMessage) -> bool:
        """Send a message to a trainer; False if it is gone. `Left` ends the session."""
        session = self._by_number.get(number)
        if session is None:
            return False
        self._reply(session.route, message)
        if isinstance(message, Left):
            self._end(session, "it said goodbye")
        return True

    def look_after(self) -> None:
        """End the sessions of trainers that are gone and that no pidfd watches."""
        for session in [*self._by_route.values()]:
            if session.pidfd < 0 and not self._is_alive(session):
                self._end(session, "its process is gone")

    def pids(self) -> list[int | None]:
        """Return each trainer's process id; None for one that cannot be seen from here."""
        return [
            session.hello.pid if session.is_visible else None for session in self._by_route.values()
        ]

    def silences_s(self) -> dict[int, float]:
        """Return for how long each trainer has been silent, by its process id."""
        now_s = self._clock()
        return {
            session.hello.pid: now_s - session.heard_at_s for session in self._by_route.values()
        }

    def close(self) -> None:
        """Stop watching the trainers' processes."""
        for session in self._by_route.values():
            self._stop_watching(session)

    def _take_hello(self, route: bytes, hello: Hello) -> None:
        cause = self._mismatch(hello)
        if cause is not None:
            self._reply(route, Refused(cause=cause))
            return
        if route not in self._by_route:
            self._last_number += 1
            session = TrainerSession(
                number=self._last_number, route=route, hello=hello, heard_at_s=self._clock()
            )
            self._by_route[route] = session
            self._by_number[session.number] = session
            self._watch(session)
            self._changed()
            self._post(SessionOpened(session=session.number))
        self._reply(route, self._welcome)

    def _mismatch(self, hello: Hello) -> Cause | None:
        """Return why the versions of the two sides do not go together."""
        if hello.protocol != PROTOCOL_VERSION:
            return Cause(
                "version-mismatch",
                f"the client speaks protocol {hello.protocol} (milepost {hello.version}), the "
                f"daemon {PROTOCOL_VERSION} (milepost {self._welcome.version})",
                "install one version on both sides and restart the daemon",
            )
        if _major_minor(hello.torch_version) != _major_minor(self._torch_version):
            return Cause(
                "version-mismatch",
                f"the trainer runs torch {hello.torch_version}, the daemon's planner torch "
                f"{self._torch_version}",
                "start milepostd from the trainer's environment",
            )
        return None

    def _watch(self, session: TrainerSession) -> None:
        """Hear at once when the trainer ends, if its process can be seen and is the one it says."""
        session.is_visible = _is_process(session.hello)
        if not session.is_visible:
            return
        try:
            session.pidfd = os.pidfd_open(session.hello.pid)
        except OSError:
            return
        asyncio.get_running_loop().add_reader(
            session.pidfd, self._end, session, "its process has ended"
        )

    def _stop_watching(self, session: TrainerSession) -> None:
        if session.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1

    def _is_alive(self, session: TrainerSession) -> bool:
        if session.is_visible:
            return _is_process(session.hello)
        return self._clock() - session.heard_at_s < SILENT_TRAINER_S

    def _end(self, session: TrainerSession, reason: str) -> None:
        self._stop_watching(session)
        self._by_route.pop(session.route, None)
        self._by_number.pop(session.number, None)
        self._changed()
        self._lost(session.number, reason)


def _major_minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _is_process(hello: Hello) -> bool:
    """Whether the process that said hello still runs, and its pid was not given to another one."""
    try:
        process = psutil.Process(hello.pid)
        return (
            abs(process.create_time() - hello.pid_created_s) < CREATED_WITHIN_S
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False
