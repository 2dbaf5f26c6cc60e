"""Which tensors of a state are copied when, and on which device's queue.

Owns the choice between copying now, copying behind the next step, and copying from a clone. Owns
also what the copies of one layout share from save to save. It must not know of slots or saves, and
starts no copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from milepost.staging.copying import DevicePart
from milepost.staging.gathering import Gathering
from milepost.staging.layouts import TensorColumns
from milepost.staging.sampling import Sampler
from milepost.staging.selection import Selection
from milepost.staging.streams import Streams, default_streams

if TYPE_CHECKING:
    from milepost.memory.arena import Slot
    from milepost.staging.stager import Stager
    from milepost.state.items import Items

EARLY_MAX: Final = 128
"""How many tensors are also sampled before `save()` returns. Each costs a microsecond or two."""

CLONE_BYTES_MAX: Final = 256 << 20
"""Device memory that a save may take for clones of tensors that are not guarded. Tensors that do
not fit are copied before `save()` returns, and `save()` waits for the device."""


class Split(NamedTuple):
    """The tensors of a layout, by how they are copied; each is named by its position."""

    now: list[int]
    """Before `save()` returns."""
    guarded: list[int]
    """In the background: tensors of an optimizer."""
    cloned: list[int]
    """In the background, from a clone on their device: other tensors on a device."""


class ImageViews(NamedTuple):
    """Where the tensors of a layout lie in one slot's image."""

    layout: TensorColumns
    targets: Sequence[torch.Tensor | None]
    """A view for each tensor of the layout; None: it has no bytes."""
    image: memoryview

    @classmethod
    def of(cls, stager: Stager, slot: Slot) -> ImageViews:
        """Return those of a slot of the layout in force."""
        assert stager.layout is not None
        return cls(stager.layout.tensors, stager.targets(slot), slot.image)


class _Kept(NamedTuple):
    """What the copies of one layout from one device share."""

    made_for: Any
    early: Sampler
    early_picked: range
    late: Sampler
    gathering: Gathering | None


class Division:
    """Decides when and where each tensor of a state is copied. One thread at a time.

    Args:
        streams: the queues of a device.
    """

    def __init__(self, streams: Callable[[torch.device], Streams] = default_streams) -> None:
        self._streams_of = streams
        self._streams: dict[torch.device, Streams] = {}
        self._kept: dict[torch.device, _Kept] = {}
        """By device, of the last layout."""
        self._split: tuple[frozenset[int], Sequence[int], Split] = (
            frozenset(),
            (),
            Split([], [], []),
        )
        """The last split for host memory: what it was made from, and the split."""

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
        # With a device the host runs ahead: it changes its own tensors long before the device
        # reaches the step that the hook announced.
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

    def parts(self, split: Split, items: Items, views: ImageViews) -> list[DevicePart]:
        """Return the part of a copy for each device, with its guarded and cloned tensors. Clones
        are made here, in the order of the current stream.
        """
        layout, targets, image = views
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
        """Give a part the objects that are kept from save to save under one layout."""
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
