"""What one rank could write, as columns: the planner's input.

An offer travels through the daemons as opaque msgpack bytes; only the planner's child opens it.
Entry i of every column belongs to item i. It holds no payload, and nothing that has to be
unpickled. Never imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, TypeAlias

import msgpack
import msgspec

from milepost.errors import ProtocolError

Box: TypeAlias = tuple[int, ...]
"""Offsets or sizes, one number for each dimension."""


class Kind(IntEnum):
    """What an item is."""

    TENSOR = 0
    """A whole tensor; all ranks that offer the key hold the same values (torch:
    WriteItemType.TENSOR)."""
    SHARD = 1
    """A box of a tensor (torch: WriteItemType.SHARD)."""
    OBJECT = 2
    """A serialised object (torch: WriteItemType.BYTE_IO)."""


class GlobalMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a user's `create_global_plan` returned, without torch's classes; sent by rank 0 only.

    Entry i of every column describes the i-th key of `state_dict_metadata`; objects have an empty
    dtype, size and chunks.
    """

    keys: tuple[str, ...]
    kinds: bytes
    dtypes: tuple[str, ...]
    requires_grad: bytes
    pinned: bytes
    sizes: tuple[Box, ...]
    chunks: tuple[tuple[tuple[Box, Box], ...], ...]
    planner_data: bytes
    """`planner_data` of the Metadata, by `pack_plain`."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The columns. For objects: dtype "", global_sizes, offsets, sizes (), container_bytes 0."""

    keys: tuple[str, ...]
    """Flattened keys (fqn)."""
    kinds: bytes
    """One `Kind` a byte."""
    dtypes: tuple[str, ...]
    """As in `str(torch.dtype)` without the leading `torch.`: "float32"."""
    global_sizes: tuple[Box, ...]
    offsets: tuple[Box, ...]
    sizes: tuple[Box, ...]
    container_bytes: tuple[int, ...]
    """Length of the container that holds the payload."""
    requires_grad: bytes
    """One 0 or 1 a byte: what TensorProperties records."""
    pinned: bytes
    """One 0 or 1 a byte: what TensorProperties records."""
    digests: tuple[int, ...]
    """A digest of each item's value, -1: not known. Used once, to find replicas that differ."""
    paths: tuple[tuple[str | int, ...], ...]
    """The path of each key in the nested state (torch: planner_data of DefaultSavePlanner)."""
    final: bool = False
    """True: a user's SavePlanner has decided; each rank writes every item of its offer."""
    metadata: GlobalMetadata | None = None
    """With `final`, on rank 0."""
    to_lowest_rank: bool = False
    """torch: DefaultSavePlanner(dedup_save_to_lowest_rank=True)."""
    check_replicas: str = "off"
    """What happens if replicas differ: "warn", "raise" (the save fails), or "off": nothing."""
    nesting: bytes = b""
    """What torch's index does not say about the state's dicts; see `format.nesting`."""


def encode_offer(offer: Offer) -> bytes:
    """Return the offer as msgpack."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(offer, builtin_types=(bytes,)))
    return packed


def decode_offer(data: bytes) -> Offer:
    """Read an offer and check that its columns agree. Raises ProtocolError."""
    try:
        offer = msgspec.convert(
            msgpack.unpackb(data, use_list=False, strict_map_key=True),
            Offer,
            builtin_types=(bytes,),
        )
    except (ValueError, msgspec.ValidationError) as error:
        raise ProtocolError("protocol", f"malformed offer: {error}") from error
    columns: tuple[Sequence[object], ...] = (
        offer.kinds,
        offer.dtypes,
        offer.global_sizes,
        offer.offsets,
        offer.sizes,
        offer.container_bytes,
        offer.requires_grad,
        offer.pinned,
        offer.digests,
        offer.paths,
    )
    if any(len(column) != len(offer.keys) for column in columns):
        raise ProtocolError("protocol", "malformed offer: its columns differ in length")
    return offer


def pack_assigned(items: Iterable[int], count: int) -> bytes:
    """Return a set of items as bits: bit i, little-endian within each byte, stands for item i of
    `count`.
    """
    bits = bytearray((count + 7) // 8)
    for item in items:
        bits[item >> 3] |= 1 << (item & 7)
    return bytes(bits)


def unpack_assigned(assigned: bytes, count: int) -> list[int]:
    """Return the items whose bit is set, ascending. Raises ProtocolError if the length does not fit
    `count`.
    """
    if len(assigned) != (count + 7) // 8:
        raise ProtocolError("protocol", f"{len(assigned)} bytes do not hold {count} assignments")
    return [item for item in range(count) if assigned[item >> 3] >> (item & 7) & 1]


def layout_id(fingerprint: str, assigned: bytes) -> str:
    """Return the name of a rank's layout: the same offer with the same assignment always has the
    same layout.
    """
    return hashlib.blake2b(assigned, digest_size=12, key=fingerprint.encode()[:64]).hexdigest()


_TUPLE = 1


def _default(value: Any) -> Any:
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, pack_plain(list(value)))
    raise TypeError(f"{type(value).__name__} is not plain data")


def pack_plain(value: Any) -> bytes:
    """Encode None, bool, int, float, str, bytes, and lists, tuples and dicts of these; types are
    kept. Raises TypeError.
    """
    packed: bytes = msgpack.packb(value, default=_default, strict_types=True)
    return packed


def unpack_plain(data: bytes) -> Any:
    """Read back what `pack_plain` wrote."""

    def ext(code: int, body: bytes) -> Any:
        return tuple(unpack_plain(body)) if code == _TUPLE else msgpack.ExtType(code, body)

    return msgpack.unpackb(data, ext_hook=ext, strict_map_key=False)
