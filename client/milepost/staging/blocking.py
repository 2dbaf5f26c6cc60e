"""Staging at once: when `save()` returns, the image is complete and the state may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milepost.staging.strategy import Filling, Listener, Staging

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from milepost.memory.arena import Slot
    from milepost.staging.stager import Stager
    from milepost.state.items import Items
    from milepost.wire.messages import SaveRef


class BlockingFilling(Filling):
    """Copies all of a state at once."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def prepare(self, stager: Stager) -> None:
        """See `Filling.prepare`: `Stager.lay_out` has made everything."""

    def fill(
        self,
        stager: Stager,
        slot: Slot,
        save: SaveRef,
        objects: Mapping[int, bytes] | None,
        listener: Listener,
        digests: Callable[[], bytes] = bytes,
    ) -> bool:
        """See `Filling.fill`; the image is always complete."""
        listener.staged(stager.stage(slot, save, self._items, objects=objects, digests=digests))
        return True


class BlockingStaging(Staging):
    """Copies everything at once, so there is nothing to guard or to wait for."""

    def arm(self) -> None:
        """See `Staging.arm`."""

    def choose(self, items: Items) -> Filling:
        """See `Staging.choose`."""
        return BlockingFilling(items)

    def guard(self) -> None:
        """Return at once."""

    def settle(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Return at once."""
