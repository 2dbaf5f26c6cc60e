"""Where copies are given: on the host at once, on a device to a side stream that waits for events.

Owns the order between a copy, the work that made its sources, and the step that changes them. Knows
nothing of optimizers, layouts or saves. The stand-in of the tests keeps the same interface.

Sources: torch/cuda/streams.py, the notes on CUDA semantics and `Tensor.record_stream` in torch's
manual (2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from milepost.errors import UsageError


class Streams(Protocol):
    """The copy's queue on one device, and its relation to the stream the caller works on."""

    @property
    def gathers(self) -> bool:
        """Whether the tensors are out of the host's reach, so that small ones are worth gathering
        on the device before they are copied.
        """

    def fork(self) -> None:
        """Let the copy's queue wait for all that the current stream was given so far."""

    def here(self, work: Callable[[], None]) -> None:
        """Give work to the current stream."""

    def give(self, work: Callable[[], None]) -> None:
        """Give work to the copy's queue."""

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        """See that memory that is freed is not used anew before the copy's queue is past now."""

    def mark(self) -> Any:
        """Return a mark in the copy's queue, after all that it was given so far."""

    def hold(self, mark: Any) -> None:
        """Let the current stream wait for the mark; the host does not."""

    def join(self, mark: Any) -> None:
        """Wait on the host until the mark was passed, without the GIL."""


class HostStreams:
    """Host memory: work is done at once, on the calling thread, so there is nothing to wait for."""

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
    """A CUDA device: a side stream of its own, and events."""

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
        # Blocking: who joins sleeps, instead of spinning on a core of the trainer's.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._side)
        return event

    def hold(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self, mark: Any) -> None:
        mark.synchronize()


def default_streams(device: torch.device) -> Streams:
    """Return what fits a device. Raises UsageError for one whose queues are not known here."""
    if device.type == "cpu":
        return HostStreams()
    if device.type == "cuda":
        return CudaStreams(device)
    raise UsageError(
        "usage",
        f"staging='overlap' knows host memory and CUDA, and a parameter is on {device}",
        "use staging='blocking'",
    )
