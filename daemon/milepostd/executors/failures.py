"""Failures of executors: tried again if they may pass, and translated for people.

Knows nothing of what was being done.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from milepost.errors import MilepostError, StorageError
from milepost.storage.refusals import storage_error
from milepost.wire.messages import Cause
from milepostd.ops.logs import emit

_log = logging.getLogger(__name__)
T = TypeVar("T")

RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 10.0
"""First and longest pause before a file operation is tried again. A mount recovers from a hiccup in
a moment, from a failover in some seconds."""


def cause_of(error: BaseException, *, node: str, rank: int = -1) -> Cause:
    """Translate an exception for people. An unexpected one is logged with its trace."""
    if isinstance(error, MilepostError):
        return Cause(error.code, error.message, error.hint, node, rank)
    if isinstance(error, OSError):
        path = str(error.filename or "")
        found = storage_error("a file operation", path, error, None)
        return Cause(found.code, found.message, found.hint, node, rank)
    _log.error("executor.broken", exc_info=error, extra={"fields": {"cause": repr(error)}})
    return Cause("internal", f"{type(error).__name__}: {error}", "report it", node, rank)


async def retried(work: Callable[[], Awaitable[T]], until_ns: int) -> T:
    """Return what `work` returns. While storage refuses it for a reason that may pass, try again,
    until this instant of the monotonic clock.
    """
    pause_s = RETRY_S_MIN
    while True:
        try:
            return await work()
        except StorageError as error:
            if not error.transient or time.monotonic_ns() + pause_s * 1e9 > until_ns:
                raise
            emit("warning", "storage.retried", file=error.path, code=error.code,
                 cause=error.message, wait_s=pause_s)  # fmt: skip
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_S_MAX)
