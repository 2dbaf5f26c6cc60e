"""Trainers that die, leave early, or get SIGTERM, at the worst moment of a save."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from milepostd.core.role import VERDICT_GRACE_S
from tests.faults.fleet import (
    DEADLINE_S,
    SHORT_S,
    SLACK_S,
    Crew,
    Fired,
    Member,
    abandoning,
    fired,
    is_stopped,
    log_lines,
    members,
    until,
)
from tests.faults.judging import check_root, judge, partials
from tests.integration.cluster import Node, await_answer, start_node


def is_there(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("moment", "nodes_of_ranks"),
    [("before its call", (0, 1)), ("while staging", (0, 1)), ("while staging", (0, 0))],
)
def test_a_save_that_one_rank_did_not_live_to_stage_fails_by_name_and_a_restart_saves(
    folder: Path, shm: Path, moment: str, nodes_of_ranks: tuple[int, int]
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    # Of a rank that has said nothing of the save a node that has no other rank knows nothing: only
    # the deadline can tell.
    deadline_s = DEADLINE_S if nodes_of_ranks == (0, 0) else SHORT_S
    with members(folder, folder, [[]] * len(set(nodes_of_ranks)), **places) as daemons:
        nodes = [daemons[index].node for index in nodes_of_ranks]
        crew = Crew(root, nodes, expect_death=[1], environment=places)
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=1)]
        if deadline_s == SHORT_S:
            crew.hurry()
        crew.tell(0, "save", step=2)
        if moment == "before its call":
            crew.tell(1, "die")
        else:
            crew.tell(1, "die_staging", step=2)
        told = crew.hear(0)
        assert "failed" == told["phase"]
        assert nodes[1].status()["node"]["node_id"] in told["message"]
        if nodes_of_ranks == (0, 0):
            assert "rank-missing" == told["code"]
            assert f"rank 1 (pid {crew.pids[1]}) was lost before it staged" in told["message"]
            assert told["waited_s"] < deadline_s / 2, "its node need not wait for the deadline"
        else:
            # Where nobody on a node has spoken of the save, the deadline may be what tells.
            assert told["code"] in ("rank-missing", "node-missing")
            assert told["waited_s"] < deadline_s + VERDICT_GRACE_S + SLACK_S
        crew.dismiss()
        assert ["step_1"] == check_root(root)
        again = Crew(root, nodes, environment=places)
        assert [1, 1] == again.all("load")
        assert ["committed"] * 2 == [told["phase"] for told in again.all("save", step=2)]
        again.dismiss()
        assert [] == partials(root)
        judge(root, ["latest", "step_1", "step_2"])
    assert [] == os.listdir(shm)


@pytest.mark.parametrize("way", ["die", "exit"])
def test_what_all_ranks_have_staged_is_committed_though_all_of_them_are_gone(
    folder: Path, shm: Path, way: str
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [["after-staged:stop@2"]] * 2, **places) as daemons:
        nodes = [member.node for member in daemons]
        for member in daemons:
            member.holds_stopped = True
        crew = Crew(root, nodes, expect_death=[0, 1], environment=places)
        crew.all("save", step=1)
        crew.all("begin", step=2)
        crew.all("wait_staged", step=2)
        until(lambda: all(is_stopped(member.pid) for member in daemons), "the daemons are held")
        for rank in (0, 1):
            crew.tell(rank, way)
        until(lambda: not any(map(is_there, crew.pids)), "the trainers are dead")
        assert [True, True] == [is_stopped(member.pid) for member in daemons], "nothing was read"
        assert not (root / "step_2").exists()
        for member in daemons:
            member.holds_stopped = False
        until(lambda: (root / "step_2").exists(), "the daemons commit without them")
        assert [[Fired("after-staged", "stop", 2)]] * 2 == [fired(node) for node in nodes]
        until(lambda: "step_2" == os.readlink(root / "latest"), "latest follows")
        until(lambda: not os.listdir(shm), "the dead trainers' shared memory is freed")
        crew.dismiss()
        judge(root, ["latest", "step_1", "step_2"])


def test_five_crashes_in_a_row_lose_nothing_staged_and_leave_a_neighbour_alone(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    beside = Member(folder / "beside", folder / "other", environment=places)
    lives: list[Node] = []
    try:
        with abandoning():
            await_answer(beside.node)
            neighbour = Crew(folder / "other", [beside.node], environment=places)
            neighbour.all("save", step=1, values=100)
            (its_arena,) = os.listdir(shm)
            for step in range(1, 6):
                # Nothing is written before both are dead, and the next daemon is killed, too.
                faults = {"MILEPOSTD_FAULTS": "after-staged:sleep:60"}
                lives.append(start_node(folder / "n", root, ["--allow-faults"], **places, **faults))
                await_answer(lives[-1])
                crew = Crew(root, lives[-1:], expect_death=[0], environment=places)
                crew.all("begin", step=step)
                lives[-1].process.kill()
                crew.tell(0, "die")
                lives[-1].process.wait()
                crew.dismiss()
            lives.append(start_node(folder / "n", root, **places))
            await_answer(lives[-1])
            crew = Crew(root, lives[-1:], environment=places)
            assert ["committed"] == [told["phase"] for told in crew.all("save", step=6)]
            until(lambda: not partials(root), "what each attempt had staged is committed")
            until(lambda: 2 == len(os.listdir(shm)), "one arena is ours, and one its")
            assert its_arena in os.listdir(shm)
            crew.dismiss()
            again = neighbour.all("save", step=2, values=100)
            assert ["committed"] == [told["phase"] for told in again]
            neighbour.dismiss()
        assert [0, 0] == [lives[-1].stop(), beside.end()]
    finally:
        beside.destroy()
        for node in lives:
            if node.process.poll() is None:
                node.process.kill()
                node.process.wait(5)
    assert [f"step_{step}" for step in range(1, 7)] == sorted(check_root(root))
    assert "step_6" == os.readlink(root / "latest")
    judge(root, ["latest", *check_root(root)], ranks=1)


ALL_WAYS = """
import json, os, sys
# Once for all of them: each is a fork, which goes on to the end of this script.
import torch, torch.distributed.checkpoint

running = {}
for WAY in sys.argv[2:]:
    ROOT = os.path.join(sys.argv[1], WAY)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(ROOT + ".out", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(os.open(ROOT + ".err", os.O_WRONLY | os.O_CREAT), 2)
        break
    running[pid] = WAY
else:
    ends = dict(os.wait() for _ in running)
    print(json.dumps({way: os.waitstatus_to_exitcode(ends[pid]) for pid, way in running.items()}))
    sys.exit()
"""


class End(NamedTuple):
    """How a script ended."""

    code: int
    out: str
    err: str


def run_all_ways(script: str, ways: Iterable[str], folder: Path, **environ: str) -> dict[str, End]:
    """Run a script once for each way, all of them at once, with `WAY` and a `ROOT` of its own."""
    run = subprocess.run(
        [sys.executable, "-c", ALL_WAYS + script, str(folder), *ways],
        capture_output=True, text=True, timeout=200, env={**os.environ, **environ},
    )  # fmt: skip
    assert 0 == run.returncode, run.stderr
    return {
        way: End(code, *((folder / f"{way}.{name}").read_text() for name in ("out", "err")))
        for way, code in json.loads(run.stdout).items()
    }


LEAVING = """
from milepost import Checkpointer

ck = Checkpointer(ROOT)
save = ck.save(4, {"step": 4, "replica": torch.full((16,), 4.0),
                   "w": torch.arange(64, dtype=torch.float64) + 4})
save.wait_staged()
print("staged", flush=True)
if WAY == "sys.exit":
    sys.exit(0)
if WAY == "exception":
    raise RuntimeError("a bug of the training loop")
if WAY == "os._exit":
    os._exit(0)
"""


def test_a_script_that_ends_right_after_staging_ends_soon_and_its_save_is_committed(
    folder: Path, shm: Path
) -> None:
    places = {"MILEPOST_SHM_DIR": str(shm)}
    codes = {"return": 0, "sys.exit": 0, "exception": 1, "os._exit": 0}
    with members(folder, folder, [["after-staged:hold@4"]], **places) as (member,):
        ends = run_all_ways(
            LEAVING, codes, folder, MILEPOST_RUN_DIR=str(member.node.run_dir), **places
        )
        assert codes == {way: end.code for way, end in ends.items()}
        assert dict.fromkeys(codes, "staged\n") == {way: end.out for way, end in ends.items()}
        assert ends["exception"].err.rstrip().endswith("RuntimeError: a bug of the training loop")
        assert "leaked" not in "".join(end.err for end in ends.values())
        assert [Fired("after-staged", "hold", 4)] * len(codes) == fired(member.node)
        assert [] == [way for way in codes if (folder / way / "latest").is_symlink()]
        member.release("after-staged", 4)
        for way in codes:
            until(lambda way=way: (folder / way / "latest").is_symlink(), f"{way}: committed")  # type: ignore[misc]
            assert ["step_4"] == check_root(folder / way)
        until(lambda: not os.listdir(shm), "shared memory is freed")
    judge(folder, [f"{way}/latest" for way in codes], ranks=1, values=64)


COPYING = """
import atexit, multiprocessing, threading, time
from milepost import Checkpointer
from milepost.staging.streams import HostStreams

def train():
    parameter = torch.nn.Parameter(torch.rand(1 << 20))
    ck = Checkpointer(ROOT, staging="overlap", optimizer=torch.optim.SGD([parameter], lr=1))
    if WAY == "atexit":
        atexit.register(save, ck, parameter)
    else:
        save(ck, parameter)

def save(ck, parameter):
    saving, is_told = threading.current_thread(), threading.Event()

    def give(streams, work):
        # The copy goes on after what is printed, while the script ends.
        if threading.current_thread() is not saving:
            is_told.wait()
            time.sleep(0.3)
        work()

    HostStreams.give = give
    save = ck.save(4, {"step": 4, "replica": torch.full((16,), 4.0), "p": parameter,
                       "w": torch.arange(64, dtype=torch.float64) + 4})
    print(save.phase, flush=True)
    is_told.set()
    if WAY == "kept":
        globals()["kept"] = ck  # as a module's variable that nobody closes
    if WAY == "exception":
        raise RuntimeError("a bug of the training loop")
    if WAY == "sys.exit":
        sys.exit(0)

if WAY == "child":
    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
elif WAY == "thread":
    threading.Thread(target=lambda: (threading.main_thread().join(), train())).start()
else:
    train()
"""


def test_a_script_that_ends_while_a_copy_is_under_way_still_gets_its_checkpoint(
    folder: Path, shm: Path
) -> None:
    places = {"MILEPOST_SHM_DIR": str(shm)}
    codes = {
        "return": 0, "kept": 0, "sys.exit": 0, "exception": 1, "child": 0, "thread": 0, "atexit": 0,
    }  # fmt: skip
    with members(folder, folder, [[]], **places) as (member,):
        ends = run_all_ways(
            COPYING, codes, folder, MILEPOST_RUN_DIR=str(member.node.run_dir), **places
        )
        for way, code in codes.items():
            # While the interpreter ends there is no other thread to copy.
            # The daemon may have begun to write by the time that the phase is printed.
            phases = {"staged\n", "writing\n"} if way == "atexit" else {"staging\n"}
            assert code == ends[way].code, ends[way].err
            assert ends[way].out in phases, ends[way].err
            until(lambda way=way: (folder / way / "latest").is_symlink(), f"{way}: committed")  # type: ignore[misc]
            assert ["step_4"] == check_root(folder / way)
        until(lambda: not os.listdir(shm), "shared memory is freed")
    judge(folder, [f"{way}/latest" for way in codes], ranks=1, values=64)


PREEMPTED = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from pathlib import Path
from milepost import Checkpointer
from tests.integration.cluster import await_answer, start_node

class Numbers(Dataset):
    def __len__(self): return 10**9
    def __getitem__(self, index): return torch.tensor(index)

if __name__ == "__main__":
    root, run_dir = Path(sys.argv[1]), Path(sys.argv[2])
    node = start_node(run_dir, root, ["--log-format", "json", "--allow-faults"],
                      MILEPOSTD_FAULTS="before-publish:sleep:1@4")
    await_answer(node)
    loader = iter(DataLoader(Numbers(), num_workers=2))
    next(loader)
    ck = Checkpointer(root, run_dir=run_dir)
    save = ck.save(4, {"step": 4, "replica": torch.full((16,), 4.0),
                       "w": torch.arange(64, dtype=torch.float64) + 4})
    save.wait_staged()
    print("staged", node.process.pid, flush=True)
    time.sleep(600)
"""


def _group(pgid: int) -> list[int]:
    """Return the living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == pgid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def test_sigterm_to_trainer_loader_workers_and_daemon_at_once_still_commits_what_was_staged(
    folder: Path, shm: Path
) -> None:
    root, run_dir = folder / "root", folder / "n0"
    script = folder / "train.py"
    script.write_text(PREEMPTED)
    process = subprocess.Popen(
        [sys.executable, str(script), str(root), str(run_dir)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "MILEPOST_SHM_DIR": str(shm), "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline().split()
        assert "staged" == line[0], process.communicate(timeout=60)[1]
        assert 4 <= len(_group(process.pid)), "trainer, daemon and two workers"
        os.killpg(process.pid, signal.SIGTERM)
        assert -signal.SIGTERM == process.wait(60)
        until(lambda: not _group(process.pid), "everything of the group ends by itself")
    finally:
        for pid in _group(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=60)
    lines = [json.loads(line) for line in (run_dir / "test.log").read_text().splitlines()]
    assert [("fault.fired", 4)] == [
        (line["event"], line["step"]) for line in lines if line["event"] == "fault.fired"
    ]
    assert ["drained"] == [line["reason"] for line in lines if line["event"] == "daemon.ended"]
    assert ["step_4"] == check_root(root)
    assert ([], []) == (partials(root), os.listdir(shm))
    judge(root, ["latest"], ranks=1, values=64)


def test_a_save_that_one_rank_aborts_ends_for_all_and_leaves_nothing(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [[], ["mid-write:hold@2"]], **places) as daemons:
        crew = Crew(root, [member.node for member in daemons], environment=places)
        crew.all("save", step=1)
        crew.all("begin", step=2)
        daemons[1].await_held("mid-write", 2)
        crew.tell(1, "abort", step=2)
        crew.hear(1)
        told = crew.all("finish", step=2)
        daemons[1].release("mid-write", 2)
        assert [("failed", "aborted")] * 2 == [(each["phase"], each["code"]) for each in told]
        assert ["rank 1 asked for an abort" in each["message"] for each in told] == [True, True]
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("save", step=3)]
        until(lambda: not partials(root), "nothing of it is left")
        assert ["step_1", "step_3"] == check_root(root)
        crew.dismiss()


def test_while_a_save_is_held_training_and_its_collectives_go_on_undisturbed(
    folder: Path, shm: Path
) -> None:
    root, places = folder / "root", {"MILEPOST_SHM_DIR": str(shm)}
    with members(folder, root, [["before-publish:stop@1"], []], **places) as daemons:
        daemons[0].holds_stopped = True
        crew = Crew(root, [member.node for member in daemons], environment=places)
        crew.all("prepare")
        crew.all("begin", step=1)
        until(lambda: is_stopped(daemons[0].pid), "the save is held")
        assert [2 * sum(range(200))] * 2 == crew.all("train", rounds=200)
        assert not (root / "step_1").exists()
        daemons[0].holds_stopped = False
        assert ["committed"] * 2 == [told["phase"] for told in crew.all("finish", step=1)]
        assert [Fired("before-publish", "stop", 1)] == fired(daemons[0].node)
        crew.dismiss()
        assert not [line for line in log_lines(daemons[0].node) if line["level"] == "error"]
