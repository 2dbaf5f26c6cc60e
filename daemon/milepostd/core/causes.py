"""Causes of failures: what follows from a code, where it happened, and how a sentence lists
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from milepost.wire.messages import Cause

NAMED_MAX: Final = 8
"""Most ranks or nodes that a sentence names; it counts the rest."""

LISTED_MAX: Final = 10
"""Most keys that a refusal names, and most warnings of a save."""

_RUNS_MAX: Final = 8
"""Most runs of ranks that a sentence names."""

PLAN_VOIDING: Final = frozenset(
    {
        "structure-changed",
        "key-conflict",
        "coverage-gap",
        "coverage-overlap",
        "coverage-bounds",
        "plan-failed",
        "planner-failed",
        # The next plan compares everything, and names all keys.
        "replicas-differ",
    }
)
"""Codes that void the plan: every rank offers its items again at its next save."""

REFUSALS: Final = frozenset({"read-only", "permission", "no-space", "quota", "already-committed"})
"""Codes that prove that a publication did not happen, since the file system refused it. After any
other failure the rename may still happen: only the answer may have been lost on the network."""

MISMATCH_HINT: Final = (
    "every rank must call save() in the same order, with the same step and name; the ranks' counts "
    "differ until each rank makes a new Checkpointer"
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


def show_ranks(ranks: Sequence[int]) -> str:
    """Write ascending ranks as `rank 3` or `ranks 0-2, 7`, long lists shortened."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs = [[ranks[0], ranks[0]]]
    for before, rank in pairwise(ranks):
        if rank == before + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:_RUNS_MAX]]
    rest = sum(high - low + 1 for low, high in runs[_RUNS_MAX:])
    return f"ranks {', '.join(shown)}" + (f" and {rest} more" if rest else "")


def and_more(count: int, noun: str) -> str:
    """Write how many of so many things are left after `LISTED_MAX` of them; empty if none."""
    rest = count - LISTED_MAX
    return f"; and {rest} more {noun}{'s' if rest > 1 else ''}" if rest > 0 else ""
