"""Replicas that differ: how they are found and told.

A replica is what one rank holds of a *place*: a key, or a box of a tensor. All ranks that hold a
place should hold the same, since one of them writes it. Pure; knows no plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from milepost.wire.messages import Cause
from milepost.wire.replicas import DUE_MAX, pack_rota, unpack_digests
from milepostd.core.causes import LISTED_MAX, and_more, show_ranks

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from milepost.wire.offers import Offer

_HINT: Final = (
    "start all ranks from the same values (seed, broadcast); what is to differ by rank is passed "
    "as per_rank={...}"
)

_SIDES_MAX: Final = 3
"""Most groups of ranks that a sentence names."""

TURNS: Final = 31
"""In how many saves all replicas are compared, unless that is too much for one save or too little
to be worth a turn."""

TURN_COST_MAX: Final = 4 << 20
"""Most that a rank compares in one save after the plan, as bytes: some 2 ms of the trainer where
tensors are small, and that many small tensors cost a save ten times as much."""

TURN_COST_MIN: Final = 256 << 10
"""Least that is worth a turn: some 0.1 ms."""

_ITEM_COST: Final = TURN_COST_MAX // DUE_MAX
"""What it costs to read nothing of an item."""

_READ_MAX: Final = 64 << 10
"""What it costs to read a large one; a sample of it, from memory far apart, costs as much."""


def is_refused(offers: Iterable[Offer]) -> bool:
    """Whether a rank wants saves to fail whose replicas differ."""
    return any(offer.check_replicas == "raise" for offer in offers)


@dataclass
class Differences:
    """Keys whose replicas differ; False if there are none.

    keys: each with the ranks of every value, and with the rank whose copy is written.
    """

    keys: dict[str, tuple[Sequence[Sequence[int]], int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.keys)

    def note(self, key: str, sides: Sequence[Sequence[int]], writer: int) -> None:
        """Add a key; of several places with one key the first one is told.

        Args:
            key: its name.
            sides: the ranks, ascending, that hold the same value.
            writer: whose value is written.
        """
        self.keys.setdefault(key, (sides, writer))

    def warnings(self, told: Container[str] = ()) -> tuple[Cause, ...]:
        """Return a cause for each key that was not told before, `LISTED_MAX` at most; the last one
        counts the rest.
        """
        new = [key for key in self.keys if key not in told]
        causes = []
        for key in new[:LISTED_MAX]:
            writer = self.keys[key][1]
            text = f"{self._sentence(key)}; the copy of rank {writer} is the one written"
            causes.append(Cause("replicas-differ", text, _HINT, rank=writer))
        if more := and_more(len(new), "key"):
            causes[-1] = msgspec.structs.replace(causes[-1], message=causes[-1].message + more)
        return tuple(causes)

    def refusal(self) -> Cause:
        """Return why a save fails that does not allow any."""
        sentences = [self._sentence(key) for key in list(self.keys)[:LISTED_MAX]]
        text = "; ".join(sentences) + and_more(len(self.keys), "key")
        return Cause("replicas-differ", text, f"{_HINT}; check_replicas='warn' saves all the same")

    def _sentence(self, key: str) -> str:
        sides, _ = self.keys[key]
        groups = [show_ranks(side) for side in sides[:_SIDES_MAX]]
        rest = len(sides) - len(groups)
        more = f", and {rest} more values" if rest else ""
        return f"key {key!r} differs by rank, {' from '.join(groups)}{more}"


class Rotas:
    """Gives each place a turn, the same on all ranks that hold it, and each rank at most
    `TURN_COST_MAX` in a turn.

    Args:
        counts: how many items each rank has.
    """

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._ends = dict.fromkeys(counts, 0)
        """Where the last place of each rank ends, when all of them are laid out in a row."""
        self._starts = {rank: [-1] * count for rank, count in counts.items()}
        """Where each of them begins, by rank and item; -1: the rank alone holds it."""

    def take(self, holders: Sequence[int], weight: int) -> None:
        """Add a place.

        Args:
            holders: rank, item, rank, item ... of those that hold it.
            weight: its bytes.
        """
        ends = self._ends
        at = max(map(ends.__getitem__, holders[::2]))
        end = at + _ITEM_COST + min(weight, _READ_MAX)
        for rank, item in zip(holders[::2], holders[1::2], strict=True):
            ends[rank] = end
            self._starts[rank][item] = at

    def packed(self) -> dict[int, bytes]:
        """Return the rota of each rank."""
        length = max(self._ends.values(), default=0)
        cost = min(max(-(-length // TURNS), TURN_COST_MIN), TURN_COST_MAX)
        turns = -(-length // cost)
        return {
            rank: pack_rota(turns, [at // cost for at in starts])  # -1 // cost is -1
            for rank, starts in self._starts.items()
        }


def compare_digests(
    offers: Mapping[int, Offer],
    digests: Mapping[int, bytes],
    counted: Mapping[int, Container[int]],
) -> Differences:
    """Compare what ranks have said of their replicas in one save.

    Cheap where ranks that offer alike have said the same. Digests of items that no offer has are
    ignored.

    Args:
        offers: of the ranks.
        digests: what each has said, packed.
        counted: the items of each that the index names.

    Raises ProtocolError for digests that nobody packed.
    """
    alike: dict[bytes, list[tuple[Offer, list[int]]]] = {}
    for rank, packed in sorted(digests.items()):
        if packed:
            offer, known = offers[rank], alike.setdefault(packed, [])
            for other, ranks in known:
                # Columns that are equal are one object mostly, and comparing them would take long.
                if (
                    offer.keys is other.keys
                    and offer.offsets is other.offsets
                    and offer.sizes is other.sizes
                ):
                    ranks.append(rank)
                    break
            else:
                known.append((offer, [rank]))
    places: dict[tuple[str, object, object], dict[int, list[tuple[int, int]]]] = {}
    told = [(packed, *group) for packed, groups in alike.items() for group in groups]
    for packed, offer, ranks in told if len(told) > 1 else ():
        for item, digest in unpack_digests(packed):
            if item < len(offer.keys):
                place = offer.keys[item], offer.offsets[item], offer.sizes[item]
                sides = places.setdefault(place, {})
                sides.setdefault(digest, []).extend((rank, item) for rank in ranks)
    found = Differences()
    for (key, _, _), sides in places.items():
        if len(sides) > 1:
            holders = sorted(holder for side in sides.values() for holder in side)
            writer = next((rank for rank, item in holders if item in counted[rank]), holders[0][0])
            found.note(key, sorted(sorted(rank for rank, _ in s) for s in sides.values()), writer)
    return found
