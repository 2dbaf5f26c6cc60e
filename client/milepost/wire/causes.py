"""From the cause that a message carries to the error that a trainer sees."""

from __future__ import annotations

from milepost.errors import MilepostError
from milepost.wire.messages import Cause


def error_of(cause: Cause, kind: type[MilepostError]) -> MilepostError:
    """Return the cause as an exception whose text says where it happened."""
    where = [f"node {cause.node}"] if cause.node else []
    where += [f"rank {cause.rank}"] if cause.rank >= 0 else []
    text = f"{cause.message} ({', '.join(where)})" if where else cause.message
    if where and cause.message.endswith(text[len(cause.message) :]):
        text = cause.message  # It came from there as such an error, and says so already.
    return kind(cause.code, text, cause.hint)
