"""The bandwidth limit on images: one token bucket for the node, and one pace for each write.

`BandwidthLimit` says how fast all writer threads together may write. `Pace` says when one write may
go on with its next block, and ends it if its save has ended or cannot meet its deadline at this
speed. Knows nothing of files. Thread-safe.
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
"""The unit of `write_mbps`, as vendors of storage and networks count."""

BURST_S: Final = 0.25
"""How much credit an idle node may collect, in seconds of the limit. That much of a save is written
at once, the rest at an even rate."""

BLOCK_BYTES_MIN: Final = 256 << 10
"""Smaller blocks would make the rate more even, but cost too much processor time."""


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
        """When the rate has paid for all bytes granted so far. Credit that is older than `BURST_S`
        is lost."""

    @property
    def block_bytes(self) -> int:
        """How much to write at once: about what the limit allows in `BURST_S`, in whole pages."""
        even = int(self.bytes_per_s * BURST_S) // PAGE_BYTES * PAGE_BYTES
        return min(BLOCK_BYTES, max(BLOCK_BYTES_MIN, even))

    def reserve(self, count: int, now_s: float) -> float:
        """Take `count` bytes; return the instant from which they may be written."""
        with self._lock:
            self._paid_at_s = self._after(count, now_s)
            return self._paid_at_s

    def earliest_s(self, count: int, now_s: float) -> float:
        """Return the earliest instant by which `count` bytes can be granted. Takes none."""
        with self._lock:
            return self._after(count, now_s)

    def give_back(self, count: int) -> None:
        """Give back bytes that were reserved and will not be written."""
        with self._lock:
            self._paid_at_s -= count / self.bytes_per_s

    def _after(self, count: int, now_s: float) -> float:
        return max(self._paid_at_s, now_s - BURST_S) + count / self.bytes_per_s


class Pace:
    """Says when the blocks of one image may be written. One thread writes, any may `stop` it.

    Args:
        limit: of the node; None: as fast as the device allows.
        until_s: the save's deadline, by `clock`.
        on_wait: called on the writing thread after each wait for the limit, with its seconds.
        clock: returns monotonic seconds.
        wait: waits for an event for at most these seconds; returns whether it was set.
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
        """End the write at its next block, even if it is waiting for the limit now."""
        self._stopped.set()

    def check(self) -> None:
        """Raises SaveFailed("aborted") once the write was stopped."""
        if self._stopped.is_set():
            raise SaveFailed("aborted", "the save has ended; its image is not written any further")

    def await_turn(self, count: int, left: int) -> None:
        """Wait until the next `count` of the `left` bytes of the image may be written.

        Raises:
            SaveFailed: "aborted": the write was stopped; "timeout": at this limit the `left` bytes
                cannot be written by the save's deadline. In both cases other writes get what this
                block would have taken of the limit.
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
