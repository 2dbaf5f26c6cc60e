"""A trainer's line to its daemon: hello, order, heartbeats, and every way to lose it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from milepost.errors import ProtocolError, Rejected, SaveFailed, Unavailable
from milepost.link import connection
from milepost.link.connection import Connection, fetch_status
from milepost.link.run_dir import socket_path
from milepost.wire.causes import error_of
from milepost.wire.messages import (
    PROTOCOL_VERSION,
    SILENCE_S,
    AbortWanted,
    Cause,
    ClientMessage,
    Concluded,
    DaemonMessage,
    Ending,
    Hello,
    Leave,
    Left,
    NodeRef,
    Ping,
    Pong,
    Refused,
    SaveRef,
    StatusIs,
    StatusWanted,
    Welcome,
    decode_client,
    decode_daemon,
    encode,
)

NODE = NodeRef("node-0", "tcp://127.0.0.1:1", "k")
WAIT_S = 10.0
"""Never waited in full: only a fault takes so long."""

HASTY_SILENCE_S = 0.05

Answer = Callable[[ClientMessage], list[DaemonMessage | bytes]]


def welcome(pid: int | None = None) -> Welcome:
    return Welcome(
        protocol=PROTOCOL_VERSION,
        version="0.1.0",
        pid=os.getpid() if pid is None else pid,
        incarnation="i",
        node=NODE,
    )


def polite(message: ClientMessage) -> list[DaemonMessage | bytes]:
    """What a daemon says to a trainer that wants nothing."""
    match message:
        case Hello():
            return [welcome()]
        case Ping():
            return [Pong()]
        case Leave():
            return [Left()]
        case _:
            return []


class Daemon:
    """A ROUTER socket on a thread, which answers as a function says."""

    def __init__(self, run_dir: Path, answer: Answer) -> None:
        self.heard: list[ClientMessage] = []
        self.answer = answer
        self.changed = threading.Condition()
        self.is_closing = threading.Event()
        self.is_open = threading.Event()
        self.run_dir = run_dir
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()
        assert self.is_open.wait(WAIT_S)

    def serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(f"ipc://{socket_path(self.run_dir)}")
            self.is_open.set()
            while not self.is_closing.is_set():
                if not router.poll(5):
                    continue
                route, frame = router.recv_multipart()
                message = decode_client(frame)
                for answer in self.answer(message):
                    sent = answer if isinstance(answer, bytes) else encode(answer)
                    router.send_multipart([route, sent])
                with self.changed:
                    self.heard.append(message)
                    self.changed.notify_all()

    def wait_for(self, kind: type, count: int = 1) -> None:
        """Return once so many messages of this type were heard."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.count(kind) >= count, WAIT_S)

    def count(self, kind: type) -> int:
        return sum(isinstance(message, kind) for message in self.heard)


class Trainer:
    """What a connection's callbacks were told."""

    def __init__(self, run_dir: Path) -> None:
        self.heard: list[DaemonMessage] = []
        self.lost: list[Cause] = []
        self.changed = threading.Condition()
        self.connection = Connection(run_dir, self.on_message, self.on_lost)

    def on_message(self, message: DaemonMessage) -> None:
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()

    def on_lost(self, cause: Cause) -> None:
        with self.changed:
            self.lost.append(cause)
            self.changed.notify_all()

    def wait_for(self, has_come: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(has_come, WAIT_S)


@contextlib.contextmanager
def serving(run_dir: Path, answer: Answer = polite) -> Iterator[Daemon]:
    daemon = Daemon(run_dir, answer)
    try:
        yield daemon
    finally:
        daemon.is_closing.set()
        daemon.thread.join(WAIT_S)
        assert not daemon.thread.is_alive()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.connection.close()
    assert not trainer.connection._thread.is_alive()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats a hundred times shorter."""
    monkeypatch.setattr(connection, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(connection, "HELLO_AGAIN_S", 0.01)


class Clock:
    """The connection's clock, which a test can put forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(connection, "time", made)
    return made


def test_hello_tells_who_is_there_and_is_answered(tmp_path: Path, trainer: Trainer) -> None:
    with serving(tmp_path) as daemon:
        assert welcome() == trainer.connection.open(WAIT_S)
        daemon.wait_for(Hello)
        (hello,) = daemon.heard
        assert isinstance(hello, Hello)
        assert (PROTOCOL_VERSION, os.getpid()) == (hello.protocol, hello.pid)
        assert pytest.approx(psutil.Process().create_time()) == hello.pid_created_s
        assert hello.torch_version.startswith("2.")


def test_hello_is_repeated_until_a_daemon_listens(
    tmp_path: Path, trainer: Trainer, hasty: None
) -> None:
    opened: list[Welcome] = []
    thread = threading.Thread(target=lambda: opened.append(trainer.connection.open(WAIT_S)))
    thread.start()
    ignored = 3

    def slow(message: ClientMessage) -> list[DaemonMessage | bytes]:
        nonlocal ignored
        ignored -= 1
        return [] if ignored > 0 else polite(message)

    with serving(tmp_path, slow):
        thread.join(WAIT_S)
        assert [welcome()] == opened


def test_no_daemon_is_an_error_that_names_the_socket(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    with pytest.raises(Unavailable, match=r"no daemon answers at .*milepostd\.sock within 0\.05 s"):
        trainer.connection.open(0.05)
    assert not trainer.connection._thread.is_alive()
    assert [] == trainer.lost


def test_a_refusal_of_hello_is_raised_with_its_cause(tmp_path: Path, trainer: Trainer) -> None:
    cause = Cause("version-mismatch", "the client speaks protocol 2, the daemon 1", "install one")
    with serving(tmp_path, lambda message: [Refused(cause=cause)]):
        with pytest.raises(Rejected, match="speaks protocol 2") as caught:
            trainer.connection.open(WAIT_S)
        assert ("version-mismatch", "install one") == (caught.value.code, caught.value.hint)
    assert [] == trainer.lost


def test_what_is_said_arrives_in_order_from_any_thread(tmp_path: Path, trainer: Trainer) -> None:
    saves = [SaveRef("job", f"1-{count}", count, f"step_{count}") for count in range(300)]
    with serving(tmp_path) as daemon:
        trainer.connection.open(WAIT_S)
        for save in saves:
            trainer.connection.send(AbortWanted(save=save))
        daemon.wait_for(AbortWanted, 300)
        assert saves == [
            message.save for message in daemon.heard if isinstance(message, AbortWanted)
        ]


def test_what_the_daemon_says_is_handed_on_but_for_heartbeats(
    tmp_path: Path, trainer: Trainer, hasty: None
) -> None:
    concluded = Concluded(save_id="1-1", outcome=Ending.COMMITTED)

    def answer(message: ClientMessage) -> list[DaemonMessage | bytes]:
        return [concluded] if isinstance(message, AbortWanted) else polite(message)

    with serving(tmp_path, answer) as daemon:
        trainer.connection.open(WAIT_S)
        daemon.wait_for(Ping, 2)
        trainer.connection.send(AbortWanted(save=SaveRef("job", "1-1", 1, "step_1")))
        trainer.wait_for(lambda: bool(trainer.heard))
        assert [concluded] == trainer.heard


def test_the_last_words_are_delivered_by_close(tmp_path: Path, trainer: Trainer) -> None:
    with serving(tmp_path) as daemon:
        trainer.connection.open(WAIT_S)
        trainer.connection.send(Leave())
        trainer.connection.close()
        daemon.wait_for(Leave)
        trainer.connection.send(Leave())
        trainer.connection.close()
        assert 1 == daemon.count(Leave)
    assert [] == trainer.lost


def test_a_daemon_that_falls_silent_is_lost_once(
    tmp_path: Path, trainer: Trainer, hasty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", HASTY_SILENCE_S)

    def mute(message: ClientMessage) -> list[DaemonMessage | bytes]:
        return [welcome()] if isinstance(message, Hello) else []

    with serving(tmp_path, mute):
        trainer.connection.open(WAIT_S)
        trainer.wait_for(lambda: bool(trainer.lost))
        trainer.connection._thread.join(WAIT_S)
    (cause,) = trainer.lost
    assert "daemon-lost" == cause.code
    assert "silent" in cause.message


def test_a_daemon_that_only_answers_heartbeats_is_not_lost(
    tmp_path: Path, trainer: Trainer, hasty: None, clock: Clock
) -> None:
    def answer(message: ClientMessage) -> list[DaemonMessage | bytes]:
        if isinstance(message, Ping):
            clock.ahead_s += SILENCE_S / 3
        return polite(message)

    with serving(tmp_path, answer) as daemon:
        trainer.connection.open(WAIT_S)
        daemon.wait_for(Ping, 7)
        assert clock.ahead_s > 2 * SILENCE_S
        assert [] == trainer.lost


def test_a_trainer_that_was_held_up_itself_does_not_take_its_daemon_for_silent(
    tmp_path: Path, trainer: Trainer, hasty: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold_up(frame: bytes) -> DaemonMessage:
        message = decode_daemon(frame)
        if isinstance(message, Pong) and not clock.ahead_s:
            clock.ahead_s = 2 * SILENCE_S
        return message

    monkeypatch.setattr(connection, "decode_daemon", hold_up)
    with serving(tmp_path) as daemon:
        trainer.connection.open(WAIT_S)
        daemon.wait_for(Ping, 4)
        assert clock.ahead_s
        assert [] == trainer.lost


def test_a_daemon_whose_process_ends_is_lost_at_once(tmp_path: Path, trainer: Trainer) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:

        def answer(message: ClientMessage) -> list[DaemonMessage | bytes]:
            return [welcome(process.pid)] if isinstance(message, Hello) else polite(message)

        with serving(tmp_path, answer):
            trainer.connection.open(WAIT_S)
            started_s = time.monotonic()
            process.kill()
            trainer.wait_for(lambda: bool(trainer.lost))
            assert time.monotonic() - started_s < SILENCE_S / 2
        (cause,) = trainer.lost
        assert f"the daemon (pid {process.pid}) has ended" == cause.message


def test_a_daemon_that_does_not_know_the_session_was_restarted(
    tmp_path: Path, trainer: Trainer
) -> None:
    def forgetful(message: ClientMessage) -> list[DaemonMessage | bytes]:
        return (
            [welcome()]
            if isinstance(message, Hello)
            else [Refused(cause=Cause("daemon-lost", "who?"))]
        )

    with serving(tmp_path, forgetful):
        trainer.connection.open(WAIT_S)
        trainer.connection.send(Leave())
        trainer.wait_for(lambda: bool(trainer.lost))
    (cause,) = trainer.lost
    assert ("daemon-lost", "the daemon was restarted") == (cause.code, cause.message)


def test_a_refusal_after_hello_is_the_caller_s_to_judge(tmp_path: Path, trainer: Trainer) -> None:
    refused = Refused(cause=Cause("root-refused", "not under /data"))

    def answer(message: ClientMessage) -> list[DaemonMessage | bytes]:
        return [refused] if isinstance(message, Leave) else polite(message)

    with serving(tmp_path, answer):
        trainer.connection.open(WAIT_S)
        trainer.connection.send(Leave())
        trainer.wait_for(lambda: bool(trainer.heard))
    assert ([refused], []) == (trainer.heard, trainer.lost)


def test_a_daemon_that_speaks_nonsense_is_lost_with_the_reason(
    tmp_path: Path, trainer: Trainer
) -> None:
    def nonsense(message: ClientMessage) -> list[DaemonMessage | bytes]:
        return [b"\xc1"] if isinstance(message, Leave) else polite(message)

    with serving(tmp_path, nonsense):
        trainer.connection.open(WAIT_S)
        trainer.connection.send(Leave())
        trainer.wait_for(lambda: bool(trainer.lost))
    assert "malformed message" in trainer.lost[0].message


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with serving(tmp_path):
        trainer = Trainer(tmp_path)
        trainer.connection.open(WAIT_S)
        trainer.connection.close()
    assert len(os.listdir("/proc/self/fd")) <= len(before)


# --- status without a session


def test_the_status_is_fetched_without_a_hello(tmp_path: Path) -> None:
    def answer(message: ClientMessage) -> list[DaemonMessage | bytes]:
        return [StatusIs(status_json='{"version": 1, "jobs": []}')]

    with serving(tmp_path, answer) as daemon:
        assert {"version": 1, "jobs": []} == fetch_status(tmp_path, WAIT_S)
        daemon.wait_for(StatusWanted)
        assert [StatusWanted()] == daemon.heard


def test_the_status_of_nobody_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no daemon answers") as caught:
        fetch_status(tmp_path, 0.05)
    assert "daemon-unreachable" == caught.value.code


def test_another_answer_than_the_status_is_an_error(tmp_path: Path) -> None:
    with serving(tmp_path, lambda message: [Pong()]), pytest.raises(ProtocolError, match="Pong"):
        fetch_status(tmp_path, WAIT_S)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (Cause("no-space", "full", "free some", "n1", 3), "full (node n1, rank 3) [no-space]"),
        (Cause("no-space", "full", "free some", "n1"), "full (node n1) [no-space]"),
        (Cause("no-space", "full", "free some"), "full [no-space]"),
        (Cause("no-space", "full (node n1)", "free some", "n1"), "full (node n1) [no-space]"),
    ],
)
def test_a_cause_becomes_an_error_that_says_where(cause: Cause, text: str) -> None:
    error = error_of(cause, SaveFailed)
    assert isinstance(error, SaveFailed)
    assert f"{text}\nhint: free some" == str(error)
