"""Where copies run: on the host at once, on a device in a side stream.

Owns the order between a copy, the work that made its sources, and the step that changes them. Knows
nothing of optimizers, layouts or saves. Tests have a stand-in with the same interface.

Sources: torch/cuda/streams.py, the notes on CUDA semantics and `Tensor.record_stream` in torch's
manual (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from milepost.errors import UsageError


class Streams(Protocol):
    """The queue of copies on one device, and its order with the caller's current stream."""

    @property
    def gathers(self) -> bool:
        """Whether the tensors are in device memory, so that it pays to gather small ones there
        before they are copied.
        """

    def fork(self) -> None:
        """Make the queue wait for all work that is in the current stream now."""

    def here(self, work: Callable[[], None]) -> None:
        """Run work in the current stream."""

    def give(self, work: Callable[[], None]) -> None:
        """Run work in the queue."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """Prevent the reuse of freed memory until the queue has done the work that is in it now."""

    def mark(self) -> Any:
        """Return a mark in the queue, after all work that is in it now."""

    def hold(self, mark: Any) -> None:
        """Make the current stream wait for the mark; the host does not wait."""

    def join(self, mark: Any) -> None:
        """Wait on the host until the queue has passed the mark, without the GIL."""


class HostStreams:
    """Host memory: work runs at once, on the calling thread, so there is nothing to wait for."""

    gathers = False

    def fork(self) -> None:
        pass

    def here(self, work: Callable[[], None]) -> None:
        work()

    def give(self, work: Callable[[], None]) -> None:
        work()

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        pass

    def mark(self) -> None:
        return None

    def hold(self, mark: None) -> None:
        pass

    def join(self, mark: None) -> None:
        pass


class CudaStreams:
    """A CUDA device: the queue is a side stream, marks are events."""

    gathers = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def here(self, work: Callable[[], None]) -> None:
        with torch.cuda.device(self._device):
            work()

    def give(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._side):
            work()

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.record_stream(self._side)

    def mark(self) -> Any:
        # Blocking events: a thread that joins sleeps instead of spinning on a trainer's core.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event

    def hold(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self, mark: Any) -> None:
        mark.synchronize()


def default_streams(device: torch.device) -> Streams:
    """Return the streams for a device. Raises UsageError for a kind that is not supported."""
    if device.type == "cpu":
        return HostStreams()
    if device.type == "cuda":
        return CudaStreams(device)
    raise UsageError(
        "usage",
        f"staging='overlap' supports host memory and CUDA only, and a parameter is on {device}",
        "use staging='blocking'",
    )
