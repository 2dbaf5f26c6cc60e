"""A short deadline at every stage that can wait, all of them held at once.

`test_trainers` tests a silent rank, `test_peers` a peer that cannot be reached.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from milepostd.core.role import VERDICT_GRACE_S
from tests.faults.fleet import (
    RESOLVE_S,
    RESOLVING_SOON,
    SHORT_S,
    SLACK_S,
    Crew,
    Fired,
    fired,
    members,
    until,
)
from tests.faults.judging import check_root, judge, partials

WAIT_S: Final = 0.5
"""Timeout of a `wait()` for a save that is held longer."""


class Stage(NamedTuple):
    """Where a save is held, and what it waited for according to its handles."""

    point: str
    node: int
    grace_s: float
    code: str
    waits_for: str


STAGES: Final = (
    Stage("before-publish", 0, RESOLVE_S, "node-missing",
          f"gave no verdict within {SHORT_S + RESOLVE_S:g} s; the save was given up"),
    Stage("before-metadata", 0, VERDICT_GRACE_S, "timeout", "building the index and the manifest"),
    Stage("before-durable", 1, 0.0, "timeout", "writing the manifest fragment"),
    Stage("mid-write", 1, 0.0, "timeout", "writing 0 of "),
    Stage("after-staged", 0, 0.0, "timeout", "writing 0 of "),
    # Without a layout `save()` itself waits, so this one is last.
    Stage("before-plan", 0, VERDICT_GRACE_S, "timeout", "planning: dropping replicas"),
)  # fmt: skip
"""The step of a stage's save is ten times the stage's number, from 1 on."""


def test_a_deadline_ends_a_save_wherever_it_is_held_and_the_handles_name_what_it_waited_for(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    steps = {stage: 10 * number for number, stage in enumerate(STAGES, 1)}
    # The first rank alone, as another job, has both its slots held.
    alone = {101: "after-staged", 102: "after-staged"}
    faults = [
        [f"{stage.point}:hold@{step}" for stage, step in steps.items() if stage.node == node]
        for node in (0, 1)
    ]
    faults[0] += [f"{point}:hold@{step}" for step, point in alone.items()]
    with members(folder, folder, faults, prefix=RESOLVING_SOON, **places) as daemons:
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, environment=places, slots=len(STAGES) + 1)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        crew.hurry()
        lone = Crew(folder / "alone", nodes[:1], environment=places, deadline_s=SHORT_S)

        for rank in (0, 1):
            for stage, step in steps.items():
                if step == 20:
                    crew.tell(rank, "finish", step=10, timeout_s=WAIT_S)
                width = {"width": 1} if stage.point == "before-plan" else {}
                crew.tell(rank, "begin", step=step, **width)
        for step in (101, 102, 103):
            lone.tell(0, "begin", step=step)
        stalls = [[crew.hear(0)], [crew.hear(1)]]
        for rank, stalls_s in enumerate(stalls):
            # What a call asks for holds for that call, whatever the deadline is.
            told = crew.hear(rank)
            assert "test-timeout" == told["code"]
            assert f"is not committed after {WAIT_S:g} s; it is " in told["message"]
            assert WAIT_S <= told["waited_s"] < SHORT_S
            stalls_s += [crew.hear(rank) for _ in STAGES[1:]]
        held, also_held, waited_s = (lone.hear(0) for _ in range(3))
        # No slot is free: save() waits for one as long, and no longer.
        assert max(held, also_held) < SHORT_S <= waited_s < SHORT_S + SLACK_S
        (told,) = lone.all("finish", step=103)
        assert ("failed", "busy") == (told["phase"], told["code"])
        assert f"no slot became free within {SHORT_S:g} s" in told["message"]

        for *others, planning_s in stalls:
            assert max(others) < SHORT_S, "save() returns though its save is held"
            assert planning_s < SHORT_S + VERDICT_GRACE_S + SLACK_S
        for stage, step in steps.items():
            told = crew.all("finish", step=step)
            assert [("failed", stage.code)] * 2 == [(at["phase"], at["code"]) for at in told]
            assert [True] * 2 == [stage.waits_for in each["message"] for each in told], told
            if stage.point != "before-publish":
                assert told[0]["message"] == told[1]["message"]
                assert f"did not end within {SHORT_S:g} s" in told[0]["message"]
                place = nodes[stage.node].status()["node"]["node_id"]
                assert f"(node {place}" in told[0]["message"]
            for lasted_s in crew.lasted_s(step):
                # Ranks begin one after another; the deadline counts from the first word.
                until_s = SHORT_S + stage.grace_s
                assert until_s <= lasted_s < until_s + SLACK_S, (stage, lasted_s)

        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=70)]
        wanted = [Fired(stage.point, "hold", step) for stage, step in steps.items()]
        seen = [each for node in nodes for each in fired(node) if each.step < 100]
        assert sorted(wanted) == sorted(seen)
        for stage, step in steps.items():
            daemons[stage.node].release(stage.point, step)
        for step, point in alone.items():
            daemons[0].release(point, step)
        until(lambda: not any(node.status()["saves"] for node in nodes), "all holds are over")
        until(lambda: not partials(root), "nothing is left over")
        for each in (crew, lone):
            each.dismiss()
        assert ["step_1", "step_70"] == check_root(root)
        assert "step_70" == os.readlink(root / "latest")
        judge(root, ["latest", "step_1"])
