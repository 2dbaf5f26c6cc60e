"""The table of slow commands with real executors, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milepostd.executors.arenas import OpenArenas
from milepostd.executors.directories import SaveDirectories
from milepostd.executors.images import Images
from milepostd.executors.plans import Plans
from milepostd.executors.table import Executor, make_executors
from milepostd.executors.threads import Threads
from milepostd.ops.faults import FaultPoints
from milepostd.ops.metrics import Counters
from milepostd.planner.process import Planner


def table_of(directories: SaveDirectories) -> dict[type, Executor[Any]]:
    """Return a table whose planner is not started and whose images are written unthrottled."""
    faults, counters = FaultPoints(()), Counters()
    images = Images(
        "node",
        arenas=OpenArenas(),
        writers=Threads("writers", 1),
        files=Threads("files", 1),
        faults=faults,
        counters=counters,
        limit=None,
        post=lambda event: None,
    )
    return make_executors(images, Plans(Planner(Path()), faults, counters), directories)
