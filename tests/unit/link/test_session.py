"""A rank's place at its daemon: across the daemon's restarts, and from one attempt to the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import Rejected, Unavailable
from milepost.link.session import Session
from milepost.wire.messages import (
    Cause,
    ClientMessage,
    DaemonMessage,
    Join,
    Joined,
    NodeRef,
    Refused,
    Welcome,
)

NODE = NodeRef("a", "tcp://a", "ka")


def place(attempt: int) -> Join:
    return Join(job="j", attempt=attempt, root="/r", rank=0, node_of_rank=(0,), cohort=(NODE,))


class Daemon:
    """A daemon's end of all connections: gives each place, but those of attempts it refuses."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.refuses: set[int] = set()

    @property
    def asked(self) -> list[list[int]]:
        """Attempts that a place was asked for in, by connection."""
        return [line.asked for line in self.lines]


class Line:
    """Stands for a `Connection`, and answers soon."""

    def __init__(
        self, daemon: Daemon, on_message: Callable[[Any], None], on_lost: Callable[[Cause], None]
    ) -> None:
        self.daemon = daemon
        self.on_message = on_message
        self.lose = on_lost
        self.asked: list[int] = []
        self.is_closed = False
        daemon.lines.append(self)

    def open(self, timeout_s: float) -> Welcome:
        return Welcome(protocol=1, version="0", pid=1, incarnation="i", node=NODE)

    def send(self, message: ClientMessage) -> None:
        if not isinstance(message, Join):
            return
        self.asked.append(message.attempt)
        if message.attempt in self.daemon.refuses:
            self._answer(Refused(cause=Cause("attempt-superseded", "history")))
        else:
            self._answer(Joined(job="j", attempt=message.attempt, rank=message.rank))

    def _answer(self, message: DaemonMessage) -> None:
        # It is heard once the session waits, which lets go of its lock then.
        threading.Thread(target=self.on_message, args=(message,)).start()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    made = Daemon()
    monkeypatch.setattr(
        "milepost.link.session.Connection", lambda run_dir, heard, lost: Line(made, heard, lost)
    )
    return made


@pytest.fixture
def session(daemon: Daemon, tmp_path: Path) -> Iterator[Session]:
    made = Session(
        tmp_path, is_embedded=False, on_message=lambda message: None, on_gone=lambda cause: None
    )
    made.open()
    yield made
    made.close()


def restore(session: Session, daemon: Daemon) -> None:
    """Have the daemon restarted, and wait until the session stands again."""
    daemon.lines[-1].lose(Cause("daemon-lost", "killed"))
    with session._changed:
        assert session._changed.wait_for(lambda: not session._is_restoring, 60)


def test_a_place_is_asked_for_once(session: Session, daemon: Daemon) -> None:
    session.ensure(place(1))
    session.ensure(place(1))
    assert [[1]] == daemon.asked


def test_a_restored_place_of_the_attempt_before_is_not_taken_for_that_of_the_next(
    session: Session, daemon: Daemon
) -> None:
    session.ensure(place(1))
    restore(session, daemon)
    assert [[1], [1]] == daemon.asked
    session.ensure(place(2))
    assert [[1], [1, 2]] == daemon.asked


def test_that_an_earlier_attempt_was_refused_does_not_refuse_the_next(
    session: Session, daemon: Daemon
) -> None:
    daemon.refuses.add(1)
    with pytest.raises(Rejected):
        session.ensure(place(1))
    session.ensure(place(2))
    assert [[1, 2]] == daemon.asked


def test_a_thread_that_a_later_attempt_has_overtaken_gets_the_place_of_that_one(
    session: Session, daemon: Daemon
) -> None:
    session.ensure(place(2))
    session.ensure(place(1))
    restore(session, daemon)
    assert [[2], [2]] == daemon.asked


def test_a_session_that_is_closed_while_a_daemon_is_looked_for_keeps_no_connection(
    session: Session, daemon: Daemon
) -> None:
    session.close()
    with pytest.raises(Unavailable, match="was closed"):
        session.open()
    assert daemon.lines[-1].is_closed
    assert session._connection is None
