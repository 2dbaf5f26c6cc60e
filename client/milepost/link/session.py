"""One rank's session with its node's daemon, across the daemon's restarts.

Owns hello, the rank's place in the job, and the last message about each save that is not settled. A
daemon that comes back gets all these messages again, in order. So a save that was staged before the
daemon died is written as if nothing had happened. This module starts an embedded daemon again; a
supervisor restarts any other daemon. Knows nothing of states or layouts.

Threads: any thread may call all methods. Callbacks run on the connection's thread or on the thread
that restores the session, and must not block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from milepost.concurrency.waiting import make_condition
from milepost.errors import MilepostError, Rejected, Unavailable
from milepost.link.connection import Connection
from milepost.link.embedded import START_S, ensure_daemon
from milepost.wire.causes import error_of
from milepost.wire.messages import (
    Cause,
    ClientMessage,
    DaemonMessage,
    Join,
    Joined,
    Leave,
    Left,
    Offered,
    Refused,
    Skipped,
    Staged,
    Unable,
    Welcome,
)

log = logging.getLogger("milepost")

JOIN_S: Final = 30.0
"""How long a daemon that answered hello may take to give a rank its place."""

MISSING_S: Final = 20.0
"""How long a trainer waits in `save()` for a daemon that is away: a restart takes under a second,
with a supervisor's back-off somewhat longer. The save then fails and training goes on."""

RESTORE_S: Final = 60.0
"""How long the session looks for a lost daemon before the saves that wait for it fail."""

ANSWER_S: Final = 2.0
"""How long to wait for the answer to one hello before connecting again."""

RETRY_S: Final = 0.2
"""Pause between attempts to reach a daemon that is away."""

LEAVE_S: Final = 10.0
"""How long to wait for the daemon's goodbye once nothing is pending."""

SaveWord = Offered | Staged | Skipped | Unable
"""The messages that a restarted daemon gets again."""


class Session:
    """See the module's docstring.

    Args:
        run_dir: the daemon's run directory.
        is_embedded: start a daemon there when none is running.
        on_message: called with each message of the daemon that is not about the session itself.
        on_gone: called when a lost daemon did not come back in time, or another one came instead.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        is_embedded: bool,
        on_message: Callable[[DaemonMessage], None],
        on_gone: Callable[[Cause], None],
    ) -> None:
        self.run_dir = run_dir
        self._is_embedded = is_embedded
        self._on_message = on_message
        self._on_gone = on_gone
        self._changed = make_condition()
        """Guards all fields below; the fields above never change."""
        self._connection: Connection | None = None
        self._welcome: Welcome | None = None
        self._join: Join | None = None
        self._joined: Joined | None = None
        """The last answer to `Join` on this connection."""
        self._has_left = False
        self._is_closed = False
        self._is_restoring = False
        self._refusal: Cause | None = None
        self._said: dict[str, SaveWord] = {}
        """The last message about each save that has not ended, or whose slot the daemon still
        reads; it implies those before it.
        """

    def open(self) -> Welcome:
        """Start a daemon if it is an embedded one, and say hello.

        Raises Unavailable or Rejected.
        """
        connection, welcome = self._say_hello()
        with self._changed:
            before = self._welcome
        if before is not None and welcome.node != before.node:
            connection.close()
            raise Rejected(
                "daemon-lost",
                f"node {before.node.node_id} came back as {welcome.node.node_id} at "
                f"{welcome.node.address}, which the other nodes do not know",
                "make a new Checkpointer on every rank",
            )
        with self._changed:
            is_closed = self._is_closed
            if not is_closed:
                self._connection, self._welcome = connection, welcome
                self._joined, self._has_left = None, False
                self._refusal = None
        if is_closed:
            # Another thread has closed the session meanwhile, and did not see this connection.
            connection.close()
            raise Unavailable("daemon-lost", "the session was closed")
        return welcome

    def _is_over(self) -> bool:
        """Whether `close` was called."""
        with self._changed:
            return self._is_closed

    @property
    def node_id(self) -> str:
        """The node whose daemon has answered; "" before the first hello."""
        with self._changed:
            return "" if self._welcome is None else self._welcome.node.node_id

    def _say_hello(self) -> tuple[Connection, Welcome]:
        started_s = time.monotonic()
        while True:
            if self._is_embedded:
                ensure_daemon(self.run_dir)
            connection = Connection(self.run_dir, self._heard, self._lost)
            try:
                return connection, connection.open(ANSWER_S)
            except Unavailable as error:
                # An embedded daemon that was found running may have been about to end.
                waited_s = time.monotonic() - started_s
                if waited_s > START_S or self._is_over():
                    raise Unavailable(
                        error.code,
                        f"no daemon answers in {self.run_dir} within {START_S:g} s"
                        + ("" if self.run_dir.is_dir() else ": there is no such directory"),
                        error.hint,
                    ) from None
                log.warning(
                    "waiting for the daemon in %s (%.0f of %.0f s)", self.run_dir, waited_s, START_S
                )

    def ensure(self, join: Join, timeout_s: float = MISSING_S) -> None:
        """Return once the rank has its place at a running daemon.

        Args:
            join: the same in every call, until the rank continues as a later attempt. If that
                happens while a thread waits here, the thread gets the place of the later attempt.
            timeout_s: how long to wait for a daemon that is away.

        Raises:
            Unavailable: "daemon-lost": it is still away.
            Rejected: the daemon refused the rank.
        """
        with self._changed:
            if self._join is not None and join.attempt < self._join.attempt:
                join = self._join
            self._join = join
            if self._has_place(join):
                return
            if self._connection is None:
                self._start_restoring()
                self._changed.wait_for(lambda: not self._is_restoring, timeout_s)
                if self._has_place(join):
                    return
                if self._refusal is not None:
                    raise error_of(self._refusal, Rejected)
                if self._connection is None:
                    raise Unavailable(
                        "daemon-lost",
                        f"the daemon in {self.run_dir} is away and did not come back within "
                        f"{timeout_s:g} s",
                        "is it being restarted? `milepost status` tells",
                    )
        self._take_place(join)

    def _has_place(self, join: Join) -> bool:
        """Whether the rank has exactly this place: after a restore it may have the place of its
        earlier attempt. The lock is held.
        """
        return self._joined is not None and self._joined.attempt == join.attempt

    def _take_place(self, join: Join) -> None:
        """Ask for the rank's place and wait for the answer."""
        with self._changed:
            connection = self._connection
            self._refusal = None
            if connection is not None:
                connection.send(join)
            self._changed.wait_for(
                lambda: (
                    self._has_place(join) or self._refusal is not None or self._connection is None
                ),
                JOIN_S,
            )
            if self._has_place(join):
                return
            refusal = self._refusal
        if refusal is not None:
            raise error_of(refusal, Rejected)
        raise Unavailable("daemon-lost", f"the daemon in {self.run_dir} gave the rank no place")

    def say(self, message: SaveWord) -> None:
        """Send a message about a save, now and to every later daemon, until `settle`."""
        with self._changed:
            self._said[message.save.save_id] = message
            if self._connection is not None and self._join and self._has_place(self._join):
                self._connection.send(message)

    def settle(self, save_id: str) -> None:
        """Forget the message about an ended save whose slot the daemon no longer reads."""
        with self._changed:
            self._said.pop(save_id, None)

    def send(self, message: ClientMessage) -> None:
        """Send a message once; without a daemon it is dropped."""
        with self._changed:
            if self._connection is not None:
                self._connection.send(message)

    def leave(self) -> bool:
        """Say goodbye; return whether the daemon said that nothing of this rank is pending."""
        with self._changed:
            if self._connection is None:
                return False
            self._connection.send(Leave())
            self._changed.wait_for(lambda: self._has_left or self._connection is None, LEAVE_S)
            return self._has_left

    def close(self) -> None:
        """End the session. Idempotent."""
        with self._changed:
            self._is_closed = True
            connection, self._connection = self._connection, None
            self._changed.notify_all()
        if connection is not None:
            connection.close()

    # --- on the connection's thread

    def _heard(self, message: DaemonMessage) -> None:
        match message:
            case Joined():
                with self._changed:
                    self._joined = message
                    self._changed.notify_all()
            case Left():
                with self._changed:
                    self._has_left = True
                    self._changed.notify_all()
            case Refused():
                with self._changed:
                    self._refusal = message.cause
                    self._changed.notify_all()
            case _:
                self._on_message(message)

    def _lost(self, cause: Cause) -> None:
        with self._changed:
            self._connection = self._joined = None
            self._changed.notify_all()
            if not self._is_closed:
                self._start_restoring()

    # --- coming back

    def _start_restoring(self) -> None:
        """Look for the daemon on a new thread; the lock is held."""
        if self._is_restoring:
            return
        self._is_restoring = True
        threading.Thread(target=self._restore, name="milepost-restore", daemon=True).start()

    def _restore(self) -> None:
        try:
            cause = self._find_again()
        except Exception as error:
            log.exception("restoring the session failed")
            cause = Cause("internal", f"restoring the session failed: {error!r}")
        with self._changed:
            self._is_restoring = False
            if cause is not None:
                self._said.clear()
            is_closed = self._is_closed
            self._changed.notify_all()
        if cause is not None and not is_closed:
            self._on_gone(cause)

    def _find_again(self) -> Cause | None:
        """Reach the daemon and send it everything again; return why that is impossible, or None."""
        until_s = time.monotonic() + RESTORE_S
        while True:
            with self._changed:
                join = self._join
            try:
                self.open()
                if join is not None:
                    self._take_place(join)
                self._say_again()
                log.warning("the daemon in %s is back", self.run_dir)
                return None
            except Rejected as error:
                refusal = Cause(error.code, error.message, error.hint)
                with self._changed:
                    if self._join != join:
                        continue  # The rank has begun another attempt meanwhile.
                    self._refusal = refusal
                return refusal
            except MilepostError as error:
                if time.monotonic() > until_s or self._is_over():
                    return Cause(
                        "daemon-lost",
                        f"the daemon in {self.run_dir} has been away for {RESTORE_S:g} s: "
                        f"{error.message}",
                        "start it again; the next save looks for it",
                    )
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)

    def _say_again(self) -> None:
        with self._changed:
            if self._connection is None:
                return
            for word in self._said.values():
                self._connection.send(word)
