"""The manifest: what milepost knows of a checkpoint beyond torch's index, and the fragments it is
put together from.

Each node writes one fragment, `.fragment-<node>`, beside its data files; the coordinator's planner
child reads all of them (which proves that the nodes share the root), writes `.milepost`, and the
fragments go before the checkpoint is published. msgpack; a reader ignores fields it does not know,
and every field added later has a default. No torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgpack
import msgspec

from milepost.errors import CorruptCheckpoint

MANIFEST_NAME: Final = ".milepost"
METADATA_NAME: Final = ".metadata"
"""torch's index beside it: a directory that has none is no checkpoint."""
FRAGMENT_PREFIX: Final = ".fragment-"
FORMAT_VERSION: Final = 1


class FragmentFile(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's data file. `crcs[i]` is the CRC-32 of the whole container of the layout's i-th
    tensor.
    """

    rank: int
    layout_id: str
    file: str
    file_bytes: int
    crcs: tuple[int, ...]
    objects: tuple[tuple[int, int, int, int], ...]
    """(item of the offer, offset, length, CRC-32) of each serialised object."""


class Fragment(msgspec.Struct, frozen=True, kw_only=True):
    """What one node wrote for one save."""

    format: int = FORMAT_VERSION
    node_id: str
    save_id: str
    files: tuple[FragmentFile, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`.milepost`. Column entry i of `keys`, `files_of`, `offsets`, `lengths`, `crcs` describes
    blob i.
    """

    format: int = FORMAT_VERSION
    job: str = ""
    save_id: str = ""
    step: int = -1
    world: int = 0
    torch_version: str = ""
    milepost_version: str = ""
    committed_at_ms: int = 0
    """Wall clock of the coordinator, milliseconds since 1970."""
    files: tuple[str, ...] = ()
    file_bytes: tuple[int, ...] = ()
    keys: tuple[str, ...] = ()
    files_of: tuple[int, ...] = ()
    """Index into `files`."""
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    crcs: tuple[int, ...] = ()
    """CRC-32 over the blob's whole container."""
    index_crc: int = -1
    """CRC-32 of `.metadata`; -1: not recorded."""


def encode(value: Fragment | Manifest) -> bytes:
    """Return the msgpack form."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(value))
    return packed


def decode_fragment(data: bytes) -> Fragment:
    """Read a fragment. Raises CorruptCheckpoint."""
    try:
        return msgspec.convert(msgpack.unpackb(data, use_list=False), Fragment)
    except (ValueError, msgspec.ValidationError) as error:
        raise CorruptCheckpoint("corrupt", f"malformed manifest fragment: {error}") from error


def decode_manifest(data: bytes) -> Manifest:
    """Read a manifest. Raises CorruptCheckpoint."""
    try:
        return msgspec.convert(msgpack.unpackb(data, use_list=False), Manifest)
    except (ValueError, msgspec.ValidationError) as error:
        raise CorruptCheckpoint("corrupt", f"malformed manifest: {error}") from error


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint directory, or None if it has none. Raises
    CorruptCheckpoint, OSError.
    """
    try:
        data = (checkpoint / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        return None
    return decode_manifest(data)
