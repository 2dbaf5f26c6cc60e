"""What the tests of `milepost.dcp`'s loading save and load into."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed.checkpoint as stock
from tests.unit.reading.checkpoints import adopt, stock_save
from torch.distributed.checkpoint.api import CheckpointException


class Counter:
    """A Stateful that counts its loads."""

    def __init__(self, value: float) -> None:
        self.weight = torch.full((3,), value)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "value": float(self.weight[0])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.weight = state["weight"]


def filled() -> dict[str, Any]:
    """A state with values."""
    return {
        "w": torch.arange(3000.0).reshape(30, 100),
        "half": torch.full((7,), 1.5, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4),
        "nested": {"list": [torch.ones(3), "text", {"deep": 2**70}], "none": None},
        "stateful": Counter(5.0),
    }


def blank() -> dict[str, Any]:
    """The same state, before it is loaded."""
    return {
        "w": torch.zeros(30, 100),
        "half": torch.zeros(7, dtype=torch.bfloat16),
        "scalar": torch.tensor(0),
        "empty": torch.zeros(0, 4),
        "nested": {"list": [torch.zeros(3), "", {"deep": 0}], "none": 1},
        "stateful": Counter(0.0),
    }


def told(state: dict[str, Any]) -> dict[str, Any]:
    """A state as plain values, which can be compared."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.tolist()
        if isinstance(value, Counter):
            return plain(value.weight), value.loads
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return cast("dict[str, Any]", plain(state))


def saved(path: Path, state: dict[str, Any] | None = None, *, is_ours: bool = False) -> Path:
    """Save with stock torch; `is_ours`: with a manifest, as if milepost had written it."""
    stock_save(path, filled() if state is None else state)
    if is_ours:
        adopt(path, 1)
    return path


def loaded_by_stock(path: Path, state: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Load a state by stock torch alone."""
    stock.load(state, checkpoint_id=path, no_dist=True, **more)
    return state


def failure(error: CheckpointException, rank: int = 0) -> BaseException:
    """Return what a rank has failed in."""
    return error.failures[rank][0]


def flip(path: Path, at: int = -1) -> Path:
    """Change a byte of a checkpoint's first data file, by default one in its middle; return it."""
    file = min(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at < 0 else at] ^= 0xFF
    file.write_bytes(data)
    return file
