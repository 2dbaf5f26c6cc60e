"""What is remembered of dicts beside torch's index."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.format.manifest import MANIFEST_NAME, Manifest, encode_manifest
from milepost.format.nesting import (
    Nesting,
    merge_nestings,
    pack_nesting,
    read_nesting,
    unpack_nesting,
)

NESTING = Nesting(
    names=((("a", 3, "b"), ("7", "None"), (7, None)), ((), ("(1,)",), (("tuple", (1,)),))),
    empty=(("a", 1), ("b", "c")),
)


def test_it_reads_back_as_packed() -> None:
    assert NESTING == unpack_nesting(pack_nesting(NESTING))
    assert b"" == pack_nesting(Nesting())
    assert Nesting() == unpack_nesting(b"")


def test_ranks_that_say_the_same_are_not_even_opened() -> None:
    assert b"whatever" == merge_nestings([b"whatever", b"whatever"])
    assert b"" == merge_nestings([])


def test_what_ranks_say_is_put_together_and_the_first_counts() -> None:
    one = Nesting(names=((("a",), ("1", "2"), (1, 2)),), empty=(("x",),))
    other = Nesting(
        names=((("a",), ("2", "3"), (2.0, 3)), (("b",), ("4",), (4,))), empty=(("y",), ("x",))
    )
    merged = unpack_nesting(merge_nestings(map(pack_nesting, (one, Nesting(), other))))
    assert ((("a",), ("1", "2", "3"), (1, 2, 3)), (("b",), ("4",), (4,))) == merged.names
    assert (("x",), ("y",)) == merged.empty


def test_it_is_read_from_a_manifest_without_its_columns(tmp_path: Path) -> None:
    assert Nesting() == read_nesting(tmp_path)
    written = encode_manifest(Manifest(nesting=pack_nesting(NESTING), keys=("k" * 5_000_000,)))
    (tmp_path / MANIFEST_NAME).write_bytes(written[:10_000])
    assert NESTING == read_nesting(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"damaged",
        encode_manifest(Manifest(nesting=b"damaged")),
        encode_manifest(Manifest())[:20],
    ],
)
def test_a_manifest_that_does_not_tell_tells_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(data)
    assert Nesting() == read_nesting(tmp_path)
