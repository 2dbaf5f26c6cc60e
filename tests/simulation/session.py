"""A rank's session with its node's daemon: the twin of `Session`, as processes.

Source: `client/milepost/link/session.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from milepost.errors import MilepostError, Rejected, Unavailable
from milepost.link.embedded import START_S
from milepost.link.session import ANSWER_S, JOIN_S, LEAVE_S, MISSING_S, RESTORE_S, RETRY_S, SaveWord
from milepost.wire.messages import (
    SILENCE_S,
    AbortWanted,
    Cause,
    DaemonMessage,
    Join,
    Joined,
    Left,
    PreemptionNoticed,
    ReadsTold,
    Refused,
)
from tests.simulation.machine import Link, Machine
from tests.simulation.world import Life, Sleep, Steps, Until

if TYPE_CHECKING:
    from tests.simulation.world import World


class Session:
    """The session of one trainer.

    Args:
        life: the trainer.
        on_message, on_gone: as of the client's.
    """

    def __init__(
        self,
        world: World,
        life: Life,
        machine: Machine,
        on_message: Callable[[DaemonMessage], None],
        on_gone: Callable[[Cause], None],
    ) -> None:
        self.world = world
        self.life = life
        self.machine = machine
        self.on_message = on_message
        self.on_gone = on_gone
        self.link: Link | None = None
        self.joined: Joined | None = None
        """The place that this link was given last."""
        self.has_left = False
        self.is_closed = False
        self.is_restoring = False
        self.refusal: Cause | None = None
        self.place: Join | None = None
        """The place for which the rank last asked."""
        self.said: dict[str, SaveWord] = {}
        """The last message about each save that has not ended."""

    # --- hello

    def _hello_once(self) -> Steps:
        """One hello; returns the link, or None if nobody answers."""
        daemon = self.machine.daemon
        if daemon is None and self.machine.is_embedded:
            yield Sleep(0.3)
            self.machine.start_daemon()
            daemon = self.machine.daemon
        if daemon is None:
            yield Sleep(ANSWER_S)
            return None
        answers: list[Link] = []
        self.world.after(0.0002, daemon, self._greeted, daemon, answers)
        yield Until(lambda: bool(answers), ANSWER_S)
        if not answers:
            return None
        return answers[0] if answers[0].daemon.is_alive else None

    def _greeted(self, daemon: Any, answers: list[Link]) -> None:
        if not self.life.is_alive:
            return
        link: Link = daemon.hello(self.life, lambda message: self._heard_from(link, message))
        answers.append(link)
        self.life.notify()

    def open(self) -> Steps:
        until_ns = self.world.now_ns + int(START_S * 1e9)
        while True:
            link = yield from self._hello_once()
            if link is not None:
                self.link = link
                self.joined, self.has_left = None, False
                self.refusal = None
                self.life.notify()
                self._watch(link)
                return
            if self.world.now_ns > until_ns or self.is_closed:
                raise Unavailable("daemon-lost", f"no daemon on {self.life.node}")

    def _watch(self, link: Link) -> None:
        """Send heartbeats. A stopped daemon counts as lost after a while of silence."""
        self.world.after(SILENCE_S, self.life, self._check_silence, link)

    def _check_silence(self, link: Link) -> None:
        if link is not self.link:
            return
        if link.daemon.is_stopped:
            link.is_open = False
            self._lost()
        else:
            self._watch(link)

    # --- the rank's place

    def ensure(self, place: Join) -> Steps:
        self.place = place
        if self._has_place(place):
            return
        if self.link is None:
            self._start_restoring()
            yield Until(lambda: not self.is_restoring, MISSING_S)
            if self._has_place(place):
                return
            if self.refusal is not None:
                raise Rejected(self.refusal.code, self.refusal.message)
            if self.link is None:
                raise Unavailable("daemon-lost", f"the daemon of {self.life.node} is away")
        yield from self._take_place(place)

    def _has_place(self, place: Join | None) -> bool:
        """Whether the rank has this place: a restored place may be of an earlier attempt."""
        return (
            self.joined is not None and place is not None and self.joined.attempt == place.attempt
        )

    def _take_place(self, place: Join) -> Steps:
        self.refusal = None
        if self.link is not None:
            self.link.daemon.joined(self.link, place)
        yield Until(
            lambda: self._has_place(place) or self.refusal is not None or self.link is None, JOIN_S
        )
        if self._has_place(place):
            return
        if self.refusal is not None:
            raise Rejected(self.refusal.code, self.refusal.message)
        raise Unavailable("daemon-lost", f"the daemon of {self.life.node} gave no place")

    # --- words

    def say(self, word: SaveWord) -> None:
        self.said[word.save.save_id] = word
        if self.link is not None and self._has_place(self.place):
            self.send(word)

    def settle(self, save_id: str) -> None:
        self.said.pop(save_id, None)

    def send(self, word: SaveWord | AbortWanted) -> None:
        if self.link is not None:
            self.link.daemon.said(self.link, word)

    def signal(self, message: PreemptionNoticed | ReadsTold) -> None:
        if self.link is not None:
            self.link.daemon.signalled(self.link, message)

    def leave(self) -> Steps:
        if self.link is not None and self.joined is not None:
            self.link.daemon.left(self.link)
            yield Until(lambda: self.has_left or self.link is None, LEAVE_S)

    def close(self) -> None:
        self.is_closed = True
        self.link = None

    def _heard_from(self, link: Link, message: DaemonMessage | None) -> None:
        if link is not self.link:
            return
        match message:
            case None:
                self._lost()
                return
            case Joined():
                self.joined = message
            case Left():
                self.has_left = True
            case Refused():
                self.refusal = message.cause
            case _:
                self.on_message(message)
        self.life.notify()

    # --- coming back

    def _lost(self) -> None:
        self.link = self.joined = None
        self.life.notify()
        if not self.is_closed:
            self._start_restoring()

    def _start_restoring(self) -> None:
        if not self.is_restoring:
            self.is_restoring = True
            self.world.spawn(self.life, self._restore())

    def _restore(self) -> Steps:
        cause = yield from self._find_again()
        self.is_restoring = False
        if cause is not None:
            self.said.clear()
        self.life.notify()
        if cause is not None and not self.is_closed:
            self.on_gone(cause)

    def _find_again(self) -> Steps:
        until_ns = self.world.now_ns + int(RESTORE_S * 1e9)
        while True:
            place = self.place
            try:
                yield from self.open()
                if place is not None:
                    yield from self._take_place(place)
                for word in list(self.said.values()):
                    self.send(word)
                return None
            except Rejected as error:
                if self.place != place:
                    continue  # The rank goes on as another attempt by now.
                self.refusal = Cause(error.code, error.message, error.hint)
                return self.refusal
            except MilepostError:
                if self.world.now_ns > until_ns or self.is_closed:
                    return Cause("daemon-lost", f"the daemon of {self.life.node} is away")
                yield Until(lambda: self.is_closed, RETRY_S)
