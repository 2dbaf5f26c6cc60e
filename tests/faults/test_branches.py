"""Runs that continue differently than they began: fewer ranks, an older step, fewer checkpoints."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from milepost import KeepLast
from milepost.errors import CorruptCheckpoint, LoadFailed
from milepost.reading.verification import verify
from milepost.storage.root import Root
from tests.faults.fleet import (
    RESOLVING_SOON,
    VALUES,
    Crew,
    Fired,
    fired,
    is_stopped,
    log_lines,
    members,
    until,
)
from tests.faults.judging import check_root, judge, partials


def test_two_ranks_become_one_on_the_same_daemons_and_words_of_the_old_attempt_are_dropped(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    # The other node's words about the abandoned save come when the new attempt has begun.
    faults: list[list[str]] = [[], ["before-durable:stop@2"]]
    with members(folder, folder, faults, prefix=RESOLVING_SOON, **places) as daemons:
        daemons[1].holds_stopped = True
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, expect_death=[0, 1], environment=places)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        crew.hurry()
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


LOOK_S = 0.005


@contextlib.contextmanager
def repeating(look: Callable[[], None]) -> Iterator[None]:
    """Look again and again, on another thread, until the block ends; raise the thread's
    exception.
    """
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as others:

        def run() -> None:
            while not is_over.wait(LOOK_S):
                look()

        looking = others.submit(run)
        try:
            yield
        finally:
            is_over.set()
            looking.result()


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
    held = [("before-publish", 2), ("after-publish", 2), ("mid-write", 3), ("before-committed", 4)]
    faults = [f"{point}:hold@{step}" for point, step in held] + ["before-publish:eio@3"]
    seen: list[list[str]] = []

    def look() -> None:
        # One that a newer one replaced while it was looked at says nothing: look again.
        seen.append(loadable(root) or loadable(root))
        assert seen[-1], f"nothing can be loaded; before that {seen[-5:]}"
        link = os.readlink(root / "latest")
        assert link in seen[-1] or link in loadable(root), f"latest names {link}, {seen[-1]}"

    with members(folder, root, [faults, []], **places) as daemons:
        first = daemons[0]
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, environment=places, keep=KeepLast(1), slots=3)
        crew.all("save", step=1)
        assert ["step_1"] == loadable(root)
        crew.all("begin", step=2)
        crew.all("begin", step=3)
        with repeating(look):
            for point, step in held[:2]:
                first.await_held(point, step)
                look()
                first.release(point, step)
            assert ["committed"] * 2 == [each["phase"] for each in crew.all("finish", step=2)]
            until(lambda: ["step_2"] == loadable(root), "the older one is removed")
            first.await_held("mid-write", 3)
            first.release("mid-write", 3)
            assert ["failed"] * 2 == [each["phase"] for each in crew.all("finish", step=3)]
            look()
            crew.all("begin", step=4)
            first.await_held("before-committed", 4)
            look()
            first.release("before-committed", 4)
            assert ["committed"] * 2 == [each["phase"] for each in crew.all("finish", step=4)]
            until(lambda: ["step_4"] == loadable(root), "and again")
        assert ["step_1"] in seen
        assert ["step_2"] in seen
        assert len(faults) == len(fired(nodes[0]))
        crew.dismiss()
        until(lambda: not partials(root), "nothing is left over")
    assert ["step_4"] == check_root(root)
    judge(root, ["latest"])


@pytest.mark.parametrize("point", ["before-publish", "after-publish"])
def test_a_save_that_newer_ones_overtake_is_not_kept_and_does_not_move_latest_back(
    folder: Path, shm: Path, point: str
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    seen: list[str] = []

    def look() -> None:
        seen.append(os.readlink(root / "latest"))
        assert (root / seen[-1] / ".metadata").exists() or seen[-1] != os.readlink(
            root / "latest"
        ), f"latest names {seen[-1]}, which is gone"

    with members(folder, root, [[f"{point}:hold@2"], []], **places) as daemons:
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, environment=places, keep=KeepLast(1), slots=3)
        crew.all("save", step=1)
        with repeating(look):
            for step in (2, 3):
                crew.all("begin", step=step)
            daemons[0].await_held(point, 2)
            assert ["committed"] * 2 == [each["phase"] for each in crew.all("finish", step=3)]
            daemons[0].release(point, 2)
            assert ["committed"] * 2 == [each["phase"] for each in crew.all("finish", step=2)]
            until(lambda: ["step_3"] == loadable(root), "the older ones are removed")
        assert seen == sorted(seen), "latest went back"
        assert "step_3" == seen[-1]
        assert [Fired(point, "hold", 2)] == fired(nodes[0])
        assert "step_3" == os.readlink(root / "latest")
        crew.dismiss()
        until(lambda: not partials(root), "nothing is left over")
        assert ["step_3"] == check_root(root)
    judge(root, ["latest"])
