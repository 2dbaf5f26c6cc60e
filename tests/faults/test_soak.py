"""The soak in small: `make soak` runs it at length."""

from __future__ import annotations

from pathlib import Path

from tests.faults.soak import Options, draw, soak


def test_saves_with_random_delays_faults_and_killed_daemons_leave_nothing_behind(
    folder: Path, shm: Path
) -> None:
    # As `python -O`: nothing may depend on an assert.
    options = Options(saves=20, seed=1, bytes=1_000_000, optimize=True)
    told = soak(options, folder, shm)
    assert 20 == sum(told["phases"].values())
    assert 1 <= told["killed"] + told["fired"].get("kill", 0)
    assert 20 <= told["fired"]["sleep"]


def test_a_seed_draws_the_same_faults_again_and_the_last_save_is_spared() -> None:
    options = Options(saves=300, seed=7, bytes=0, optimize=False)
    plan = draw(options)
    assert plan == draw(options)
    assert plan != draw(options._replace(seed=8))
    kinds = {fault.split(":")[1].partition("@")[0] for node in plan.faults for fault in node}
    assert {"sleep", "kill", "stop", "raise", "eio", "enospc"} == kinds
    assert plan.kills
    assert plan.widths
    assert not [fault for node in plan.faults for fault in node if fault.endswith("@300")]
