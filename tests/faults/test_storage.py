"""Storage and memory that are too small, refuse, hang, or are not the same on all nodes.

A scenario is a function that runs in a process with its own mount namespace. There it mounts file
systems of special sizes and kinds, which only its daemons and ranks see.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.fleet import (
    DEADLINE_S,
    SHORT_S,
    Crew,
    Fired,
    Member,
    abandoning,
    fired,
    members,
    until,
)
from tests.faults.judging import check_root, judge, partials, picture
from tests.integration.cluster import await_answer

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)


def in_namespace(scenario: str, folder: Path) -> None:
    """Run a function of this module, with a folder, where it may mount; fail if it fails."""
    call = f"import pathlib, {__name__} as here; here.{scenario}(pathlib.Path({str(folder)!r}))"
    run = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", call],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    if run.returncode and run.stderr.startswith("unshare:"):
        pytest.skip("no namespaces here")
    assert 0 == run.returncode, run.stderr


def mount(kind: str, place: Path) -> None:
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", kind, "none", place], check=True)


VALUES = 300_000
"""Numbers a rank holds: 2.4 MB each, 4.8 MB a checkpoint, of which three fit into 16 MB."""


def full_then_read_only(folder: Path) -> None:
    root, memory = folder / "root", folder / "shm"
    mount("size=16m", root)
    memory.mkdir()
    places = {"MILEPOST_SHM_DIR": str(memory)}
    with members(folder, root, [[], []], **places) as daemons:
        crew = Crew(root, [member.node for member in daemons], environment=places)

        def save(step: int) -> list[Any]:
            return crew.all("save", step=step, values=VALUES)

        for step in (1, 2, 3):
            assert ["committed"] * 2 == [told["phase"] for told in save(step)]
        seen = picture(root / "step_3")

        told = save(4)
        assert [("failed", "no-space")] * 2 == [(each["phase"], each["code"]) for each in told]
        assert told[0]["message"] == told[1]["message"]
        assert f"write {root}/.partial/step_4.1-4/__" in told[0]["message"]
        assert "no space left on device" in told[0]["message"]
        assert "bytes wanted)" in told[0]["message"]
        assert seen == picture(root / "step_3")
        assert "step_3" == os.readlink(root / "latest")
        until(lambda: not partials(root), "what a failed save wrote is gone, and its space is free")

        shutil.rmtree(root / "step_1")
        assert ["committed"] * 2 == [told["phase"] for told in save(5)]
        shutil.rmtree(root / "step_2")

        subprocess.run(["mount", "-o", "remount,ro", root], check=True)
        told = save(6)
        # It cannot be taken out of the way either; but nobody has published it, or will.
        assert {"failed"} == {each["phase"] for each in told}
        assert told[0]["message"] == told[1]["message"]
        assert f"open {root}/.partial/step_6.1-6: read-only file system" in told[0]["message"]
        subprocess.run(["mount", "-o", "remount,rw", root], check=True)
        assert ["committed"] * 2 == [told["phase"] for told in save(7)]
        until(lambda: not partials(root), "nothing is left over")
        crew.dismiss()
    assert ["step_3", "step_5", "step_7"] == check_root(root)
    judge(root, ["latest", "step_3", "step_5", "step_7"], values=VALUES)


@needs_mounts
@pytest.mark.root
def test_a_full_and_then_a_read_only_root_are_told_with_the_numbers_and_saves_go_on_after(
    folder: Path,
) -> None:
    in_namespace("full_then_read_only", folder)


def memory_runs_short(folder: Path) -> None:
    root, memory = folder / "root", folder / "shm"
    mount("size=8m", memory)
    places = {"MILEPOST_SHM_DIR": str(memory)}
    with members(folder, root, [[], []], **places) as daemons:
        crew = Crew(root, [member.node for member in daemons], environment=places)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        # Two slots a rank of 4 MB each: the first rank's fit at most.
        told = crew.all("save", step=2, values=500_000)
        assert [("failed", "shm-too-small")] * 2 == [(each["phase"], each["code"]) for each in told]
        for each in told:
            # The ranks' arenas differ by a page or two, and either rank may come too late.
            text = r"wants 8[12]\d{5} bytes, \d{6,7} bytes of the file system are free"
            assert re.search(f"an arena in {memory} {text}", each["message"])
        assert [2 * sum(range(20))] * 2 == crew.all("train", rounds=20), "training goes on"
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=3)]
        assert 2 == len(os.listdir(memory))
        crew.dismiss()
    assert [] == os.listdir(memory)
    assert ["step_1", "step_3"] == check_root(root)
    judge(root, ["latest", "step_1"])


WAITING_S = 0.5
"""How long to watch that a call waits. On a busy machine it may not have begun by then."""


def memory_is_busy(folder: Path) -> None:
    root, memory = folder / "root", folder / "shm"
    # Both ranks' images of one structure fit, two slots each, and no second structure beside them.
    mount("size=12m", memory)
    places = {"MILEPOST_SHM_DIR": str(memory)}
    held = ["before-publish:hold@2"]
    with members(folder, root, [held, []], **places) as daemons:
        crew = Crew(root, [member.node for member in daemons], environment=places)
        assert ["committed"] * 2 == [
            told["phase"] for told in crew.all("save", step=1, values=300_000)
        ]
        crew.all("begin", step=2, values=300_000)
        daemons[0].await_held("before-publish", 2)
        for rank in (0, 1):
            crew.tell(rank, "save", step=3, values=310_000)
        # It has nowhere to lie before the other one is published.
        time.sleep(WAITING_S)
        assert [False, False] == [crew.has_answered(rank) for rank in (0, 1)]
        daemons[0].release("before-publish", 2)
        told = [crew.hear(rank) for rank in (0, 1)]
        assert [("committed", "")] * 2 == [(each["phase"], each["message"]) for each in told]
        assert ["committed"] * 2 == [each["phase"] for each in crew.all("finish", step=2)]
        assert [Fired("before-publish", "hold", 2)] == fired(daemons[0].node)
        crew.dismiss()
    assert [] == os.listdir(memory)
    assert ["step_1", "step_2", "step_3"] == check_root(root)


@needs_mounts
@pytest.mark.root
def test_memory_that_earlier_images_still_fill_is_waited_for_when_the_structure_changes(
    folder: Path,
) -> None:
    in_namespace("memory_is_busy", folder)


@needs_mounts
@pytest.mark.root
def test_shared_memory_that_is_too_small_for_a_grown_state_ends_that_save_only(
    folder: Path,
) -> None:
    in_namespace("memory_runs_short", folder)


GROUPED = 4_000_000
"""Numbers of a state of 32 MB. Making it takes twice as much; it and two slots of it take three
times as much."""

GROUP_BYTES = 80_000_000


LIMITS = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes"),
    "": ("memory.max", "memory.current", "memory.peak"),
}
"""Names of limit, use and greatest use, below the folders of control groups v1 and v2."""

GROUPS = Path("/sys/fs/cgroup")


class Group(NamedTuple):
    """A control group for memory, of the kernel's or described in files."""

    limit: Path
    peak: Path | None
    members: Path | None
    """The file that takes process ids; None: the group holds all processes."""


@contextlib.contextmanager
def kernels_group() -> Iterator[Group | None]:
    """Make a control group; None if this process may not."""
    for top, (limit, _, peak) in LIMITS.items():
        group = GROUPS / top / f"milepost-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                yield Group(group / limit, group / peak, group / "cgroup.procs")
                return
        finally:
            with contextlib.suppress(OSError):  # A test that fails leaves a process in it.
                group.rmdir()
    yield None


def described_group() -> Group:
    """Describe a group that holds every process, as a container sees its own, v1 and v2. For a
    mount namespace of its own. The kernel does not enforce it.
    """
    mount("size=1m", GROUPS)
    told = GROUPS / "limit"
    for top, (limit, used, _) in LIMITS.items():
        folder = GROUPS / top
        folder.mkdir(exist_ok=True)
        (folder / limit).symlink_to(told)
        # The state lies there when it is saved, and the process itself.
        (folder / used).write_text(str(8 * GROUPED + (1 << 20)))
        (folder / "memory.stat").touch()
    return Group(told, None, None)


def memory_is_limited(folder: Path, shm: Path, group: Group, ranks: int) -> None:
    """Limit the last rank."""
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [[]] * ranks, **places) as daemons:
        crew = Crew(root, [member.node for member in daemons], environment=places)
        assert ["committed"] * ranks == [told["phase"] for told in crew.all("save", step=1)]
        group.limit.write_text(str(GROUP_BYTES))
        if group.members is not None:
            group.members.write_text(str(crew.pids[-1]))

        told = crew.all("save", step=2, values=GROUPED)
        assert [("failed", "shm-too-small")] * ranks == [
            (each["phase"], each["code"]) for each in told
        ]
        assert 1 == len({each["message"] for each in told})
        said = re.search(
            rf"an arena in {shm} wants (6\d{{7}}) bytes, (\d+) bytes of memory are free "
            rf"\(.*rank {ranks - 1}",
            told[0]["message"],
        )
        assert said is not None, told[0]["message"]
        assert 2 * 8 * GROUPED < int(said[1])
        # Beside the state, which lies there, not everything is left.
        assert int(said[2]) < GROUP_BYTES - 8 * GROUPED
        if group.peak is not None:
            # Of the arena nothing was there: with it the limit would have been met.
            assert 2 * 8 * GROUPED <= int(group.peak.read_text()) < GROUP_BYTES
        if ranks > 1:  # a lone rank has no group to train with
            sums = crew.all("train", rounds=20)
            assert [ranks * sum(range(20))] * ranks == sums, "training goes on"
        assert ["committed"] * ranks == [told["phase"] for told in crew.all("save", step=3)]

        group.limit.write_text(str(4 * GROUP_BYTES))
        told = crew.all("save", step=4, values=GROUPED)
        assert ["committed"] * ranks == [each["phase"] for each in told], "the limit was the reason"
        crew.dismiss()
    assert [] == os.listdir(shm)
    assert ["step_1", "step_3", "step_4"] == check_root(root)
    judge(root, ["latest"], ranks=ranks, values=GROUPED)


def memory_is_said_to_be_limited(folder: Path) -> None:
    shm = folder / "shm"
    shm.mkdir()
    memory_is_limited(folder, shm, described_group(), 1)


@pytest.mark.root
def test_a_control_group_that_is_too_small_is_told_with_the_numbers_before_a_page_is_taken(
    folder: Path, shm: Path
) -> None:
    with kernels_group() as group:
        if group is not None:
            memory_is_limited(folder, shm, group, 2)
    if group is None:
        in_namespace("memory_is_said_to_be_limited", folder)


@needs_mounts
@pytest.mark.root
def test_a_control_group_that_is_described_in_files_only_is_heeded_as_one(folder: Path) -> None:
    in_namespace("memory_is_said_to_be_limited", folder)


def test_a_file_size_limit_on_one_node_is_told_to_all_and_saves_go_on_when_it_is_raised(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [[], []], **places) as daemons:
        crew = Crew(root, [member.node for member in daemons], environment=places)
        for step, limit in ((1, -1), (2, 100_000), (3, -1)):
            for member in daemons[1:]:
                resource.prlimit(member.pid, resource.RLIMIT_FSIZE, (limit, -1))
            told = crew.all("save", step=step, values=40_000)
            if limit < 0:
                assert ["committed"] * 2 == [each["phase"] for each in told]
                continue
            assert [("failed", "file-too-large")] * 2 == [
                (each["phase"], each["code"]) for each in told
            ]
            assert told[0]["message"] == told[1]["message"]
            assert (
                f"write {root}/.partial/step_2.1-2/__1_0.distcp: file too large"
                in (told[0]["message"])
            )
            assert "bytes wanted)" in told[0]["message"]
            assert "rank 1" in told[0]["message"]
        until(lambda: not partials(root), "nothing is left over")
        assert ["step_1", "step_3"] == check_root(root)
        crew.dismiss()


def test_a_write_that_hangs_ends_its_save_at_the_deadline_and_holds_up_no_other(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, folder, [[], ["mid-write:hold@2"]], **places) as daemons:
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, environment=places)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        crew.hurry()
        told = crew.all("save", step=2)
        assert [("failed", "timeout")] * 2 == [(each["phase"], each["code"]) for each in told]
        assert SHORT_S <= min(crew.lasted_s(2)), "not before its deadline"
        assert daemons[1].node.status()["node"]["node_id"] in told[0]["message"]
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=3)]
        assert [Fired("mid-write", "hold", 2)] == fired(daemons[1].node)
        daemons[1].release("mid-write", 2)
        until(
            lambda: not daemons[1].node.status()["saves"], "the write that hung has come to its end"
        )
        until(lambda: not partials(root), "and what it wrote is gone")
        assert ["step_1", "step_3"] == check_root(root)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=4)]
        crew.dismiss()


SLOW_VALUES = 200_000
"""Numbers a rank holds: 1.6 MB. The bytes of the first quarter of a second are written at once."""


def test_storage_of_one_megabyte_a_second_delays_training_by_no_more_than_the_policy_says(
    folder: Path, shm: Path
) -> None:
    places = {"MILEPOST_SHM_DIR": str(shm)}
    slow = {**places, "MILEPOSTD_WRITE_MBPS": "1"}
    shape = {"values": SLOW_VALUES}
    # Slow as it is, storage might be faster than a test on a busy machine: saves are held, too.
    held = [
        "before-metadata:hold@10", "after-metadata:hold@10", "after-staged:hold@20",
        "after-staged:hold@50", "after-staged:hold@60",
    ]  # fmt: skip
    with members(folder, folder, [held, []], **slow) as daemons:
        first = daemons[0]
        nodes = [member.node for member in daemons]
        root = folder / "skip"
        crew = Crew(root, nodes, environment=places, on_busy="skip")
        crew.all("prepare", **shape)
        looks: list[set[str]] = []
        crew.all("begin", step=10, **shape)
        directory = root / ".partial" / "step_10.1-2"
        for step in (20, 30, 40):
            assert [2 * sum(range(20))] * 2 == crew.all("train", rounds=20)
            stalls = crew.all("begin", step=step, **shape)
            assert max(stalls) < DEADLINE_S / 2, "save() does not wait for storage"
        for step in (30, 40):
            told = crew.all("finish", step=step)
            assert [("skipped", "busy")] * 2 == [(each["phase"], each["code"]) for each in told]
            assert told[0]["message"] == told[1]["message"]
            assert re.search(
                r"has all 2 slots in use: step 10 is \w+, step 20 is \w+", told[0]["message"]
            )
        assert not (root / "step_10").exists(), "they were skipped while both were under way"

        def is_indexed() -> bool:
            looks.append(set(os.listdir(directory)))
            return ".metadata" in looks[-1]

        first.await_held("before-metadata", 10)
        assert not is_indexed()
        first.release("before-metadata", 10)
        until(is_indexed, "it has its index")
        first.await_held("after-metadata", 10)
        assert is_indexed()
        assert not (root / "step_10").exists()
        first.release("after-metadata", 10)
        first.release("after-staged", 20)
        for step in (10, 20):
            assert ["committed"] * 2 == [told["phase"] for told in crew.all("finish", step=step)]
        # The index comes last: whoever saw it, saw all of the checkpoint, and wrote nothing after.
        written = {entry.name: entry.stat().st_mtime_ns for entry in (root / "step_10").iterdir()}
        assert {"__0_0.distcp", "__1_0.distcp", ".milepost"} < set(written)
        assert all(set(written) <= look for look in looks if ".metadata" in look)
        assert written[".metadata"] == max(written.values())
        crew.dismiss()

        root = folder / "wait"
        crew = Crew(root, nodes, environment=places, on_busy="wait")
        crew.all("prepare", **shape)
        for step in (50, 60):
            assert max(crew.all("begin", step=step, **shape)) < DEADLINE_S / 2
        for rank in (0, 1):
            crew.tell(rank, "begin", step=70, **shape)
        time.sleep(WAITING_S)
        assert not crew.has_answered(0), "save() waits for a slot"
        first.release("after-staged", 50)
        for rank in (0, 1):
            assert crew.hear(rank) < DEADLINE_S / 2
        told = crew.all("finish", step=50)
        assert [Fired("after-staged", "hold", 60)] == fired(nodes[0])[-1:], "which is still held"
        first.release("after-staged", 60)
        told += crew.all("finish", step=60) + crew.all("finish", step=70)
        assert ["committed"] * 6 == [each["phase"] for each in told]
        crew.dismiss()
    assert ["step_10", "step_20"] == check_root(folder / "skip")
    assert ["step_50", "step_60", "step_70"] == check_root(root)
    judge(root, ["latest", "step_50"], values=SLOW_VALUES)


@needs_mounts
@pytest.mark.root
def test_two_nodes_that_do_not_share_the_root_are_found_before_anything_is_committed(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    root.mkdir()
    elsewhere = f"mount -t tmpfs none '{root}' && exec \"$@\""
    one = Member(folder / "n0", root, environment=places)
    two = Member(folder / "n1", root, prefix=["unshare", "-m", "sh", "-c", elsewhere, "sh"],
                 environment=places)  # fmt: skip
    try:
        with abandoning():
            for member in (one, two):
                await_answer(member.node)
            crew = Crew(root, [one.node, two.node], environment=places)
            told = crew.all("save", step=1)
            assert [("failed", "root-not-shared")] * 2 == [
                (each["phase"], each["code"]) for each in told
            ]
            assert f"{root} is no root on this node" in told[0]["message"]
            assert "rank 1" in told[0]["message"]
            assert [[], []] == crew.all("steps")
            crew.dismiss()
        assert [] == check_root(root)
        until(lambda: not partials(root), "nothing is left over")
        assert [0, 0] == [one.end(), two.end()]
    finally:
        one.destroy()
        two.destroy()
