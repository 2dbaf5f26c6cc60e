"""Replicas that differ: when they are compared, how they are found and told."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from milepost.wire.offers import Kind, Offer
from milepost.wire.replicas import DUE_MAX, Rota, pack_digests, unpack_rota
from milepostd.core.causes import LISTED_MAX
from milepostd.core.replicas import TURN_COST_MAX, TURNS, Differences, Rotas, compare_digests

MIB = 1 << 20


def differing(*keys: str) -> Differences:
    found = Differences()
    for key in keys:
        found.note(key, [[0, 1], [2]], 1)
    return found


def test_a_warning_names_key_ranks_and_writer_and_points_to_per_rank() -> None:
    (warning,) = differing("rng").warnings()

    assert (
        "key 'rng' differs by rank, ranks 0-1 from rank 2; the copy of rank 1 is the one written"
        == warning.message
    )
    assert ("replicas-differ", 1) == (warning.code, warning.rank)
    assert "per_rank={...}" in warning.hint


def test_of_several_places_with_one_key_the_first_is_told() -> None:
    found = differing("w")
    found.note("w", [[4], [5]], 4)

    (warning,) = found.warnings()

    assert "ranks 0-1 from rank 2" in warning.message


def test_what_was_told_before_is_not_told_again() -> None:
    assert ["b"] == [
        cause.message.split("'")[1] for cause in differing("a", "b", "c").warnings({"a", "c"})
    ]
    assert () == differing("a").warnings({"a"})


def test_many_keys_are_counted_in_warning_and_refusal() -> None:
    found = differing(*[f"k{i}" for i in range(LISTED_MAX + 3)])

    warnings = found.warnings()
    assert LISTED_MAX == len(warnings)
    assert warnings[-1].message.endswith("; and 3 more keys")
    assert not warnings[0].message.endswith("keys")
    assert found.refusal().message.endswith("; and 3 more keys")
    assert LISTED_MAX == found.refusal().message.count("differs by rank")


def test_many_values_are_counted() -> None:
    found = Differences()
    found.note("seed", [[rank] for rank in range(9)], 0)

    assert (
        "key 'seed' differs by rank, rank 0 from rank 1 from rank 2, and 6 more values"
        == found.refusal().message
    )


# --- turns --------------------------------------------------------------------------------------


def rotas_of(places: Iterable[tuple[tuple[int, ...], int]], *counts: int) -> list[Rota]:
    """The rotas of ranks that hold places, each given by rank, item, rank, item ... and bytes."""
    rotas = Rotas(dict(enumerate(counts)))
    for holders, nbytes in places:
        rotas.take(holders, nbytes)
    packed = rotas.packed()
    return [unpack_rota(packed[rank]) for rank in range(len(counts))]


def test_a_place_has_the_same_turn_on_all_ranks_that_hold_it() -> None:
    # Ranks 0 and 1 share one half of a state, 2 and 3 the other, and all of them 500 more.
    halves: list[tuple[tuple[int, ...], int]] = [
        ((first, item, first + 1, item), MIB) for item in range(700) for first in (0, 2)
    ]
    common: list[tuple[tuple[int, ...], int]] = [
        (tuple(n for rank in range(4) for n in (rank, 700 + at + rank)), MIB) for at in range(500)
    ]

    rotas = rotas_of(halves + common, *[1300] * 4)

    assert TURNS == rotas[0].turns
    assert 1 == len({rota.turns for rota in rotas})
    for number in range(TURNS):
        due = [
            {item if item < 700 else item - rank for item in rotas[rank].due_in(number)}
            for rank in range(4)
        ]
        assert due[0] == due[1]
        assert due[2] == due[3]
        assert {item for item in due[0] if item >= 700} == {item for item in due[2] if item >= 700}
    for rota in rotas:
        assert 1200 == sum(len(rota.due_in(number)) for number in range(TURNS))


def test_what_a_save_compares_is_bounded_by_bytes_and_by_number() -> None:
    (large, _) = rotas_of([((0, item, 1, item), 30 * MIB) for item in range(9000)], 9000, 9000)
    (small, _) = rotas_of([((0, item, 1, item), 4) for item in range(90_000)], 90_000, 90_000)

    read = 64 << 10
    for rota, most in ((large, TURN_COST_MAX // read), (small, DUE_MAX)):
        counts = [len(rota.due_in(number)) for number in range(rota.turns)]
        assert most >= max(counts)
        assert 1.1 * sum(counts) / most > rota.turns > TURNS


def test_few_replicas_are_compared_in_every_save() -> None:
    (rota, other) = rotas_of([((0, 1, 1, 0), MIB)], 2, 1)

    assert {(1,)} == {rota.due_in(number) for number in range(5)}
    assert {(0,)} == {other.due_in(number) for number in range(5)}


# --- comparing ----------------------------------------------------------------------------------


def offer(*keys: str, offset: int = 0) -> Offer:
    count = len(keys)
    return Offer(
        keys=keys,
        kinds=bytes([Kind.SHARD] * count),
        dtypes=("float32",) * count,
        global_sizes=((8,),) * count,
        offsets=((offset,),) * count,
        sizes=((4,),) * count,
        container_bytes=(1500,) * count,
        requires_grad=bytes(count),
        pinned=bytes(count),
        digests=(-1,) * count,
        paths=tuple((key,) for key in keys),
    )


def test_values_of_one_place_that_differ_are_found_with_the_ranks_of_each() -> None:
    same = offer("a", "b")
    offers = {0: same, 1: same, 2: offer("c", "b", "a"), 3: offer("a", offset=4)}
    digests = {
        0: pack_digests({0: 1, 1: 2}),
        1: pack_digests({0: 1, 1: 2}),
        2: pack_digests({0: 9, 1: 2, 2: 7}),
        3: pack_digests({0: 5}),
    }

    found = compare_digests(offers, digests, {0: [1], 1: [0], 2: [0], 3: [0]})

    assert {"a": ([[0, 1], [2]], 1)} == found.keys


def test_what_is_equal_or_was_not_read_or_is_not_offered_is_no_difference() -> None:
    offers = {rank: offer("a", "b") for rank in range(4)}
    digests = {
        0: pack_digests({0: 1, 1: 2}),
        1: pack_digests({0: 1}),
        2: b"",
        3: pack_digests({1: 2, 7: 3}),
    }

    assert not compare_digests(offers, digests, {rank: [0, 1] for rank in range(4)})


def test_ranks_that_say_the_same_of_other_places_are_not_taken_for_alike() -> None:
    one = offer("a", "b")
    other = msgspec.structs.replace(one, keys=("b", "a"))
    said = pack_digests({0: 1, 1: 2})

    found = compare_digests({0: one, 1: other}, {0: said, 1: said}, {0: [0, 1], 1: []})

    assert {"a", "b"} == set(found.keys)
