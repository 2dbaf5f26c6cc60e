"""The bandwidth limit on images: one token bucket for the node, and each write's way through it.

Owns how fast images may be written (`BandwidthLimit`, for all writer threads together) and when a
write has to end between two of its blocks (`Pace`): because its save has ended, or because at this
speed it cannot be done by the save's deadline. Knows nothing of files. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from milepost.errors import SaveFailed
from milepost.format.layout import PAGE_BYTES
from milepost.storage.blocks import BLOCK_BYTES

MB: Final = 1_000_000
"""What `write_mbps` counts in, as vendors of storage and networks do."""

BURST_S: Final = 0.25
"""What may be saved up while nothing is written, as seconds of the limit; so much of a save comes
at once, then it is even."""

BLOCK_BYTES_MIN: Final = 256 << 10
"""Smaller direct writes cost more processor time than evenness is worth."""


class BandwidthLimit:
    """Grants bytes at a rate, in the order in which they are asked for. Thread-safe.

    In any span of t seconds at most (t + `BURST_S`) x `bytes_per_s` are granted.

    Args:
        bytes_per_s: above 0.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._paid_at_s = float("-inf")
        """When all that was granted so far is paid for; what lies further back than `BURST_S` is
        credit that has lapsed."""

    @property
    def block_bytes(self) -> int:
        """How much to write at once, whole pages: what the limit allows in `BURST_S`."""
        even = int(self.bytes_per_s * BURST_S) // PAGE_BYTES * PAGE_BYTES
        return min(BLOCK_BYTES, max(BLOCK_BYTES_MIN, even))

    def reserve(self, count: int, now_s: float) -> float:
        """Take `count` bytes; return the instant from which they may be written."""
        with self._lock:
            self._paid_at_s = self._after(count, now_s)
            return self._paid_at_s

    def earliest_s(self, count: int, now_s: float) -> float:
        """Return the instant before which `count` bytes cannot have been granted; takes nothing."""
        with self._lock:
            return self._after(count, now_s)

    def give_back(self, count: int) -> None:
        """Return bytes that were reserved and are not going to be written."""
        with self._lock:
            self._paid_at_s -= count / self.bytes_per_s

    def _after(self, count: int, now_s: float) -> float:
        return max(self._paid_at_s, now_s - BURST_S) + count / self.bytes_per_s


class Pace:
    """When the blocks of one image may be written. One thread writes, any thread may `stop` it.

    Args:
        limit: of the node; None: as fast as the device takes it.
        until_s: the save's deadline, by `clock`.
        on_wait: told the seconds after each wait for the limit, on the writing thread.
        clock: monotonic seconds.
        wait: waits for an event at most so many seconds; whether it was set.
    """

    def __init__(
        self,
        limit: BandwidthLimit | None = None,
        *,
        until_s: float = float("inf"),
        on_wait: Callable[[float], None] = lambda elapsed_s: None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._limit = limit
        self._until_s = until_s
        self._on_wait = on_wait
        self._clock = clock
        self._wait = wait
        self._stopped = threading.Event()

    @property
    def block_bytes(self) -> int:
        """How much to write at once."""
        return BLOCK_BYTES if self._limit is None else self._limit.block_bytes

    def stop(self) -> None:
        """Have the write end at its next block, also if it waits for the limit now."""
        self._stopped.set()

    def check(self) -> None:
        """Raises SaveFailed("aborted") once the write was stopped."""
        if self._stopped.is_set():
            raise SaveFailed("aborted", "the save has ended; its image is not written any further")

    def await_turn(self, count: int, left: int) -> None:
        """Return when the next `count` of the `left` bytes of the image may be written.

        Raises:
            SaveFailed: "aborted": the write was stopped; "timeout": at the limit the bytes that are
                left cannot be written by the save's deadline. What the block would have taken of
                the limit is left to others.
        """
        self.check()
        if self._limit is None:
            return
        now_s = self._clock()
        needed_s = self._limit.earliest_s(left, now_s) - now_s
        if now_s + needed_s > self._until_s:
            limit_mbps = self._limit.bytes_per_s / MB
            raise SaveFailed(
                "timeout",
                f"{left} bytes of the image are left to write, which takes {needed_s:.1f} s or "
                f"more at the daemon's limit of {limit_mbps:g} MB/s, and the save has "
                f"{max(0.0, self._until_s - now_s):.1f} s left",
                "raise the daemon's write_mbps, or deadline_s of the Checkpointer",
            )
        wait_s = self._limit.reserve(count, now_s) - now_s
        if wait_s > 0:
            self._wait(self._stopped, wait_s)
            self._on_wait(self._clock() - now_s)
            if self._stopped.is_set():
                self._limit.give_back(count)
                self.check()
