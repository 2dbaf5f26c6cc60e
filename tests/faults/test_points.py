"""Every fault at every point of a save, on the coordinator's node and on another, with one pair of
daemons and one pair of ranks that live through them all.

The step of a case is its number times ten, and its faults carry that step; the save after it is to
commit. A daemon that is killed comes back by its supervisor. What must hold after each case stands
in `test_a_fault_ends_in_a_checkpoint_or_in_one_reason_for_all`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from milepostd.ops.faults import POINTS
from tests.faults.fleet import Crew, Fired, Member, fired, members, until
from tests.faults.judging import check_root, judging, partials, picture

ON_EVERY_NODE: Final = ("after-staged", "mid-write", "after-write", "before-durable")
"""Points that every node meets in a save. Only the coordinator meets the others."""

ON_THE_RANK: Final = ("after-staged", "mid-write", "after-write")
"""Points within one rank's write. A failure there names the rank, too."""

PUBLISHED: Final = ("after-publish", "before-committed")
"""Points after the rename. The save is a checkpoint then, whatever fails."""

QUOTA_AT: Final = ("mid-write", "before-durable", "before-metadata", "before-publish")
"""Points at which a quota is tested. It is handled like a full disk."""

CODES: Final = {
    "raise": "internal", "enospc": "no-space", "edquot": "quota", "eio": "io-error",
}  # fmt: skip
"""The error code of each failing action."""

REASONS: Final = {
    "raise": "injected at fault point",
    "enospc": "no space left on device",
    "edquot": "disk quota exceeded",
    "eio": "input/output error",
}

SLEEP_S: Final = 0.3


class Case(NamedTuple):
    """One fault: where, what, on whose node, and at which step."""

    point: str
    action: str
    node: int
    step: int

    @property
    def fault(self) -> str:
        argument = f":{SLEEP_S}" if self.action == "sleep" else ""
        return f"{self.point}:{self.action}{argument}@{self.step}"


def _cases() -> list[Case]:
    cases: list[Case] = []
    for action in ("kill", "eio", "enospc", "edquot", "raise", "sleep", "stop"):
        for point in QUOTA_AT if action == "edquot" else POINTS:
            for node in (0, 1) if point in ON_EVERY_NODE else (0,):
                cases.append(Case(point, action, node, 10 * (len(cases) + 1)))
    return cases


CASES: Final = _cases()

PAIRS: Final = (
    ("before-durable:kill", "before-durable:kill"),
    ("before-metadata:kill", "mid-write:kill"),
    ("before-publish:kill", "after-staged:stop"),
    ("after-publish:kill", "after-write:eio"),
    ("mid-write:eio", "mid-write:enospc"),
)
"""Faults of both nodes in one save."""

PAIR_STEP: Final = 10 * (len(CASES) + 1)
"""Step of the first pair; the next ones are ten further each."""


class Yard(NamedTuple):
    """The state that the cases share."""

    root: Path
    shm: Path
    members: list[Member]
    crew: Crew
    verified: set[str]
    """Checkpoints that were verified already."""


@pytest.fixture(scope="module")
def root(module_folder: Path) -> Iterator[Path]:
    """Where all cases save; judged when the daemons have ended."""
    with judging(module_folder / "root") as root:
        yield root


@pytest.fixture(scope="module")
def yard(root: Path, module_folder: Path, module_shm: Path) -> Iterator[Yard]:
    faults = [[case.fault for case in CASES if case.node == node] for node in (0, 1)]
    for number, pair in enumerate(PAIRS):
        for node in (0, 1):
            faults[node].append(f"{pair[node]}@{PAIR_STEP + 10 * number}")
    with members(module_folder, root, faults, MILEPOST_SHM_DIR=str(module_shm)) as daemons:
        crew = Crew(
            root,
            [member.node for member in daemons],
            environment={"MILEPOST_SHM_DIR": str(module_shm)},
        )
        crew.all("prepare")
        assert ["", ""] == [told["code"] for told in crew.all("save", step=1)]
        yield Yard(root, module_shm, daemons, crew, set())
        crew.dismiss()
        until(
            lambda: not os.listdir(module_shm), "the shared memory of ranks that have left is freed"
        )


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.action}-{case.point}-node{case.node}" for case in CASES]
)
def test_a_fault_ends_in_a_checkpoint_or_in_one_reason_for_all(yard: Yard, case: Case) -> None:
    root, daemons, crew = yard.root, yard.members, yard.crew
    pids = [member.pid for member in daemons]
    before = root / os.readlink(root / "latest")
    seen = picture(before)
    # A plan is made for a new structure only.
    shape = {"width": case.step} if case.point == "before-plan" else {}

    told = crew.all("save", step=case.step, **shape)

    struck = Fired(case.point, case.action, case.step)
    assert [struck] == [each for each in fired(daemons[case.node].node) if each.step == case.step]
    assert [] == [each for each in fired(daemons[1 - case.node].node) if each.step == case.step]

    names = [f"step_{case.step}"]
    if case.action in CODES and case.point not in PUBLISHED:
        assert ["failed"] * 2 == [each["phase"] for each in told]
        assert [CODES[case.action]] * 2 == [each["code"] for each in told]
        assert told[0]["message"] == told[1]["message"]
        assert REASONS[case.action] in told[0]["message"]
        status = daemons[case.node].node.status()
        assert f"node {status['node']['node_id']}" in told[0]["message"]
        if case.point in ON_THE_RANK:
            assert f"rank {case.node}" in told[0]["message"]
        assert (case.point in told[0]["message"]) or (
            f"step_{case.step}" in told[0]["message"] and "bytes wanted" in told[0]["message"]
        )
        assert not (root / names[0]).exists()
        names = []
        assert before.name == os.readlink(root / "latest")
    else:
        assert [("committed", "")] * 2 == [(each["phase"], each["message"]) for each in told]
    assert seen == picture(before), "the last checkpoint was touched"

    after = crew.all("save", step=case.step + 1)

    assert [("committed", "")] * 2 == [(each["phase"], each["message"]) for each in after]
    names.append(f"step_{case.step + 1}")
    assert set(names) <= set(check_root(root, yard.verified)) | yard.verified
    until(lambda: not partials(root), f"nothing is left over, but there is {partials(root)}")
    assert names[-1] == os.readlink(root / "latest")
    assert [True, True] == [os.path.exists(path) for path in (root / names[-1], root / "latest")]
    assert 2 == len(os.listdir(yard.shm)), "one arena a rank"
    for member, pid in zip(daemons, pids, strict=True):
        was_killed = case.action == "kill" and member is daemons[case.node]
        assert was_killed == (member.pid != pid), "a daemon ended that was not killed"


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[" and ".join(pair) for pair in PAIRS])
def test_faults_on_both_nodes_in_one_save_have_one_end_and_the_next_save_commits(
    yard: Yard, number: int
) -> None:
    root, step, pair = yard.root, PAIR_STEP + 10 * number, PAIRS[number]
    told = yard.crew.all("save", step=step)
    hits = [
        f"{each.point}:{each.action}"
        for member in yard.members
        for each in fired(member.node)
        if each.step == step
    ]
    # What the first one ended, the second may never have met.
    assert hits
    assert set(hits) <= set(pair)
    assert (told[0]["phase"], told[0]["message"]) == (told[1]["phase"], told[1]["message"])
    is_refused = any(hit.endswith((":eio", ":enospc")) for hit in hits)
    assert told[0]["phase"] == ("failed" if is_refused else "committed")
    after = yard.crew.all("save", step=step + 1)
    assert [("committed", "")] * 2 == [(each["phase"], each["message"]) for each in after]
    until(lambda: not partials(root), f"nothing is left over, but there is {partials(root)}")
    check_root(root, yard.verified)
    assert f"step_{step + 1}" == os.readlink(root / "latest")
    assert 2 == len(os.listdir(yard.shm))
