"""A rank's slots: which saves hold one, waiting until one is free, and starting over.

Owns the stager. Knows nothing of daemons or states: the caller says what a save is called and
whether it is over. docs/design/0010-interrupts.md says how an interrupted save is handled.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from milepost.concurrency.waiting import wait_telling
from milepost.errors import MilepostError, Rejected, SaveFailed

if TYPE_CHECKING:
    from milepost.memory.arena import Slot
    from milepost.staging.stager import Stager
    from milepost.state.items import Items

ROOM_S: Final = 1.0
"""How long to wait if shared memory is short. Ranks replace their images within milliseconds of
each other, and one may have to wait for memory that another frees."""


class Slots:
    """The slots of one attempt's rank.

    Args:
        stager: makes and fills the images; this object's from now on.
        changed: guards who holds what, and is notified when that changes; also whenever the
            `is_over` of a waiting call may have changed.
        count: how many saves may hold a slot at once.
        timeout_s: how long a call waits.
        who: the waiting rank, for the log.

    Threads: any thread may call `hold`, `free`, `held` and `lose`; only one thread at a time may
    call the rest. `changed` guards `_held` and `_is_lost`. Only that one thread uses `stager` and
    `_is_doubtful`. The other fields never change.
    """

    def __init__(
        self,
        stager: Stager,
        changed: threading.Condition,
        *,
        count: int,
        timeout_s: float,
        who: object,
    ) -> None:
        self.stager = stager
        self.count = count
        self._changed = changed
        self._timeout_s = timeout_s
        self._who = who
        self._held: dict[str, Slot] = {}
        self._is_lost = False
        """Somebody removed the file of the arena."""
        self._is_doubtful = False
        """A call is using the stager, or was interrupted while using it."""

    # --- who holds what

    def hold(self, save_id: str, slot: Slot) -> None:
        """Note that the daemon may read the slot until it says that it has finished."""
        with self._changed:
            self._held[save_id] = slot

    def free(self, save_id: str) -> None:
        """Give back the save's slot, if it holds one."""
        with self._changed:
            slot = self._held.pop(save_id, None)
            if slot is not None:
                slot.release()
            self._changed.notify_all()

    @property
    def held(self) -> tuple[str, ...]:
        """The saves that hold a slot."""
        with self._changed:
            return tuple(self._held)

    # --- waiting

    def await_one(self, is_over: Callable[[], bool], busy: str) -> bool:
        """Wait until a slot is free; return False if `is_over` turned true before.

        `busy` says which saves hold the slots. Raises Rejected("busy").
        """
        has_room = self._wait(
            lambda: len(self._held) < self.count or is_over(), f"a free slot: {busy}"
        )
        if is_over():
            return False
        if not has_room:
            raise Rejected(
                "busy",
                f"no slot became free within {self._timeout_s:g} s: storage is slower than saves "
                "come",
                "save less often, or see `milepost status`",
            )
        return True

    def await_none(self) -> None:
        """Wait until no save holds a slot. Raises Rejected("busy")."""
        if not self._wait(lambda: not self._held, "earlier images to be written"):
            raise Rejected("busy", f"earlier images are still read after {self._timeout_s:g} s")

    def lay_out(
        self,
        items: Items,
        assigned: Sequence[int],
        layout_id: str,
        objects: Mapping[int, bytes] | None,
        *,
        is_over: Callable[[], bool],
        may_wait: bool,
    ) -> None:
        """Put a layout in force; return without it once `is_over` is true.

        If memory is short because images of another structure are still being written, the call
        waits for them, if it may. If other ranks of the node may be about to free their images, it
        waits for `ROOM_S`. Raises Rejected("shm-too-small"), UsageError("unpicklable").
        """
        until_s = time.monotonic() + ROOM_S
        while not is_over():
            try:
                self.stager.lay_out(items, assigned, layout_id, objects=objects)
                return
            except Rejected as error:
                if error.code != "shm-too-small":
                    raise
                if may_wait and self.held:
                    may_wait = False
                    self._wait(
                        lambda: not self._held or is_over(),
                        f"earlier images to be written: {error.message}",
                    )
                    until_s = time.monotonic() + ROOM_S
                elif time.monotonic() > until_s:
                    raise
                else:
                    time.sleep(ROOM_S / 20)

    def take(self) -> Slot:
        """Return a free slot of the layout in force; `await_one` has made sure that one is free."""
        free = self.stager.free_slots()
        if not free:
            raise SaveFailed("internal", "no slot of the arena is free, and no save holds one")
        return free[0]

    def _wait(self, is_so: Callable[[], bool], what: str) -> bool:
        with self._changed:
            return wait_telling(
                self._changed, is_so, self._timeout_s, f"{self._who} waits for {what}"
            )

    # --- starting over

    def lose(self) -> None:
        """Note that somebody removed the arena's file: the next save gets a new arena."""
        with self._changed:
            self._is_lost = True

    @contextlib.contextmanager
    def at_work(self, is_over: Callable[[], bool]) -> Iterator[Stager]:
        """Give the stager to a save. If the last save was interrupted, anything may be half done,
        so the stager starts over (docs/design/0010-interrupts.md).

        Raises Rejected("busy").
        """
        self._mend(is_over)
        self._is_doubtful = True
        try:
            yield self.stager
        except MilepostError as error:
            # A nested call that was refused came from a signal handler, so it may have come between
            # any two lines.
            self._is_doubtful = error.code == "nested-call"
            raise
        self._is_doubtful = False

    def _mend(self, is_over: Callable[[], bool]) -> None:
        if self._is_doubtful:
            # Images that the daemon still reads must stay; files that nobody knows of must go.
            self._wait(lambda: not self._held or is_over(), "earlier images to be written")
            if self.held:
                raise Rejected("busy", f"earlier images are still read after {self._timeout_s:g} s")
            self.stager.abandon()
        with self._changed:
            is_lost, self._is_lost = self._is_lost, False
        if is_lost:
            self.stager.renew()

    def close(self, *, unlink: bool) -> None:
        """Release all images and remove their files; `unlink=False` keeps the files (see
        `Stager.close`).
        """
        if unlink and self._is_doubtful:
            self.stager.abandon()
        self.stager.close(unlink=unlink)
