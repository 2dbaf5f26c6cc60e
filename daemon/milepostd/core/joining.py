"""Why a node refuses a rank or a save, as far as the message itself tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

from milepost.wire.messages import Cause, Join, SaveRef
from milepostd.core.job import Job

DEADLINE_S_MAX: Final = 7 * 86_400.0
"""Longest deadline of a save."""

JOB_CHARACTERS_MAX: Final = 300
ROOT_CHARACTERS_MAX: Final = 4096
"""Longest names accepted, since they are in each status and in each line of the log. The client
allows 200 characters for a job and adds the root's identity; 4,096 is PATH_MAX."""

PLACE_CHARACTERS_MAX: Final = 3000
"""Longest path of a checkpoint in a place of its own. Names below it must fit into PATH_MAX, and
the path itself into a slot's record."""


def why_not(join: Join, here: str, roots: Sequence[str], known: Job | None) -> Cause | None:
    """Return why a rank cannot join; None if it can.

    Args:
        here: this node's id.
        roots: those that jobs may use, with all below them; empty: any.
        known: the newest attempt of this job here, if there is one.
    """
    if not 0 < join.deadline_s <= DEADLINE_S_MAX:
        return Cause(
            "usage",
            f"deadline_s is {join.deadline_s:g}, not above 0 and at most {DEADLINE_S_MAX:g}",
            "",
            here,
            join.rank,
        )
    world = len(join.node_of_rank)
    if not (
        join.attempt >= 0
        and 0 < len(join.job) <= JOB_CHARACTERS_MAX
        and len(join.root) <= ROOT_CHARACTERS_MAX
        and 0 <= join.rank < world
        and min(join.node_of_rank) >= 0
        and max(join.node_of_rank) < len(join.cohort)
        and len({node.node_id for node in join.cohort}) == len(join.cohort)
        and join.cohort[join.node_of_rank[join.rank]].node_id == here
    ):
        return Cause(
            "protocol",
            f"rank {join.rank} of {world} describes a cohort that does not place it on {here}",
            "a restarted daemon needs a new Checkpointer on every rank",
            here,
            join.rank,
        )
    if not is_allowed(join.root, roots):
        return Cause(
            "root-refused",
            f"root {join.root} lies under none of this daemon's roots: " + ", ".join(roots),
            "start milepostd with --root for it",
            here,
            join.rank,
        )
    if known is not None and join.attempt < known.attempt:
        return Cause(
            "attempt-superseded",
            f"job {join.job} is at attempt {known.attempt}; attempt {join.attempt} is history",
            "end the older run",
            here,
            join.rank,
        )
    if known is not None and join.attempt == known.attempt and not known.agrees_with(join):
        return Cause(
            "protocol",
            f"rank {join.rank} of job {join.job} describes another cohort than the other ranks",
            "",
            here,
            join.rank,
        )
    return None


def why_not_there(save: SaveRef, here: str, roots: Sequence[str]) -> Cause | None:
    """Return why a save cannot be published in a place of its own; None if it can, or names none.

    Args:
        here: this node's id.
        roots: those that may be written in, with all below them; empty: any.
    """
    if not save.place:
        return None
    if len(save.place) > PLACE_CHARACTERS_MAX or "\0" in save.place:
        text = f"the path of save {save.save_id} has {len(save.place)} characters, or a NUL"
        hint = f"use one of at most {PLACE_CHARACTERS_MAX} characters, without a NUL"
        return Cause("usage", text, hint, here)
    if not is_allowed(save.place, roots):
        return Cause(
            "root-refused",
            f"{save.place} lies under none of this daemon's roots: " + ", ".join(roots),
            "start milepostd with --root for it",
            here,
        )
    return None


def is_allowed(root: str, roots: Sequence[str]) -> bool:
    """Whether a root lies under one of these."""
    path = PurePosixPath(root)
    if not path.is_absolute() or ".." in path.parts:
        return False
    return not roots or any(path.is_relative_to(allowed) for allowed in roots)
