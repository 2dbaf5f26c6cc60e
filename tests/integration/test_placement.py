"""The daemon gives way to training: checks what the kernel says about every thread of the daemon
and its planner. Saves obey a bandwidth limit, which does not delay aborted saves or the daemon's
end.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.cluster import (
    Node,
    Rank,
    await_answer,
    judge,
    nodes,
    run_ranks,
    start_node,
    until,
)

BURST_S = 0.25
"""How many seconds' worth of bytes a limit lets through at once."""

ROOMY = (
    "import sys; import milepostd.ops.placement as p; p.CORES_MIN = 1; sys.argv = sys.argv[3:]; "
    "from milepostd.cli import main; main()"
)
"""Runs a daemon for which one free core is room enough, so that two cores can show a move."""


REFUSED = """
import ctypes, os, platform, struct, sys

# sched_setaffinity, ioprio_set, setpriority
denied = {"x86_64": (203, 251, 141), "aarch64": (122, 30, 140)}[platform.machine()]
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
steps = [(LOAD, 0, 0, 0)]
steps += [(JUMP_IF_EQUAL, len(denied) - i, 0, number) for i, number in enumerate(denied)]
steps += [(RETURN, 0, 0, 0x7FFF0000), (RETURN, 0, 0, 0x00050001)]  # allow; EPERM
program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))

class Filter(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("steps", ctypes.c_void_p)]

libc = ctypes.CDLL(None, use_errno=True)
found = Filter(len(steps), ctypes.addressof(program))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(found), 0, 0):
    sys.exit(f"no seccomp filter: {os.strerror(ctypes.get_errno())}")
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Executes what follows where a seccomp filter denies what a strict container does. Source:
seccomp(2), PR_SET_NO_NEW_PRIVS and PR_SET_SECCOMP of prctl(2)."""


def everywhere() -> frozenset[int]:
    """Return the cores that the cpuset allows, even if this process is confined to fewer."""
    found: list[frozenset[int]] = []

    def look() -> None:
        os.sched_setaffinity(0, range(8192))
        found.append(frozenset(os.sched_getaffinity(0)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def threads_of(pid: int) -> list[int]:
    """The threads of a daemon and of its planner."""
    pids = [pid, *(child.pid for child in psutil.Process(pid).children())]
    return [int(thread) for each in pids for thread in os.listdir(f"/proc/{each}/task")]


def masks_of(pid: int) -> set[frozenset[int]]:
    """The cores that the threads of a daemon and of its planner may use."""
    return {frozenset(os.sched_getaffinity(thread)) for thread in threads_of(pid)}


def save_large(rank: Rank) -> dict[str, Any]:
    """Save two tensors of `mb` MB together, replicated on all ranks; return the outcome."""
    import torch

    from milepost import Checkpointer, SaveFailed

    half = rank.arguments["mb"] * 1_000_000 // 8
    state = {name: torch.arange(half, dtype=torch.int32) for name in ("a", "b")}
    with Checkpointer(rank.root, deadline_s=rank.arguments.get("deadline_s", 60)) as ck:
        ck.prepare(state)
        started_s = time.monotonic()
        save = ck.save(1, state)
        try:
            save.wait(90)
        except SaveFailed as error:
            return {"code": error.code, "message": error.message, "hint": error.hint}
        return {"elapsed_s": time.monotonic() - started_s}


class Saving:
    """Ranks that save in the background while the test looks at the daemon."""

    def __init__(self, root: Path, nodes_of_ranks: list[Node], **arguments: Any) -> None:
        self.told: list[Any] = []
        self._thread = threading.Thread(
            target=lambda: self.told.extend(
                run_ranks(save_large, root, nodes_of_ranks, **arguments)
            )
        )
        self._thread.start()

    def end(self) -> list[Any]:
        self._thread.join()
        return self.told


def waits_for(node: Node) -> str:
    return " ".join(save["waits_for"] for save in node.status()["saves"])


def is_writing(node: Node) -> bool:
    return any(0 < save["bytes_written"] < save["bytes_total"] for save in node.status()["saves"])


# --- place


def test_every_thread_of_daemon_and_planner_has_the_niceness_and_the_cores_of_the_settings(
    folder: Path,
) -> None:
    root, core, go_on = folder / "root", max(everywhere()), folder / "go-on"
    flags = ["--nice", "7", "--io-class", "idle", "--cpus", str(core), "--write-mbps", "4"]
    fault = f"mid-write:hold:{go_on}"
    with nodes(folder, 1, root, [*flags, "--allow-faults"], MILEPOSTD_FAULTS=fault) as (node,):
        idle = len(threads_of(node.process.pid))
        saving = Saving(root, [node], mb=1)
        until(lambda: "mid-write" in waits_for(node), "a writer is at work")
        threads = threads_of(node.process.pid)
        assert len(threads) > idle, "the writer and the planner have come"
        assert {core} == set().union(*masks_of(node.process.pid))
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + 7
        assert {niceness} == {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}
        classes = {psutil.Process(thread).ionice().ioclass for thread in threads}
        assert {psutil.IOPRIO_CLASS_IDLE} == classes
        writer = node.status()["writer"]
        go_on.touch()
        (told,) = saving.end()
    assert told["elapsed_s"] > 0
    assert {
        "threads": 2,
        "write_mbps": 4.0,
        "nice": niceness,
        "io_class": "idle",
        "cpus": str(core),
        "cpus_reason": f"cpus is {core}",
    } == writer


def test_by_default_the_daemon_reads_and_writes_at_the_lowest_level_of_best_effort(
    folder: Path,
) -> None:
    with nodes(folder, 1, folder / "root") as (node,):
        for thread in threads_of(node.process.pid):
            told = psutil.Process(thread).ionice()
            assert (psutil.IOPRIO_CLASS_BE, 7) == (told.ioclass, told.value)
        shown = subprocess.run(
            [sys.executable, "-m", "milepost", "status", "--json", "--run-dir", str(node.run_dir)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    writer = json.loads(shown.stdout)["writer"]
    assert ("best-effort", 0, 2) == (writer["io_class"], writer["write_mbps"], writer["threads"])


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="system calls have other numbers"
)
def test_a_daemon_whose_container_refuses_everything_logs_each_refusal_once_and_works(
    folder: Path,
) -> None:
    root = folder / "root"
    flags = ["--cpus", str(min(everywhere())), "--log-format", "json"]
    prefix = [sys.executable, "-c", REFUSED]
    node = start_node(folder / "n0", root, flags, prefix=prefix, MILEPOSTD_NICE="10")
    try:
        await_answer(node)
        (told,) = run_ranks(save_large, root, [node], mb=1)
        writer = node.status()["writer"]
    finally:
        assert 0 == node.stop()
    assert told["elapsed_s"] > 0
    assert (os.getpriority(os.PRIO_PROCESS, 0), "none") == (writer["nice"], writer["io_class"])
    lines = [json.loads(line) for line in node.log.read_text().splitlines()]
    refused = [line["setting"] for line in lines if line["event"] == "place.refused"]
    assert ["nice", "io_class", "cpus"] == refused


def save_pinned(rank: Rank) -> dict[str, Any]:
    """Pin this rank as a launcher would, start a daemon, and return the daemon's cores."""
    import torch

    from milepost import Checkpointer

    os.sched_setaffinity(0, {rank.arguments["core"]})
    with Checkpointer(rank.root) as ck:
        ck.save(1, {"w": torch.arange(10)}).wait(60)
        node, writer = ck.status()["node"], ck.status()["writer"]
        group = Path(f"/proc/{node['pid']}/autogroup")
        return {
            "masks": masks_of(node["pid"]),
            "threads": len(threads_of(node["pid"])),
            "writer": writer,
            "session": group.read_text() if group.exists() else "",
            "nice": os.getpriority(os.PRIO_PROCESS, node["pid"]),
        }


def test_an_embedded_daemon_does_not_stay_on_the_core_of_the_rank_that_started_it(
    folder: Path,
) -> None:
    from milepostd.ops.placement import Host, choose_cores

    allowed = everywhere()
    core = min(allowed)
    environment = {
        "XDG_RUNTIME_DIR": str(folder), "MILEPOSTD_LINGER_S": "0.1", "MILEPOSTD_NICE": "10",
    }  # fmt: skip
    (told,) = run_ranks(save_pinned, folder / "root", [None], environment=environment, core=core)
    expected = choose_cores(allowed, [frozenset((core,))], Host().siblings)
    assert {expected.cores} == told["masks"]
    assert expected.reason == told["writer"]["cpus_reason"]
    if told["session"]:
        # Its session is its own, and niceness has to count among sessions, too.
        assert told["session"].split()[-2:] == ["nice", str(told["nice"])]


def save_until_moved(rank: Rank) -> list[frozenset[int]]:
    import torch

    from milepost import Checkpointer

    state = {"w": torch.arange(10)}
    with Checkpointer(rank.root) as ck:
        ck.prepare(state)
        pid = ck.status()["node"]["pid"]
        seen = [*masks_of(pid)]
        # Late, as a framework does that pins its processes itself.
        os.sched_setaffinity(0, {rank.arguments["core"]})
        away = frozenset(rank.arguments["away"])
        until(lambda: {away} == masks_of(pid), "all threads have moved")
        ck.save(1, state).wait(60)
        assert ck.status()["writer"]["cpus"] == ",".join(map(str, away))
        return [*seen, *masks_of(pid)]


@pytest.mark.skipif(len(everywhere()) < 2, reason="a move needs two cores, the cpuset has one")
def test_daemon_and_planner_move_off_the_core_of_a_trainer_and_back_when_it_leaves(
    folder: Path,
) -> None:
    from milepostd.ops.placement import parse_cores

    root = folder / "root"
    core, other = sorted(everywhere())[:2]
    both = frozenset((core, other))
    taskset = ["taskset", "-c", f"{core},{other}"]
    node = start_node(folder / "n0", root, prefix=[*taskset, sys.executable, "-c", ROOMY])
    try:
        await_answer(node)
        (masks,) = run_ranks(save_until_moved, root, [node], core=core, away=[other])
        assert [both, frozenset((other,))] == masks
        until(lambda: {both} == masks_of(node.process.pid), "the daemon has the core back")
    finally:
        assert 0 == node.stop()
    placed = [
        (line["cpus"], line["reason"])
        for line in map(json.loads, node.log.read_text().splitlines())
        if line["event"] == "daemon.placed"
    ]
    assert [both, {other}, both] == [parse_cores(cpus) for cpus, _ in placed]
    assert f"apart from the trainers' cores {core}" == placed[1][1]


# --- the bandwidth limit


def load_both(rank: int, world: int, path: str) -> bool:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {name: torch.zeros(4_000_000, dtype=torch.int32) for name in ("a", "b")}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return all(torch.equal(torch.arange(4_000_000), each) for each in state.values())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_limited_save_of_two_ranks_takes_its_bytes_divided_by_the_limit_and_commits(
    folder: Path,
) -> None:
    root = folder / "root"
    flags = ["--write-mbps", "16", "--http", "127.0.0.1:0"]
    with nodes(folder, 1, root, flags) as (node,):
        saving = Saving(root, [node, node], mb=32)
        sentences: list[str] = []

        def is_said() -> bool:
            sentences.extend(
                save["waits_for"]
                for save in node.status()["saves"]
                if save["role"] == "participant" and save["phase"] == "writing"
            )
            return bool(sentences)

        until(is_said, "the save is being written")
        told = saving.end()
        with urllib.request.urlopen(node.status()["node"]["http"] + "/metrics") as answer:
            found = re.search(
                r"^milepostd_throttled_seconds_total (.+)$", answer.read().decode(), re.MULTILINE
            )
    assert sentences[-1].endswith("bytes, at most 16 MB/s (write_mbps)")
    # The two ranks wrote 32 MB together, over one limit. No upper bound: the machine may be busy.
    # One rank may call save() when the other one's image is being written already.
    assert max(each["elapsed_s"] for each in told) >= 32 / 16 - BURST_S
    assert found is not None
    assert float(found[1]) >= 32 / 16 - BURST_S
    assert [True] == judge(load_both, 1, str(root / "step_1"))


def abort_and_save_again(rank: Rank) -> tuple[str, str]:
    import torch

    from milepost import Checkpointer, SaveFailed

    state = {"w": torch.zeros(8_000_000)}
    with Checkpointer(rank.root) as ck:
        ck.prepare(state)
        save = ck.save(1, state)
        until(lambda: save.phase == "writing", "it is being written")
        save.abort()
        with pytest.raises(SaveFailed) as failure:
            save.wait(60)
        # Both slots are needed, the first save's too: its writer must have let go of it.
        others = [ck.save(step, {"w": torch.zeros(8_000_000)}) for step in (2, 3)]
        for other in others:
            other.abort()
        return failure.value.code, failure.value.message


def test_a_save_that_is_aborted_under_a_limit_lets_go_at_once(folder: Path) -> None:
    root = folder / "root"
    # Unless it ends by itself, a save takes longer than this test may.
    with nodes(folder, 1, root, ["--write-mbps", "0.2"]) as (node,):
        ((code, message),) = run_ranks(abort_and_save_again, root, [node])
        assert ("aborted", True) == (code, "rank 0 asked for an abort" in message)
        until(lambda: not node.status()["saves"], "nothing is written any more")
        until(lambda: not list((root / ".partial").iterdir()), "nothing of it is left")


def test_a_save_that_cannot_end_in_time_under_the_limit_fails_at_once_with_the_numbers(
    folder: Path,
) -> None:
    root = folder / "root"
    with nodes(folder, 1, root, ["--write-mbps", "1"]) as (node,):
        (told,) = run_ranks(save_large, root, [node], mb=64, deadline_s=30)
    assert "timeout" == told["code"]
    said = re.match(
        r"64\d{6} bytes of the image are left to write, which takes 6[34]\.\d s or more at the "
        r"daemon's limit of 1 MB/s, and the save has (\d+\.\d) s left",
        told["message"],
    )
    assert said is not None, told["message"]
    assert float(said[1]) > 0
    assert "write_mbps" in told["hint"]


def stage_and_leave(rank: Rank) -> None:
    import torch

    from milepost import Checkpointer

    state = {"w": torch.zeros(8_000_000)}
    ck = Checkpointer(rank.root)
    ck.prepare(state)
    ck.save(1, state).wait_staged()
    until(
        lambda: any(save["bytes_written"] for save in ck.status()["saves"]),
        "the daemon writes it",
    )
    os._exit(0)


def test_a_daemon_that_is_told_to_stop_at_once_does_not_wait_for_the_limit(folder: Path) -> None:
    root = folder / "root"
    node = start_node(folder / "n0", root, ["--write-mbps", "0.2"])
    await_answer(node)
    run_ranks(stage_and_leave, root, [node], expect_death=[0])
    node.process.send_signal(signal.SIGTERM)
    until(lambda: not node.status()["accepting"], "it drains")
    assert is_writing(node), "draining goes on at the limit"
    node.process.send_signal(signal.SIGTERM)
    assert 0 == node.process.wait(30)
    again = start_node(folder / "n0", root)
    await_answer(again)
    until(lambda: (root / "latest").is_symlink(), "the next life finishes it, without a limit")
    assert 0 == again.stop()
