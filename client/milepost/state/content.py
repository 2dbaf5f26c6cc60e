"""What this rank offers to write in one save. Reads the state, directly or through a user's
SavePlanner.

Knows states and planners; nothing of daemons, arenas or slots. One thread at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from milepost.state.collecting import collect
from milepost.state.digests import TensorDigests, plain_digest
from milepost.state.fingerprint import Fingerprints
from milepost.state.flattening import call_stateful, flatten, with_per_rank
from milepost.state.items import Items
from milepost.state.offering import digests_of, make_offer, serialise_objects
from milepost.state.planners import (
    FinalPlan,
    PlannerExchange,
    Resolved,
    is_default,
    make_final_offer,
    resolve,
    wants_lowest_rank,
)
from milepost.state.watching import watching_steps
from milepost.wire.offers import Kind
from milepost.wire.replicas import pack_digests

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.planner import SavePlanner

    from milepost.link.rendezvous import Group
    from milepost.wire.offers import Offer


class Content(NamedTuple):
    """What this rank offers to write in one save."""

    items: Items
    structure: str
    """The structure's fingerprint."""
    objects: dict[int, bytes] | None
    """All objects, serialised, if a user's SavePlanner made them."""
    final: FinalPlan | None
    """What a user's SavePlanner has decided."""


class ContentReader:
    """Reads the states of one rank.

    Args:
        planner: the user's, or None.
        group: this rank's place among the ranks that plan together.
        timeout_s: how long to wait for the others.
        check_replicas: as in `Offer`.
    """

    def __init__(
        self,
        planner: SavePlanner | None,
        group: Group,
        timeout_s: float,
        check_replicas: str = "off",
    ) -> None:
        self._planner = planner
        # A rank that is alone has nothing to compare with.
        self._check_replicas = check_replicas if group.world > 1 else "off"
        self._place = (group.world, group.rank)
        # A plan that gives replicas to the lowest rank is another plan.
        self._told: tuple[object, ...] = (
            (*self._place, "lowest") if wants_lowest_rank(planner) else self._place
        )
        self._has_read = False
        self._fingerprints = Fingerprints()
        self._exchange: PlannerExchange | None = None
        if planner is not None and not is_default(planner):
            self._exchange = PlannerExchange(
                planner,
                rank=group.rank,
                world=group.world,
                store=cast("Store | None", group.store),
                timeout_s=timeout_s,
            )

    def read(
        self,
        save_id: str,
        state: Mapping[str, Any],
        per_rank: Mapping[str, Any] | None,
        ensure: Callable[[], None],
        storage_meta: StorageMeta | None = None,
    ) -> Content:
        """List what the state holds.

        Args:
            save_id: the save that the content is for.
            state, per_rank: as for `Checkpointer.save`.
            ensure: returns once the rank has joined its job at the daemon. Called first, since the
                other ranks have to hear of it if the state is refused.
            storage_meta: what a user's planner is told of where the save goes.

        Raises UsageError for what cannot be saved, SaveFailed if planning with the others failed,
        and what `ensure` and the state's own `state_dict()` raise.
        """
        # Only once: a hook that comes and goes may make compiled steps recompile.
        watch = contextlib.nullcontext() if self._has_read else watching_steps()
        self._has_read = True
        _, rank = self._place
        if self._exchange is None:
            ensure()
            with watch:
                flat, paths = flatten(with_per_rank(state, per_rank, rank))
            items = collect(flat, paths)
            return Content(items, self._fingerprints.take(items, self._told), None, None)
        assert self._planner is not None
        try:
            ensure()
            with watch:
                nested = call_stateful(with_per_rank(state, per_rank, rank))
        except Exception as error:
            # The other ranks are about to plan together. They must not wait for this rank.
            self._exchange.refuse(save_id, f"before it could plan, raised {error!r}", error)
            raise
        final = self._exchange.plan(nested, save_id, storage_meta)
        resolved = resolve(final.plan, self._planner)
        structure = self._fingerprints.take(resolved.items, (*self._told, final.plan_id))
        return Content(resolved.items, structure, resolved.objects, final)

    def digests(self, content: Content, due: Sequence[int], number: int) -> Callable[[], bytes]:
        """Read the replicas that are due in the save of this number. Returns what gives their
        digests, packed, once a device is done with them; it keeps nothing of the state.

        Objects that are not plain data are left out.
        """
        if not due or self._check_replicas == "off":
            return bytes
        items = content.items
        tensors = TensorDigests(items, due, number)
        objects = {
            item: digest
            for item in due
            if items.kinds[item] == Kind.OBJECT
            and (digest := plain_digest(items.sources[item])) is not None
        }
        return lambda: pack_digests(tensors.get() | objects)

    def offer(self, content: Content, *, is_still: bool = True) -> tuple[Offer, dict[int, bytes]]:
        """Return the offer, and all objects serialised. Raises UsageError("unpicklable").

        is_still: no rank changes its state meanwhile, so digests of replicas can be compared.
        """
        if content.final is not None:
            objects = content.objects or {}
            return make_final_offer(content.final, Resolved(content.items, objects)), objects
        objects = serialise_objects(content.items)
        is_compared = is_still and self._check_replicas != "off"
        offer = make_offer(
            content.items,
            objects,
            digests=digests_of(content.items, objects) if is_compared else {},
            check_replicas=self._check_replicas,
            to_lowest_rank=wants_lowest_rank(self._planner),
        )
        return offer, objects
