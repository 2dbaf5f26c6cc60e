"""Has the planner's process make plans and indexes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from milepost.wire.messages import Cause
from milepostd.core.commands import BuildIndex, MakePlan
from milepostd.core.events import IndexBuilt, PlanMade
from milepostd.core.job import save_order
from milepostd.ops.faults import FaultPoints
from milepostd.ops.logs import emit
from milepostd.ops.metrics import Counters
from milepostd.planner.process import Planner


class Plans:
    """Executors of MakePlan and BuildIndex.

    Args:
        planner: the planner's process.
        faults: the points at which a test makes something happen.
        counters: count how long plans take.
    """

    def __init__(self, planner: Planner, faults: FaultPoints, counters: Counters) -> None:
        self._planner = planner
        self._faults = faults
        self._counters = counters

    async def make_plan(self, command: MakePlan) -> PlanMade | Cause:
        """Plan a job's structure."""
        save = command.save
        started_s = time.monotonic()
        await self._faults.at("before-plan", save)
        attempt, _ = save_order(save)
        made = await self._planner.make_plan(save.job, attempt, command.reports)
        if save.is_plan_only:
            # `prepare()` shall return when the first save is cheap, and the index needs torch.
            await self._planner.warm()
        self._counters.planning_took(time.monotonic() - started_s)
        if isinstance(made, Cause):
            return made
        return PlanMade(save=save, layouts=made.layouts, warnings=made.warnings)

    async def build_index(self, command: BuildIndex) -> IndexBuilt | Cause:
        """Write manifest and `.metadata` of a save."""
        save = command.save
        await self._faults.at("before-metadata", save)
        built = await self._planner.build_index(
            save,
            command.root,
            command.files,
            command.fragments,
            command.until_ns / 1e9,
            umask=command.umask,
        )
        await self._faults.at("after-metadata", save)
        if isinstance(built, Cause):
            return built
        return IndexBuilt(
            save=save, checkpoint_bytes=built.checkpoint_bytes, warnings=built.warnings
        )

    async def start(self) -> None:
        """Start the planner's process ahead of time."""
        await _ahead_of_time(self._planner.start)

    async def warm(self) -> None:
        """Have the planner's process import torch ahead of time."""
        await _ahead_of_time(self._planner.warm)


async def _ahead_of_time(act: Callable[[], Awaitable[None]]) -> None:
    try:
        await act()
    except OSError as error:  # the first plan tries again, and fails with the cause
        emit("warning", "planner.cold", cause=str(error))
