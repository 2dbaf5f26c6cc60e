"""Waiting on a trainer's threads: with a time limit, and with log lines during long waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from milepost.concurrency.collector import collector_running
from milepost.errors import UsageError

log = logging.getLogger("milepost")

WAIT_TOLD_S: Final = 15.0
"""How long a call waits without a log line. Then the log says what the call waits for."""


def make_condition() -> threading.Condition:
    """Return a condition that a trainer's threads may use beside signal handlers that raise.

    `Condition.__enter__` is Python code: if a handler raises between its taking the lock and its
    return, the lock stays taken for ever. A lock's own `__enter__` is not Python code. See
    docs/design/0010-interrupts.md.
    """
    lock = threading.RLock()
    own = {"__enter__": lock.__enter__, "__exit__": lock.__exit__}
    made: threading.Condition = type("Condition", (threading.Condition,), own)(lock)
    return made


def check_timeout(timeout_s: object) -> None:
    """Raise UsageError unless this is a time to wait: None, or seconds."""
    if timeout_s is None or (
        isinstance(timeout_s, int | float)
        and not isinstance(timeout_s, bool)
        and timeout_s == timeout_s
    ):
        return
    raise UsageError("usage", f"timeout_s must be seconds, or None for ever, got {timeout_s!r}")


def wait_telling(
    changed: threading.Condition, is_so: Callable[[], bool], timeout_s: float, what: str
) -> bool:
    """Wait until `is_so()` is true, on a condition that the caller holds; False: not in time.

    The trainer's other threads may run for long meanwhile, so the collector runs, too.

    Args:
        changed: notified whenever `is_so` may have changed.
        is_so: the condition to wait for.
        timeout_s: seconds.
        what: who waits for what, for the log.
    """
    if is_so():
        return True
    started_s = time.monotonic()
    pause_s = WAIT_TOLD_S
    with collector_running():
        while not changed.wait_for(is_so, min(pause_s, timeout_s)):
            waited_s = time.monotonic() - started_s
            if waited_s >= timeout_s:
                return False
            log.warning("%s (%.0f s so far); `milepost status` tells more", what, waited_s)
            pause_s = min(4 * WAIT_TOLD_S, timeout_s - waited_s)
    return True
