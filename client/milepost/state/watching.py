"""Warns if reading a state has changed it by a step of an optimizer."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

log = logging.getLogger("milepost")


@contextlib.contextmanager
def watching_steps() -> Iterator[None]:
    """Warn if an optimizer steps on this thread within this block: a read must not change a
    state.
    """
    stepped: list[str] = []
    thread = threading.get_ident()

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == thread:
            stepped.append(type(optimizer).__name__)

    hook = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
    if stepped:
        log.warning(
            "reading the state has stepped %s, which counts as a step of training: torch's "
            "get_state_dict does so to an optimizer that has no state yet; call prepare() and "
            "save() after the optimizer's first step",
            ", ".join(stepped),
        )
