"""Causes: what follows from a code, on which node it was, and how a sentence lists ranks."""

from __future__ import annotations

from typing import Final

import msgspec

from milepost.wire.messages import Cause

NAMED_MAX: Final = 8
"""Most ranks or nodes that a sentence names; it counts the rest."""

PLAN_VOIDING: Final = frozenset(
    {
        "structure-changed",
        "key-conflict",
        "coverage-gap",
        "coverage-overlap",
        "coverage-bounds",
        "plan-failed",
        "planner-failed",
    }
)
"""Codes that void the plan: every rank offers its items again at its next save."""

REFUSALS: Final = frozenset({"read-only", "permission", "no-space", "quota", "already-committed"})
"""Codes that prove that a publication did not happen, since the file system refused it. After any
other failure the rename may still happen: only the answer may have been lost on the network."""

MISMATCH_HINT: Final = (
    "every rank must call save() in the same order, with the same step and name; their counts stay "
    "apart until each makes a new Checkpointer"
)


def placed(cause: Cause, node_id: str) -> Cause:
    """Return the cause with this node, unless it names a node already."""
    if cause.node:
        return cause
    return msgspec.structs.replace(cause, node=node_id)


def named(what: str, values: list[int] | list[str], total: int) -> str:
    """Return for instance `2 of 8 ranks: 3, 5`, with at most NAMED_MAX names."""
    shown = ", ".join(str(value) for value in values[:NAMED_MAX])
    rest = f" and {len(values) - NAMED_MAX} more" if len(values) > NAMED_MAX else ""
    plural = what if total == 1 else f"{what}s"
    return f"{len(values)} of {total} {plural}: {shown}{rest}"
