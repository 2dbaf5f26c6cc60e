"""`milepost demo`: one whole run, one that is interrupted, and what its judgement rests on."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from milepost.demo.judge import compare, digest
from milepost.demo.launcher import EVERY, MARKER, STEPS, make_afresh
from milepost.demo.records import Called, Ended, Reader, Record, Stepped, Writer
from milepost.demo.report import figures_of
from milepost.errors import UsageError

DEMO = [sys.executable, "-P", "-c", "from milepost.cli import main; main()", "demo"]


def _machine_busy_s() -> float:
    """Return what all processes have had of all cores since the start of the machine."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _children_busy_s() -> float:
    """Return what the children of this process that have ended, and theirs, have had."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.timeout(240)
def test_demo_loses_a_trainer_resumes_and_ends_with_nothing_different(tmp_path: Path) -> None:
    began_s, busy_s, ours_s = time.monotonic(), _machine_busy_s(), _children_busy_s()
    run = subprocess.run(DEMO, cwd=tmp_path, capture_output=True, text=True, timeout=220)
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


def test_a_folder_that_no_demo_made_is_refused_and_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    with pytest.raises(UsageError, match="no demonstration made it"), make_afresh(tmp_path):
        pass
    assert kept.read_text() == "years of work"


def test_a_demos_own_folder_is_emptied_unless_it_is_in_use(tmp_path: Path) -> None:
    folder = tmp_path / "demo-run"
    with make_afresh(folder):
        (folder / "node0").mkdir()
        (folder / "node0" / "old").touch()
        with pytest.raises(UsageError, match="is running"), make_afresh(folder):
            pass
        assert (folder / "node0" / "old").exists()
    with make_afresh(folder):
        assert [path.name for path in folder.iterdir()] == [MARKER]


def _expected(parts: Sequence[torch.Tensor]) -> list[tuple[int, str]]:
    return [(len(part), digest(part)) for part in parts]


def test_the_judge_sees_one_flipped_bit_and_every_key_too_many_or_too_few() -> None:
    table = torch.randn(10, 3)
    expected = {"table": _expected(torch.chunk(table, 3)), "lr": [(-1, digest(0.1))]}
    same: dict[str, Any] = {"table": table.clone(), "lr": 0.1}
    assert compare(expected, same) == {"equal": 2, "wrong": []}
    for row in (0, 5, 9):
        other = table.clone()
        other.view(torch.int32)[row, 0] ^= 1
        found = compare(expected, {"table": other, "lr": 0.1})
        assert found["equal"] == 1
        assert found["wrong"][0].startswith("table is ")
    assert compare(expected, {"table": table})["wrong"] == ["lr is missing"]
    assert compare(expected, same | {"more": 1})["wrong"] == ["more is ['1'], saved was nothing"]
    for other in (table[:9], torch.cat([table, table[:1]]), table.double(), table.reshape(3, 10)):
        assert compare(expected, same | {"table": other})["equal"] == 1


def test_steps_that_a_save_overlaps_are_compared_with_those_that_none_does() -> None:
    rank0: list[Record] = [Stepped(n, 1.0, 10.0 * n, 10.0 * n + 8) for n in range(1, 9)]
    rank0 += [Called(5, "1-1", 58.5, 0.5, 0.0), Ended(5, "1-1", "committed", 71.0)]
    rank1: list[Record] = [Called(5, "1-1", 58.0, 1.5, 0.0), Ended(5, "1-1", "committed", 73.0)]
    figures = figures_of([[rank0, rank1]])
    (row,) = figures.rows
    assert (5, "committed", 1.5, 15.0) == (row.step, row.outcome, row.stall_s, row.commit_s)
    assert [8.0, 8.0] == row.during_s
    assert [[8.0] * 3] == figures.without_s


def test_a_line_of_records_that_is_not_complete_yet_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    reader = Reader(path)
    assert reader.refresh() == []
    first, second = Stepped(1, 2.5, 0.0, 1.0), Stepped(2, 2.25, 1.0, 2.0)
    Writer(path).write(first)
    line = msgspec.json.encode(second) + b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(line[:10])
        assert reader.refresh() == [first]
        file.write(line[10:])
    assert reader.refresh() == [first, second]
