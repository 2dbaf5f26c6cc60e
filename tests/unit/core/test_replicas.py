"""Replicas that differ: how they are told."""

from __future__ import annotations

from milepostd.core.causes import LISTED_MAX
from milepostd.core.replicas import Differences


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
