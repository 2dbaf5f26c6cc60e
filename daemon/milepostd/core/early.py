"""Messages for jobs that no local rank has joined yet: a peer may be faster by the start-up of a
process.

Pure and bounded; a message that is repeated is kept once.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from milepost.wire.messages import SaveMessage

EARLY_MAX: Final = 1024
"""Messages kept; the oldest go first."""

EARLY_S: Final = 60.0
"""How long they are kept; their senders repeat them anyway."""

EARLY_NS: Final = int(EARLY_S * 1_000_000_000)

EarlyKey: TypeAlias = tuple[str, str, str, str]
"""Node, job, save id and type."""


class EarlyMessages:
    """What came too early."""

    def __init__(self) -> None:
        self.kept: dict[EarlyKey, tuple[int, SaveMessage]] = {}
        """With when they came, oldest first."""

    def keep(self, node_id: str, message: SaveMessage, now_ns: int) -> None:
        """Keep the message for when a local rank joins its job."""
        kept = self.kept
        key = (node_id, message.save.job, message.save.save_id, type(message).__name__)
        kept.pop(key, None)
        kept[key] = (now_ns, message)
        while len(kept) > EARLY_MAX or now_ns - next(iter(kept.values()))[0] > EARLY_NS:
            del kept[next(iter(kept))]

    def take(self, job: str, now_ns: int) -> list[tuple[str, SaveMessage]]:
        """Return what peers have said of the job lately, and forget it."""
        keys = [key for key in self.kept if key[1] == job]
        found = [(key[0], *self.kept.pop(key)) for key in keys]
        return [(node_id, message) for node_id, at_ns, message in found
                if now_ns - at_ns <= EARLY_NS]  # fmt: skip
