"""`torch.distributed.checkpoint` by milepost: the same calls, results and errors.

```python
import milepost.dcp as dcp

dcp.save(state, checkpoint_id=path)
dcp.load(state, checkpoint_id=path)
```

All other names are torch's, so that this module can replace torch's. docs/dcp.md says what differs,
and which calls are left to torch.
"""

from __future__ import annotations

from typing import Any

import torch.distributed.checkpoint as _stock

from milepost.dcp.loading import load
from milepost.dcp.reader import Reader
from milepost.dcp.saving import async_save, save
from milepost.dcp.writer import Writer

__all__ = ["Reader", "Writer", "async_save", "load", "save"]


def __getattr__(name: str) -> Any:
    if name.startswith("_") or not hasattr(_stock, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_stock, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *(name for name in dir(_stock) if not name.startswith("_"))})
