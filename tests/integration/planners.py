"""SavePlanners as torch's own documentation writes them, and planners that fail.

The four patterns are from the docstring of `torch.distributed.checkpoint.SavePlanner` (2.13), with
its mistakes corrected: a plan's items are in `items`, and a rank's own part of a state is separate
from the items that rank 0 distributes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import distribute_tensor

from tests.integration.sharded_states import S0, line, whole
from tests.integration.states import State


class RenamePlanner(DefaultSavePlanner):
    """Rewrites the state."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {"foo_" + key: value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class HalfPlanner(DefaultSavePlanner):
    """Changes the local plan and the look-up in tandem."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        item: Any = super().resolve_data(write_item)
        return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float16)


class DealingPlanner(DefaultSavePlanner):
    """Deals rank 0's items out over all ranks, in the global plan."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        iters = [iter(all_plans[0].items)] * len(all_plans)
        items_per_rank = [
            [item for item in items if item is not None]
            for items in zip(*zip_longest(*iters), strict=True)
        ]
        dealt = [
            replace(plan, items=items)
            for plan, items in zip(all_plans, items_per_rank, strict=True)
        ]
        return super().create_global_plan(dealt)


class ExtraDataPlanner(DefaultSavePlanner):
    """Adds data of each rank to the checkpoint's metadata."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, planner_data="per-rank-data")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        # The default planner would merge the data of all ranks as mappings.
        kept, self.flatten_state_dict = self.flatten_state_dict, False
        global_plan, metadata = super().create_global_plan(all_plans)
        self.flatten_state_dict = kept
        merged = [plan.planner_data for plan in global_plan]
        return global_plan, replace(metadata, planner_data=merged)


class FailingPlanner(DefaultSavePlanner):
    """Raises in one of its methods, while `fails_in` names it."""

    fails_in = ""

    def _fail(self, name: str) -> None:
        if self.fails_in == name:
            raise ValueError(f"no luck in {name}")

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self._fail("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        self._fail("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self._fail("create_global_plan")
        return super().create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._fail("finish_plan")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        self._fail("resolve_data")
        return super().resolve_data(write_item)


PATTERNS: dict[str, type[DefaultSavePlanner]] = {
    "rename": RenamePlanner,
    "half": HalfPlanner,
    "dealing": DealingPlanner,
    "extra": ExtraDataPlanner,
}

METHODS = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "resolve_data",
)


def state(name: str, at: int) -> State:
    """Return what the ranks save with a planner; all ranks call it. `at` changes all values."""
    plain: State = {
        "weights": {f"w{i}": whole(f"w{i}", (3, i + 1)) + at for i in range(5)},
        "step": at,
        "name": "x" * at,
    }
    if name != "dealing":
        plain["table"] = distribute_tensor(whole("table", (5, 2)) + at, line(), [S0])
    return plain
