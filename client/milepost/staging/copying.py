"""One background copy: what it does on each device, and who waits for its end.

Owns the order of a copy, the moment from which its sources may change, and the check by samples
that finds a torn copy. It must not know of optimizers, layouts or slots: it copies pairs of tensors
and tells a callback how the copy ended.

In host memory, work is done as soon as it is given, and waiting blocks the host. A device has
queues: work is only given to a side stream, and another stream waits for it.

Sources: torch/cuda/streams.py, the notes on CUDA semantics and `Tensor.record_stream` in torch's
manual (2.13).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from milepost.concurrency.collector import collector_paused
from milepost.errors import MilepostError, SaveFailed
from milepost.staging.gathering import CHUNK_TENSORS, Copies, Gathering
from milepost.staging.sampling import Sampler
from milepost.staging.selection import Spans
from milepost.staging.streams import Streams

log = logging.getLogger("milepost")

CHUNK_BYTES: Final = 64 << 20
"""How much one call copies, unless a tensor is larger. It is enough to run at memory speed, and one
call is still short."""

GUARD_HINT: Final = (
    "call ck.guard() before changing parameters outside optimizer.step(), or use staging='blocking'"
)


@dataclass(eq=False)
class DevicePart:
    """The part of a copy on one device. Guarded tensors come first, clones after them."""

    streams: Streams
    image: torch.Tensor | None
    """The bytes of the slot."""
    keys: list[str] = field(default_factory=list)
    """Of the guarded tensors."""
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    """The tensors from which queued copies read; empty once these copies are made."""
    gathering: Gathering | None = None
    """Of the guarded tensors, on a device."""
    early: Sampler | None = None
    early_picked: range = range(0)
    """Which of the guarded tensors are sampled before `save()` returns."""
    late: Sampler | None = None
    versions: list[int] = field(default_factory=list)
    """Version counters of these tensors at `save()`. They only help to explain an error, since
    fused optimizers do not change them."""
    guarded_mark: Any = None
    """Once passed, the guarded tensors may change."""
    mark: Any = None
    """Once passed, all is in host memory."""

    def make_room(self) -> None:
        """Make the memory for samples, and compute where they are in an image."""
        for sampler in (self.early, self.late):
            if sampler is not None and self.sources:
                sampler.make_room(self.sources[0].device)

    def begin(self) -> None:
        """Read the early samples and let the copy's queue begin here; on the trainer's thread."""
        guarded = self.sources[: len(self.keys)]
        if self.early is not None:
            early, picked = self.early, [guarded[index] for index in self.early_picked]
            self.streams.here(lambda: early.read(picked))
        with contextlib.suppress(RuntimeError):  # inference tensors have no counter
            self.versions = [guarded[index]._version for index in self.early_picked]
        self.streams.fork()

    def give(self) -> None:
        """Give all copies to the queue: the guarded ones, their late samples, then the clones."""
        guarded = len(self.keys)
        # Detach here, so that the copy keeps its storage if somebody replaces it meanwhile. In
        # `save()` this would double the time of the call.
        sources = list(map(torch.Tensor.detach, self.sources[:guarded]))
        self._keep(sources)
        if not all(map(torch.Tensor.data_ptr, sources)):
            raise SaveFailed(
                "torn-snapshot",
                "storages of overlapped tensors were freed before they were copied",
                GUARD_HINT,
            )
        try:
            for into, out_of in self._guarded_copies(sources):
                self._give_copies(into, out_of)
            if self.late is not None:
                late = self.late
                self.streams.give(lambda: late.read(sources))
        finally:
            self.guarded_mark = self.mark = self.streams.mark()
        try:
            clones = self.sources[guarded:]
            self._keep(clones)
            for into, out_of in _chunks(self.targets[guarded:], clones):
                self._give_copies(into, out_of)
            for sampler in (self.early, self.late):
                if sampler is not None:
                    self.streams.give(sampler.fetch)
        finally:
            self.mark = self.streams.mark()
            if self.mark is None:  # not queued but done
                self.kept.clear()

    def _guarded_copies(self, sources: list[torch.Tensor]) -> Iterator[Copies]:
        """Yield the copies in order: small tensors in whole stretches, the others one by one."""
        if self.gathering is None or self.image is None:
            yield from _chunks(self.targets[: len(sources)], sources)
            return
        yield from self.gathering.gathered(self.image, sources)
        yield from _chunks(*self.gathering.rest(self.targets, sources))

    def _keep(self, sources: list[torch.Tensor]) -> None:
        self.kept += sources
        self.streams.keep(sources)

    def _give_copies(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        def copy() -> None:
            with torch.no_grad():
                torch._foreach_copy_(targets, sources, non_blocking=True)

        self.streams.give(copy)

    def torn(self) -> list[int]:
        """Return which guarded tensors changed between `save()` and the end of the copy."""
        image = self.image
        assert image is not None
        found = set() if self.late is None else set(self.late.differing(image))
        if self.early is not None:
            found |= {self.early_picked[index] for index in self.early.differing(image)}
        return sorted(found)

    def let_go(self) -> None:
        """Drop every reference to the state and to the image."""
        self.targets.clear()
        self.sources.clear()
        self.kept.clear()
        self.image = None


def _chunks(into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor]) -> Iterator[Copies]:
    """Yield the copies in lists of about `CHUNK_BYTES`, or of `CHUNK_TENSORS`."""
    low = size = 0
    for high, tensor in enumerate(out_of, 1):
        size += tensor.nbytes
        if size >= CHUNK_BYTES or high - low == CHUNK_TENSORS or high == len(out_of):
            yield list(into[low:high]), list(out_of[low:high])
            low, size = high, 0


def copy_with_one_thread() -> None:
    """Make torch's copies on this thread use no further threads. A second team of OpenMP threads
    would spin on the cores on which the trainer's team computes; one core nearly saturates memory.
    """
    # torch sets a thread's OpenMP number when it first reads it, which would undo ours.
    torch.get_num_threads()
    with contextlib.suppress(AttributeError):  # a torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


class Copy:
    """One save's background copy.

    Args:
        parts: one for each device; released at the end.
        spans: the memory that must not change meanwhile.
        on_end: called once, on the copy's thread, with the error or None.
        on_waited: called with the seconds for which a guard kept the host waiting.
    """

    def __init__(
        self,
        parts: Sequence[DevicePart],
        spans: Spans,
        on_end: Callable[[MilepostError | None], None],
        on_waited: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        self._parts = parts
        self._on_end = on_end
        self._on_waited = on_waited
        self._pid = os.getpid()
        self._lock = threading.Lock()
        """Guards the two fields below: either the copy begins, or it is cancelled."""
        self._is_running = False
        self._is_cancelled = False
        self._is_given = False
        """Set once, by the trainer's thread; read by any, as `_is_running` is."""
        self._thread = 0
        """The one that copies; set once, by itself."""
        self._copied = threading.Event()
        """All work was given to the queues; in host memory that means: done."""
        self._ended = threading.Event()
        self.spans = spans

    def begin(self) -> None:
        """Note where the streams are now; on the trainer's thread, before `save()` returns."""
        for part in self._parts:
            part.begin()

    def start(self, executor: Executor) -> None:
        """Have the executor's thread copy; without one, copy here and now."""
        try:
            executor.submit(self.run)
        except RuntimeError:
            main = threading.main_thread()
            # An executor takes no work once the main thread has ended, but other threads may still
            # train. The interpreter waits for those threads, and for threads that they start.
            may_start = not main.is_alive() and threading.current_thread() is not main
            if not (may_start and self._start_thread()):
                self.run(in_thread=False)
        self._is_given = True

    def _start_thread(self) -> bool:
        try:
            threading.Thread(target=self.run, name="milepost-copy").start()
        except RuntimeError:
            return False
        return True

    @property
    def _is_coming(self) -> bool:
        # The call that should have given the copy to a thread may have been interrupted. Then
        # no thread will ever run it. See docs/design/0010-interrupts.md.
        return self._is_given or self._is_running

    def cancel(self) -> None:
        """Cancel the copy if the thread has not begun it yet."""
        with self._lock:
            if self._is_running:
                return
            self._is_cancelled = True
        self.let_go()
        self._copied.set()
        self._ended.set()

    def join(self) -> None:
        """Return once the copy is over and its result was reported."""
        # A callback that hears of the end, on the copying thread itself, may call `close`.
        is_own = self._thread == threading.get_ident()
        if self._is_coming and not is_own and not self.has_ended:
            self._ended.wait()

    def run(self, *, in_thread: bool = True) -> None:
        """Copy, check, and tell; once.

        in_thread: this is the copying thread. Otherwise an interrupt that ends the copy is raised
            again.
        """
        with self._lock:
            if self._is_cancelled or self._is_running:
                return
            self._is_running = True
        self._thread = threading.get_ident()
        if in_thread:
            # Let the trainer return from `save()` first: it waits for the interpreter's lock.
            time.sleep(0)
            copy_with_one_thread()
        error: MilepostError | None = None
        interrupt: BaseException | None = None
        try:
            try:
                with collector_paused():
                    self._give()
            finally:
                self._copied.set()
                # Do this after a failure, too: the slot must not be used while copies into it are
                # queued.
                for part in self._parts:
                    if part.mark is not None:
                        part.streams.join(part.mark)
            error = self._torn()
        except MilepostError as caught:
            error = caught
        except BaseException as caught:
            error = SaveFailed("internal", f"the background copy failed: {caught!r}")
            interrupt = None if in_thread or isinstance(caught, Exception) else caught
        finally:
            self.let_go()
        try:
            self._on_end(error)
        except Exception:
            log.exception("the end of a background copy could not be reported")
        finally:
            self._ended.set()
        if interrupt is not None:
            raise interrupt

    @property
    def has_ended(self) -> bool:
        """Whether the copy is over. True in a forked child, which has no copying thread."""
        return self._ended.is_set() or os.getpid() != self._pid

    def let_go(self) -> None:
        """Drop every reference to the state and to the image."""
        self.spans = Spans(())
        for part in self._parts:
            part.let_go()

    def _give(self) -> None:
        for part in self._parts:
            part.give()

    def hold(self) -> None:
        """Hold the caller, on the host or by its streams, until all guarded tensors are copied."""
        if self.has_ended or not self._is_coming:
            return
        if not self._copied.is_set():
            started_s = time.monotonic()
            self._copied.wait()
            self._on_waited(time.monotonic() - started_s)
        for part in self._parts:
            if part.guarded_mark is not None:
                part.streams.hold(part.guarded_mark)

    def _torn(self) -> SaveFailed | None:
        total, count, first = 0, 0, ""
        for part in self._parts:
            total += len(part.keys)
            found = part.torn()
            count += len(found)
            if found and not first:
                first = repr(part.keys[found[0]])
                if part.versions and found[0] in part.early_picked:
                    then = part.versions[part.early_picked.index(found[0])]
                    now = part.sources[found[0]]._version
                    first += f" (version counter {then} at save(), {now} after the copy)"
        if not count:
            return None
        return SaveFailed(
            "torn-snapshot",
            f"{count} of {total} overlapped tensors changed while they were copied, {first} first: "
            "something other than a step of the given optimizers changed them",
            GUARD_HINT,
        )
