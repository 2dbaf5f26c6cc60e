"""Which replicas are compared in which save, and how a rank says what they are.

The plan compares everything. After it a save compares what is due: each place that several ranks
hold has a *turn*, the same on all of them, and the turns go round with the number of the save. So a
save reads a bounded part, and all is read again after as many saves as there are turns. Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from milepost.errors import ProtocolError

DUE_MAX: Final = 1024
"""Most items of a rank that are due in one save."""

DIGESTS_BYTES_MAX: Final = 8 * DUE_MAX
"""Most that `pack_digests` returns for what is due in one save."""

_TURN_MAX: Final = 0xFFFF


class Rota(NamedTuple):
    """When the items of one rank are due."""

    turns: int = 0
    """How many saves it takes until all were due; 0: nothing ever is."""
    due: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """By turn, the items, ascending."""

    def due_in(self, number: int) -> tuple[int, ...]:
        """Return the items that are due in the save of this number, ascending."""
        return self.due.get(number % self.turns, ()) if self.turns else ()


def pack_rota(turns: int, turn_of: Sequence[int]) -> bytes:
    """Return a rota as bytes: two for the number of turns, and two for each item, little-endian: 0
    if it is never due, else one more than its turn.

    Args:
        turns: how many there are. It is made odd, so that structures that are saved in alternation
            both see all turns.
        turn_of: of each item; -1: it is never due.
    """
    if max(turn_of, default=-1) < 0:
        return b""
    turns = min(turns, _TURN_MAX) | 1
    column = [turn % turns + 1 if turn >= 0 else 0 for turn in turn_of]
    return struct.pack(f"<{1 + len(column)}H", turns, *column)


def unpack_rota(packed: bytes) -> Rota:
    """Read what `pack_rota` returned. Raises ProtocolError for what it cannot have returned."""
    if not packed:
        return Rota()
    if len(packed) % 2:
        raise ProtocolError("protocol", f"malformed rota: {len(packed)} bytes")
    turns, *column = struct.unpack(f"<{len(packed) // 2}H", packed)
    due: dict[int, list[int]] = {}
    for item, turn in enumerate(column):
        if turn:
            due.setdefault(turn - 1, []).append(item)
    return Rota(turns, {turn: tuple(items[:DUE_MAX]) for turn, items in due.items()})


def pack_digests(digests: Mapping[int, int]) -> bytes:
    """Return digests by item as bytes: four for the item and four for the digest, little-endian,
    items ascending.
    """
    flat = [number for pair in sorted(digests.items()) for number in pair]
    return struct.pack(f"<{len(flat)}I", *flat)


def unpack_digests(packed: bytes) -> Iterable[tuple[int, int]]:
    """Read what `pack_digests` returned. Raises ProtocolError for what it cannot have returned."""
    try:
        return struct.iter_unpack("<II", packed)
    except struct.error as error:
        raise ProtocolError("protocol", f"malformed digests: {len(packed)} bytes") from error
