"""Histories drawn by a seed: nothing that must never happen does, and what must happen, in time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.run import Run, draw_options


@pytest.mark.parametrize("block", range(10))
def test_histories_of_a_few_nodes_break_nothing_and_commit_once_healed(block: int) -> None:
    commits = 0
    for seed in range(block * 6, block * 6 + 6):
        commits += Run(draw_options(seed, 2 + seed % 9)).go().commits
    assert commits > 0


@pytest.mark.slow
def test_256_nodes_break_nothing() -> None:
    assert Run(draw_options(7, 256)).go().commits > 0


@pytest.mark.slow
def test_a_seed_is_the_same_history_whatever_order_sets_have() -> None:
    """Two interpreters that hash strings differently take every turn alike."""

    def told(hash_seed: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", "11", "--nodes", "24"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        return done.stdout.splitlines()[-2:]

    first = told("1")
    assert first[0].startswith("commits ")
    assert first[1].startswith("trace hash ")
    assert first == told("2")
