"""Errors of the file system at single calls: for data, fragments, the manifest, `.metadata`, names,
and the deletion of a replaced checkpoint.

One pair of daemons lives through all cases. The step of a case is ten times its number. The id of
its save is known, since ids count the calls of `save()`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.faults.fleet import Crew, Member, log_lines, members, until
from tests.faults.judging import check_root, judge, judging, partials, picture
from tests.faults.syscalls import injecting, planner_of
from tests.integration.tracing import needs_strace

pytestmark = needs_strace


class Yard(NamedTuple):
    """The state that the cases share."""

    folder: Path
    places: dict[str, str]
    members: list[Member]

    def crew(self, root: Path, **options: Any) -> Crew:
        nodes = [member.node for member in self.members]
        return Crew(root, nodes, environment=self.places, **options)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.strace"


class Station(NamedTuple):
    """The yard, and ranks that save to one root."""

    yard: Yard
    root: Path
    crew: Crew
    counts: list[int]
    """One number: how often `save` was called."""

    def save(self, step: int) -> list[dict[str, str]]:
        self.counts[0] += 1
        return self.crew.all("save", step=step)

    def next_dir(self, step: int) -> Path:
        """Return where the next save's files will lie."""
        return self.root / ".partial" / f"step_{step}.1-{self.counts[0] + 1}"


@pytest.fixture(scope="module")
def yard(module_folder: Path, module_shm: Path) -> Iterator[Yard]:
    places = {"MILEPOST_SHM_DIR": str(module_shm)}
    with members(module_folder, module_folder, [[], []], **places) as daemons:
        yield Yard(module_folder, places, daemons)
    assert [] == os.listdir(module_shm)


@pytest.fixture(scope="module")
def root(yard: Yard) -> Iterator[Path]:
    """Where the cases of the station save; judged when its ranks have left."""
    with judging(yard.folder / "root") as root:
        yield root


@pytest.fixture(scope="module")
def station(yard: Yard, root: Path) -> Iterator[Station]:
    crew = yard.crew(root)
    made = Station(yard, root, crew, [0])
    assert ["committed"] * 2 == [told["phase"] for told in made.save(1)]
    yield made
    crew.dismiss()


class Case(NamedTuple):
    """One kind of call that fails."""

    name: str
    process: str
    """"other": the daemon that is not the coordinator; "planner": the coordinator's, which has one
    thread, so that `when` counts its calls."""
    calls: str
    what: str
    has_path: bool
    """Only calls that name the save's directory."""
    code: str
    reason: str


CASES: Final = (
    Case("quota-for-data", "other", "fallocate,pwrite64", "error=EDQUOT", False, "quota",
         "disk quota exceeded"),
    Case("data-not-synced", "other", "fsync", "error=EIO", False, "io-error",
         "input/output error"),
    Case("names-not-synced", "other", "fsync", "error=EIO", True, "io-error",
         "input/output error"),
    Case("full-disk-for-the-manifest", "planner", "write", "error=ENOSPC:when=1", False,
         "no-space", "no space left on device"),
    Case("full-disk-for-metadata", "planner", "write", "error=ENOSPC:when=2", False, "no-space",
         "no space left on device"),
    Case("quota-for-the-name-of-metadata", "planner", "/^rename", "error=EDQUOT:when=2", False,
         "quota", "disk quota exceeded"),
    Case("metadata-not-synced", "planner", "fsync", "error=EIO:when=3", False, "io-error",
         "input/output error"),
)  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_call_that_fails_ends_the_save_with_one_reason_and_the_next_one_commits(
    station: Station, number: int
) -> None:
    case, step, root = CASES[number], 10 * (number + 1), station.root
    daemons = station.yard.members
    before = root / os.readlink(root / "latest")
    seen = picture(before)
    directory = station.next_dir(step)
    paths = [directory] if case.has_path else []
    pid = daemons[1].pid if case.process == "other" else planner_of(daemons[0].pid)
    log = station.yard.log(case.name)
    with injecting([pid], case.calls, case.what, log=log, paths=paths) as injection:
        told = station.save(step)
        assert injection.has_struck()

    assert [("failed", case.code)] * 2 == [(each["phase"], each["code"]) for each in told]
    assert told[0]["message"] == told[1]["message"]
    assert case.reason in told[0]["message"]
    assert str(directory) in told[0]["message"]
    if case.reason != "input/output error":
        assert "bytes wanted" in told[0]["message"]
    assert not (root / f"step_{step}").exists()
    assert before.name == os.readlink(root / "latest")
    assert seen == picture(before), "the last checkpoint was touched"

    assert ["committed"] * 2 == [told["phase"] for told in station.save(step + 1)]
    until(lambda: not partials(root), f"nothing is left over, but there is {partials(root)}")
    assert f"step_{step + 1}" in check_root(root)


CREATED: Final = re.compile(r'openat\(.*"(__\d+_\d+\.distcp)", .*O_CREAT')
SYNCED: Final = re.compile(r"fsync\(\d+<.*/(__\d+_\d+\.distcp)>")


@pytest.mark.parametrize(("error", "number"), [("ETIMEDOUT", 91), ("EAGAIN", 92)])
def test_what_fails_for_a_passing_reason_is_written_anew_and_the_save_commits(
    station: Station, error: str, number: int
) -> None:
    step, node = 10 * number, station.yard.members[1].node

    def retries() -> int:
        return sum(line["event"] == "storage.retried" for line in log_lines(node))

    before = retries()
    with injecting(
        [station.yard.members[1].pid], "fsync", f"error={error}",
        log=station.yard.log(error), also_traced="openat",
    ) as injection:  # fmt: skip
        station.crew.all("begin", step=step)
        station.counts[0] += 1
        until(
            lambda: sum(map(bool, map(SYNCED.match, injection.calls()))) > 2,
            "what cannot be synced is written again",
        )
        # Lines that say the same are folded into one.
        until(lambda: retries() > before, "which is logged")
        calls = injection.calls()
    told = station.crew.all("finish", step=step)
    assert ["committed"] * 2 == [each["phase"] for each in told]
    story = []
    for call in calls:
        if found := CREATED.match(call):
            story.append(("made", found[1]))
        elif found := SYNCED.match(call):
            story.append(("synced", found[1]))
    # However often: each sync is the one and only sync of a file that was made for it.
    wanted = [("made", "__1_0.distcp"), ("synced", "__1_0.distcp")]
    assert wanted * (len(story) // 2) == story[: len(story) // 2 * 2]
    assert 2 <= len(story) // 2
    assert f"step_{step}" in check_root(station.root)


def test_an_index_that_cannot_be_synced_for_a_passing_reason_is_built_again(
    station: Station,
) -> None:
    step, member = 930, station.yard.members[0]

    def retries() -> int:
        lines = log_lines(member.node)
        return sum(line["event"] == "storage.retried" for line in lines)

    before = retries()
    with injecting(
        [planner_of(member.pid)], "fsync", "error=ESTALE", log=station.yard.log("index")
    ) as injection:
        station.crew.all("begin", step=step)
        station.counts[0] += 1
        until(lambda: retries() > before, "the daemon asks its planner again")
        assert injection.has_struck()
    assert ["committed"] * 2 == [each["phase"] for each in station.crew.all("finish", step=step)]
    assert f"step_{step}" in check_root(station.root)


class Unsynced(NamedTuple):
    """How the sync of the root after the publishing rename fails, and how the save ends.

    A thread that publishes first syncs the save's own directory and then the root. Nothing else
    syncs both. So, with both paths given, the second call is exactly that sync of the root.
    """

    name: str
    what: str
    is_once: bool
    phase: str


UNSYNCED: Final = (
    Unsynced("once", "error=EIO:when=2", True, "committed"),
    Unsynced("for a passing reason", "error=ETIMEDOUT:when=2", True, "committed"),
    Unsynced("as long as it is asked", "error=EIO", False, "outcome-unknown"),
)


@pytest.mark.parametrize("number", range(len(UNSYNCED)), ids=[case.name for case in UNSYNCED])
def test_a_root_that_cannot_be_synced_after_the_rename_is_asked_again_before_a_word_is_said(
    station: Station, number: int
) -> None:
    """The rename has happened, so no rank may hear of a failure. As long as the root cannot be
    synced, no rank may hear of a commit.
    """
    case, step, root = UNSYNCED[number], 1000 + 10 * number, station.root
    directory = station.next_dir(step)
    with injecting(
        [station.yard.members[0].pid], "fsync", case.what, log=station.yard.log(f"root-{number}"),
        paths=[root, directory] if case.is_once else [root],
        also_traced="/^rename" if case.is_once else "",
    ) as injection:  # fmt: skip
        told = station.save(step)
        calls = injection.calls()

    struck = [at for at, call in enumerate(calls) if "(INJECTED)" in call]
    assert struck
    if case.is_once:
        assert 1 == len(struck)
        renamed = next(at for at, call in enumerate(calls) if f'"{root}/step_{step}"' in call)
        assert renamed < struck[0]
        # By who looks where the save went, and when `latest` has moved.
        assert 2 <= sum(call.startswith("fsync(") and f"<{root}>" in call
                        for call in calls[struck[0] + 1 :])  # fmt: skip
    assert [case.phase] * 2 == [each["phase"] for each in told]
    assert told[0]["message"] == told[1]["message"]
    if case.phase == "outcome-unknown":
        assert f"publish {root}/step_{step}: input/output error" in told[0]["message"]
    assert [True, True] == [step in each for each in station.crew.all("steps")]

    assert ["committed"] * 2 == [told["phase"] for told in station.save(step + 1)]
    until(lambda: not partials(root), f"nothing is left over, but there is {partials(root)}")
    assert {f"step_{step}", f"step_{step + 1}"} <= set(check_root(root))
    assert f"step_{step + 1}" == os.readlink(root / "latest")


def test_a_directory_sync_that_hangs_ends_its_save_at_the_deadline_and_holds_up_no_other(
    yard: Yard,
) -> None:
    root, other = yard.folder / "hanging", yard.members[1]
    crew = yard.crew(root)
    assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
    crew.hurry()
    with injecting(
        [other.pid], "fsync", "delay_enter=600s", log=yard.log("hanging"),
        paths=[root / ".partial" / "step_2.2-2"],
    ) as injection:  # fmt: skip
        told = crew.all("save", step=2)
        assert [("failed", "timeout")] * 2 == [(each["phase"], each["code"]) for each in told]
        assert other.node.status()["node"]["node_id"] in told[0]["message"]
        assert "manifest fragment" in told[0]["message"]
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=3)]
        assert ["step_1", "step_3"] == check_root(root)
        # It hangs still: what is traced when a call ends is not there yet.
        assert not any("= 0" in call for call in injection.calls())
        assert any("step_2.2-2" in call for call in injection.calls())
    until(lambda: not other.node.status()["saves"], "the sync that hung has come to its end")
    until(lambda: not partials(root), "and what it was for is gone")
    crew.dismiss()
    judge(root, ["latest", "step_1", "step_3"])


def test_a_daemon_that_is_killed_deleting_what_was_replaced_leaves_the_new_checkpoint_alone(
    yard: Yard,
) -> None:
    root, first = yard.folder / "replacing", yard.members[0]
    crew = yard.crew(root, overwrite=True)
    assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
    crew.all("take_branch", branch=1)
    lives = first.lives
    # The first file is gone and the second is not: half a checkpoint, under no name of one.
    with injecting(
        [first.pid], "unlinkat", "signal=KILL:when=2", log=yard.log("replacing")
    ) as injection:
        told = crew.all("save", step=1)
        assert ["committed"] * 2 == [each["phase"] for each in told]
        until(lambda: first.lives == lives + 1, "the daemon was killed, and is there again")
        assert any("killed by SIGKILL" in call for call in injection.calls())
    assert ["step_1"] == check_root(root)
    judge(root, ["latest", "step_1"], branch=1)
    assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=2)]
    until(lambda: not partials(root), f"nothing is left over, but there is {partials(root)}")
    assert ["step_1", "step_2"] == check_root(root)
    judge(root, ["latest", "step_1", "step_2"], branch=1)
    crew.dismiss()
