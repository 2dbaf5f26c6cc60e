"""Staging behind the step: `save()` returns at once, and what optimizers change is copied later.

Tensors that only an optimizer's step changes are copied during the next forward and backward, and
the next step waits for the copy. Everything else is copied before `save()` returns. Owns the copy
that is under way and its thread. `selection` finds what may be copied later, `division` decides
how, `copying` copies, and `guard` calls this module before each step. See
docs/design/0007-overlap.md.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import Optimizer

from milepost.errors import MilepostError, SaveFailed
from milepost.staging import guard
from milepost.staging.copying import Copy, copy_with_one_thread
from milepost.staging.division import Division, ImageViews
from milepost.staging.selection import Optimizers, Selection, Selector, stepped
from milepost.staging.strategy import Filling, Listener, Staging
from milepost.staging.streams import Streams, default_streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from milepost.memory.arena import Slot
    from milepost.staging.stager import Stager
    from milepost.state.items import Items
    from milepost.wire.messages import SaveRef

log = logging.getLogger("milepost")


class BehindFilling(Filling):
    """Copies a state in part now, and in part in the background."""

    def __init__(self, staging: BehindStaging, items: Items, selection: Selection) -> None:
        self._staging = staging
        self._items = items
        self._selection = selection

    def prepare(self, stager: Stager) -> None:
        """See `Filling.prepare`: the samplers, and what gathers small tensors on a device."""
        if stager.layout is None:
            return
        division, views = self._staging.division, ImageViews.of(stager, stager.slots[0])
        split = division.split(self._selection, self._items, views.layout.items)
        for part in division.parts(split._replace(cloned=[]), self._items, views):
            part.make_room()
            part.let_go()

    def fill(
        self,
        stager: Stager,
        slot: Slot,
        save: SaveRef,
        objects: Mapping[int, bytes] | None,
        listener: Listener,
        digests: Callable[[], bytes] = bytes,
    ) -> bool:
        """See `Filling.fill`; the image is completed by the copy's thread."""
        items, division = self._items, self._staging.division
        slot, placed = stager.begin(slot, items, objects=objects)

        def end(error: MilepostError | None) -> None:
            """On the copy's thread."""
            if error is None:
                try:
                    image = stager.seal(slot, save, placed, digests())
                except Exception as caught:
                    error = SaveFailed("internal", f"the image could not be sealed: {caught!r}")
                else:
                    listener.staged(image)
                    return
            slot.release()
            listener.failed(error)

        try:
            views = ImageViews.of(stager, slot)
            split = division.split(self._selection, items, views.layout.items)
            stager.copy(slot, items, split.now)
            parts = division.parts(split, items, views)
            self._staging.start(Copy(parts, self._selection.spans, end, listener.waited))
        except BaseException:
            # It may have begun to copy before it was interrupted.
            self._staging.settle()
            slot.release()
            raise
        return False


class BehindStaging(Staging):
    """Runs the background copies of one Checkpointer, one at a time.

    Args:
        optimizer: one or several.
        streams: the queues of a device.

    Raises UsageError for optimizers that cannot be guarded.

    Threads: any thread may call `before_step` and `guard`. Everything else is for the trainer's
    thread, and only this thread writes the fields.
    """

    def __init__(
        self,
        optimizer: Optimizers | None,
        streams: Callable[[torch.device], Streams] = default_streams,
    ) -> None:
        self._selector = Selector(optimizer)
        self.division = Division(streams)
        self._copy: Copy | None = None
        # One thread for all copies: starting a thread means waiting until it runs, which takes
        # milliseconds if every core is busy. At its end the interpreter waits for submitted work,
        # so no copy is stopped inside torch.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="milepost-copy")

    def arm(self) -> None:
        """Begin to guard steps, and have a thread ready."""
        guard.arm(self)
        with contextlib.suppress(RuntimeError):  # then saves do without
            self._executor.submit(copy_with_one_thread)

    def choose(self, items: Items) -> Filling:
        """See `Staging.choose` and `Selector.select`."""
        return BehindFilling(self, items, self._selector.select(items))

    def start(self, copy: Copy) -> None:
        """Begin a copy. The last one has ended."""
        copy.begin()
        # Note it first (docs/design/0010-interrupts.md): the thread may be done before `start`
        # returns.
        self._copy = copy
        try:
            copy.start(self._executor)
        except BaseException:
            copy.cancel()
            raise

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
        """Return once no copy is under way and the result of the last one was reported."""
        # Forget the copy only once it is over: until then, a step of another thread must find it,
        # and so must the next call after an interrupt (docs/design/0010-interrupts.md).
        if self._copy is not None:
            self._copy.join()
        self._copy = None

    def close(self) -> None:
        """Settle, and stop guarding steps."""
        self.settle()
        guard.disarm(self)
        self._executor.shutdown(wait=False)
