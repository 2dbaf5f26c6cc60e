"""The manifest: what milepost knows about a checkpoint beyond torch's index. Also the fragments
from which it is made.

Each node writes one fragment, `.fragment-<node>`, beside its data files. The coordinator's planner
child reads all of them (which proves that the nodes share the root) and writes `.milepost`; the
fragments are removed before the checkpoint is published. Both are msgpack: a reader ignores fields
that it does not know, and every field added later has a default. No torch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgpack
import msgspec
from isal import isal_zlib

from milepost.errors import CorruptCheckpoint
from milepost.format.opening import read_regular

MANIFEST_NAME: Final = ".milepost"
METADATA_NAME: Final = ".metadata"
"""torch's index beside it. A directory without it is not a checkpoint."""
FRAGMENT_PREFIX: Final = ".fragment-"
FORMAT_VERSION: Final = 1

STRETCH_BYTES: Final = 1 << 20
"""A data file is checked in stretches of this size, each with a CRC. They are so long that the CRCs
are few, and so short that a part of a large tensor can be checked without reading much of the rest.
The format does not depend on this size: each manifest names its own."""


class FragmentFile(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's data file. `crcs[i]` is the CRC-32 of the container of the layout's i-th tensor,
    as a whole.
    """

    rank: int
    layout_id: str
    file: str
    file_bytes: int
    crcs: tuple[int, ...]
    objects: tuple[tuple[int, int, int, int], ...]
    """(item of the offer, offset, length, CRC-32) of each serialised object."""
    stretches: bytes = b""
    """CRC-32 of each stretch of `STRETCH_BYTES`, of which the last may be shorter, by `pack_crcs`;
    empty: not known."""
    digests: bytes = b""
    """Of the rank's replicas that are due, in the file or not: as the rank has packed them."""


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """What one node wrote for one save."""

    format: int = FORMAT_VERSION
    node_id: str
    save_id: str
    files: tuple[FragmentFile, ...]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`.milepost` without its columns of blobs. It is quick to read, and a load needs no more."""

    format: int = FORMAT_VERSION
    job: str = ""
    save_id: str = ""
    step: int = -1
    world: int = 0
    torch_version: str = ""
    milepost_version: str = ""
    committed_at_ms: int = 0
    """Wall clock of the coordinator, milliseconds since 1970."""
    nesting: bytes = b""
    """What the index does not say about the state's dicts, as `format.nesting` packs it. It comes
    before the columns, so that it can be read without them."""
    files: tuple[str, ...] = ()
    file_bytes: tuple[int, ...] = ()
    index_crc: int = -1
    """CRC-32 of `.metadata`; -1: not recorded."""
    stretch_bytes: int = 0
    """Length of a stretch."""
    stretches: tuple[bytes, ...] = ()
    """For each file the CRC-32 of its stretches, as in `FragmentFile`; empty for a file whose
    stretches are not known. The whole tuple is empty if none are."""
    index: bytes = b""
    """The content of `.metadata`, packed by `dcp_format.columns`; empty: left out."""


class Manifest(Summary, frozen=True, kw_only=True):
    """`.milepost`. Column entry i of `keys`, `files_of`, `offsets`, `lengths`, `crcs` describes
    blob i.
    """

    keys: tuple[str, ...] = ()
    files_of: tuple[int, ...] = ()
    """Index into `files`."""
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    crcs: tuple[int, ...] = ()
    """CRC-32 of the blob's container, as a whole."""


_SELF_CRC: Final = b"\xa8self_crc\xce"
"""How the last field of a manifest begins: its name, and msgpack's mark of a four-byte number."""


def pack_crcs(crcs: Sequence[int]) -> bytes:
    """Return checksums as little-endian four-byte numbers."""
    return struct.pack(f"<{len(crcs)}I", *crcs)


def encode_fragment(fragment: Fragment) -> bytes:
    """Return the msgpack form."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(fragment, builtin_types=(bytes,)))
    return packed


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the msgpack form, which ends with the CRC-32 of everything before it."""
    built = msgspec.to_builtins(manifest, builtin_types=(bytes,))
    # A placeholder that needs four bytes reserves the space.
    body: bytes = msgpack.packb({**built, "self_crc": 0xFFFFFFFF})[:-4]
    assert body.endswith(_SELF_CRC)
    return body + isal_zlib.crc32(body).to_bytes(4, "big")


def decode_fragment(data: bytes) -> Fragment:
    """Read a fragment. Raises CorruptCheckpoint."""
    try:
        return msgspec.convert(
            msgpack.unpackb(data, use_list=False), Fragment, builtin_types=(bytes,)
        )
    except (ValueError, msgspec.ValidationError) as error:
        raise CorruptCheckpoint("corrupt", f"malformed manifest fragment: {error}") from error


def decode_manifest(data: bytes) -> Manifest:
    """Read a manifest. Raises CorruptCheckpoint, also if its checksum is wrong."""
    try:
        fields = msgpack.unpackb(data, use_list=False)
        _check_itself(data, fields)
        return msgspec.convert(fields, Manifest, builtin_types=(bytes,))
    except (ValueError, msgspec.ValidationError) as error:
        raise CorruptCheckpoint("corrupt", f"malformed manifest: {error}") from error


def decode_summary(data: bytes) -> Summary:
    """Read a manifest without its blobs. Raises CorruptCheckpoint, also if its checksum is
    wrong.
    """
    try:
        summary = msgspec.msgpack.decode(data, type=Summary)
        _check_itself(data, {"stretches": 0} if summary.stretches else {})
        return summary
    except (ValueError, msgspec.DecodeError) as error:
        raise CorruptCheckpoint("corrupt", f"malformed manifest: {error}") from error


def _check_itself(data: bytes, fields: object) -> None:
    """Compare a manifest with its own checksum, which is required if it has `stretches`. Raises
    ValueError.
    """
    body, written = data[:-4], int.from_bytes(data[-4:], "big")
    if body.endswith(_SELF_CRC):
        found = isal_zlib.crc32(body)
        if found != written:
            raise ValueError(f"its checksum is {found:08x}, but {written:08x} was written")
    elif isinstance(fields, dict) and "stretches" in fields:
        raise ValueError("its checksum is gone")


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint directory, or None if it has none. Raises
    CorruptCheckpoint, OSError.
    """
    data = _read(checkpoint)
    return None if data is None else decode_manifest(data)


def read_summary(checkpoint: Path) -> Summary | None:
    """Return the manifest of a checkpoint directory without its blobs, or None if it has no
    manifest. Raises CorruptCheckpoint, OSError.
    """
    data = _read(checkpoint)
    return None if data is None else decode_summary(data)


def _read(checkpoint: Path) -> bytes | None:
    try:
        return read_regular(checkpoint / MANIFEST_NAME)
    except FileNotFoundError:
        return None
