"""`milepost demo`: one whole run, and one that is interrupted."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from milepost.demo.attempts import EVERY, STEPS

DEMO = [sys.executable, "-P", "-c", "from milepost.cli import main; main()", "demo"]


def _machine_busy_s() -> float:
    """Return the processor time that all processes have used since the start of the machine."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _children_busy_s() -> float:
    """Return the processor time of this process's ended children and their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.timeout(240)
def test_demo_loses_a_trainer_resumes_and_ends_with_nothing_different(
    tmp_path: Path, alone: Path
) -> None:
    # As a stranger has it, who has installed milepost and nothing else.
    demo = [str(alone.with_name("milepost")), "demo"]
    began_s, busy_s, ours_s = time.monotonic(), _machine_busy_s(), _children_busy_s()
    run = subprocess.run(demo, cwd=tmp_path, capture_output=True, text=True, timeout=220)
    took_s = time.monotonic() - began_s
    others_s = _machine_busy_s() - busy_s - (_children_busy_s() - ours_s)
    assert (0, "") == (run.returncode, run.stderr), run.stdout
    rows = re.findall(r"│ +(\d+) │ +(\d) │ +[\d.]+ │ +\d+ │ .* │ committed +│", run.stdout)
    assert [step for step, _ in rows] == [str(n) for n in range(EVERY, STEPS + 1, EVERY)]
    assert {attempt for _, attempt in rows} == {"1", "2"}
    assert re.search(r"killed rank 2, pid \d+, by SIGKILL", run.stdout)
    assert re.search(r"resumed from step \d+ in a new attempt", run.stdout)
    assert re.search(rf"\d+ values of {len(rows)} checkpoints are equal bit for bit", run.stdout)
    root = tmp_path / "demo-run" / "checkpoints"
    assert {f"step_{step}" for step, _ in rows} == {path.name for path in root.glob("step_*")}
    assert os.readlink(root / "latest") == f"step_{STEPS}"
    # Two minutes are meant on a machine that does nothing else: what others took is not counted.
    assert took_s - max(0.0, others_s) / (os.cpu_count() or 1) < 120


def test_an_interrupted_demo_ends_every_process_it_started(tmp_path: Path) -> None:
    demo = subprocess.Popen(DEMO, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    with demo, demo.stdout:
        for line in demo.stdout:
            if "attempt 1" in line:
                break
        started = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        assert 128 + signal.SIGINT == demo.wait(30)
    assert 6 <= len(started)
    assert [] == [process for process in started if process.is_running()]
