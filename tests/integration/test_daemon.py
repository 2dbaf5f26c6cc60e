"""The daemon seen from outside: started by a trainer or a supervisor, killed, asked for its
status.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import (
    Rank,
    await_answer,
    judge,
    nodes,
    run_ranks,
    start_node,
    until,
)


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for arenas of this test only, on a memory file system."""
    made = Path(tempfile.mkdtemp(prefix="mp-test-", dir="/dev/shm"))
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(made))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def embedded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private place for embedded daemons, which linger for a moment only."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("MILEPOSTD_LINGER_S", "0.5")
    monkeypatch.delenv("MILEPOST_RUN_DIR", raising=False)
    return folder / "milepost"


def _environment(folder: Path, shm: Path) -> dict[str, str]:
    return {
        "XDG_RUNTIME_DIR": str(folder),
        "MILEPOSTD_LINGER_S": "0.5",
        "MILEPOST_SHM_DIR": str(shm),
    }


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- embedded -------------------------------------------------------------------------------------


def save_and_tell_daemon(rank: Rank) -> dict[str, Any]:
    import torch

    from milepost import Checkpointer

    with Checkpointer(rank.root) as ck:
        ck.save(1, {"w": torch.arange(10)}).wait(60)
        node = ck.status()["node"]
        pid = node["pid"]
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return {
            "pid": pid,
            "command": [part.decode() for part in command if part],
            "session": os.getsid(pid),
            "own_session": os.getsid(0),
            "has_torch": "libtorch" in Path(f"/proc/{pid}/maps").read_text(),
            "embedded": node["embedded"],
        }


def test_ranks_of_a_node_start_one_daemon_by_exec_and_it_ends_after_them(
    folder: Path, shm: Path, embedded: Path
) -> None:
    told = run_ranks(
        save_and_tell_daemon, folder / "root", [None, None], environment=_environment(folder, shm)
    )
    assert told[0]["pid"] == told[1]["pid"]
    assert [sys.executable, "-P", "-m", "milepostd"] == told[0]["command"][:4]
    assert told[0]["pid"] == told[0]["session"] != told[0]["own_session"]
    assert not told[0]["has_torch"]
    assert told[0]["embedded"]
    until(lambda: not _is_running(told[0]["pid"]), "the daemon ends when nobody needs it")
    assert [] == list(shm.iterdir())


def die_after_staging(rank: Rank) -> None:
    import torch

    from milepost import Checkpointer

    ck = Checkpointer(rank.root)
    ck.prepare({"w": torch.zeros(1000)})
    ck.save(7, {"w": torch.arange(1000.0)}).wait_staged()
    os.kill(os.getpid(), signal.SIGKILL)


def load_seven(rank: int, world: int, path: str) -> bool:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.zeros(1000)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return torch.equal(torch.arange(1000.0), state["w"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_was_staged_is_committed_though_the_trainer_was_killed(
    folder: Path, shm: Path, embedded: Path
) -> None:
    root = folder / "root"
    run_ranks(
        die_after_staging, root, [None], expect_death=[0], environment=_environment(folder, shm)
    )
    until(lambda: (root / "latest").is_symlink(), "the staged save is committed")
    assert [True] == judge(load_seven, 1, str(root / "step_7"))
    until(lambda: not list(shm.iterdir()), "the dead trainer's shared memory is freed")


def kill_daemon_under_save(rank: Rank) -> dict[str, Any]:
    import torch

    from milepost import Checkpointer

    state = {"w": torch.randn(500_000)}
    with Checkpointer(rank.root) as ck:
        ck.prepare(state)
        pid = ck.status()["node"]["pid"]
        save = ck.save(1, state)
        os.kill(pid, signal.SIGKILL)
        path = save.wait(60).path
        again = ck.save(2, state).wait(60)
        return {
            "old": pid,
            "new": ck.status()["node"]["pid"],
            "paths": [str(path), str(again.path)],
        }


def test_a_killed_embedded_daemon_is_started_again_and_finishes_what_was_staged(
    folder: Path, shm: Path, embedded: Path
) -> None:
    root = folder / "root"
    (told,) = run_ranks(kill_daemon_under_save, root, [None], environment=_environment(folder, shm))
    assert told["old"] != told["new"]
    assert [str(root / "step_1"), str(root / "step_2")] == told["paths"]
    assert [] == list((root / ".partial").iterdir())


# --- supervised -----------------------------------------------------------------------------------


def save_held(rank: Rank) -> str:
    import torch

    from milepost import Checkpointer

    with Checkpointer(rank.root) as ck:
        return str(ck.save(3, {"w": torch.arange(10)}).wait(60).path)


def test_status_tells_what_a_running_save_waits_for(folder: Path) -> None:
    import threading

    root, go_on = folder / "root", folder / "go-on"
    flags, fault = ["--allow-faults"], f"before-publish:hold:{go_on}"
    with nodes(folder, 1, root, flags, MILEPOSTD_FAULTS=fault) as (node,):
        runner = threading.Thread(target=run_ranks, args=(save_held, root, [node]))
        runner.start()
        seen: dict[str, Any] = {}

        def is_held() -> bool:
            done = subprocess.run(
                [sys.executable, "-m", "milepost", "status", "--json", "--run-dir",
                 str(node.run_dir)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            found = json.loads(done.stdout)
            seen.update({save["role"]: save for save in found["saves"]})
            return "before-publish" in seen.get("coordinator", {}).get("waits_for", "")

        until(is_held, "the status names the fault point that holds the save")
        assert "publishing" == seen["coordinator"]["phase"]
        assert 3 == seen["coordinator"]["step"]
        assert not (root / "step_3").exists()
        go_on.touch()
        runner.join()
        assert 1 == node.status()["jobs"][0]["committed_total"]
        assert [] == node.status()["saves"]


def kill_and_wait(rank: Rank) -> str:
    import torch

    from milepost import Checkpointer

    with Checkpointer(rank.root) as ck:
        state = {"w": torch.full((100_000,), float(rank.rank)), "r": torch.ones(10)}
        per_rank = {"own": rank.rank}
        ck.prepare(state | {f"per_rank/{rank.rank}/own": rank.rank})
        save = ck.save(1, state, per_rank=per_rank)
        if rank.rank == 0:
            os.kill(ck.status()["node"]["pid"], signal.SIGKILL)
        return str(save.wait(60).path)


def test_a_killed_coordinator_that_is_restarted_finishes_the_save_for_all(folder: Path) -> None:
    import threading

    root = folder / "root"
    first = start_node(folder / "n0", root)
    second = start_node(folder / "n1", root)
    for node in (first, second):
        await_answer(node)
    again: list[Any] = []

    def restart() -> None:
        first.process.wait(60)
        again.append(start_node(folder / "n0", root))

    supervisor = threading.Thread(target=restart)
    supervisor.start()
    try:
        told = run_ranks(kill_and_wait, root, [first, second])
        supervisor.join(10)
    finally:
        second.stop()
        for node in again:
            node.stop()
    assert [str(root / "step_1")] * 2 == told
    assert (root / "step_1" / ".metadata").exists()


def die_with_daemon(rank: Rank) -> None:
    import torch

    from milepost import Checkpointer

    ck = Checkpointer(rank.root)
    state = {"w": torch.arange(1000.0)}
    ck.prepare(state)
    ck.save(7, state).wait_staged()
    until(
        lambda: any("fault point" in save["waits_for"] for save in ck.status()["saves"]),
        "the daemon has heard of it",
    )
    os.kill(ck.status()["node"]["pid"], signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_was_staged_survives_trainer_and_daemon_both(folder: Path, shm: Path) -> None:
    root = folder / "root"
    # Held at this point, nothing is written before both are dead.
    faults = {"MILEPOSTD_FAULTS": "after-staged:sleep:60"}
    node = start_node(folder / "n0", root, ["--allow-faults"], **faults)
    await_answer(node)
    shared = {"MILEPOST_SHM_DIR": str(shm)}
    run_ranks(die_with_daemon, root, [node], expect_death=[0], environment=shared)
    node.process.wait(10)
    assert "fault.fired" in node.log.read_text()
    assert not (root / "latest").exists()
    again = start_node(folder / "n0", root)
    await_answer(again)
    until(lambda: (root / "latest").is_symlink(), "the restarted daemon commits what was staged")
    assert [True] == judge(load_seven, 1, str(root / "step_7"))
    assert 0 == again.stop(), "draining does not wait for the dead"
    assert [] == list(shm.iterdir())
    assert [] == list((folder / "n0" / "journal").iterdir())


def test_a_second_daemon_in_a_run_directory_is_refused_with_the_pid_of_the_first(
    folder: Path,
) -> None:
    with nodes(folder, 1, folder) as (node,):
        done = subprocess.run(
            [sys.executable, "-m", "milepostd", "--run-dir", str(node.run_dir), "--root", "/x"],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    assert 2 == done.returncode
    assert f"in use by the daemon with pid {node.process.pid}" in done.stderr


def test_a_daemon_that_was_killed_leaves_nothing_that_keeps_the_next_from_starting(
    folder: Path,
) -> None:
    node = start_node(folder / "n0", folder)
    await_answer(node)
    node.process.kill()
    node.process.wait(5)
    assert (folder / "n0" / "milepostd.sock").exists()
    again = start_node(folder / "n0", folder)
    await_answer(again)
    before, after = node.log.read_text(), again.status()["node"]
    assert after["node_id"] in before, "a restarted daemon is the same node to its peers"
    assert 0 == again.stop()


def save_two_jobs(rank: Rank) -> list[str]:
    import torch

    from milepost import Checkpointer

    with Checkpointer(rank.root / "a") as one, Checkpointer(rank.root / "b") as two:
        saves = [one.save(1, {"w": torch.ones(3)}), two.save(1, {"w": torch.ones(4)})]
        return [str(save.wait(60).path) for save in saves]


def test_one_daemon_serves_several_jobs_at_once(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        told = run_ranks(save_two_jobs, root, [node])
        jobs = node.status()["jobs"]
    assert [[str(root / "a" / "step_1"), str(root / "b" / "step_1")]] == told
    assert [1, 1] == [job["committed_total"] for job in jobs]


def open_and_close_many(rank: Rank) -> list[int]:
    import torch

    from milepost import Checkpointer

    counts = []
    for number in range(24):
        with Checkpointer(rank.root / str(number % 2)) as ck:
            if number % 3:
                ck.save(number, {"w": torch.ones(3)}).wait(60)
            pid = ck.status()["node"]["pid"]
        counts.append(len(os.listdir(f"/proc/{pid}/fd")) + len(os.listdir("/proc/self/fd")))
    return counts


def test_checkpointers_that_come_and_go_leave_no_descriptors(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        (counts,) = run_ranks(open_and_close_many, root, [node])
        assert [] == node.status()["sessions"]
    # A leak of one descriptor a Checkpointer would be 18 by now; a few come and go with file work.
    assert counts[-1] - counts[5] <= 6, counts


def save_beside_another_job(rank: Rank) -> tuple[str, str, str]:
    import torch

    from milepost import Checkpointer, SaveFailed

    state = {"w": torch.ones(3)}
    with Checkpointer(rank.root, job="first") as one:
        one.save(1, state).wait(60)
        with Checkpointer(rank.root, job="second") as two:
            assert 1 == two.load({"w": torch.zeros(3)}).step, "reading is for everybody"
            with pytest.raises(SaveFailed) as failure:
                two.save(2, state).wait(60)
    with Checkpointer(rank.root, job="second") as two:
        path = two.save(3, state).wait(60).path
    return failure.value.code, failure.value.message, str(path)


def test_a_second_job_on_a_root_is_refused_by_name_until_the_first_has_left(folder: Path) -> None:
    root = folder / "root"
    with nodes(folder, 1, root) as (node,):
        ((code, message, path),) = run_ranks(save_beside_another_job, root, [node])
    assert "root-locked" == code
    assert "in use by job first" in message
    assert str(root / "step_3") == path


def save_where_forbidden(rank: Rank) -> str:
    import torch

    from milepost import Checkpointer, SaveFailed

    with Checkpointer(rank.root) as ck:
        save = ck.save(1, {"w": torch.ones(3)})
        with pytest.raises(SaveFailed) as failure:
            save.wait(30)
        return failure.value.code


def test_a_root_that_the_daemon_was_not_given_is_refused(folder: Path) -> None:
    with nodes(folder, 1, folder / "allowed") as (node,):
        assert ["root-refused"] == run_ranks(save_where_forbidden, folder / "other", [node])
    assert [] == [entry for entry in (folder / "other").iterdir() if entry.name.startswith("step")]
