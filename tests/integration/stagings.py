"""Both ways of staging, so that tests can check each of them.

With `staging="overlap"` only what an optimizer changes is copied late. Here an optimizer claims
every tensor of the state, whatever its dtype and layout, so that all of a checkpoint comes from the
late copy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict
from torch.distributed.tensor import DTensor

from tests.integration.cluster import Rank

STAGINGS: Final = ("blocking", "overlap")


class Everything(torch.optim.Optimizer):
    """An optimizer that claims any given tensors as its own."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})

    def claim(self, state: Any) -> None:
        """Take all tensors of a state as parameters, in place of the earlier ones."""
        self.param_groups[0]["params"] = list(_tensors(state))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError("what this optimizer claims is changed by the tests themselves")


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that are saved as such and lie in the state's own memory."""
    once, again = (flatten_state_dict(_stateful_to_state_dict(state))[0] for _ in range(2))
    for key, value in once.items():
        # A quantised tensor is saved as an object; what a Stateful makes anew is a copy.
        if isinstance(value, torch.Tensor) and not value.is_quantized:
            local, other = (_local(each) for each in (value, again[key]))
            if local.data_ptr() == other.data_ptr():
                yield value


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextlib.contextmanager
def opened(
    rank: Rank, folder: str = "", *, is_guarded: bool = False, **options: Any
) -> Iterator[Any]:
    """Open a Checkpointer on the rank's root, or a folder in it, that stages as the test asked by
    `run_ranks(..., staging=)`.

    Args:
        is_guarded: each save is followed by `guard()`, after which the state may be changed.
        options: further ones of the Checkpointer.
    """
    from milepost import Checkpointer

    root = rank.root / folder
    if rank.arguments["staging"] == "blocking":
        with Checkpointer(root, **options) as ck:
            yield ck
        return
    optimizer = Everything()
    with Checkpointer(root, staging="overlap", optimizer=optimizer, **options) as ck:
        plain_prepare, plain_save = ck.prepare, ck.save

        def prepare(state: Any, *args: Any, **more: Any) -> Any:
            optimizer.claim(state)
            return plain_prepare(state, *args, **more)

        def save(step: int, state: Any, *args: Any, **more: Any) -> Any:
            optimizer.claim(state)
            made = plain_save(step, state, *args, **more)
            if is_guarded:
                ck.guard()
            return made

        ck.prepare, ck.save = prepare, save  # type: ignore[method-assign]
        yield ck
