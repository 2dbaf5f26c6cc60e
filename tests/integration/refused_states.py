"""States that cannot be saved exactly, for all ranks or for one of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.integration.sharded_states import line
from tests.integration.states import State


class Scaled(torch.Tensor):
    """A wrapper without storage of its own, as quantising libraries make them."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        made.wrapped = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return Scaled(args[0].wrapped)
        raise NotImplementedError(f"Scaled has no {func}")


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def unpicklable() -> Any:
    """Return an object that pickle has no name for."""
    return lambda: None


def _partial() -> DTensor:
    return DTensor.from_local(torch.ones(2), line(), [Partial()])


def _wrapper_inside() -> DTensor:
    shape, stride = torch.Size([4]), (1,)
    local = Scaled(torch.ones(2, dtype=torch.int8))
    return DTensor.from_local(
        local, line(), [Shard(0)], run_check=False, shape=shape, stride=stride
    )


class Refusal(NamedTuple):
    """A state that every rank refuses, the code, and what the error must name."""

    make: Callable[[], Any]
    code: str
    names: tuple[str, ...]


def _tensor(make: Callable[[], Any], *names: str) -> Refusal:
    """Return a refusal of one tensor among others, deep in the state."""

    def state() -> State:
        return {"fine": torch.ones(2), "deep": {"bad": [make()]}}

    return Refusal(state, "unsupported-tensor", ("'deep.bad.0'", *names))


EVERYWHERE: dict[str, Refusal] = {
    "partial": _tensor(_partial, "Partial"),
    "meta": _tensor(lambda: torch.empty(2, device="meta"), "meta"),
    "coo": _tensor(lambda: torch.eye(2).to_sparse(), "sparse_coo"),
    "csr": _tensor(lambda: torch.eye(2).to_sparse_csr(), "sparse_csr"),
    "nested": _tensor(lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
    "wrapper": _tensor(lambda: Scaled(torch.ones(2, dtype=torch.int8)), "Scaled"),
    "wrapper in a DTensor": _tensor(_wrapper_inside, "Scaled"),
    "freed": _tensor(_freed, "freed"),
    "below a byte": _tensor(lambda: torch.empty(4, dtype=vars(torch)["int4"]), "int4"),
    "lambda": Refusal(
        lambda: {"deep": {"hook": unpicklable()}}, "unpicklable", ("'deep.hook'", "function")
    ),
    "dots": Refusal(
        lambda: {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
        "key-collision",
        ("'a.b'", "'a' / 'b'"),
    ),
    "list": Refusal(
        lambda: {"x": [torch.ones(1)], "x.0": torch.ones(1)}, "key-collision", ("'x' / 0", "'x.0'")
    ),
    "number": Refusal(
        lambda: {0: torch.ones(1), "0": torch.ones(1)}, "key-collision", ("0 and '0'",)
    ),
    "no dict": Refusal(lambda: [torch.ones(1)], "usage", ("list",)),
}
"""By name. All ranks of a save pass the same state."""


class Dispute(NamedTuple):
    """What two ranks pass to one save, the code it fails with, and what the error must name.

    raises: the rank whose own call raises, if it is one's fault; the other learns it from its
    handle.
    """

    make: Callable[[int], State]
    code: str
    names: tuple[str, ...]
    raises: int | None = None


DISPUTED: dict[str, Dispute] = {
    "unpicklable on one": Dispute(
        lambda rank: {"w": torch.ones(2), "deep": {"hook": unpicklable() if rank else 1}},
        "unpicklable",
        ("'deep.hook'",),
        raises=1,
    ),
    "unpicklable on the first": Dispute(
        lambda rank: {"w": torch.ones(2), "hook": 1 if rank else unpicklable()},
        "unpicklable",
        ("'hook'",),
        raises=0,
    ),
    "meta on one": Dispute(
        lambda rank: {"w": torch.empty(2, device="meta" if rank else "cpu")},
        "unsupported-tensor",
        ("'w'", "meta"),
        raises=1,
    ),
    "shapes": Dispute(
        lambda rank: {"fine": torch.ones(1), "deep": {"w": torch.ones(2 + rank)}},
        "key-conflict",
        ("'deep.w'", "rank 0", "rank 1"),
    ),
    "tensor and object": Dispute(
        lambda rank: {"deep": {"w": torch.ones(2) if rank else [2.0]}},
        "key-conflict",
        ("'deep.w'", "rank 0", "rank 1"),
    ),
    "dtypes": Dispute(
        lambda rank: {"w": torch.ones(2, dtype=torch.float64 if rank else torch.float32)},
        "key-conflict",
        ("'w'", "float64", "float32"),
    ),
    "half a tensor": Dispute(
        lambda rank: {"fine": 1} if rank else {"w": _half(), "fine": 1},
        "coverage-gap",
        ("'w'",),
    ),
    "half and whole": Dispute(
        lambda rank: {"w": _whole() if rank else _half()}, "coverage-overlap", ("'w'",)
    ),
}


def _half() -> DTensor:
    """Return a tensor's first half; needs no other rank."""
    size = torch.Size([4, 3])
    return DTensor.from_local(
        torch.ones(2, 3), line(), [Shard(0)], run_check=False, shape=size, stride=(3, 1)
    )


def _whole() -> DTensor:
    return DTensor.from_local(torch.ones(4, 3), line(), [Replicate()], run_check=False)


def good(at: int) -> State:
    """Return a state that can be saved; all ranks call it."""
    return {"w": distribute_tensor(torch.full((5, 2), float(at)), line(), [Shard(0)]), "at": at}
