"""Staging: one rank's arenas, and the one pass of copies that fills an image.

Owns the making and replacing of arenas as layouts change, the containers around the payloads, the
views that the copies go to, and pinning. It must not know of daemons, plans or checkpoints: which
items to stage comes from the caller, and so does the choice of a slot. Nothing of the state is kept
between saves: a layout holds shapes and dtypes, never a tensor or an address of the trainer's.

One thread at a time uses a `Stager`, except that `fault_in` may run beside the others.

Sources: torch/serialization.py (2.13), cudaHostRegister in the CUDA runtime's manual.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import torch

from milepost.dcp_format import container
from milepost.errors import Rejected, SaveFailed
from milepost.format.layout import (
    PAGE_BYTES,
    SMALL_ALIGN_BYTES,
    TableRow,
    align,
    pack_table,
    place,
)
from milepost.memory.arena import (
    Arena,
    Slot,
    SlotRecord,
    SlotState,
    arena_path,
    find_arenas,
    record_bytes,
)
from milepost.staging.gathering import GATHERED_ON, Copies, Gathering, views
from milepost.state.items import serialise_objects
from milepost.wire.offers import Kind

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from pathlib import Path

    from milepost.state.items import Items
    from milepost.wire.messages import SaveRef
    from milepost.wire.offers import Box

log = logging.getLogger(__name__)

OBJECTS_SPARE_BYTES: Final = 64 << 10
"""Least room for objects to grow in an image; beside it, a quarter of their length. An image that
is too short costs a new arena, with all its first touches."""


# --- pinning ------------------------------------------------------------------------------------


class Pinner(Protocol):
    """Makes host memory fit for fast copies from a device."""

    def register(self, address: int, nbytes: int) -> str:
        """Pin a range that is not pinned; return "" or why it could not be done."""

    def unregister(self, address: int) -> None:
        """Unpin a range by its start."""


class NoPinner:
    """For machines without a device: nothing is pinned, and nothing needs to be."""

    def register(self, address: int, nbytes: int) -> str:
        return ""

    def unregister(self, address: int) -> None:
        pass


class CudaPinner:
    """Pins with `cudaHostRegister`, in the context of the current device."""

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, nbytes: int) -> str:
        result = self._runtime().cudaHostRegister(address, nbytes, 0)
        return "" if int(result) == 0 else f"cudaHostRegister: {result}"

    def unregister(self, address: int) -> None:
        self._runtime().cudaHostUnregister(address)


def default_pinner() -> Pinner:
    """Return what fits this machine."""
    return CudaPinner() if torch.cuda.is_available() else NoPinner()


# --- layouts and generations --------------------------------------------------------------------


class _Tensors(NamedTuple):
    """The tensors of a layout, as columns in the order in which they lie in the image."""

    items: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...]
    sizes: tuple[Box, ...]
    payloads_at: tuple[int, ...]


class Layout(NamedTuple):
    """Where everything lies in a rank's images. `objects` are the items to serialise, ascending."""

    layout_id: str
    table: bytes
    tensors: _Tensors
    containers: tuple[tuple[int, container.Template], ...]
    """Offset in the image and form of each tensor's container."""
    objects: tuple[int, ...]
    objects_at: int


def make_layout(items: Items, assigned: Sequence[int], layout_id: str) -> Layout:
    """Lay the assigned items out; `assigned` is ascending. Pure; cost about 3 us an item."""
    chosen = [item for item in assigned if items.kinds[item] != Kind.OBJECT]
    templates = []
    for item in chosen:
        dtype = items.dtypes[item]
        assert dtype is not None
        templates.append(container.template(tuple(items.sizes[item]), dtype))
    placement = place([template.total_bytes for template in templates])
    rows = [
        TableRow(
            item,
            at,
            template.total_bytes,
            at + template.payload_at,
            template.payload_bytes,
            at + template.crc_at,
            at + template.central_crc_at,
        )
        for item, at, template in zip(chosen, placement.offsets, templates, strict=True)
    ]
    tensors = _Tensors(
        tuple(chosen),
        tuple(items.dtypes[item] for item in chosen),
        tuple(tuple(items.sizes[item]) for item in chosen),
        tuple(row.payload_at for row in rows),
    )
    return Layout(
        layout_id,
        pack_table(rows),
        tensors,
        tuple(zip(placement.offsets, templates, strict=True)),
        tuple(item for item in assigned if items.kinds[item] == Kind.OBJECT),
        placement.objects_at,
    )


def _serialised(
    items: Items, layout: Layout, objects: Mapping[int, bytes] | None
) -> Mapping[int, bytes]:
    """Return the layout's objects serialised, those given as they are."""
    known = objects or {}
    missing = [item for item in layout.objects if item not in known]
    return {**known, **serialise_objects(items, missing)} if missing else known


def _check(layout: Layout, items: Items) -> None:
    """Refuse items that are not those the layout was made for: a copy would broadcast or convert.

    Raises SaveFailed("structure-changed").
    """
    tensors, sizes, dtypes, kinds = layout.tensors, items.sizes, items.dtypes, items.kinds
    hint = "offer the new structure before staging it"
    last = max(tensors.items[-1:] + layout.objects[-1:], default=-1)
    if last >= len(items):
        raise SaveFailed(
            "structure-changed",
            f"layout {layout.layout_id} places item {last} of a state that has {len(items)}",
            hint,
        )
    # A column at a time, since this is asked in every save; which one differs, only if one does.
    is_same = tensors.sizes == tuple([sizes[item] for item in tensors.items]) and (
        tensors.dtypes == tuple([dtypes[item] for item in tensors.items])
    )
    differing = () if is_same else zip(tensors.items, tensors.sizes, tensors.dtypes, strict=True)
    for item, size, dtype in differing:
        if sizes[item] != size or dtypes[item] is not dtype:
            raise SaveFailed(
                "structure-changed",
                f"{items.keys[item]!r} is {dtypes[item]} {tuple(sizes[item])} where layout "
                f"{layout.layout_id} has {dtype} {tuple(size)}",
                hint,
            )
    for item in layout.objects:
        if kinds[item] != Kind.OBJECT:
            raise SaveFailed(
                "structure-changed",
                f"{items.keys[item]!r} is a tensor where layout {layout.layout_id} has an object",
                hint,
            )


def _targets(image: memoryview, tensors: _Tensors) -> list[torch.Tensor | None]:
    """Return a view of the image for each tensor's payload; None where there is nothing to copy."""
    if not len(image):
        return [None] * len(tensors.items)
    base = torch.frombuffer(image, dtype=torch.uint8)
    return views(base, tensors.dtypes, tensors.sizes, tensors.payloads_at)


class _Pairs(NamedTuple):
    """Tensors of one device and where they go, by position in the layout."""

    positions: list[int]
    into: list[torch.Tensor]
    out_of: list[torch.Tensor]


def _by_device(
    items: Items, chosen: Sequence[int], positions: list[int]
) -> dict[torch.device, list[int]]:
    """Divide positions of a layout by where their tensors are, host memory last."""
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
    """One arena with the views into it."""

    arena: Arena
    layout: Layout
    targets: list[list[torch.Tensor | None]] = field(default_factory=list)
    """Per slot, a view for each tensor of the layout."""
    gatherings: dict[torch.device, tuple[list[int], Gathering]] = field(default_factory=dict)
    """By device: the positions it was made for, and how they get into an image."""
    pinned_at: int = 0
    """Address of the pinned range; 0: none."""
    is_faulted_in: bool = False

    def close(self, pinner: Pinner, *, unlink: bool) -> None:
        """Unpin, then unmap and perhaps remove. The views go first: each holds the mapping's
        buffer.
        """
        if self.pinned_at:
            pinner.unregister(self.pinned_at)
            self.pinned_at = 0
        self.targets.clear()
        if unlink and _is_free(self):
            self.arena.free()
        self.arena.close()
        if unlink:
            self.arena.unlink()


def _is_free(generation: _Generation) -> bool:
    return all(slot.state is SlotState.FREE for slot in generation.arena.slots)


class Staged(NamedTuple):
    """A complete image. `slot` is the one used: another than asked for if the arena had to grow."""

    arena: Path
    slot: Slot
    record: SlotRecord


class Stager:
    """Fills images for one rank. Owns its arenas, and removes each when nothing in it is needed.

    Args:
        job, attempt, rank: name the arenas' files.
        slots: images an arena holds.
        pinner: None for what fits this machine.
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
    def layout(self) -> Layout | None:
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
        """Return the free slots of the layout in force, and let go of arenas no longer needed."""
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
        free. `objects` are serialised objects by item, to know how much room they take; those not
        in it are serialised here. Once a layout: what a save needs on top is one `stage`.

        Raises:
            Rejected: "shm-too-small"; the old layout stays in force, unless its arena was given
                up for the new one and there was no room all the same.
            UsageError: "unpicklable".
        """
        if self.layout_id == layout_id:
            return
        layout = make_layout(items, assigned, layout_id)
        blobs = _serialised(items, layout, objects)
        self._put_in_force(layout, [len(blobs[item]) for item in layout.objects])

    def renew(self) -> None:
        """Have the next `lay_out` make a new arena; the present one goes when its slots are."""
        if self._current is not None:
            self._retired.append(self._current)
            self._current = None

    def fault_in(self) -> None:
        """Map every page of the arena in force and pin it, once; later saves are as cheap as any.

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
    ) -> Staged:
        """Fill the slot with this save's values and seal it; on return the state may change.

        Objects first, then one pass of copies; on return all device copies have ended. If the
        objects do not fit, the arena is replaced by a larger one and one of its slots is used; the
        slot that was passed stays free. `objects` are those already serialised for this save.

        Raises:
            UsageError: "unpicklable"; the slot stays free.
            SaveFailed: "structure-changed": the items do not fit the layout; the slot stays free.
            Rejected: "shm-too-small" when the objects outgrew the arena; the slot stays free.
        """
        slot, placed = self.begin(slot, items, objects=objects)
        try:
            assert self._current is not None
            self.copy(slot, items, range(len(self._current.layout.tensors.items)))
            return self.seal(slot, save, placed)
        except BaseException:
            slot.release()
            raise

    def begin(
        self, slot: Slot, items: Items, *, objects: Mapping[int, bytes] | None = None
    ) -> tuple[Slot, tuple[tuple[int, int, int], ...]]:
        """Start an image: check it against the layout and write the objects.

        Returns the slot used (see `stage`) and where the objects lie, for `seal`. For callers that
        copy in parts; `stage` does it all. Raises as `stage` does.
        """
        current = self._current
        assert current is not None, "no layout is in force"
        assert current.arena.slots[slot.index] is slot, "the slot is of another arena"
        layout = current.layout
        _check(layout, items)
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
            # The file ends on a page; what an earlier, longer image left there is not written out.
            image[end : align(end, PAGE_BYTES)] = bytes(align(end, PAGE_BYTES) - end)
        except BaseException:
            slot.release()
            raise
        return slot, tuple(placed)

    def targets(self, slot: Slot) -> Sequence[torch.Tensor | None]:
        """Return where each tensor of the layout in force goes; None: it has no bytes.

        These are views of the slot's image, and keep the arena mapped: drop them before `close`.
        """
        current = self._current
        assert current is not None
        assert current.arena.slots[slot.index] is slot, "the slot is of another arena"
        return current.targets[slot.index]

    def copy(self, slot: Slot, items: Items, positions: Sequence[int]) -> None:
        """Copy the tensors at these positions of the layout into the slot; on return all is there.

        A position counts the layout's tensors from 0. Holds no GIL while it copies.
        """
        current = self._current
        assert current is not None
        assert current.arena.slots[slot.index] is slot, "the slot is of another arena"
        targets, chosen = current.targets[slot.index], current.layout.tensors.items
        filled = [position for position in positions if targets[position] is not None]
        by_device = _by_device(items, chosen, filled)
        with torch.no_grad():
            # The device's work is only given here, and goes on beside the copies of host memory,
            # which come last.
            for device, found in by_device.items():
                # In columns: there may be 10,000, and the trainer waits.
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
        """Yield what to copy, in order: what is small in whole stretches, the rest as it is."""
        image = torch.frombuffer(slot.image, dtype=torch.uint8)
        known = current.gatherings.get(device)
        if known is None or known[0] != pairs.positions:
            gathering = Gathering(current.layout.tensors, pairs.positions, image, device)
            known = current.gatherings[device] = (pairs.positions, gathering)
        _, gathering = known
        yield from gathering.gathered(image, pairs.out_of)
        if gathering.alone:
            yield gathering.rest(pairs.into, pairs.out_of)

    def seal(self, slot: Slot, save: SaveRef, placed: Sequence[tuple[int, int, int]]) -> Staged:
        """Declare the image complete. `placed` is what `begin` returned."""
        current = self._current
        assert current is not None
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
            objects=tuple(placed),
        )
        slot.seal(record)
        return Staged(current.arena.path, slot, record)

    def abandon(self) -> None:
        """Let go of all arenas in whatever state they are, also of files that an interrupted call
        has left, and go on with numbers that none of them has. Only once nobody reads an image.
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

        `unlink=False` leaves the files: for a daemon that still writes what was staged, or a
        trainer that restarts from memory.
        """
        for each in self._all():
            each.close(self._pinner, unlink=unlink)
        self._current = None
        self._retired.clear()

    def _all(self) -> list[_Generation]:
        return [*self._retired, *([] if self._current is None else [self._current])]

    def _put_in_force(self, layout: Layout, object_bytes: Sequence[int]) -> _Generation:
        wanted = layout.objects_at
        if object_bytes:
            wanted += sum(align(length, SMALL_ALIGN_BYTES) for length in object_bytes)
            wanted += max(OBJECTS_SPARE_BYTES, wanted - layout.objects_at >> 2)
        self._drop_retired()
        try:
            arena = self._make_arena(layout, wanted)
        except Rejected:
            if self._current is None or not _is_free(self._current):
                raise
            # Old and new together do not fit; nothing in the old one is needed.
            self.renew()
            self._drop_retired()
            arena = self._make_arena(layout, wanted)
        self._generation += 1
        current = _Generation(arena, layout)
        for slot in arena.slots:
            for at, template in layout.containers:
                payload_at = at + template.payload_at
                slot.image[at:payload_at] = template.prefix
                after = payload_at + template.payload_bytes
                slot.image[after : after + len(template.suffix)] = template.suffix
            current.targets.append(_targets(slot.image, layout.tensors))
        if self._current is not None:
            self._retired.append(self._current)
        self._current = current
        self._drop_retired()
        return current

    def _make_arena(self, layout: Layout, image_bytes: int) -> Arena:
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
            if _is_free(each):
                each.close(self._pinner, unlink=True)
            else:
                kept.append(each)
        self._retired = kept

    def _pin(self, generation: _Generation) -> None:
        """Pin all images as one range, once. A failure costs speed only, and is said once."""
        slots = generation.arena.slots
        nbytes = generation.arena.image_bytes * len(slots)
        # Registering a range without bytes is an error that shows in an unrelated later call.
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
