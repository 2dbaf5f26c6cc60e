"""The benchmarks run, clean up after themselves and write the results that `results.py` describes.
No figure is judged here, since a machine that runs tests is not fit for measurements.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from benchmarks import launching, report
from benchmarks.__main__ import _chosen
from benchmarks.campaign import WORLDS
from benchmarks.load_campaign import read_index
from benchmarks.planning import plan
from benchmarks.results import (
    BusySave,
    Cost,
    Floors,
    IndexRead,
    LoadCost,
    Loaded,
    Machine,
    Measured,
    Options,
    Results,
    read_results,
    spread,
    write_results,
)
from benchmarks.trial import Busy, Step, derive

ROOT = Path(__file__).parents[2]


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--output", str(folder / "results.json"), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workload", "world", "tensors"), [("large", 1, 64), ("small", 1, 55), ("ranks", 2, 48)]
)
def test_a_workload_is_measured_beside_torch_and_the_floors(
    workload: str, world: int, tensors: int, tmp_path: Path
) -> None:
    ended = bench(
        tmp_path, "--folder", str(tmp_path / "checkpoints"), "--size", "0.005", "--repeats", "1",
        "--saves", "1", "--idle-saves", "1", "--quiet-steps", "2",
        "--only", workload, "--only", "milepost", "--only", "torch-thread",
    )  # fmt: skip
    assert 0 == ended.returncode, ended.stderr + ended.stdout
    results = read_results(tmp_path / "results.json")
    assert [workload] == list(results.workloads)
    measured = results.workloads[workload]
    assert (world, tensors) == (measured.world, measured.tensors)
    assert {} == measured.failures
    assert {"milepost", "torch-thread"} == set(measured.costs) == set(measured.timelines)
    for cost in measured.costs.values():
        assert (1, 1, 1) == (
            len(cost.first_stall_s.values), len(cost.stall_s.values), len(cost.commit_s.values),
        )  # fmt: skip
        assert 0 < min(cost.stall_s.low, cost.busy_commit_s.low, cost.commit_s.low)
        assert 0 < cost.memory_bytes.median
    assert measured.costs["milepost"].shared_bytes.median >= measured.image_bytes
    assert measured.image_bytes > measured.state_bytes
    assert 0 < measured.floors.copy_s.median
    assert "torch-thread" in ended.stdout
    assert not (tmp_path / "checkpoints").exists()


def test_the_planner_is_measured(tmp_path: Path) -> None:
    ended = bench(
        tmp_path, "--folder", str(tmp_path / "plans"), "--size", "0.01", "--only", "planning"
    )
    assert 0 == ended.returncode, ended.stderr
    results = read_results(tmp_path / "results.json")
    assert [(2, 2000), (10, 1000)] == [(each.ranks, each.tensors) for each in results.planning]
    assert all(each.plan_s > 0 and each.later_index_s > 0 for each in results.planning)
    assert all(0 < each.steady_wire_bytes < 1024 for each in results.planning)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workload", "world", "tensors"), [("small", 1, 55), ("ranks", 2, 48)])
def test_loads_are_measured_beside_torch_and_the_floors(
    workload: str, world: int, tensors: int, tmp_path: Path
) -> None:
    ended = bench(
        tmp_path, "--folder", str(tmp_path / "checkpoints"), "--size", "0.005", "--repeats", "1",
        "--loads", "1", "--only", "loads", "--only", workload, "--only", "milepost-path",
        "--only", "torch-load",
    )  # fmt: skip
    assert 0 == ended.returncode, ended.stderr + ended.stdout
    results = read_results(tmp_path / "results.json")
    assert ([], [workload]) == (list(results.workloads), list(results.loads))
    loaded = results.loads[workload]
    assert (world, tensors, {}) == (loaded.world, loaded.tensors, loaded.failures)
    assert ["milepost-path", "torch-load"] == list(loaded.cold) == list(loaded.warm)
    for cost in (*loaded.cold.values(), *loaded.warm.values()):
        assert 1 == len(cost.load_s.values)
        assert 0 < min(cost.load_s.low, cost.ratio.low, cost.cpu_ratio.low)
    assert 0 < min(loaded.read_s.low, loaded.copy_s.low)
    assert f"loads of {workload}" in ended.stdout
    assert not (tmp_path / "checkpoints").exists()


def test_the_index_of_many_ranks_is_read_up_to_the_first_data(tmp_path: Path) -> None:
    found: list[IndexRead] = []
    plan(tmp_path / "plans", 3, 40, lambda path: found.append(read_index(path, 3, 40)))
    assert [(3, 40, 36 * 3 + 4)] == [(each.ranks, each.tensors, each.chunks) for each in found]
    assert 0 < min(found[0].read_s, found[0].cpu_s, found[0].stock_s)


def test_only_names_families_and_systems() -> None:
    everything = _chosen([])
    assert list(WORLDS) == everything.saves == everything.loads
    assert everything.with_planning
    assert everything.with_index
    of_large = _chosen(["large", "milepost"])
    assert (["large"], ["milepost"], []) == (of_large.saves, of_large.systems, of_large.loads)
    loads = _chosen(["loads", "torch-load"])
    assert ([], list(WORLDS), ["torch-load"]) == (loads.saves, loads.loads, loads.readers)
    assert (False, True) == (loads.with_planning, loads.with_index)
    of_small = _chosen(["loads", "small"])
    assert ([], ["small"], False) == (of_small.saves, of_small.loads, of_small.with_index)
    assert [] == _chosen(["planning"]).saves == _chosen(["planning"]).loads
    with pytest.raises(typer.BadParameter):
        _chosen(["cold"])


def test_the_time_lost_is_the_call_and_the_extra_time_of_all_steps() -> None:
    # Quiet steps take 1 s. The call took 0.5 s; the first step waited 0.25 s at its guard; the
    # save ended within the third.
    steps = [Step(0.5, 2.0, 0.25), Step(2.0, 3.25, 0.0), Step(3.25, 4.5, 0.0)]
    assert BusySave(
        stall_s=0.5, guard_s=0.25, lost_s=0.5 + 1.0, slow_down=1.25, commit_s=4.0
    ) == derive(Busy(0.0, 0.5, 4.0, steps), 1.0)


def test_a_save_that_ends_within_a_step_slows_no_whole_step_down() -> None:
    assert None is derive(Busy(0.0, 0.5, 1.0, [Step(0.5, 1.5, 0.0)]), 1.0).slow_down


def synthetic() -> Results:
    def cost(seconds: float, is_synced: bool = True) -> Cost:
        many = spread([seconds / 2, seconds, 2 * seconds])
        return Cost(
            is_synced=is_synced, prepare_s=many, first_stall_s=many, first_lost_s=many,
            stall_s=many, guard_s=many, lost_s=many, slow_down=None, busy_commit_s=many,
            commit_s=many, cpu_s=many, memory_bytes=many, shared_bytes=many, descriptors=many,
        )  # fmt: skip

    def loads(times: float) -> LoadCost:
        return LoadCost(
            load_s=spread([times / 10]), cpu_s=spread([times / 10]), first_ratio=spread([times]),
            ratio=spread([times]), cpu_ratio=spread([times]), memory_bytes=spread([64 << 20]),
        )  # fmt: skip

    return Results(
        at="2026-01-02T03:04:05+00:00",
        machine=Machine(
            processor="a processor",
            cores=2,
            memory_bytes=2**34,
            device="cpu",
            file_system="ext4",
            kernel="6.1",
            python="3.11",
            packages={"torch": "2.13"},
            load=0.1,
        ),
        options=Options(size=1, repeats=3, saves=1, idle_saves=1, quiet_steps=1),
        workloads={
            "large": Measured(
                world=1,
                tensors=64,
                state_bytes=100 << 20,
                image_bytes=120 << 20,
                step_s=spread([0.2]),
                floors=Floors(spread([0.1]), spread([0.3]), True),
                bare_writer=None,
                costs={
                    "milepost": cost(0.1),
                    "milepost-overlap": cost(0.05),
                    "torch-thread": cost(0.4),
                    "torch-process": cost(0.5),
                    "torch-checkpointing": cost(0.01, is_synced=False),
                },
                timelines={},
                failures={"torch-save": "it broke"},
            )
        },
        failures={},
        planning=(),
        loads={
            "small": Loaded(
                world=1,
                tensors=11_000,
                state_bytes=80 << 20,
                read_s=spread([0.06]),
                copy_s=spread([0.02]),
                cold={"milepost": loads(4.0), "torch-load": loads(80.0)},
                warm={"milepost": loads(8.0), "torch-load": loads(200.0)},
                failures={"torch-checkpointing": "not there"},
            )
        },
        indexes=(
            IndexRead(
                ranks=1024, tensors=1000, chunks=921_700, read_s=1.5, cpu_s=1.5,
                memory_bytes=1 << 28, stock_s=30.0,
            ),
        ),
    )  # fmt: skip


def test_the_page_has_ratios_and_why_a_system_is_missing() -> None:
    text = report.page(synthetic())
    assert "| milepost | 1.00 (0.50–2.00) | 1.00 (0.50–2.00) |" in text
    assert "| torch-thread | 4.00 (2.00–8.00) | 4.00 (2.00–8.00) |" in text
    assert "* torch-save: it broke" in text
    assert "| milepost | 4.00 (4.00–4.00) | 4.00 (4.00–4.00) |" in text
    assert "* torch-checkpointing: not there" in text
    assert "| 1024 ranks of 1000 tensors, 921700 chunks | 1.50 s |" in text


def test_a_bar_is_a_share_of_its_limit() -> None:
    shares = {bar.what: bar.share for bar in report.bars(synthetic())}
    assert 1 / 1.25 == pytest.approx(shares["large, milepost: save()"])
    # Our better mode, beside the best of those who sync.
    assert 3 * 0.05 / 0.4 == pytest.approx(shares["large, milepost-overlap: training time lost"])
    assert "large, milepost: training time lost" not in shares
    assert 0.1 / (1.3 * 0.4) == pytest.approx(shares["large, milepost: committed"])
    assert 4 / 5 == pytest.approx(shares["load of small, milepost: cold"])
    assert 64 / 256 == pytest.approx(shares["load of small, milepost: memory of a rank"])
    # A limit for copies is set where bytes cost, not tensors.
    assert "load of small, milepost: warm" not in shares
    assert 0.5 == pytest.approx(shares["index of 1024 ranks of 1000 tensors, to the first read"])
    # 0.4 s for 1.5 GiB.
    assert 0.1 / (0.4 * 120 / 1536) == pytest.approx(shares["large, milepost: processor time"])


def test_a_system_that_fails_is_quoted_by_its_errors_and_no_path() -> None:
    log = (
        'Traceback (most recent call last):\n  File "/a/b.py", line 1, in <module>\n'
        "[rank0]: OSError: [Errno 24] Too many open files\n[rank1]: some.where.SaveError: no\n"
        "OSError: [Errno 24] Too many open files\n"
    )
    assert "OSError: [Errno 24] Too many open files; some.where.SaveError: no" == launching.said(
        log
    )
    assert "b | c | d" == launching.said("a\nb\nc\nd\n")


def test_a_page_is_filled_from_the_results(tmp_path: Path) -> None:
    write_results(tmp_path / "results.json", synthetic())
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- results -->\nold\n<!-- end of results -->\nbetween\n"
        "<!-- loads -->\nold\n<!-- end of loads -->\nafter\n"
    )
    ended = bench(tmp_path, "--page", str(tmp_path / "results.json"), "--into", str(page))
    assert 0 == ended.returncode, ended.stderr
    text = report.sections(synthetic())
    assert ["saves", "loads"] == list(text)
    assert "\n".join(text.values()) == report.page(synthetic())
    assert page.read_text() == (
        f"before\n<!-- results -->\n{text['saves']}<!-- end of results -->\nbetween\n"
        f"<!-- loads -->\n{text['loads']}<!-- end of loads -->\nafter\n"
    )
