"""What all tests share: their order, what `slow` means, and hypothesis without deadlines, since the
machines are noisy.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

# Their asserts say what they have compared, as those of the tests do.
pytest.register_assert_rewrite("tests.faults", "tests.integration", "tests.simulation")

settings.register_profile("milepost", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("milepost")

# A shell starts what it puts in the background with Ctrl-C ignored, `nohup` ignores the end of the
# terminal, and children inherit both. Tests that interrupt a command would then wait for nothing.
for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _default)

FOLDERS: Final = ("unit", "simulation", "integration", "faults")
"""The cheapest first: what is simply wrong is told within a minute."""

QUICK: Final = FOLDERS[:2]
"""What `make quick` runs, without the slow ones."""

SLOW_S: Final = 12.0
"""Processor time, that of children included, beyond which a test of these folders fails that is not
marked `slow`. Marked are those that take 2 s on an idle machine: on a busy one caches are cold, and
the same work takes twice as long and more.
"""


def folder_of(item: pytest.Item) -> str:
    """Return the folder of `tests/` in which a test stands."""
    return item.path.relative_to(Path(__file__).parent).parts[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FOLDERS.index(folder_of(item)))
    for item in items:
        if item.get_closest_marker("slow") and folder_of(item) not in QUICK:
            raise pytest.UsageError(f"{item.nodeid}: only tests of {QUICK} can be `slow`")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before_s = sum(os.times()[:4])
    yield
    spent_s = sum(os.times()[:4]) - before_s
    if spent_s > SLOW_S and folder_of(item) in QUICK and not item.get_closest_marker("slow"):
        pytest.fail(f"takes {spent_s:.1f} s of processor time and is not marked `slow`", False)
