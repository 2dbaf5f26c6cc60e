"""What happens to a message between two daemons: it is lost, late, doubled, reordered or cut off.

Knows the names of nodes but not the content of messages. A message waits for a daemon that is away,
as in the real transport's queue, or is lost with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

LATENCY_S: Final = 0.0005


@dataclass
class Network:
    """The cables between all nodes.

    Attributes:
        loss, doubling, delay: probability that a message is lost, comes twice, comes late.
        delay_s_max: how late.
        cuts: pairs (from, to) of groups between which nothing passes in this direction.
    """

    rng: random.Random
    loss: float = 0.0
    doubling: float = 0.0
    delay: float = 0.0
    delay_s_max: float = 0.0
    cuts: dict[int, tuple[frozenset[str], frozenset[str]]] = field(default_factory=dict)
    lost: int = 0
    doubled: int = 0
    delayed: int = 0

    def is_cut(self, source: str, target: str) -> bool:
        return any(source in here and target in there for here, there in self.cuts.values())

    def arrivals(self, source: str, target: str) -> tuple[float, ...]:
        """Return the delays in seconds after which the message arrives; each is one arrival."""
        if self.cuts and self.is_cut(source, target):
            self.lost += 1
            return ()
        if not (self.loss or self.doubling or self.delay):
            return (LATENCY_S,)
        if self.rng.random() < self.loss:
            self.lost += 1
            return ()
        copies = 1
        if self.rng.random() < self.doubling:
            self.doubled += 1
            copies = 2
        return tuple(self._delay_s() for _ in range(copies))

    def _delay_s(self) -> float:
        if self.rng.random() < self.delay:
            self.delayed += 1
            return self.rng.random() * self.delay_s_max
        return LATENCY_S * (1 + self.rng.random())

    def heal(self) -> None:
        self.loss = self.doubling = self.delay = 0.0
        self.cuts.clear()
