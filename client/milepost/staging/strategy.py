"""The interface of the two ways to stage a state: at once, and behind the next step.

Owns only the interface. `blocking` and `behind` implement it; a `Checkpointer` knows nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from milepost.errors import MilepostError
    from milepost.memory.arena import Slot
    from milepost.staging.stager import StagedImage, Stager
    from milepost.state.items import Items
    from milepost.wire.messages import SaveRef


class Listener(Protocol):
    """Hears whether an image was completed. Called on the trainer's or the copying thread."""

    def staged(self, image: StagedImage) -> None:
        """The image is complete and sealed."""

    def failed(self, error: MilepostError) -> None:
        """The image cannot be completed; its slot is free."""

    def waited(self, waited_s: float) -> None:
        """The guard has kept a thread waiting for this long."""


class Filling(ABC):
    """One state on its way into an image. Keeps references to its tensors until they are copied."""

    @abstractmethod
    def prepare(self, stager: Stager) -> None:
        """Make what the first `fill` under the layout in force needs. Reads no tensor."""

    @abstractmethod
    def fill(
        self,
        stager: Stager,
        slot: Slot,
        save: SaveRef,
        objects: Mapping[int, bytes] | None,
        listener: Listener,
        digests: Callable[[], bytes] = bytes,
    ) -> bool:
        """Copy the state into a free slot of the layout in force.

        Args:
            stager: fills images; nobody else uses it until `Staging.settle` returns.
            slot: where to put the image; another slot is used if the arena has to grow.
            save: the save that the image belongs to.
            objects: those already serialised for this save, by item.
            listener: hears of the end exactly once, unless this call raises.
            digests: returns what the image's record says of replicas; called once all is copied.

        Returns whether the image is complete; if not, the listener hears of it later.
        Raises the same as `Stager.stage`; the slot is free then.
        """


class Staging(ABC):
    """One way of staging, for all saves of a Checkpointer.

    Threads: any thread may call `guard`; the rest is for the trainer's thread.
    """

    @abstractmethod
    def arm(self) -> None:
        """Get ready for the first save."""

    @abstractmethod
    def choose(self, items: Items) -> Filling:
        """Decide how each tensor of a state is copied.

        Raises UsageError, naming the key or the parameter, for what cannot be copied this way.
        """

    @abstractmethod
    def guard(self) -> None:
        """Wait until the tensors that are being copied may change."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until nothing is being copied, and the listener has heard of it."""

    @abstractmethod
    def close(self) -> None:
        """Settle, for good. Idempotent."""
