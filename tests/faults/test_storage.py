"""Storage and memory that are too small, refuse, hang, or are not the same on all nodes.

File systems of these sizes and kinds are mounted where only a scenario and its daemons and ranks
see them: a scenario is a function that runs as a process of its own in a mount namespace.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fleet import (
    SHORT_S,
    Crew,
    Fired,
    Member,
    abandoning,
    check_root,
    fired,
    judge,
    members,
    partials,
    picture,
    until,
    warm_up,
)
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
            text = r"wants 81\d{5} bytes, \d{6,7} bytes of the file system are free"
            assert re.search(f"an arena in {memory} {text}", each["message"])
        assert [2 * sum(range(20))] * 2 == crew.all("train", rounds=20), "training goes on"
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=3)]
        assert 2 == len(os.listdir(memory))
        crew.dismiss()
    assert [] == os.listdir(memory)
    assert ["step_1", "step_3"] == check_root(root)
    judge(root, ["latest", "step_1"])


def memory_is_busy(folder: Path) -> None:
    root, memory = folder / "root", folder / "shm"
    # Both ranks' images of one structure fit, two slots each, and no second structure beside them.
    mount("size=12m", memory)
    places = {"MILEPOST_SHM_DIR": str(memory)}
    held = ["before-publish:sleep:2@2"]
    with members(folder, root, [held, []], **places) as daemons:
        crew = Crew(root, [member.node for member in daemons], environment=places)
        assert ["committed"] * 2 == [
            told["phase"] for told in crew.all("save", step=1, values=300_000)
        ]
        crew.all("begin", step=2, values=300_000)
        told = crew.all("save", step=3, values=310_000)
        assert [("committed", "")] * 2 == [(each["phase"], each["message"]) for each in told]
        assert ["committed"] * 2 == [each["phase"] for each in crew.all("finish", step=2)]
        assert [Fired("before-publish", "sleep", 2)] == fired(daemons[0].node)
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
    # Longer than the deadline and the next save together, and then over.
    hang = f"mid-write:sleep:{2 * SHORT_S + 4}@2"
    with members(folder, folder, [[], [hang]], **places) as daemons:
        nodes = [member.node for member in daemons]
        warm_up(folder / "before", nodes, places)
        crew = Crew(root, nodes, environment=places, deadline_s=SHORT_S)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        told = crew.all("save", step=2)
        assert [("failed", "timeout")] * 2 == [(each["phase"], each["code"]) for each in told]
        assert all(SHORT_S <= each["waited_s"] for each in told), "not before its deadline"
        assert daemons[1].node.status()["node"]["node_id"] in told[0]["message"]
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=3)]
        assert [Fired("mid-write", "sleep", 2)] == fired(daemons[1].node)
        until(
            lambda: not daemons[1].node.status()["saves"], "the write that hung has come to its end"
        )
        until(lambda: not partials(root), "and what it wrote is gone")
        assert ["step_1", "step_3"] == check_root(root)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=4)]
        crew.dismiss()


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
