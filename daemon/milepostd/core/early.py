"""Messages about jobs that no local rank has joined yet: another node's trainers may have started
sooner.

Bounded; a message that is repeated is kept once.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from milepost.wire.messages import SaveMessage
from milepostd.core.timers import later

EARLY_MAX: Final = 1024
"""Most messages kept; the oldest go first."""

EARLY_S: Final = 60.0
"""How long a message is kept. Its sender repeats it anyway."""

EarlyKey: TypeAlias = tuple[str, str, str, str]
"""Node, job, save id and type."""


class EarlyMessages:
    """The messages that came too early."""

    def __init__(self) -> None:
        self.kept: dict[EarlyKey, tuple[int, SaveMessage]] = {}
        """Each with the instant at which it came; the oldest first."""

    def keep(self, node_id: str, message: SaveMessage, now_ns: int) -> None:
        """Keep a message until a local rank joins its job."""
        kept = self.kept
        key = (node_id, message.save.job, message.save.save_id, type(message).__name__)
        kept.pop(key, None)
        kept[key] = (now_ns, message)
        while len(kept) > EARLY_MAX or now_ns > later(next(iter(kept.values()))[0], EARLY_S):
            del kept[next(iter(kept))]

    def take(self, job: str, now_ns: int) -> list[tuple[str, SaveMessage]]:
        """Return the messages about a job that are not too old, with their senders; forget them."""
        keys = [key for key in self.kept if key[1] == job]
        found = [(key[0], *self.kept.pop(key)) for key in keys]
        return [
            (node_id, message)
            for node_id, at_ns, message in found
            if now_ns <= later(at_ns, EARLY_S)
        ]
