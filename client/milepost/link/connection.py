"""A trainer's connection to its node's daemon: one DEALER socket on a thread of its own.

Owns hello and heartbeats, and notices when the daemon is gone (its process has ended, or it has
been silent for too long). Does not know what the other messages mean: it passes each of them to one
callback on the connection's thread, which must not block. `send` may be called from any thread and
never blocks. ZeroMQ sockets never leave the thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil
import zmq

from milepost.errors import ProtocolError, Rejected, Unavailable
from milepost.link.run_dir import socket_path
from milepost.wire.causes import error_of
from milepost.wire.messages import (
    HEARTBEAT_S,
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    SILENCE_S,
    Cause,
    ClientMessage,
    DaemonMessage,
    Hello,
    Ping,
    Pong,
    Refused,
    StatusIs,
    StatusWanted,
    Welcome,
    decode_daemon,
    encode,
)

log = logging.getLogger(__name__)

LINGER_MS: Final = 500
"""How long a closing connection may still try to deliver its last messages."""

HELLO_AGAIN_S: Final = 0.25
"""How often hello is repeated until it is answered. ZeroMQ queues a hello until the daemon listens,
but it is lost if the daemon dies in between; repeating it is harmless."""

QUEUE_MESSAGES_MAX: Final = 10_000
"""High-water mark; a trainer has only a handful of messages in flight."""


def _open_socket(context: zmq.Context[zmq.Socket[bytes]], run_dir: Path) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, LINGER_MS)
    dealer.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
    dealer.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
    dealer.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.connect(f"ipc://{socket_path(run_dir)}")
    return dealer


class Connection:
    """One session.

    Args:
        run_dir: the daemon's run directory.
        on_message: called with each message except heartbeats, on the connection's thread.
        on_lost: called once if the daemon is gone, on the connection's thread; nothing arrives
            afterwards.
    """

    def __init__(
        self,
        run_dir: Path,
        on_message: Callable[[DaemonMessage], None],
        on_lost: Callable[[Cause], None],
    ) -> None:
        self.run_dir = run_dir
        self._on_message = on_message
        self._on_lost = on_lost
        self._outbox: deque[ClientMessage] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closing = False
        self._welcomed = threading.Event()
        self._welcome: Welcome | None = None
        self._refusal: Cause | None = None
        self._thread = threading.Thread(target=self._run, name="milepost-connection", daemon=True)

    def open(self, timeout_s: float) -> Welcome:
        """Say hello and return the daemon's answer.

        Raises:
            Unavailable: "daemon-unreachable" if no daemon answers in time.
            Rejected: the daemon refused, for example with "version-mismatch".
        """
        self._thread.start()
        if not self._welcomed.wait(timeout_s):
            self.close()
            raise Unavailable(
                "daemon-unreachable",
                f"no daemon answers at {socket_path(self.run_dir)} within {timeout_s:g} s",
                "is milepostd running with this --run-dir? `milepost status --run-dir DIR` asks it",
            )
        if self._refusal is not None:
            self.close()
            raise error_of(self._refusal, Rejected)
        assert self._welcome is not None
        return self._welcome

    def send(self, message: ClientMessage) -> None:
        """Queue a message, in order. After the connection was lost or closed, it is dropped."""
        with self._lock:
            if self._is_closing:
                return
            self._outbox.append(message)
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Deliver what is queued, within `LINGER_MS`, and end the thread. Idempotent."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                os.eventfd_write(self._wake, 1)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(LINGER_MS / 1000 + 5)

    # --- on the thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = _open_socket(context, self.run_dir)
        pidfd = -1
        try:
            pidfd = self._talk(dealer)
        finally:
            if pidfd >= 0:
                os.close(pidfd)
            with self._lock:
                self._is_closing = True
                os.close(self._wake)
            dealer.close()
            context.term()

    def _talk(self, dealer: zmq.Socket[bytes]) -> int:
        """Serve until closed or lost; return the daemon's pidfd, if one was opened."""
        poller = zmq.Poller()
        poller.register(dealer, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        hello = encode(_hello())
        dealer.send(hello, zmq.NOBLOCK)
        said_at_s = time.monotonic()
        # Since when the daemon owes an answer. While this thread does not run, it asks nothing.
        asked_at_s: float | None = None
        pidfd = -1
        while True:
            period_s = HEARTBEAT_S if self._welcome is not None else HELLO_AGAIN_S
            ready = dict(poller.poll(int(period_s * 1000)))
            now_s = time.monotonic()
            if dealer in ready:
                asked_at_s = None
                if not self._drain(dealer):
                    return pidfd
                if self._welcome is not None and pidfd < 0:
                    pidfd = _open_pid(self._welcome.pid)
                    if pidfd >= 0:
                        poller.register(pidfd, zmq.POLLIN)
            if self._wake in ready:
                os.eventfd_read(self._wake)
                is_closing = self._is_closing
                while self._outbox:
                    dealer.send(encode(self._outbox.popleft()), zmq.NOBLOCK)
                if is_closing:
                    return pidfd
            if pidfd >= 0 and pidfd in ready:
                # Its last messages may still be in the socket.
                self._drain(dealer)
                assert self._welcome is not None
                self._lose(f"the daemon (pid {self._welcome.pid}) has ended")
                return pidfd
            if asked_at_s is not None and now_s - asked_at_s > SILENCE_S:
                self._lose(f"the daemon has been silent for {now_s - asked_at_s:.0f} s")
                return pidfd
            if now_s - said_at_s >= period_s:
                said_at_s = now_s
                if self._welcome is not None and asked_at_s is None:
                    asked_at_s = now_s
                with contextlib.suppress(zmq.Again):
                    dealer.send(encode(Ping()) if self._welcome is not None else hello, zmq.NOBLOCK)

    def _drain(self, dealer: zmq.Socket[bytes]) -> bool:
        """Handle every message that has arrived; return False if the thread has to end."""
        while True:
            try:
                frame = dealer.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                message = decode_daemon(frame)
            except ProtocolError as error:
                self._lose(str(error))
                return False
            match message:
                case Pong():
                    pass
                case Welcome():
                    self._welcome = message
                    self._welcomed.set()
                case Refused() if self._welcome is None:
                    self._refusal = message.cause
                    self._welcomed.set()
                    return False
                case Refused() if message.cause.code == "daemon-lost":
                    self._lose("the daemon was restarted")
                    return False
                case _:
                    self._on_message(message)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._is_closing:
                return
        log.warning("daemon lost: %s", reason)
        self._on_lost(
            Cause("daemon-lost", reason, "the next save connects again; `milepost status` shows it")
        )


def _hello() -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        version=version("milepost"),
        torch_version=version("torch"),
        pid=os.getpid(),
        pid_created_s=psutil.Process().create_time(),
    )


def _open_pid(pid: int) -> int:
    """Return a pidfd, or -1 if the daemon's process cannot be seen (another PID namespace)."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def fetch_status(run_dir: Path, timeout_s: float) -> dict[str, Any]:
    """Ask the daemon of a run directory for its status. Raises Unavailable if no daemon answers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = _open_socket(context, run_dir)
    try:
        dealer.send(encode(StatusWanted()), zmq.NOBLOCK)
        if not dealer.poll(int(timeout_s * 1000)):
            raise Unavailable(
                "daemon-unreachable",
                f"no daemon answers at {socket_path(run_dir)} within {timeout_s:g} s",
                "start milepostd, or name its --run-dir",
            )
        answer = decode_daemon(dealer.recv())
        if not isinstance(answer, StatusIs):
            raise ProtocolError("protocol", f"the daemon answered {type(answer).__name__}")
        status: dict[str, Any] = json.loads(answer.status_json)
        return status
    finally:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.close()
        context.term()
