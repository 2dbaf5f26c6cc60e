"""The hook that lets a copy hold the optimizers' next step.

Owns the one global pre-hook of this process, which exists while any guard is armed. torch's global
hooks run before an optimizer's own. Source: torch/optim/optimizer.py, `profile_hook_step` (2.13).
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


class Guarding(Protocol):
    """An object that may hold a step."""

    def before_step(self, optimizer: Optimizer) -> None:
        """Hold the step if it changes what is being copied. For any thread."""


_lock: Final = threading.Lock()
"""Guards the two variables below."""
_armed: Final[weakref.WeakSet[Guarding]] = weakref.WeakSet()
_hook: RemovableHandle | None = None


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for each in list(_armed):
        each.before_step(optimizer)


def arm(guarding: Guarding) -> None:
    """Have `before_step` called before any torch optimizer's step in this process."""
    global _hook
    with _lock:
        _armed.add(guarding)
        if _hook is None:
            # Exempt the hook from tracing: a compiled step leaves its graph for it. Traced, the
            # wait would become a constant.
            _hook = register_optimizer_step_pre_hook(
                torch.compiler.disable(_before_step)  # type: ignore[no-untyped-call]
            )


def disarm(guarding: Guarding) -> None:
    """Stop calling it; the last one to disarm removes the hook. Idempotent."""
    global _hook
    with _lock:
        _armed.discard(guarding)
        if not _armed and _hook is not None:
            _hook.remove()
            _hook = None
