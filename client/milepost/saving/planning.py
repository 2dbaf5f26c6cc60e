"""Finds the layout for a state's structure and puts it in force. Asks the daemon for a new one.

Owns the question to the daemon and the wait for its answer. It must not know how a state is copied.
One thread at a time.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from milepost.errors import MilepostError, Unavailable
from milepost.ledger import KnownPlan
from milepost.link.session import JOIN_S
from milepost.wire.causes import error_of
from milepost.wire.messages import Offered
from milepost.wire.offers import encode_offer, unpack_assigned
from milepost.wire.replicas import unpack_rota

if TYPE_CHECKING:
    from milepost.handle import Save
    from milepost.link.session import Session
    from milepost.saving.saves import Saves
    from milepost.state.content import Content, ContentReader
    from milepost.wire.messages import SaveRef

log = logging.getLogger("milepost")


class Planning:
    """The layouts of one rank.

    Args:
        session: where offers go.
        saves: waits for the answers and remembers them.
        reader: describes a content to the planner.
        deadline_s: how long to wait for an answer.
        may_wait: whether a layout may wait until earlier images are written.
        who: this rank, for the log.
        is_first: it is rank 0, which logs for all ranks.
    """

    def __init__(
        self,
        session: Session,
        saves: Saves,
        reader: ContentReader,
        *,
        deadline_s: float,
        may_wait: bool,
        who: object,
        is_first: bool,
    ) -> None:
        self._session = session
        self._saves = saves
        self._reader = reader
        self._deadline_s = deadline_s
        self._may_wait = may_wait
        self._who = who
        self._is_first = is_first

    def put_in_force(self, ref: SaveRef, save: Save, content: Content) -> Content | None:
        """Put the layout of a content's structure in force. Ask for one only if none is known.

        Returns the content, with its objects serialised if that was needed. None: the save has
        ended. Raises the same as `ask`.
        """
        plan = self._saves.plan_of(content.structure)
        if plan is None:
            return self.ask(ref, save, content)
        self._lay_out(ref, content, plan)
        return None if self._saves.is_over(ref) else content

    def ask(
        self, ref: SaveRef, save: Save, content: Content, *, is_still: bool = True
    ) -> Content | None:
        """Offer the content, wait for this rank's layout and put it in force.

        is_still: the state does not change meanwhile on any rank; see `ContentReader.offer`.

        Returns the content with its objects serialised; None: the save has ended.

        Raises:
            UsageError: "unpicklable".
            Rejected: "shm-too-small".
            Unavailable: "timeout": no layout came.
            SaveFailed: the save has ended, and was opened only to get a layout.
        """
        offer, objects = self._reader.offer(content, is_still=is_still)
        content = content._replace(objects=objects)
        self._session.say(
            Offered(save=ref, fingerprint=content.structure, offer=encode_offer(offer))
        )
        ready = self._saves.await_layout(
            ref,
            self._deadline_s + JOIN_S,
            f"{self._who} waits for its layout: every rank has to call save() or prepare()",
        )
        if ready is None:
            if not self._saves.is_over(ref):
                raise Unavailable("timeout", f"no layout came within {self._deadline_s:g} s")
            if ref.is_plan_only:
                save.wait()  # raises why it has ended
            return None
        for warning in ready.warnings if self._is_first else ():
            log.warning("%s", error_of(warning, MilepostError))
        assigned = tuple(unpack_assigned(ready.assigned, len(content.items)))
        plan = KnownPlan(ready.layout_id, assigned, unpack_rota(ready.rota))
        self._lay_out(ref, content, plan)
        self._saves.keep_plan(content.structure, plan)
        return None if self._saves.is_over(ref) else content

    def _lay_out(self, ref: SaveRef, content: Content, plan: KnownPlan) -> None:
        """Put a layout in force; see `Slots.lay_out`."""
        self._saves.slots.lay_out(
            content.items,
            plan.assigned,
            plan.layout_id,
            content.objects,
            is_over=lambda: self._saves.is_over(ref),
            may_wait=self._may_wait,
        )
