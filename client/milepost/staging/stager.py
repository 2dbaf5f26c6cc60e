"""Staging: one rank's arenas, and the one pass of copies that fills an image.

Makes arenas, and replaces them as layouts change. It must not know of daemons, plans or
checkpoints: the caller says which items to stage, and into which slot. It keeps no part of the
state between saves.

One thread at a time uses a `Stager`, except that `fault_in` may run beside the others.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import torch

from milepost.errors import Rejected
from milepost.format.layout import PAGE_BYTES, SMALL_ALIGN_BYTES, align
from milepost.memory.arena import (
    Arena,
    Slot,
    SlotRecord,
    SlotState,
    arena_path,
    find_arenas,
    record_bytes,
)
from milepost.staging.gathering import GATHERED_ON, Copies, Gathering
from milepost.staging.layouts import (
    ImageLayout,
    check_fits,
    make_layout,
    payload_views,
    write_containers,
)
from milepost.staging.pinning import Pinner, default_pinner
from milepost.state.offering import serialise_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping, Sequence
    from pathlib import Path

    from milepost.state.items import Items
    from milepost.wire.messages import SaveRef

log = logging.getLogger(__name__)

OBJECTS_SPARE_BYTES: Final = 64 << 10
"""Spare room in an image, at least, for its objects to grow; a quarter of their length if that is
more. An image that is too short costs a new arena, whose pages have to be touched anew."""

ObjectPlaces: TypeAlias = tuple[tuple[int, int, int], ...]
"""(item, offset in the image, length) of each serialised object."""


def _serialised(
    items: Items, layout: ImageLayout, objects: Mapping[int, bytes] | None
) -> Mapping[int, bytes]:
    """Return the layout's objects serialised; `objects` has those that are serialised already."""
    known = objects or {}
    missing = [item for item in layout.objects if item not in known]
    return {**known, **serialise_objects(items, missing)} if missing else known


class _Pairs(NamedTuple):
    """Tensors of one device, and where each goes."""

    positions: list[int]
    """In the layout."""
    into: list[torch.Tensor]
    out_of: list[torch.Tensor]


def _by_device(
    items: Items, chosen: Sequence[int], positions: list[int]
) -> dict[torch.device, list[int]]:
    """Group positions of a layout by the device that holds their tensors, host memory last."""
    devices, host = items.devices, torch.device("cpu")
    if not positions or set(devices) <= {"cpu", ""}:
        return {host: positions} if positions else {}
    found: dict[torch.device, list[int]] = {}
    on_host = []
    for position in positions:
        item = chosen[position]
        if devices[item] == "cpu":
            on_host.append(position)
        else:
            found.setdefault(items.sources[item].device, []).append(position)
    return {**found, host: on_host} if on_host else found


@dataclass(eq=False)
class _Generation:
    """One arena with its layout, and the views into it."""

    arena: Arena
    layout: ImageLayout
    targets: list[list[torch.Tensor | None]] = field(default_factory=list)
    """Per slot, a view for each tensor of the layout."""
    gatherings: dict[torch.device, tuple[list[int], Gathering]] = field(default_factory=dict)
    """By device: the positions that a gathering was made for, and the gathering."""
    pinned_at: int = 0
    """Address of the pinned range; 0: none."""
    is_faulted_in: bool = False

    @property
    def is_free(self) -> bool:
        """Whether no image in it is needed any more."""
        return all(slot.state is SlotState.FREE for slot in self.arena.slots)

    def close(self, pinner: Pinner, *, unlink: bool) -> None:
        """Unpin and unmap the arena, and remove its file if `unlink` is true."""
        if self.pinned_at:
            pinner.unregister(self.pinned_at)
            self.pinned_at = 0
        self.targets.clear()  # Each view keeps the memory mapped.
        if unlink and self.is_free:
            self.arena.free()
        self.arena.close()
        if unlink:
            self.arena.unlink()


class StagedImage(NamedTuple):
    """A complete image."""

    arena: Path
    slot: Slot
    """The slot that was used. It differs from the given one if the arena had to grow."""
    record: SlotRecord


class Stager:
    """Fills images for one rank. Owns its arenas, and removes each when no image in it is needed.

    Args:
        job, attempt, rank: name the arenas' files.
        slots: images an arena holds.
        pinner: None for the one that fits this machine.
        gathered_on: kinds of device on which small tensors are gathered before they are copied.
    """

    def __init__(
        self,
        job: str,
        attempt: int,
        rank: int,
        *,
        slots: int = 2,
        pinner: Pinner | None = None,
        gathered_on: Container[str] = GATHERED_ON,
    ) -> None:
        self._job = job
        self._attempt = attempt
        self._rank = rank
        self._slots = slots
        self._pinner = default_pinner() if pinner is None else pinner
        self._gathered_on = gathered_on
        self._generation = 0
        self._current: _Generation | None = None
        self._retired: list[_Generation] = []
        self._pinning_failed = False

    @property
    def layout_id(self) -> str:
        """The layout that is in force; "" before the first."""
        return "" if self._current is None else self._current.layout.layout_id

    @property
    def layout(self) -> ImageLayout | None:
        """The layout that is in force."""
        return None if self._current is None else self._current.layout

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The slots of the layout in force; those of earlier layouts may still be in use."""
        return () if self._current is None else self._current.arena.slots

    @property
    def arenas(self) -> tuple[Path, ...]:
        """The files of all arenas that exist, the one in force last."""
        return tuple(each.arena.path for each in self._all())

    def free_slots(self) -> list[Slot]:
        """Return the free slots of the layout in force. Removes arenas that are not needed."""
        self._drop_retired()
        return [slot for slot in self.slots if slot.state is SlotState.FREE]

    def lay_out(
        self,
        items: Items,
        assigned: Sequence[int],
        layout_id: str,
        *,
        objects: Mapping[int, bytes] | None = None,
    ) -> None:
        """Put a layout in force: make its arena, and write everything but the payloads into it.

        Does nothing if the layout is in force already. The old arena stays until its slots are
        free. Each save then needs one `stage`.

        Args:
            items: of the state.
            assigned: the items to stage, ascending.
            layout_id: the layout's name.
            objects: serialised objects by item; their lengths decide how much room they get.
                Objects that are missing are serialised here.

        Raises:
            Rejected: "shm-too-small". The old layout stays in force, unless its arena was removed
                to make room and the room was still too small.
            UsageError: "unpicklable".
        """
        if self.layout_id == layout_id:
            return
        layout = make_layout(items, assigned, layout_id)
        blobs = _serialised(items, layout, objects)
        self._put_in_force(layout, [len(blobs[item]) for item in layout.objects])

    def renew(self) -> None:
        """Make the next `lay_out` create a new arena. The present arena is removed once its slots
        are free.
        """
        if self._current is not None:
            self._retired.append(self._current)
            self._current = None

    def fault_in(self) -> None:
        """Map every page of the arena in force and pin it, once, so that the first save is cheap.

        May run in a thread of its own; wait for it before `close`.
        """
        current = self._current
        if current is not None and not current.is_faulted_in:
            current.is_faulted_in = True
            current.arena.fault_in()
            self._pin(current)

    def stage(
        self,
        slot: Slot,
        save: SaveRef,
        items: Items,
        *,
        objects: Mapping[int, bytes] | None = None,
        digests: Callable[[], bytes] = bytes,
    ) -> StagedImage:
        """Fill the slot with this save's values and seal it; on return the state may change.

        Writes the objects first, then makes one pass of copies. On return all copies from devices
        have ended. If the objects do not fit, a larger arena replaces this one, one of its slots is
        used, and the given slot stays free. `objects` are those already serialised for this save.
        `digests` is called after the copies (see `Filling.fill`).

        Raises:
            UsageError: "unpicklable"; the slot stays free.
            SaveFailed: "structure-changed": the items do not fit the layout; the slot stays free.
            Rejected: "shm-too-small": the objects outgrew the arena; the slot stays free.
        """
        slot, placed = self.begin(slot, items, objects=objects)
        try:
            layout = self._generation_of(slot).layout
            self.copy(slot, items, range(len(layout.tensors.items)))
            return self.seal(slot, save, placed, digests())
        except BaseException:
            slot.release()
            raise

    def begin(
        self, slot: Slot, items: Items, *, objects: Mapping[int, bytes] | None = None
    ) -> tuple[Slot, ObjectPlaces]:
        """Begin an image: check the items against the layout, and write the objects.

        For callers that copy in parts: `begin`, `copy`, `seal`. Returns the slot used (see `stage`)
        and where the objects lie. Raises as `stage` does.
        """
        current = self._generation_of(slot)
        layout = current.layout
        check_fits(layout, items)
        blobs = _serialised(items, layout, objects)
        end = layout.objects_at
        placed = []
        for item in layout.objects:
            at = align(end, SMALL_ALIGN_BYTES)
            placed.append((item, at, len(blobs[item])))
            end = at + len(blobs[item])
        if end > current.arena.image_bytes:
            current = self._put_in_force(layout, [length for _, _, length in placed])
            slot = current.arena.slots[0]
        slot.begin()
        try:
            image, end = slot.image, layout.objects_at
            for item, at, length in placed:
                image[end:at] = bytes(at - end)
                image[at : at + length] = blobs[item]
                end = at + length
            # The file ends on a page; overwrite what an earlier, longer image left there.
            image[end : align(end, PAGE_BYTES)] = bytes(align(end, PAGE_BYTES) - end)
        except BaseException:
            slot.release()
            raise
        return slot, tuple(placed)

    def targets(self, slot: Slot) -> Sequence[torch.Tensor | None]:
        """Return a view of the image for each tensor of the layout in force; None: it has no bytes.

        The views keep the arena mapped: drop them before `close`.
        """
        return self._generation_of(slot).targets[slot.index]

    def copy(self, slot: Slot, items: Items, positions: Sequence[int]) -> None:
        """Copy the tensors at these positions of the layout into the slot, completely.

        Releases the GIL while it copies.
        """
        current = self._generation_of(slot)
        targets, chosen = current.targets[slot.index], current.layout.tensors.items
        filled = [position for position in positions if targets[position] is not None]
        by_device = _by_device(items, chosen, filled)
        with torch.no_grad():
            # Copies from a device are only queued here. They run while the copies from host memory,
            # which come last, are made.
            for device, found in by_device.items():
                # Work on whole columns: there may be 10,000 tensors, and the trainer waits.
                pairs = _Pairs(
                    found,
                    [target for position in found if (target := targets[position]) is not None],
                    [items.sources[chosen[position]] for position in found],
                )
                if device.type == "cpu" and "cpu" not in self._gathered_on:
                    torch._foreach_copy_(pairs.into, pairs.out_of)
                    continue
                for into, out_of in self._few_copies(current, slot, device, pairs):
                    torch._foreach_copy_(into, out_of, non_blocking=True)
            for device in by_device:
                if device.type != "cpu":
                    torch.accelerator.current_stream(device).synchronize()

    def _few_copies(
        self, current: _Generation, slot: Slot, device: torch.device, pairs: _Pairs
    ) -> Iterator[Copies]:
        """Yield the copies in order: small tensors in whole stretches, the others one by one."""
        image = torch.frombuffer(slot.image, dtype=torch.uint8)
        known = current.gatherings.get(device)
        if known is None or known[0] != pairs.positions:
            gathering = Gathering(current.layout.tensors, pairs.positions, image, device)
            known = current.gatherings[device] = (pairs.positions, gathering)
        _, gathering = known
        yield from gathering.gathered(image, pairs.out_of)
        if gathering.alone:
            yield gathering.rest(pairs.into, pairs.out_of)

    def seal(
        self, slot: Slot, save: SaveRef, placed: ObjectPlaces, digests: bytes = b""
    ) -> StagedImage:
        """Declare the image complete. `placed` is what `begin` returned."""
        current = self._generation_of(slot)
        layout = current.layout
        end = layout.objects_at
        if placed:
            _, at, length = placed[-1]
            end = at + length
        record = SlotRecord(
            job=save.job,
            save_id=save.save_id,
            step=save.step,
            name=save.name,
            rank=self._rank,
            layout_id=layout.layout_id,
            image_bytes=end if layout.tensors.items or placed else 0,
            objects=placed,
            digests=digests,
            place=save.place,
            overwrite=save.overwrite,
        )
        slot.seal(record)
        return StagedImage(current.arena.path, slot, record)

    def abandon(self) -> None:
        """Remove all arenas in whatever state they are, and files that an interrupted call left.

        New arenas get other numbers. Call it only when nobody reads an image any more. See
        docs/design/0010-interrupts.md.
        """
        for each in self._all():
            with suppress(Exception):
                each.close(self._pinner, unlink=True)
        self._current, self._retired = None, []
        left = [
            file
            for file in find_arenas(self._job)
            if (file.attempt, file.rank) == (self._attempt, self._rank)
        ]
        for file in left:
            file.path.unlink(missing_ok=True)
        self._generation = 1 + max([self._generation, *(file.generation for file in left)])

    def close(self, *, unlink: bool = True) -> None:
        """Unpin and unmap all arenas, and remove their files.

        `unlink=False` keeps the files, for a daemon that still writes what was staged, or for a
        trainer that restarts from memory.
        """
        for each in self._all():
            each.close(self._pinner, unlink=unlink)
        self._current = None
        self._retired.clear()

    def _generation_of(self, slot: Slot) -> _Generation:
        """Return the arena in force, to which the slot must belong."""
        current = self._current
        assert current is not None, "no layout is in force"
        assert current.arena.slots[slot.index] is slot, "the slot is of another arena"
        return current

    def _all(self) -> list[_Generation]:
        return [*self._retired, *([] if self._current is None else [self._current])]

    def _put_in_force(self, layout: ImageLayout, object_bytes: Sequence[int]) -> _Generation:
        wanted = layout.objects_at
        if object_bytes:
            wanted += sum(align(length, SMALL_ALIGN_BYTES) for length in object_bytes)
            wanted += max(OBJECTS_SPARE_BYTES, wanted - layout.objects_at >> 2)
        self._drop_retired()
        try:
            arena = self._make_arena(layout, wanted)
        except Rejected:
            if self._current is None or not self._current.is_free:
                raise
            # The old and the new arena do not fit into memory together, and nobody needs the old
            # one.
            self.renew()
            self._drop_retired()
            arena = self._make_arena(layout, wanted)
        self._generation += 1
        current = _Generation(arena, layout)
        for slot in arena.slots:
            write_containers(layout, slot.image)
            current.targets.append(payload_views(layout, slot.image))
        if self._current is not None:
            self._retired.append(self._current)
        self._current = current
        self._drop_retired()
        return current

    def _make_arena(self, layout: ImageLayout, image_bytes: int) -> Arena:
        return Arena.create(
            arena_path(self._job, self._attempt, self._rank, self._generation),
            layout_id=layout.layout_id,
            table=layout.table,
            slots=self._slots,
            image_bytes=image_bytes,
            record_bytes=record_bytes(len(layout.objects)),
        )

    def _drop_retired(self) -> None:
        """Unmap and remove earlier arenas whose slots are all free."""
        kept = []
        for each in self._retired:
            if each.is_free:
                each.close(self._pinner, unlink=True)
            else:
                kept.append(each)
        self._retired = kept

    def _pin(self, generation: _Generation) -> None:
        """Pin all images as one range, once. A failure costs only speed, and is logged once."""
        slots = generation.arena.slots
        nbytes = generation.arena.image_bytes * len(slots)
        # Registering a range without bytes is an error that a later, unrelated call reports.
        if not nbytes or generation.pinned_at:
            return
        first = torch.frombuffer(slots[0].image, dtype=torch.uint8).data_ptr()
        problem = self._pinner.register(first, nbytes)
        if not problem:
            generation.pinned_at = first
        elif not self._pinning_failed:
            self._pinning_failed = True
            log.warning(
                "arena.unpinned",
                extra={"file": str(generation.arena.path), "bytes": nbytes, "cause": problem},
            )
