"""What the code of a cause settles, where it was, and how a sentence names many ranks or nodes."""

from __future__ import annotations

from typing import Final

import msgspec

from milepost.wire.messages import Cause

NAMED_MAX: Final = 8
"""How many ranks or nodes a sentence names before it counts the rest."""

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
"""Causes after which every rank offers anew at its next save."""

REFUSALS: Final = frozenset({"read-only", "permission", "no-space", "quota", "already-committed"})
"""Failures of a publication that come from the file system's refusal. Any other may be that of the
answer only: a rename over the network, say, that is carried out later."""


MISMATCH_HINT: Final = (
    "every rank must call save() in the same order, with the same step and name; their counts stay "
    "apart until each makes a new Checkpointer"
)


def placed(cause: Cause, node_id: str) -> Cause:
    """Return the cause with a node: that one, if it names none."""
    if cause.node:
        return cause
    return msgspec.structs.replace(cause, node=node_id)


def named(what: str, values: list[int] | list[str], total: int) -> str:
    """Return for instance `2 of 8 ranks: 3, 5`; at most NAMED_MAX are named."""
    shown = ", ".join(str(value) for value in values[:NAMED_MAX])
    rest = f" and {len(values) - NAMED_MAX} more" if len(values) > NAMED_MAX else ""
    plural = what if total == 1 else f"{what}s"
    return f"{len(values)} of {total} {plural}: {shown}{rest}"
