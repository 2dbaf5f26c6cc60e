"""Offers: columns that travel unchanged, and a bit set that says who writes what."""

from __future__ import annotations

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import ProtocolError
from milepost.wire.offers import (
    GlobalMetadata,
    Kind,
    Offer,
    decode_offer,
    encode_offer,
    layout_id,
    pack_assigned,
    pack_plain,
    unpack_assigned,
    unpack_plain,
)

PLAIN_METADATA = GlobalMetadata(
    keys=("w", "epoch"),
    kinds=bytes([Kind.TENSOR, Kind.OBJECT]),
    dtypes=("float32", ""),
    requires_grad=bytes([1, 0]),
    pinned=bytes(2),
    sizes=((4, 3), ()),
    chunks=((((0, 0), (2, 3)), ((2, 0), (2, 3))), ()),
    planner_data=pack_plain({"w": ("w",), "epoch": ("epoch",)}),
)

OFFER = Offer(
    keys=("w", "a.b", "epoch"),
    kinds=bytes([Kind.SHARD, Kind.TENSOR, Kind.OBJECT]),
    dtypes=("bfloat16", "float32", ""),
    global_sizes=((1 << 40, 3), (), ()),
    offsets=((2, 0), (), ()),
    sizes=((2, 3), (), ()),
    container_bytes=(1 << 41, 1577, 0),
    requires_grad=bytes([1, 0, 0]),
    pinned=bytes(3),
    digests=(-1, 0xFFFFFFFF, 0),
    paths=(("w",), ("a", 0, "b"), ("epoch",)),
    to_lowest_rank=True,
)


@pytest.mark.parametrize(
    "offer", [OFFER, msgspec.structs.replace(OFFER, final=True, metadata=PLAIN_METADATA)]
)
def test_an_offer_arrives_as_it_was_sent(offer: Offer) -> None:
    assert offer == decode_offer(encode_offer(offer))


def test_a_field_that_a_newer_client_added_is_ignored() -> None:
    raw = msgpack.unpackb(encode_offer(OFFER))
    assert decode_offer(msgpack.packb(raw | {"colour": "blue"})) == OFFER


COLUMNS = [
    "kinds", "dtypes", "global_sizes", "offsets", "sizes", "container_bytes", "requires_grad",
    "pinned", "digests", "paths",
]  # fmt: skip


@pytest.mark.parametrize("column", COLUMNS)
def test_an_offer_with_a_short_column_is_refused(column: str) -> None:
    short = msgspec.structs.replace(OFFER, **{column: getattr(OFFER, column)[:-1]})
    with pytest.raises(ProtocolError, match="differ in length"):
        decode_offer(encode_offer(short))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb([1, 2]),
        msgpack.packb({"keys": ["w"]}),
        msgpack.packb(msgpack.unpackb(encode_offer(OFFER)) | {"container_bytes": ["1", "2", "3"]}),
        encode_offer(OFFER)[:-1],
        encode_offer(OFFER) + b"\0",
    ],
)
def test_bytes_that_are_no_offer_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed offer") as caught:
        decode_offer(data)
    assert caught.value.code == "protocol"


@settings(deadline=None)
@given(data=st.data(), count=st.integers(0, 70))
def test_an_assignment_reads_back(data: st.DataObject, count: int) -> None:
    items = data.draw(st.sets(st.integers(0, count - 1))) if count else set()
    packed = pack_assigned(items, count)
    assert (count + 7) // 8 == len(packed)
    assert sorted(items) == unpack_assigned(packed, count)


def test_bit_i_is_little_endian_within_its_byte() -> None:
    assert pack_assigned([0, 9], 10) == bytes([0b1, 0b10])


@pytest.mark.parametrize("count", [8, 17])
def test_an_assignment_of_the_wrong_length_is_refused(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"2 bytes do not hold {count} assignments"):
        unpack_assigned(bytes(2), count)


def test_a_layout_is_named_by_fingerprint_and_assignment() -> None:
    same = layout_id("f" * 32, b"\1")
    assert same == layout_id("f" * 32, b"\1")
    others = {layout_id("f" * 32, b"\2"), layout_id("e" * 32, b"\1"), layout_id("f" * 32, b"")}
    assert len(others - {same}) == 3


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.binary(max_size=8)
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text("abc", max_size=3) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=12,
)


def typed(value: Any) -> Any:
    """The value with each type spelled out, since 1 == True and 1.0 == 1."""
    if isinstance(value, list | tuple):
        return type(value).__name__, [typed(element) for element in value]
    if isinstance(value, dict):
        return [(typed(key), typed(element)) for key, element in value.items()]
    return type(value).__name__, value


@settings(deadline=None)
@given(value=PLAIN)
def test_plain_data_keeps_its_types(value: Any) -> None:
    assert typed(value) == typed(unpack_plain(pack_plain(value)))


@pytest.mark.parametrize("value", [object(), {1, 2}, 1j, {"a": [len]}, range(3)])
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="is not plain data"):
        pack_plain(value)
