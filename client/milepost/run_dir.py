"""Where a node's daemon keeps its socket and its journal, as both sides find it.

Owns the default of the run directory and the names in it; it opens nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SOCKET_NAME: Final = "milepostd.sock"

SOCKET_PATH_BYTES_MAX: Final = 107
"""What fits into `sun_path` with its closing zero byte. Source: unix(7)."""


def default_run_dir(environment: Mapping[str, str]) -> Path:
    """Return `$XDG_RUNTIME_DIR/milepost`, else `/tmp/milepost-<uid>`."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / "milepost"
    return Path(f"/tmp/milepost-{os.getuid()}")


def socket_path(run_dir: Path) -> Path:
    """Return where the daemon of this run directory listens for trainers and commands."""
    return run_dir / SOCKET_NAME
