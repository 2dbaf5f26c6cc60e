"""Which ranks of a group have ended, as far as this host can tell.

Without this, ranks would wait for a killed rank until their time is over. Only what is certain
counts: a process of this user and of this namespace no longer exists. Nothing is known about other
processes.

Sources: proc_pid_stat(5), pid_namespaces(7), random(4) on boot_id.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgpack

from milepost.link.rendezvous import Group

_PROC: Final = Path("/proc")

_ENDED_STATES: Final = ("Z", "X")
"""States of an ended process: nobody has collected its exit status yet, or it is just
disappearing.
"""


class Presence:
    """Tells the other ranks which process this one is.

    Args:
        group: the ranks.
        topic: identifies their common call in the group's store; never used before.
    """

    def __init__(self, group: Group, topic: str) -> None:
        self._store = group.store
        self._topic = f"{topic}/process"
        self._own_key = f"{self._topic}/{group.rank}"
        self._here = ""
        self._known: dict[int, tuple[str, int, str]] = {}
        if self._store is None:
            return
        with suppress(OSError):
            self._here = _namespace()
            me = self._here, os.getpid(), _started(os.getpid())
            self._store.set(self._own_key, msgpack.packb(me))

    def close(self) -> None:
        """Take back what was told, when no rank waits for this one any more."""
        # A store that cannot delete keeps a few bytes.
        with suppress(RuntimeError):
            if self._store is not None and self._here:
                self._store.delete_key(self._own_key)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank is known to have ended. False if that cannot be found out; never
        raises.
        """
        if self._store is None or not self._here:
            return False
        with suppress(OSError, RuntimeError, ValueError):
            if rank not in self._known:
                key = f"{self._topic}/{rank}"
                if not self._store.check([key]):
                    return False
                self._known[rank] = msgpack.unpackb(self._store.get(key))
            here, pid, started = self._known[rank]
            return here == self._here and started != _started(pid)
        return False


def _namespace() -> str:
    """Return a name for the namespace of this process: processes that see one another have the
    same. Raises OSError.
    """
    kernel = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{kernel} {os.readlink(_PROC / 'self/ns/pid')} {os.geteuid()}"


def _started(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; "" if it has ended. Raises OSError if
    that cannot be found out.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The name of the program, in brackets, may hold anything.
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in _ENDED_STATES else fields[18]
