"""Runs that go on otherwise than they began: fewer ranks, an older step, fewer checkpoints."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from milepost import KeepLast
from milepost.errors import CorruptCheckpoint, LoadFailed
from milepost.reading.verification import verify
from milepost.storage.root import Root
from tests.faults.fleet import (
    SHORT_S,
    VALUES,
    Crew,
    Fired,
    fired,
    is_stopped,
    log_lines,
    members,
    until,
    warm_up,
)
from tests.faults.judging import check_root, judge, partials


def test_two_ranks_become_one_on_the_same_daemons_and_words_of_the_old_attempt_are_dropped(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    # The other node's words about the abandoned save come when the new attempt has begun.
    with members(folder, folder, [[], ["before-durable:stop@2"]], **places) as daemons:
        daemons[1].holds_stopped = True
        nodes = [member.node for member in daemons]
        warm_up(folder / "before", nodes, places)
        crew = Crew(root, nodes, expect_death=[0, 1], environment=places, deadline_s=SHORT_S)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        crew.tell(1, "begin", step=2)
        crew.hear(1)
        until(lambda: is_stopped(daemons[1].pid), "one rank's image is staged, its word is held")
        for rank in (0, 1):
            crew.tell(rank, "die")
        crew.dismiss()
        one = Crew(root, nodes[:1], environment=places)
        whole = 2 * VALUES
        assert [1] == one.all("load", values=whole)
        assert ["committed"] == [told["phase"] for told in one.all("save", step=2, values=whole)]
        assert is_stopped(daemons[1].pid)
        daemons[1].holds_stopped = False

        def dropped() -> bool:
            return any(
                line["event"] == "message.dropped" and line["step"] == 2
                for line in log_lines(nodes[0])
            )

        until(dropped, "the late word is dropped, with a line")
        assert ["committed"] == [told["phase"] for told in one.all("save", step=3, values=whole)]
        one.dismiss()
        assert [Fired("before-durable", "stop", 2)] == fired(nodes[1])
        until(lambda: not nodes[1].status()["saves"], "the old save has ended at the other node")
        until(lambda: not partials(root), "and left nothing")
        assert ["step_1", "step_2", "step_3"] == check_root(root)
        assert "step_3" == os.readlink(root / "latest")
        judge(root, ["latest", "step_1", "step_2", "step_3"])
    assert [] == os.listdir(shm)


def test_saving_again_what_was_rolled_back_replaces_it_and_latest_follows_the_new_branch(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [["before-publish:eio@30"], []], **places) as daemons:
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, environment=places)
        for step in (10, 20, 31, 40):
            crew.all("save", step=step)
        assert [10, 10] == crew.all("load", step=10)
        assert "step_40" == os.readlink(root / "latest")
        crew.all("take_branch", branch=1)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=20)]
        assert "step_20" == os.readlink(root / "latest"), "a lower step of a newer branch"
        assert [20, 20] == crew.all("latest")
        told = crew.all("save", step=30)
        assert ["io-error"] * 2 == [each["code"] for each in told]
        assert [Fired("before-publish", "eio", 30)] == fired(nodes[0])
        crew.dismiss()
        # And across a restart, which resumes from where the new branch ended.
        again = Crew(root, nodes, environment=places)
        again.all("take_branch", branch=1)
        assert [20, 20] == again.all("load")
        assert ["committed"] * 2 == [told["phase"] for told in again.all("save", step=31)]
        assert "step_31" == os.readlink(root / "latest")
        again.dismiss()
        until(lambda: not partials(root), "what was replaced is gone")
    assert ["step_10", "step_20", "step_31", "step_40"] == check_root(root)
    judge(root, ["step_10", "step_40"])
    judge(root, ["latest", "step_20", "step_31"], branch=1)


def loadable(root: Path) -> list[str]:
    """Return the checkpoints that are whole at this instant, and stay so while they are read."""
    whole = []
    for entry in Root(root).checkpoints():
        try:
            if not verify(entry.path).damages:
                whole.append(entry.name)
        except (LoadFailed, CorruptCheckpoint, OSError):
            continue  # Being removed: by its name first, then by its files.
    return whole


def test_with_one_checkpoint_kept_there_is_one_to_load_at_every_instant(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    faults = ["before-publish:sleep:1@2", "after-publish:sleep:0.5@2", "mid-write:sleep:1@3",
              "before-publish:eio@3", "before-committed:sleep:0.5@4"]  # fmt: skip
    with members(folder, root, [faults, []], **places) as daemons:
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, environment=places, keep=KeepLast(1), slots=3)
        crew.all("save", step=1)
        assert ["step_1"] == loadable(root)
        crew.all("begin", step=2)
        crew.all("begin", step=3)
        for rank in (0, 1):
            crew.tell(rank, "finish", step=2)
            crew.tell(rank, "finish", step=3)
            crew.tell(rank, "save", step=4)
        seen: list[list[str]] = []
        until_s = time.monotonic() + 90
        while len(fired(nodes[0])) < len(faults) or loadable(root) != ["step_4"]:
            assert time.monotonic() < until_s, seen[-5:]
            # One that a newer one replaced while it was looked at says nothing: look again.
            seen.append(loadable(root) or loadable(root))
            assert seen[-1], f"nothing can be loaded; before that {seen[-5:]}"
            link = os.readlink(root / "latest")
            assert link in seen[-1] or link in loadable(root), f"latest names {link}, {seen[-1]}"
        for wanted in (["committed"] * 2, ["failed"] * 2, ["committed"] * 2):
            assert wanted == [crew.hear(rank)["phase"] for rank in (0, 1)]
        assert ["step_1"] in seen
        assert ["step_2"] in seen
        crew.dismiss()
        until(lambda: not partials(root), "nothing is left over")
    assert ["step_4"] == check_root(root)
    judge(root, ["latest"])


@pytest.mark.parametrize("point", ["before-publish", "after-publish"])
def test_a_save_that_newer_ones_overtake_moves_neither_latest_back_nor_is_kept(
    folder: Path, shm: Path, point: str
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [[f"{point}:sleep:2@2"], []], **places) as daemons:
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, environment=places, keep=KeepLast(1), slots=3)
        crew.all("save", step=1)
        for step in (2, 3):
            crew.all("begin", step=step)
        for rank in (0, 1):
            crew.tell(rank, "finish", step=2)
            crew.tell(rank, "finish", step=3)
        seen: list[str] = []
        until_s = time.monotonic() + 90
        while not seen or seen[-1] != "step_3" or loadable(root) != ["step_3"]:
            assert time.monotonic() < until_s, (seen[-5:], loadable(root))
            seen.append(os.readlink(root / "latest"))
            assert (root / seen[-1] / ".metadata").exists() or seen[-1] != os.readlink(
                root / "latest"
            ), f"latest names {seen[-1]}, which is gone"
        for _ in (2, 3):
            assert ["committed"] * 2 == [crew.hear(rank)["phase"] for rank in (0, 1)]
        assert seen == sorted(seen), "latest went back"
        assert [Fired(point, "sleep", 2)] == fired(nodes[0])
        assert "step_3" == os.readlink(root / "latest")
        crew.dismiss()
        until(lambda: not partials(root), "nothing is left over")
        assert ["step_3"] == check_root(root)
    judge(root, ["latest"])
