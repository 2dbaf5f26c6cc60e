"""Tells the service manager the daemon's state: ready, alive, stopping.

Owns the datagrams and where they go; the runtime says when. Outside a unit of `Type=notify` every
call does nothing. Sources: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class ServiceManager:
    """The service manager that started this process, if there is one.

    Args:
        environment: `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` as systemd sets them.

    Attributes:
        watchdog_s: how often to call `alive`, at least: half of what the unit allows, as
            sd_watchdog_enabled(3) advises. None: there is no watchdog.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        if self._address.startswith("@"):
            self._address = "\0" + self._address[1:]
        usec = environment.get("WATCHDOG_USEC", "")
        for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s: float | None = (
            int(usec) / 2e6 if usec.isdigit() and int(usec) and for_us else None
        )

    def ready(self, status: str) -> None:
        """Saves are accepted from now on."""
        self._send(f"READY=1\nSTATUS={_line(status)}\nMAINPID={os.getpid()}")

    def status(self, status: str) -> None:
        """Set the line that `systemctl status` shows."""
        self._send(f"STATUS={_line(status)}")

    def alive(self) -> None:
        """The loop turns."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        """The daemon is draining."""
        self._send(f"STOPPING=1\nSTATUS={_line(status)}")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
                notify.setblocking(False)
                notify.sendto(state.encode(), self._address)
        except OSError:
            # The manager has gone or its queue is full. It misses a line, and the daemon goes on.
            return


def _line(status: str) -> str:
    return " ".join(status.split())
