"""Trainers' connections: who is let in, what they say as events, and when they are lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import msgspec
import psutil
import pytest

from milepost.wire.messages import (
    PROTOCOL_VERSION,
    Cause,
    DaemonMessage,
    Hello,
    Leave,
    Left,
    NodeRef,
    Ping,
    Pong,
    Refused,
    StatusIs,
    StatusWanted,
    Welcome,
)
from milepostd.core.events import AnyEvent, RankLeft, SessionOpened
from milepostd.sessions import SILENT_TRAINER_S, TrainerSessions

WELCOME = Welcome(
    protocol=PROTOCOL_VERSION,
    version="0.1.0",
    pid=1,
    incarnation="life",
    node=NodeRef("node", "tcp://127.0.0.1:1", ""),
)
ROUTE = b"route"


def hello_of(pid: int, **changes: Any) -> Hello:
    try:
        created_s = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        created_s = 0.0
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        version="0.1.0",
        torch_version="2.13.0+cpu",
        pid=pid,
        pid_created_s=created_s,
    )
    return msgspec.structs.replace(hello, **changes)


class Desk:
    """Sessions, with what they said and what became of them."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.replies: list[tuple[bytes, DaemonMessage]] = []
        self.events: list[AnyEvent] = []
        self.lost: list[tuple[int, str]] = []
        self.changes = 0
        self.has_lost = asyncio.Event()
        self.sessions = TrainerSessions(
            WELCOME,
            "2.13.1",
            reply=lambda route, message: self.replies.append((route, message)),
            post=self.events.append,
            status=lambda: {"version": 1},
            changed=self._change,
            lost=self._lose,
            clock=lambda: self.now_s,
        )

    def _change(self) -> None:
        self.changes += 1

    def _lose(self, number: int, reason: str) -> None:
        self.lost.append((number, reason))
        self.has_lost.set()


@pytest.fixture
def desk() -> Desk:
    return Desk()


UNSEEN = hello_of(os.getpid(), pid_created_s=1.0)
"""As from another PID namespace: here this pid is another process."""


def test_a_hello_opens_one_session_however_often_it_is_said(desk: Desk) -> None:
    desk.sessions.take(ROUTE, UNSEEN)
    desk.sessions.take(ROUTE, UNSEEN)
    assert [SessionOpened(session=1)] == desk.events
    assert [(ROUTE, WELCOME)] * 2 == desk.replies
    assert 1 == desk.changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, "the client speaks protocol"),
        ({"torch_version": "2.12.0"}, "the trainer runs torch 2.12.0, the daemon's planner torch"),
    ],
)
def test_a_trainer_of_another_version_is_refused_with_both(
    desk: Desk, changes: dict[str, Any], expected: str
) -> None:
    desk.sessions.take(ROUTE, msgspec.structs.replace(UNSEEN, **changes))
    ((_, refused),) = desk.replies
    assert isinstance(refused, Refused)
    assert "version-mismatch" == refused.cause.code
    assert refused.cause.message.startswith(expected)
    assert [] == desk.events


def test_who_has_not_said_hello_is_told_to_unless_it_asks_for_the_status(desk: Desk) -> None:
    desk.sessions.take(ROUTE, Ping())
    cause = Cause("daemon-lost", "this daemon does not know the session", "say hello again")
    assert [(ROUTE, Refused(cause=cause))] == desk.replies
    desk.sessions.take(ROUTE, StatusWanted())
    assert (ROUTE, StatusIs(status_json='{"version": 1}')) == desk.replies[-1]


def test_a_ping_is_answered_and_counts_as_heard(desk: Desk) -> None:
    desk.sessions.take(ROUTE, UNSEEN)
    desk.now_s += 7
    assert {os.getpid(): 7.0} == desk.sessions.silences_s()
    desk.sessions.take(ROUTE, Ping())
    assert (ROUTE, Pong()) == desk.replies[-1]
    assert {os.getpid(): 0.0} == desk.sessions.silences_s()


def test_what_a_trainer_says_is_an_event_of_its_session(desk: Desk) -> None:
    desk.sessions.take(b"other", UNSEEN)
    desk.sessions.take(ROUTE, UNSEEN)
    leave = Leave()
    desk.sessions.take(ROUTE, leave)
    assert RankLeft(session=2, message=leave) == desk.events[-1]


def test_a_goodbye_ends_the_session_after_it_was_said(desk: Desk) -> None:
    desk.sessions.take(ROUTE, UNSEEN)
    assert desk.sessions.reply(1, Left())
    assert (ROUTE, Left()) == desk.replies[-1]
    assert [(1, "it said goodbye")] == desk.lost
    assert not desk.sessions.reply(1, Left())
    assert [(1, "it said goodbye")] == desk.lost


def test_a_trainer_that_cannot_be_seen_is_lost_after_a_long_silence(desk: Desk) -> None:
    desk.sessions.take(ROUTE, UNSEEN)
    assert [None] == desk.sessions.pids()
    desk.now_s += SILENT_TRAINER_S - 1
    desk.sessions.look_after()
    assert [] == desk.lost
    desk.now_s += 1
    desk.sessions.look_after()
    assert [(1, "its process is gone")] == desk.lost
    assert [] == desk.sessions.pids()
    assert 2 == desk.changes


def test_a_trainer_that_can_be_seen_is_lost_when_its_process_ends_and_not_before(
    desk: Desk,
) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)

    async def main() -> None:
        desk.sessions.take(ROUTE, hello_of(trainer.pid))
        assert [trainer.pid] == desk.sessions.pids()
        desk.now_s += 10 * SILENT_TRAINER_S
        desk.sessions.look_after()
        assert [] == desk.lost
        trainer.communicate(b"\n")
        async with asyncio.timeout(10):
            await desk.has_lost.wait()

    asyncio.run(main())
    assert [(1, "its process has ended")] == desk.lost
    assert [] == desk.sessions.pids()


def test_closing_leaves_no_descriptor_behind(desk: Desk) -> None:
    async def main() -> None:
        before = len(os.listdir("/proc/self/fd"))
        desk.sessions.take(ROUTE, hello_of(os.getpid()))
        assert before + 1 == len(os.listdir("/proc/self/fd"))
        desk.sessions.close()
        assert before == len(os.listdir("/proc/self/fd"))

    asyncio.run(main())
    assert [] == desk.lost
