"""The devices that a fetch copies to, and the buffers that blocks pass through on the way.

On the host a thread has one buffer. For a device it has two, in pinned memory: the thread reads
into one while the device still copies out of the other. `Streams` keeps the order on a device.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from milepost.errors import UsageError
from milepost.fetching.copying import bytes_at
from milepost.fetching.files import Buffer
from milepost.format.layout import PAGE_BYTES, align
from milepost.staging.streams import Streams


class AnyBuffer(Protocol):
    """See `Buffer`."""

    view: memoryview
    address: int


class PinnedBuffer:
    """A `Buffer` that a device can copy out of by itself."""

    def __init__(self, nbytes: int) -> None:
        length = align(nbytes, PAGE_BYTES)
        self._memory = torch.empty(length + PAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.address = align(self._memory.data_ptr(), PAGE_BYTES)
        self.view = bytes_at(self.address, length)


class Devices:
    """All devices of one fetch except the host.

    Args:
        streams_of: returns the queue of a device. Raises UsageError for a device without one; then
            each copy to that device is waited for.
        make_buffer: makes memory that a device can copy out of.
    """

    def __init__(
        self,
        streams_of: Callable[[torch.device], Streams],
        make_buffer: Callable[[int], AnyBuffer] = PinnedBuffer,
    ) -> None:
        self._make_streams = streams_of
        self._make_buffer = make_buffer
        self._streams: dict[torch.device, Streams] = {}

    def open(self, devices: Iterable[torch.device]) -> None:
        """Use these devices. Copies wait for all work that is in the caller's stream now."""
        for device in set(devices):
            if device.type != "cpu":
                with contextlib.suppress(UsageError):
                    self._streams[device] = self._make_streams(device)
        for streams in self._streams.values():
            streams.fork()

    def streams_of(self, device: torch.device) -> Streams | None:
        """Return a device's queue; None for the host and for devices without a queue."""
        return self._streams.get(device)

    def mark(self) -> list[tuple[Streams, Any]]:
        """Return marks in all queues, after all work given so far."""
        return [(streams, streams.mark()) for streams in self._streams.values()]

    def wait(self) -> None:
        """Wait until all copies are done."""
        _join(self.mark())

    def buffers(self, nbytes: int) -> Buffers:
        """Return one thread's buffers of this size."""
        if self._streams:
            return Buffers(self, [self._make_buffer(nbytes) for _ in range(2)])
        return Buffers(self, [Buffer(nbytes)])


class Buffers:
    """One thread's buffers, used in turns."""

    def __init__(self, devices: Devices, buffers: Iterable[AnyBuffer]) -> None:
        self._devices = devices
        self._free: deque[tuple[AnyBuffer, list[tuple[Streams, Any]]]] = deque(
            (buffer, []) for buffer in buffers
        )

    def take(self) -> AnyBuffer:
        """Return a buffer out of which nothing is being copied any more."""
        buffer, marks = self._free.popleft()
        _join(marks)
        return buffer

    def give_back(self, buffer: AnyBuffer) -> None:
        """Take back a buffer; a device may still copy out of it."""
        self._free.append((buffer, self._devices.mark()))

    def close(self) -> None:
        """Wait until all copies out of the buffers are done; only then may their memory be
        freed.
        """
        for _, marks in self._free:
            _join(marks)


def _join(marks: Iterable[tuple[Streams, Any]]) -> None:
    for streams, mark in marks:
        streams.join(mark)
