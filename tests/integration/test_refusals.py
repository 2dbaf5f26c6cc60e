"""States that cannot be saved exactly are refused by name; nothing is left behind, and training and
later saves go on.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.integration import refused_states as bad
from tests.integration import states
from tests.integration.cluster import Rank, judge, nodes, run_ranks

DEADLINE_S = 60.0
"""A rank that is not told of another's refusal would wait for this long."""


class Outcome(NamedTuple):
    """How one rank saw a bad save and the good one after it."""

    raised: str
    """Class of what `save()` raised; "": nothing."""
    code: str
    text: str
    left: list[str]
    """New entries in the root and below `.partial`, after all ranks knew of the refusal."""
    next_phase: str


class Run(NamedTuple):
    root: Path
    ranks: list[dict[str, Any]]
    values: dict[str, states.Reading]


class Records(logging.Handler):
    """Keeps what milepost says in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _listing(root: Path) -> set[str]:
    """Return the entries of the root and of `.partial`. Leaves out the empty directories that keep
    late nodes out of a given-up save until they are removed.
    """
    partial = [name for name in os.listdir(root / ".partial") if not _is_mark(root, name)]
    return {*os.listdir(root), *(f".partial/{name}" for name in partial)}


def _is_mark(root: Path, name: str) -> bool:
    try:
        return name.endswith(".aborted") and not os.listdir(root / ".partial" / name)
    except FileNotFoundError:
        return True


def _try(ck: Any, at: int, state: Any, root: Path) -> Outcome:
    """Try to save the state, then save a good one."""
    from milepost import MilepostError

    dist.barrier()
    before = _listing(root)
    dist.barrier()
    raised = code = text = ""
    try:
        save = ck.save(at, state, checkpoint_id=f"bad_{at}")
    except MilepostError as error:
        raised, code, text = type(error).__name__, error.code, str(error)
    else:
        try:
            save.wait(60)
        except MilepostError as error:
            code, text = error.code, str(error)
    dist.barrier()
    left = sorted(_listing(root) - before)
    dist.barrier()
    after = ck.save(at, bad.good(at), checkpoint_id=f"good_{at}")
    after.wait(60)
    return Outcome(raised, code, text, left, after.phase)


def refuse(rank: Rank) -> dict[str, Any]:
    from milepost import Checkpointer

    number, root = rank.rank, rank.root
    told: dict[str, Any] = {}
    with Checkpointer(root, deadline_s=DEADLINE_S) as ck:
        # Nothing has been saved: the daemon may not even know the ranks.
        dispute = bad.DISPUTED["meta on one"]
        told["at first"] = _try(ck, 0, dispute.make(number), root)
        for at, (name, refusal) in enumerate(bad.EVERYWHERE.items(), start=1):
            told[name] = _try(ck, at, refusal.make(), root)
        for at, (name, dispute) in enumerate(bad.DISPUTED.items(), start=50):
            told[name] = _try(ck, at, dispute.make(number), root)
        # The structure is known by now, so that no plan is made before the object is met.
        hook = bad.unpicklable() if number else 2
        ck.save(80, {"w": torch.ones(3), "hook": 1}).wait(60)
        told["known structure"] = _try(ck, 81, {"w": torch.ones(3), "hook": hook}, root)
        told["warnings"] = _save_unequal_replicas(ck, number)
        ck.save(95, bad.good(95)).wait(60)
    return told


def _save_unequal_replicas(ck: Any, number: int) -> dict[str, list[str]]:
    records = Records()
    logging.getLogger("milepost").addHandler(records)
    equal: dict[str, Any] = {"equal": torch.ones(3), "also": {"equal": [1, "x"]}}
    said = {}
    unequal: dict[str, dict[str, Any]] = {
        "none": {},
        "tensor": {"deep": {"noise": torch.full((3,), float(number))}},
        "object": {"deep": {"name": f"rank {number}"}},
    }
    for step, (name, extra) in enumerate(unequal.items(), start=90):
        ck.save(step, {**equal, **extra}, checkpoint_id=f"replicas_{name}").wait(60)
        said[name], records.said = records.said, []
    logging.getLogger("milepost").removeHandler(records)
    return said


@pytest.fixture(scope="module")
def run(module_folder: Path) -> Run:
    root = module_folder / "checkpoints"
    with nodes(module_folder, 2, root) as (first, second):
        ranks = run_ranks(refuse, root, [first, second])
    paths = {
        name: str(root / name)
        for name in ("replicas_tensor", "replicas_object", "good_1", "step_95")
    }
    (values,) = judge(states.read_all, 1, paths)
    return Run(root, ranks, values)


@pytest.mark.parametrize("name", bad.EVERYWHERE)
def test_every_rank_is_told_key_and_reason_at_once(run: Run, name: str) -> None:
    refusal = bad.EVERYWHERE[name]
    for outcome in (rank[name] for rank in run.ranks):
        assert ("UsageError", refusal.code) == (outcome.raised, outcome.code), outcome.text
        assert [] == [word for word in refusal.names if word not in outcome.text], outcome.text
        assert [] == outcome.left
        assert "committed" == outcome.next_phase


@pytest.mark.parametrize("name", [*bad.DISPUTED, "at first", "known structure"])
def test_what_one_rank_cannot_save_fails_on_both_by_the_same_name(run: Run, name: str) -> None:
    alias = {"at first": "meta on one"}
    known = bad.Dispute(lambda _: {}, "unpicklable", ("'hook'",), raises=1)
    dispute = bad.DISPUTED.get(alias.get(name, name), known)
    for number, outcome in enumerate(rank[name] for rank in run.ranks):
        expected = "UsageError" if number == dispute.raises else ""
        assert (expected, dispute.code) == (outcome.raised, outcome.code), outcome.text
        assert [] == [word for word in dispute.names if word not in outcome.text], outcome.text
        if dispute.raises not in (None, number):
            assert f"rank {dispute.raises}" in outcome.text
        assert [] == [left for left in outcome.left if not left.startswith(".partial/")]
        assert "committed" == outcome.next_phase


def test_nothing_is_left_of_refused_saves(run: Run) -> None:
    assert [] == [name for name in _listing(run.root) if "bad" in name]
    assert [] == os.listdir(run.root / ".partial")


def test_the_saves_in_between_hold_the_right_values(run: Run) -> None:
    for name, value in (("good_1", 1), ("step_95", 95)):
        whole = {"w": torch.full((5, 2), float(value)), "at": value}
        assert states.expected(whole) == run.values[name].values


def test_replicas_that_differ_are_saved_with_a_warning_by_name(run: Run) -> None:
    said = run.ranks[0]["warnings"]
    assert [] == said["none"]
    for name, key in (("tensor", "'deep.noise'"), ("object", "'deep.name'")):
        (warning,) = said[name]
        assert [] == [w for w in (key, "rank", "replicas-differ") if w not in warning], warning
        assert "equal" not in warning.replace(key, "")
    noise = run.values["replicas_tensor"].values["deep.noise"]
    assert noise in [states.describe(torch.full((3,), float(rank))) for rank in range(2)]
    name_of = run.values["replicas_object"].values["deep.name"]
    assert name_of in [states.describe(f"rank {rank}") for rank in range(2)]
