"""The run directory: where a node's daemon keeps its socket and its journal.

Owns the default path, the making of the directory and the names in it; opens nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

SOCKET_NAME: Final = "milepostd.sock"

SOCKET_PATH_BYTES_MAX: Final = 107
"""Longest path that fits into `sun_path` with its closing zero byte. Source: unix(7)."""


def default_run_dir(environment: Mapping[str, str]) -> Path:
    """Return `$XDG_RUNTIME_DIR/milepost`, else `/tmp/milepost-<uid>`."""
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / "milepost"
    return Path(f"/tmp/milepost-{os.getuid()}")


def make_run_dir(run_dir: Path) -> str:
    """Make the directory, with mode 0700, if it is missing; return why it cannot be used, or ""."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "" if os.access(run_dir, os.W_OK | os.X_OK) else "it cannot be written to"


def socket_path(run_dir: Path) -> Path:
    """Return where the daemon of this run directory listens for trainers and commands."""
    return run_dir / SOCKET_NAME
