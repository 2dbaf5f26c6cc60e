"""Replicas that differ: how they are found and told.

A replica is what one rank holds of a *place*: a key, or a box of a tensor. All ranks that hold a
place should hold the same, since one of them writes it. Pure; knows no plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from milepost.wire.messages import Cause
from milepostd.core.causes import LISTED_MAX, and_more, show_ranks

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from milepost.wire.offers import Offer

_HINT: Final = (
    "start all ranks from the same values (seed, broadcast); what is to differ by rank is passed "
    "as per_rank={...}"
)

_SIDES_MAX: Final = 3
"""Most groups of ranks that a sentence names."""


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
