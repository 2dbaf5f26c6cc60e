"""When replicas are compared, and how a rank says what they are."""

from __future__ import annotations

import pytest

from milepost.errors import ProtocolError
from milepost.wire.replicas import (
    DIGESTS_BYTES_MAX,
    DUE_MAX,
    Rota,
    pack_digests,
    pack_rota,
    unpack_digests,
    unpack_rota,
)


def test_each_item_is_due_once_in_as_many_saves_as_there_are_turns() -> None:
    rota = unpack_rota(pack_rota(3, [0, -1, 1, 2, -1, 1, -1]))

    due = [rota.due_in(number) for number in range(9, 9 + rota.turns)]

    assert 3 == rota.turns
    assert [(0,), (2, 5), (3,)] == due
    assert rota.due_in(1) == rota.due_in(4)


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 1000])
def test_structures_in_alternation_both_see_all_turns(turns: int) -> None:
    rota = unpack_rota(pack_rota(turns, range(turns)))

    for first in (0, 1):
        seen = {
            item
            for number in range(first, first + 2 * rota.turns, 2)
            for item in rota.due_in(number)
        }
        assert set(range(turns)) == seen


def test_a_rank_that_shares_nothing_has_nothing_due() -> None:
    assert b"" == pack_rota(5, [-1] * 9)
    assert Rota() == unpack_rota(b"")
    assert () == Rota().due_in(7)


def test_digests_survive_the_round_trip_in_order() -> None:
    digests = {70_000: 2**32 - 1, 3: 0}

    assert [(3, 0), (70_000, 2**32 - 1)] == list(unpack_digests(pack_digests(digests)))
    assert DIGESTS_BYTES_MAX == len(pack_digests(dict.fromkeys(range(DUE_MAX), 7)))


def test_no_more_is_due_in_a_save_than_its_record_has_room_for() -> None:
    packed = pack_rota(1, [0] * (DUE_MAX + 9))

    assert DUE_MAX == len(unpack_rota(packed).due_in(0))


def test_what_nobody_packed_is_refused() -> None:
    with pytest.raises(ProtocolError, match="malformed rota"):
        unpack_rota(b"\1\0\1")
    with pytest.raises(ProtocolError, match="malformed digests"):
        unpack_digests(b"\1\0\1")
