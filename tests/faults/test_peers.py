"""Peers that cannot be reached, many peers, and peers that go away in turns."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.faults.fleet import (
    RESOLVE_S,
    RESOLVING_SOON,
    SHORT_S,
    SLACK_S,
    Crew,
    Fired,
    abandoning,
    fired,
    log_lines,
    members,
    resources,
    until,
)
from tests.faults.judging import check_root, judge, partials
from tests.faults.test_daemons import LIMITS, SILENCE_S
from tests.integration.cluster import await_answer, nodes, start_node

MANY = 20


NOWHERE = ["tcp://no-such-host.invalid:0", "tcp://127.0.0.1:9"]
"""An address that cannot be resolved, and one that nobody answers."""


def test_peers_whose_addresses_lead_nowhere_are_named_with_them_and_the_save_ends_for_all(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    flags = ["--log-format", "json"]
    started = [
        start_node(folder / f"n{number}", root, [*flags, *more], prefix=RESOLVING_SOON, **places)
        for number, more in enumerate([[], *(["--advertise", address] for address in NOWHERE)])
    ]
    try:
        with abandoning():
            for node in started:
                await_answer(node)
            away = [node.status()["node"] for node in started[1:]]
            crew = Crew(root, started, environment=places, deadline_s=SHORT_S)
            told = crew.all("save", step=1)
            assert ["failed"] * 3 == [each["phase"] for each in told]
            assert all(node["node_id"] in told[0]["message"] for node in away)
            for node, each in zip(away, told[1:], strict=True):
                assert node["node_id"] in each["message"]
            # A node without its layout waits for the coordinator's word, and then for its verdict.
            assert max(crew.lasted_s(1)) < SHORT_S + 2 * RESOLVE_S + SLACK_S
            lines = [line for line in log_lines(started[0]) if line["event"] == "peer.unreached"]
            assert {(node["node_id"], node["peer_address"]) for node in away} == {
                (line["peer"], line["address"]) for line in lines
            }
            assert all(line["cause"] for line in lines)
            assert [] == check_root(root)
    finally:
        # What one of them still waits for, of a peer that never hears it, is not this test's.
        for node in started:
            node.process.kill()
            node.process.wait()


def test_twenty_daemons_started_at_once_on_one_machine_commit_a_save_together(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with nodes(folder, MANY, root, **places) as daemons, abandoning():
        pictures = [node.status()["node"] for node in daemons]
        assert MANY == len({each["node_id"] for each in pictures})
        assert MANY == len({each["peer_address"] for each in pictures})
        crew = Crew(root, daemons, environment=places)
        assert ["committed"] * MANY == [
            told["phase"] for told in crew.all("save", step=1, values=9)
        ]
        before = [resources(node.process.pid) for node in daemons]
        assert ["committed"] * MANY == [
            told["phase"] for told in crew.all("save", step=2, values=9)
        ]
        after = [resources(node.process.pid) for node in daemons]
        # The coordinator talks to all, the others to it; nobody's descriptors grow with saves.
        assert all(each["descriptors"] < 100 for each in after[1:]), after
        assert all(each["rss"] < 200 << 20 for each in after), after
        # A few come and go with work on files.
        for was, now in zip(before, after, strict=True):
            assert abs(now["descriptors"] - was["descriptors"]) <= 2, (was, now)
        assert MANY == len(os.listdir(shm))
        crew.dismiss()
    assert [] == partials(root)
    assert ["step_1", "step_2"] == check_root(root)
    judge(root, ["latest", "step_1"], ranks=MANY, values=9)


def test_two_daemons_killed_during_different_saves_both_finish_theirs(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    faults = [["before-publish:kill@2"], ["mid-write:kill@3"]]
    with members(folder, root, faults, **places) as daemons:
        crew = Crew(root, [member.node for member in daemons], environment=places, slots=3)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        for step in (2, 3, 4):
            crew.all("begin", step=step)
        for step in (2, 3, 4):
            told = crew.all("finish", step=step)
            assert [("committed", "")] * 2 == [(each["phase"], each["message"]) for each in told]
        assert [
            [Fired("before-publish", "kill", 2)], [Fired("mid-write", "kill", 3)],
        ] == [fired(member.node) for member in daemons]  # fmt: skip
        assert [2, 2] == [member.lives for member in daemons]
        until(lambda: not partials(root), "nothing is left over")
        crew.dismiss()
    assert ["step_1", "step_2", "step_3", "step_4"] == check_root(root)
    judge(root, ["latest", "step_1", "step_2", "step_3", "step_4"])


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_daemon_that_sleeps_between_saves_is_found_again_when_it_wakes(
    folder: Path, shm: Path, stopped: int
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [[], []], **places) as daemons:
        sleeper = daemons[stopped]
        sleeper.holds_stopped = True
        pid = sleeper.pid
        crew = Crew(
            root, [member.node for member in daemons], environment=places, limits=LIMITS, slots=3
        )
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        os.kill(pid, signal.SIGSTOP)
        # Longer than the client takes to call it silent, and than peers take to repeat themselves.
        asleep = threading.Timer(SILENCE_S + 1, setattr, (sleeper, "holds_stopped", False))
        asleep.start()
        told = crew.all("save", step=2)
        asleep.join()
        assert [("committed", "")] * 2 == [(each["phase"], each["message"]) for each in told]
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=3)]
        assert pid == sleeper.pid, "the same daemon, not another life"
        crew.dismiss()
    assert ["step_1", "step_2", "step_3"] == check_root(root)
    judge(root, ["latest", "step_2", "step_3"])
