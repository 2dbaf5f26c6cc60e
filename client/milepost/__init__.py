"""milepost: checkpoints for PyTorch training that cost the trainer next to nothing.

```python
from torch.distributed.checkpoint.state_dict import get_state_dict

from milepost import Checkpointer

with Checkpointer("/shared/run-7/checkpoints") as ck:
    for step, batch in enumerate(batches):
        train(batch)
        if step % 100 == 0:
            weights, moments = get_state_dict(model, optimizer)
            ck.save(step, {"model": weights, "optimizer": moments})
```

Names are loaded on first use, so that the daemon, the command line and tests of the protocol can
use this package without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milepost.checkpointer import Checkpointer
    from milepost.errors import (
        CorruptCheckpoint,
        LoadFailed,
        MilepostError,
        Rejected,
        SaveFailed,
        StorageError,
        Unavailable,
        UsageError,
    )
    from milepost.handle import Checkpoint, Save
    from milepost.loading import load
    from milepost.reading.restore import LoadReport
    from milepost.storage.retention import KeepEvery, KeepLast, Protect

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "CorruptCheckpoint",
    "KeepEvery",
    "KeepLast",
    "LoadFailed",
    "LoadReport",
    "MilepostError",
    "Protect",
    "Rejected",
    "Save",
    "SaveFailed",
    "StorageError",
    "Unavailable",
    "UsageError",
    "load",
]

_HOMES = {
    "Checkpoint": "handle",
    "Checkpointer": "checkpointer",
    "KeepEvery": "storage.retention",
    "KeepLast": "storage.retention",
    "LoadReport": "reading.restore",
    "Protect": "storage.retention",
    "Save": "handle",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"milepost.{_HOMES.get(name, 'errors')}"), name)
