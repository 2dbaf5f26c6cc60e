"""`prepare()`: doing now what the first save would have to do.

Owns the steps of a preparation, and the thread that may take the later ones. To the ledger and the
daemons it is a save, but it asks only for layouts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from milepost.concurrency.collector import collector_paused

if TYPE_CHECKING:
    from milepost.saving.planning import Planning
    from milepost.saving.saves import Saves
    from milepost.staging.strategy import Filling, Staging
    from milepost.state.content import Content
    from milepost.wire.messages import SaveRef

log = logging.getLogger("milepost")


class Preparation:
    """One call of `prepare()`: `read`, then `plan`, then `settle`. `settle` also follows a failure.

    Args:
        saves, planning, staging: the Checkpointer's.
        claim: claims the root; may raise MilepostError.
        is_still: the state does not change until `plan` has returned.

    Threads: any thread may call `join`. Everything else belongs to the trainer's thread until
    `start`, and then to the thread that `start` makes.
    """

    def __init__(
        self,
        saves: Saves,
        planning: Planning,
        staging: Staging,
        claim: Callable[[], None],
        *,
        is_still: bool,
    ) -> None:
        self._saves = saves
        self._planning = planning
        self._staging = staging
        self._claim = claim
        self._is_still = is_still
        self._thread: threading.Thread | None = None
        self._content: Content | None = None
        self._filling: Filling | None = None
        self.is_complete = False
        """Whether the first save of the same structure is cheap now."""
        self._ref, self._save = saves.open(0, "prepare", is_plan_only=True)

    def read(self, read: Callable[[SaveRef], Content]) -> None:
        """Read the state, and decide how each tensor is copied. Never call it while training goes
        on, since a state's own `state_dict()` may change what it reads.
        """
        with collector_paused():
            self._content = read(self._ref)
            self._filling = self._staging.choose(self._content.items)

    def plan(self) -> None:
        """Get a layout, and reserve, pin and touch the memory for it. Raises as `Planning.ask`."""
        content, filling = self._content, self._filling
        assert content is not None
        assert filling is not None
        slots = self._saves.slots
        with collector_paused(), slots.at_work(lambda: self._saves.is_over(self._ref)) as stager:
            self._claim()
            self._planning.ask(self._ref, self._save, content, is_still=self._is_still)
            filling.prepare(stager)
            stager.fault_in()
        self.is_complete = True

    def settle(self, error: BaseException | None = None) -> None:
        """End the preparation and drop what was read. The other ranks plan together with this one,
        so they are told of an error.
        """
        self._content = self._filling = None
        if error is not None:
            self._saves.give_up(self._ref, error)
        self._saves.close_plan(self._ref)

    def start(self) -> None:
        """Plan and settle on a thread of its own, and log what goes wrong there."""
        self._thread = threading.Thread(target=self._finish, name="milepost-prepare", daemon=True)
        self._thread.start()

    def _finish(self) -> None:
        try:
            self.plan()
        except Exception as error:
            log.warning("prepare failed, the first save will be slow: %s", error)
            self.settle(error)
        else:
            self.settle()

    def join(self) -> None:
        """Wait until the thread has ended, if there is one."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
