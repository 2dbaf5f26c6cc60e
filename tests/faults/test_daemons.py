"""Daemons that stop answering, start late, or get two SIGTERMs. `test_points` tests killed
daemons.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from milepostd.core.role import VERDICT_GRACE_S
from tests.faults.fleet import (
    RESOLVING_SOON,
    SHORT_S,
    SLACK_S,
    Crew,
    Fired,
    Member,
    Trainer,
    abandoning,
    fired,
    log_lines,
    members,
    resources,
    until,
    warm_up,
)
from tests.faults.judging import check_root, judge, partials
from tests.integration.cluster import Rank, await_answer, run_ranks, start_node

SILENCE_S = 4.0
"""Four heartbeats: a daemon that is only slow answers one of them."""

RESTORE_S = 3.0

LIMITS = {
    "milepost.link.connection:SILENCE_S": SILENCE_S,
    "milepost.link.session:START_S": 1.0,
    "milepost.link.session:RESTORE_S": RESTORE_S,
}
"""The client's own limits, shortened. The tests show that they hold, in their order."""

CLOSING_S = 30.0
"""How much longer than a save's deadline `close()` may take."""


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_daemon_that_is_stopped_is_noticed_training_goes_on_and_every_handle_ends(
    folder: Path, shm: Path, stopped: int
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    faults: list[list[str]] = [[], []]
    faults[stopped] = ["after-staged:stop@2"]
    with members(folder, folder, faults, prefix=RESOLVING_SOON, **places) as daemons:
        daemons[stopped].holds_stopped = True
        nodes = [member.node for member in daemons]
        crew = Crew(root, nodes, environment=places, limits=LIMITS)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        crew.hurry()
        assert max(crew.all("begin", step=2)) < SILENCE_S, "save() does not wait for its daemon"
        until(lambda: bool(fired(nodes[stopped])), "the daemon is stopped")
        assert [2 * sum(range(50))] * 2 == crew.all("train", rounds=50)
        told = crew.all("finish", step=2)
        # Its own trainer sees it first, and cannot know what it will do when it goes on; the other
        # node sees the silence of a peer.
        own, other = told[stopped], told[1 - stopped]
        assert ("outcome-unknown", "outcome-unknown") == (own["phase"], own["code"])
        assert f"rank {stopped}" in own["message"]
        assert "failed" == other["phase"]
        assert other["code"] in ("node-missing", "timeout")
        # Both in bounded time: `finish` has a limit, far beyond a deadline and its graces.
        crew.tell(stopped, "begin", step=3)
        assert crew.hear(stopped) < 10 * RESTORE_S, "it is looked for as long as LIMITS say"
        assert max(crew.all("close_now")) < SHORT_S + CLOSING_S
        crew.dismiss()
        assert ["step_1"] == check_root(root)
        daemons[stopped].holds_stopped = False
        until(lambda: not any(node.status()["saves"] for node in nodes), "the daemons are quiet")
        assert [Fired("after-staged", "stop", 2)] == fired(nodes[stopped])
        again = Crew(root, nodes, environment=places)
        assert [1, 1] == again.all("load")
        assert ["committed"] * 2 == [told["phase"] for told in again.all("save", step=2)]
        again.dismiss()
        until(lambda: not partials(root), "nothing is left over")
        assert {"step_1", "step_2"} <= set(check_root(root))
        judge(root, ["latest", *check_root(root)])
    assert [] == os.listdir(shm)


def test_a_save_that_its_daemon_may_still_commit_is_called_unknown_and_never_failed(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [["before-publish:stop@2"], []], **places) as daemons:
        daemons[0].holds_stopped = True
        crew = Crew(
            root, [member.node for member in daemons], environment=places, deadline_s=60.0,
            limits=LIMITS,
        )  # fmt: skip
        crew.all("save", step=1)
        crew.all("begin", step=2)
        crew.tell(0, "finish", step=2)
        own = crew.hear(0)
        assert [Fired("before-publish", "stop", 2)] == fired(daemons[0].node)
        assert ("outcome-unknown", "outcome-unknown") == (own["phase"], own["code"])
        assert f"has been away for {RESTORE_S:g} s" in own["message"]
        assert ["step_1"] == check_root(root)
        daemons[0].holds_stopped = False
        crew.tell(1, "finish", step=2)
        assert "committed" == crew.hear(1)["phase"]
        assert [[1, 2], [1, 2]] == crew.all("steps")
        # What rank 0 does not know of is history, too, once all go back behind it.
        assert [1, 1] == crew.all("load", step=1)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=2)]
        crew.dismiss()
    judge(root, ["latest", *check_root(root)])
    assert [] == os.listdir(shm)


def save_when_there_is_a_daemon(rank: Rank) -> list[str]:
    """Save once; return what the log said before that."""
    import logging

    told: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())
            rank.arguments["told"].touch()

    logging.getLogger("milepost").addHandler(Told())
    trainer = Trainer(rank, limits={"milepost.link.session:ANSWER_S": 0.5})
    before = list(told)
    assert "committed" == trainer.save(1)["phase"]
    trainer.close()
    return before


@pytest.mark.parametrize("there", ["nothing", "a stale socket"])
def test_a_trainer_that_starts_before_its_daemon_says_so_and_waits_for_it(
    folder: Path, shm: Path, there: str
) -> None:
    root, run_dir, told = folder / "root", folder / "n0", folder / "told"
    places = {"MILEPOST_SHM_DIR": str(shm)}
    if there == "a stale socket":
        before = start_node(run_dir, root, **places)
        await_answer(before)
        before.process.kill()
        before.process.wait(5)
    assert (there == "a stale socket") == (run_dir / "milepostd.sock").exists()
    started: list[Member] = []

    def start() -> None:
        until(told.exists, "the trainer has found no daemon")
        started.append(Member(run_dir, root, environment=places))

    late = threading.Thread(target=start)
    late.start()
    environment = {**places, "MILEPOST_RUN_DIR": str(run_dir)}
    try:
        (lines,) = run_ranks(
            save_when_there_is_a_daemon, root, [None], environment=environment, told=told
        )
        late.join()
        assert lines
        assert all(line.startswith(f"waiting for the daemon in {run_dir} (") for line in lines)
        assert [0] == [member.end() for member in started]
    finally:
        late.join()
        for member in started:
            member.destroy()
    assert ["step_1"] == check_root(root)


def test_trainers_that_die_before_they_have_asked_for_anything_leave_the_daemon_to_the_next_one(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, folder, [[]], **places) as (member,):
        pid, node = member.pid, member.node
        warm_up(folder / "before", [node], places)
        before = resources(pid)["descriptors"]

        def is_alone() -> bool:
            return not node.status()["sessions"]

        for greeting in (b"", b"\xff\x00\x00"):
            with socket.socket(socket.AF_UNIX) as line:
                line.connect(str(node.run_dir / "milepostd.sock"))
                line.sendall(greeting)
        for order in ("", "prepare"):
            # With no order it has said hello, and has not asked for its place.
            crew = Crew(root, [node], expect_death=[0], environment=places)
            if order:
                crew.all(order)
            asked = [each["pid"] for each in node.status()["sessions"]]
            assert asked == (crew.pids if order else [])
            crew.tell(0, "die")
            crew.dismiss()
            until(is_alone, "the daemon has noticed its end")
        until(lambda: not os.listdir(shm), "and has freed what it had")
        until(lambda: resources(pid)["descriptors"] <= before + 2, "and holds nothing of theirs")

        crew = Crew(root, [node, node], expect_death=[1], environment=places, deadline_s=SHORT_S)
        crew.tell(1, "die")
        crew.tell(0, "save", step=1)
        told = crew.hear(0)
        assert ("failed", "rank-missing") == (told["phase"], told["code"])
        assert "waiting for 1 of 2 ranks: 1 to call save" in told["message"]
        assert told["waited_s"] < SHORT_S + VERDICT_GRACE_S + SLACK_S
        crew.dismiss()
        until(is_alone, "both have left")

        crew = Crew(root, [node, node], environment=places)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=2)]
        crew.dismiss()
        assert pid == member.pid, "the same daemon through all of it"
        errors = [line["event"] for line in log_lines(node) if line["level"] == "error"]
        assert ["save.failed"] == errors
        until(lambda: not partials(root), "nothing is left over")
    assert ["step_2"] == check_root(root)
    assert [] == os.listdir(shm)
    judge(root, ["latest"])


def test_a_second_sigterm_ends_the_daemon_at_once_and_the_next_one_finishes_its_save(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    faults = {"MILEPOSTD_FAULTS": "before-publish:sleep:60@1"}
    flags = ["--log-format", "json", "--allow-faults"]
    nodes: list[Any] = [start_node(folder / "n0", root, flags, **places, **faults)]
    try:
        with abandoning():
            await_answer(nodes[0])
            crew = Crew(root, nodes, environment=places)
            crew.all("begin", step=1)
            until(lambda: bool(fired(nodes[0])), "publication is held")
            nodes[0].process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            assert nodes[0].process.poll() is None, "the first one waits for the save"
            nodes[0].process.send_signal(signal.SIGTERM)
            assert 0 == nodes[0].process.wait(30)
            assert [] == check_root(root), "nothing looks like a checkpoint"
            nodes.append(start_node(folder / "n0", root, flags, **places))
            assert ["committed"] == [told["phase"] for told in crew.all("finish", step=1)]
            crew.dismiss()
        assert 0 == nodes[1].stop()
    finally:
        for node in nodes:
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait(5)
    assert ["step_1"] == check_root(root)
    assert ([], []) == (partials(root), os.listdir(shm))
    judge(root, ["latest"], ranks=1)


def test_thousands_of_tensors_need_no_descriptors_and_none_is_left_open_by_a_save(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [[]], **places) as (member,):
        resource.prlimit(member.pid, resource.RLIMIT_NOFILE, (256, 256))
        crew = Crew(root, [member.node], environment=places)
        crew.all("limit_descriptors", count=256)
        seen = []
        for step in range(1, 7):
            (told,) = crew.all("save", step=step, many=5000)
            assert "committed" == told["phase"]
            (rank,) = crew.all("resources")
            daemon = resources(member.pid)
            seen.append((rank["descriptors"], daemon["descriptors"]))
        # A directory or a file may be open at the moment of a look.
        grown = [last - second for second, last in zip(seen[1], seen[-1], strict=True)]
        assert max(map(abs, grown)) <= 2, seen
        crew.dismiss()
    assert [] == os.listdir(shm)
