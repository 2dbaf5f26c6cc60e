"""The messages between the daemon and its planner's process, and how they travel.

A message is a frame on the child's stdin or stdout: 8 bytes of length, little-endian, then msgpack
in the form of `milepost.wire.messages`. Must not import torch, and opens no offer.
"""

from __future__ import annotations

import struct
from typing import Any, Final, TypeAlias

import msgpack
import msgspec

from milepost.errors import ProtocolError
from milepost.wire.messages import Cause, RankLayout, RankReport, SaveRef, WrittenFile

FRAME_BYTES_MAX: Final = 1 << 30
"""Largest frame in either direction. The offers of 1,024 ranks of 1,000 items are 83 MB. A larger
request is not sent; a child that sends a larger answer is ended."""

FRAME_HEADER: Final = struct.Struct("<Q")


class PlannerRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what the daemon asks. The answer carries the same `call`."""

    call: int


class Warm(PlannerRequest, frozen=True):
    """Import torch now. Answered by `Warmed` or `RequestFailed`."""


class PlanWanted(PlannerRequest, frozen=True):
    """Plan from the reports of all ranks. Answered by `PlanReady` or `RequestFailed`."""

    job: str
    attempt: int
    reports: tuple[RankReport, ...]


class IndexWanted(PlannerRequest, frozen=True):
    """Write manifest and `.metadata`. Answered by `IndexReady`, `FileUnseen` or `RequestFailed`."""

    root: str
    save: SaveRef
    files: tuple[WrittenFile, ...]
    """One for each rank, ascending by rank."""
    fragments: tuple[str, ...]
    umask: int = -1


class PlannerAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what the child answers."""

    call: int


class Warmed(PlannerAnswer, frozen=True):
    """torch is imported."""


class PlanReady(PlannerAnswer, frozen=True):
    """Layouts for the ranks that offered, ascending by rank."""

    layouts: tuple[RankLayout, ...]
    warnings: tuple[Cause, ...]


class IndexReady(PlannerAnswer, frozen=True):
    """Manifest and `.metadata` are durable. `checkpoint_bytes` counts all files."""

    checkpoint_bytes: int
    warnings: tuple[Cause, ...] = ()


class FileUnseen(PlannerAnswer, frozen=True):
    """A file that a node wrote is missing or too short, seen from here. Asking again may help."""

    cause: Cause


class RequestFailed(PlannerAnswer, frozen=True):
    """The request cannot be met. `is_passing`: storage refused it for a reason that may pass."""

    cause: Cause
    is_passing: bool = False


AnyRequest: TypeAlias = Warm | PlanWanted | IndexWanted
AnyAnswer: TypeAlias = Warmed | PlanReady | IndexReady | FileUnseen | RequestFailed


def encode_frame(message: PlannerRequest | PlannerAnswer) -> bytes:
    """Return the message with its length before it. Raises ProtocolError over the limit."""
    body: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(
            "protocol",
            f"a planner message of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}",
        )
    return FRAME_HEADER.pack(len(body)) + body


def decode_body(body: bytes, kind: Any) -> Any:
    """Decode what follows the length, as `AnyRequest` or `AnyAnswer`. Raises ProtocolError."""
    try:
        raw = msgpack.unpackb(body, strict_map_key=True, use_list=False)
        return msgspec.convert(raw, kind, builtin_types=(bytes,))
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError("protocol", f"malformed planner message: {error}") from error
