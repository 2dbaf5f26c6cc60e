"""The future of a save: it ends with the checkpoint, and unpickles the index when asked for it.

Unpickling the index of ten thousand tensors takes a tenth of a second under Python's lock. Only a
caller that asks for the index pays for this, not the training that goes on meanwhile.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint import CheckpointException

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from milepost.dcp.saver import Pending, SavedBytes


class MetadataFuture(Future["Metadata"]):
    """Ends once a save has ended. Its callbacks run on a thread of their own, so they may block.

    The interpreter waits for this thread at its exit, so a staged save is finished.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reading = threading.Lock()
        self._saved: SavedBytes | None = None
        """Set before the future ends."""
        self._metadata: Metadata | None = None
        """Guarded by `_reading`."""
        self.set_running_or_notify_cancel()

    def follow(self, pending: Pending) -> None:
        """End as the save does."""
        threading.Thread(
            target=self._follow, args=(pending,), name="milepost-async-save", daemon=False
        ).start()

    def _follow(self, pending: Pending) -> None:
        try:
            self._saved = pending.wait()
        except (Exception, CheckpointException) as error:
            self.set_exception(error)
        else:
            self.set_result(None)  # type: ignore[arg-type]

    def result(self, timeout: float | None = None) -> Metadata:
        """Return the index of the checkpoint. Raises CheckpointException, TimeoutError."""
        found: Any = super().result(timeout)
        with self._reading:
            if self._metadata is None:
                assert self._saved is not None
                assert found is None
                self._metadata = self._saved.metadata()
            return self._metadata
