"""Copying behind forward and backward: the copy, the guard, the check.

Owns the background copy of what optimizers change (`selection` finds it), the hook that keeps the
next step from overtaking the copy, and the samples that find a copy that was overtaken all the
same. It must not know of daemons, plans or slots: where things go comes as views of an image, and
how a copy ended goes to a callback.

Host memory is the plain case: work is done where it is given, and who waits, waits on the host. A
device has queues; there work is only given to a side stream, and who waits, is a stream.

Sources: torch/optim/optimizer.py (`profile_hook_step`), torch/cuda/streams.py, the notes on CUDA
semantics and `Tensor.record_stream` in torch's manual (2.13).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from milepost.concurrency.collector import collector_paused
from milepost.errors import MilepostError, SaveFailed
from milepost.staging.gathering import CHUNK_TENSORS, Copies, Gathering
from milepost.staging.layouts import TensorColumns
from milepost.staging.sampling import Sampler
from milepost.staging.selection import Optimizers, Selection, Selector, Spans, stepped
from milepost.staging.streams import Streams, default_streams

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from milepost.state.items import Items

log = logging.getLogger("milepost")

CHUNK_BYTES: Final = 64 << 20
"""What one call copies, unless one tensor is larger: enough to be bound by memory, and short."""

EARLY_MAX: Final = 128
"""Tensors that are sampled before `save()` returns too: each costs a microsecond or two there."""

CLONE_BYTES_MAX: Final = 256 << 20
"""Device memory that a save may take for clones of what is not guarded. What does not fit is copied
before `save()` returns, which waits for the device."""


GUARD_HINT: Final = (
    "call ck.guard() before changing parameters outside optimizer.step(), or use staging='blocking'"
)


class Split(NamedTuple):
    """The tensors of a layout by how they are copied, each by its position in the layout."""

    now: list[int]
    """Before `save()` returns."""
    guarded: list[int]
    """In the background: an optimizer's."""
    cloned: list[int]
    """In the background, from a clone on their device: not an optimizer's, but on a device."""


# --- one copy -----------------------------------------------------------------------------------


@dataclass(eq=False)
class DevicePart:
    """What one copy does on one device. Guarded tensors come first, clones after them."""

    streams: Streams
    image: torch.Tensor | None
    """The bytes of the slot."""
    keys: list[str] = field(default_factory=list)
    """Of the guarded tensors."""
    targets: list[torch.Tensor] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    kept: list[torch.Tensor] = field(default_factory=list)
    """What queued copies read from; nothing once they have been made."""
    gathering: Gathering | None = None
    """Of the guarded tensors, on a device."""
    early: Sampler | None = None
    early_picked: range = range(0)
    """Which of the guarded tensors are sampled before `save()` returns."""
    late: Sampler | None = None
    versions: list[int] = field(default_factory=list)
    """Version counters of these, at `save()`. They only help to explain: fused optimizers do not
    move them."""
    guarded_mark: Any = None
    """Once passed, the guarded tensors may change."""
    mark: Any = None
    """Once passed, all is in host memory."""

    def make_room(self) -> None:
        """Make what samples are read into, and where to find them in an image."""
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
        """Give all copies to the queue, guarded ones first, then the late samples of these."""
        guarded = len(self.keys)
        # Detached: should a storage be replaced meanwhile, the copy keeps the one it has. Not
        # sooner, for it takes as long as all else in `save()`.
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
        """Yield what to copy, in order: what is small in whole stretches, the rest as it is."""
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
    """Have torch's copies on this thread use no other. A second team of OpenMP threads would spin
    on the cores that the trainer's team computes on; one core saturates memory well enough.
    """
    # torch sets a thread's number when it first asks for it, and would undo ours.
    torch.get_num_threads()
    with contextlib.suppress(AttributeError):  # a torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


class Copy:
    """One save's background copy.

    Args:
        parts: one a device; let go of at the end.
        spans: the memory that must not change meanwhile.
        on_end: called once, on the copy's thread, with what went wrong or None.
        on_waited: called with the seconds that a guard kept the host.
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
        """Taken to begin, and to see to it that nothing begins."""
        self._is_given = False
        self._is_running = False
        self._is_cancelled = False
        self._thread = 0
        """The one that copies."""
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
            # Executors take nothing any more once the main thread has ended, while others may
            # train on; those the interpreter waits for, and for what they start.
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
        # Whoever was to give it to a thread may have been interrupted: then nobody comes.
        return self._is_given or self._is_running

    def cancel(self) -> None:
        """Copy nothing if the thread has not got to it yet."""
        with self._lock:
            if self._is_running:
                return
            self._is_cancelled = True
        self.let_go()
        self._copied.set()
        self._ended.set()

    def join(self) -> None:
        """Return once nothing is copied, and what came of it was told."""
        # Whoever is told of the end, on the copying thread itself, may close.
        is_own = self._thread == threading.get_ident()
        if self._is_coming and not is_own and not self.has_ended:
            self._ended.wait()

    def run(self, *, in_thread: bool = True) -> None:
        """Copy, check, and tell; once.

        in_thread: it is one for copies. Else an interrupt that ends the copy is raised again.
        """
        with self._lock:
            if self._is_cancelled or self._is_running:
                return
            self._is_running = True
        self._thread = threading.get_ident()
        if in_thread:
            # The trainer returns from `save()` first: it waits for the interpreter's lock.
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
                # Also after a failure: the slot must not be used while copies into it are queued.
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
            log.exception("the end of a background copy could not be told")
        finally:
            self._ended.set()
        if interrupt is not None:
            raise interrupt

    @property
    def has_ended(self) -> bool:
        """Whether nothing is copied any more: also in a forked child, which has no such thread."""
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
        """Keep the caller, on the host or by its streams, until what is guarded was copied."""
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


# --- the guard ----------------------------------------------------------------------------------

_hook_lock: Final = threading.Lock()
_armed: Final[weakref.WeakSet[Overlap]] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for each in list(_armed):
        each.before_step(optimizer)


def _arm(overlap: Overlap) -> None:
    """Have `before_step` called before any torch optimizer's step in this process."""
    global _hook
    with _hook_lock:
        _armed.add(overlap)
        if _hook is None:
            # Compiled steps leave their graph for it: traced, the wait would become a constant.
            _hook = register_optimizer_step_pre_hook(
                torch.compiler.disable(_before_step)  # type: ignore[no-untyped-call]
            )


def _disarm(overlap: Overlap) -> None:
    global _hook
    with _hook_lock:
        _armed.discard(overlap)
        if not _armed and _hook is not None:
            _hook.remove()
            _hook = None


class _Kept(NamedTuple):
    """What the copies of one layout from one device share."""

    made_for: Any
    early: Sampler
    early_picked: range
    late: Sampler
    gathering: Gathering | None


class Overlap:
    """Runs the background copies of one Checkpointer, one at a time.

    Args:
        optimizer: one or several.
        streams: the queues of a device.

    Raises UsageError for optimizers that cannot be guarded.

    Threads: `before_step` and `guard` are for any thread; the rest is the trainer's.
    """

    def __init__(
        self,
        optimizer: Optimizers | None,
        streams: Callable[[torch.device], Streams] = default_streams,
    ) -> None:
        self._selector = Selector(optimizer)
        self._streams_of = streams
        self._streams: dict[torch.device, Streams] = {}
        self._kept: dict[torch.device, _Kept] = {}
        """By device, of the last layout."""
        self._split: tuple[frozenset[int], Sequence[int], Split] = (
            frozenset(),
            (),
            Split([], [], []),
        )
        """Of host memory, the last one: what it was made from, and itself."""
        self._copy: Copy | None = None
        # One thread for all copies: whoever starts one waits until it runs, which takes
        # milliseconds where every core computes. The interpreter waits for what was submitted, not
        # for more to come: no copy is stopped within torch.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="milepost-copy")

    def arm(self) -> None:
        """Begin to guard steps, and have a thread ready."""
        _arm(self)
        with contextlib.suppress(RuntimeError):  # then saves do without
            self._executor.submit(copy_with_one_thread)

    # --- before the copy

    def select(self, items: Items) -> Selection:
        """See `Selector.select`."""
        return self._selector.select(items)

    def split(self, selection: Selection, items: Items, chosen: Sequence[int]) -> Split:
        """Decide how each tensor of a layout is copied. `chosen` are its items, by position."""
        devices, sources, late = items.devices, items.sources, selection.items
        if set(devices) <= {"cpu", ""}:
            known_late, known_chosen, split = self._split
            if known_late is not late or known_chosen is not chosen:
                split = Split([], [], [])
                for position, item in enumerate(chosen):
                    (split.guarded if item in late else split.now).append(position)
                self._split = late, chosen, split
            return split
        # Beside a device the host runs ahead: it changes its own tensors long before the device
        # has come to the step that the hook announced.
        split, room = Split([], [], []), CLONE_BYTES_MAX
        for position, item in enumerate(chosen):
            if devices[item] == "cpu":
                split.now.append(position)
            elif item in late:
                split.guarded.append(position)
            elif sources[item].nbytes <= room:
                room -= sources[item].nbytes
                split.cloned.append(position)
            else:
                split.now.append(position)
        return split

    # --- the copy

    def prepare(
        self,
        selection: Selection,
        items: Items,
        layout: TensorColumns,
        targets: Sequence[torch.Tensor | None],
        image: memoryview,
    ) -> None:
        """Make what the saves of a layout share, so that the first one is as cheap as any.

        Takes what `start()` takes, and reads no tensor.
        """
        split = self.split(selection, items, layout.items)
        for part in self._parts(split._replace(cloned=[]), items, layout, targets, image):
            part.make_room()
            part.let_go()

    def start(
        self,
        selection: Selection,
        split: Split,
        items: Items,
        layout: TensorColumns,
        targets: Sequence[torch.Tensor | None],
        image: memoryview,
        on_end: Callable[[MilepostError | None], None],
        on_waited: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """Copy in the background what is guarded or cloned; call `on_end` when that has ended.

        Args:
            selection, split: what `select()` and `split()` returned.
            items, layout: the state's, and where its tensors lie in the image.
            targets: a view of the image for each tensor of the layout.
            image: the slot's bytes.
            on_end, on_waited: see `Copy`.
        """
        parts = self._parts(split, items, layout, targets, image)
        copy = Copy(parts, selection.spans, on_end, on_waited)
        copy.begin()
        # First of all, since the thread may have run before `start` returns, or is interrupted.
        self._copy = copy
        try:
            copy.start(self._executor)
        except BaseException:
            copy.cancel()
            raise

    def _parts(
        self,
        split: Split,
        items: Items,
        layout: TensorColumns,
        targets: Sequence[torch.Tensor | None],
        image: memoryview,
    ) -> list[DevicePart]:
        chosen, sources, keys = layout.items, items.sources, items.keys
        whole = torch.frombuffer(image, dtype=torch.uint8) if len(image) else None
        by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
        guarded = [position for position in split.guarded if targets[position] is not None]
        if all(items.devices[chosen[position]] == "cpu" for position in guarded[:1]):
            if guarded:
                by_device[torch.device("cpu")] = guarded
        else:
            for position in guarded:
                by_device[sources[chosen[position]].device].append(position)
        parts = {}
        for device, positions in by_device.items():
            part = parts[device] = DevicePart(self._queues(device), whole)
            own = [chosen[position] for position in positions]
            part.keys = [keys[item] for item in own]
            part.sources = [sources[item] for item in own]
            part.targets = [target for position in positions
                            if (target := targets[position]) is not None]  # fmt: skip
            self._set_kept(part, device, layout, tuple(positions))
        for position in split.cloned:
            target, source = targets[position], sources[chosen[position]].detach()
            if target is not None:
                part = parts.setdefault(
                    source.device, DevicePart(self._queues(source.device), whole)
                )
                clone = torch.empty_like(source)
                part.streams.here(_copier(clone, source))
                part.targets.append(target)
                part.sources.append(clone)
        return list(parts.values())

    def _queues(self, device: torch.device) -> Streams:
        found = self._streams.get(device)
        if found is None:
            found = self._streams[device] = self._streams_of(device)
        return found

    def _set_kept(
        self,
        part: DevicePart,
        device: torch.device,
        layout: TensorColumns,
        positions: tuple[int, ...],
    ) -> None:
        """Give a part what is kept from save to save while the layout stays."""
        made_for = (positions, layout.sizes, layout.dtypes, layout.payloads_at)
        known = self._kept.get(device)
        if known is None or known.made_for != made_for:
            picked = range(0, len(positions), -(-len(positions) // EARLY_MAX))
            is_host = not part.streams.gathers
            early = _sampler(layout, [positions[index] for index in picked])
            late = _sampler(layout, positions)
            gathering = None
            if not is_host and part.image is not None:
                gathering = Gathering(layout, positions, part.image, part.sources[0].device)
            known = self._kept[device] = _Kept(made_for, early, picked, late, gathering)
        _, part.early, part.early_picked, part.late, part.gathering = known

    # --- the guard

    def before_step(self, optimizer: Optimizer) -> None:
        """Hold a step that changes what is being copied."""
        copy = self._copy
        if copy is None or copy.has_ended:
            return
        is_ours = any(optimizer is each for each in self._selector.optimizers)
        if is_ours or copy.spans.meet(stepped(optimizer)):
            copy.hold()

    def guard(self) -> None:
        """Hold the caller until the guarded tensors may change."""
        copy = self._copy
        if copy is not None:
            copy.hold()

    def settle(self) -> None:
        """Return once no copy is under way, and what came of the last one was told."""
        # Forgotten afterwards only: another thread's step must find it meanwhile, and so must the
        # next call if this one is interrupted.
        if self._copy is not None:
            self._copy.join()
        self._copy = None

    def close(self) -> None:
        """Settle, and guard no more."""
        self.settle()
        _disarm(self)
        self._executor.shutdown(wait=False)


def _sampler(layout: TensorColumns, positions: Iterable[int]) -> Sampler:
    chosen = list(positions)
    return Sampler(
        [layout.sizes[position] for position in chosen],
        [dtype for position in chosen if (dtype := layout.dtypes[position]) is not None],
        [layout.payloads_at[position] for position in chosen],
    )


def _copier(clone: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        with torch.no_grad():
            clone.copy_(source)

    return copy
