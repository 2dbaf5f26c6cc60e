"""Finds what may be copied after `save()` returns: items whose memory only the steps of torch
optimizers change.

Owns the refusal of optimizers whose steps cannot be guarded. Knows tensors and optimizers; nothing
of copies, threads or saves.

Sources: torch/optim/optimizer.py (`profile_hook_step`), torch 2.13.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from milepost.errors import UsageError
from milepost.state.tensors import local_tensor
from milepost.wire.offers import Kind

if TYPE_CHECKING:
    from milepost.state.items import Items

BLOCKING_HINT: Final = "or use staging='blocking'"

NEAR_TENSORS: Final = 64
"""How many tensors fit into the processor's caches while several of their attributes are read."""

_NBYTES: Final = attrgetter("nbytes")

Optimizers: TypeAlias = Optimizer | Sequence[Optimizer]


def _strided_extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to its last, both included."""
    if not tensor.numel():
        return 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.itemsize


def _are_contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.Tensor.is_contiguous, tensors))


def _extents(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the extent of each tensor, in bytes."""
    return [
        tensor.nbytes if tensor.is_contiguous() else _strided_extent(tensor) for tensor in tensors
    ]


def _ranges(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return the address and the extent of each tensor.

    Fast for many tensors that are not in the processor's caches: it reads all attributes of one
    tensor at about the same time.
    """
    pointers: list[int] = []
    lengths: list[int] = []
    are_contiguous = True
    for low in range(0, len(tensors), NEAR_TENSORS):
        some = tensors[low : low + NEAR_TENSORS]
        pointers += map(torch.Tensor.data_ptr, some)
        lengths += map(_NBYTES, some)
        are_contiguous = are_contiguous and _are_contiguous(some)
    return pointers, lengths if are_contiguous else _extents(tensors)


class Spans:
    """The memory of some tensors, as ranges of addresses: device and host share one space."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    @cached_property
    def ranges(self) -> tuple[list[int], list[int]]:
        """The address and the extent of each tensor."""
        return _ranges(self.tensors)

    @property
    def pointers(self) -> list[int]:
        """The address of each tensor."""
        return self.ranges[0]

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """Length of the longest range that starts at each address."""
        pointers, lengths = self.ranges
        found = dict(zip(pointers, lengths, strict=True))
        if len(found) < len(pointers):
            for pointer, nbytes in zip(pointers, lengths, strict=True):
                if nbytes > found[pointer]:
                    found[pointer] = nbytes
        return found

    @cached_property
    def _sorted(self) -> tuple[list[int], list[int]]:
        """The start of each range, ascending, and the greatest end of the ranges up to it."""
        starts = sorted(self._bytes)
        return starts, list(accumulate((start + self._bytes[start] for start in starts), max))

    def held(self, tensors: Sequence[torch.Tensor]) -> list[bool]:
        """Return for each tensor whether all its bytes are in these ranges; False if it has
        none.
        """
        return self.cover(*Spans(tensors).ranges)

    def cover(self, pointers: Sequence[int], lengths: Sequence[int]) -> list[bool]:
        """Return the same for ranges of memory, by their addresses and lengths."""
        known = self._bytes
        return [
            # A parameter may be a view of a flat parameter. Then it begins inside a range.
            known.get(pointer, 0) >= nbytes > 0
            or (nbytes > 0 and self._reach(bisect_right, pointer) >= pointer + nbytes)
            for pointer, nbytes in zip(pointers, lengths, strict=True)
        ]

    def meet(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether any byte of the tensors is in one of the ranges."""
        return any(
            nbytes and self._reach(bisect_left, pointer + nbytes) > pointer
            for pointer, nbytes in zip(*Spans(tensors).ranges, strict=True)
        )

    def _reach(self, bisect: Callable[[list[int], int], int], address: int) -> int:
        """Return the greatest end of the ranges that start at or before (or before) an address."""
        starts, reaches = self._sorted
        at = bisect(starts, address) - 1
        return reaches[at] if at >= 0 else 0


def _local(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor's memory on this rank as a plain tensor; None if it has no memory of its
    own.
    """
    if isinstance(tensor, DTensor):
        tensor = local_tensor(tensor)
    try:
        return tensor if tensor.data_ptr() else None
    except RuntimeError:
        return None  # A wrapper subclass. Reading the state refuses it by name.


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in an optimizer's state of a parameter; LBFGS nests them in lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)


_PLAIN: Final = frozenset({torch.Tensor, nn.Parameter})
_NO_TENSOR: Final = frozenset({int, float, bool, str, type(None)})


def _memory(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return the local memory of all tensors among some values, or nested in them."""
    classes = set(map(type, values))
    if DTensor in classes:
        values = [local_tensor(value) if type(value) is DTensor else value for value in values]
        classes = set(map(type, values))
    if classes <= _PLAIN:
        return list(values)
    if classes <= _PLAIN | _NO_TENSOR:
        return [value for value in values if type(value) in _PLAIN]
    return [
        part for value in values for leaf in _leaves(value) if (part := _local(leaf)) is not None
    ]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state(optimizer: Optimizer) -> list[Any]:
    state: list[Any] = []
    # Copy the dict: while prepare() reads it in the background, the first step may add entries.
    for entry in list(optimizer.state.values()):
        state += entry.values() if type(entry) is dict else (entry,)
    return state


def stepped(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the memory that an optimizer changes only in its steps: its parameters and their
    state.

    A learning rate that is a tensor is not included, since schedulers change it.
    """
    return _memory(_parameters(optimizer)) + _memory(_state(optimizer))


def check_optimizers(optimizer: Optimizers | None) -> tuple[Optimizer, ...]:
    """Return the optimizers as a tuple.

    Raises UsageError for one that does not run torch's hooks before it changes parameters.
    """
    if optimizer is None:
        raise UsageError(
            "usage",
            "staging='overlap' needs optimizer=: without it nothing tells when parameters change",
            f"pass the optimizer, or several in a list, {BLOCKING_HINT}",
        )
    given = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    for each in given:
        if not isinstance(each, Optimizer):
            raise UsageError(
                "usage",
                f"optimizer= holds a {type(each).__name__}, which is not a torch.optim.Optimizer "
                "and does not announce its steps",
                "pass the torch optimizer inside it if it has one and calls its step(), "
                f"{BLOCKING_HINT}",
            )
        if not getattr(type(each).step, "hooked", False):
            raise UsageError(
                "usage",
                f"the step of {type(each).__name__} does not run torch's hooks: its class does not "
                "call Optimizer.__init__",
                f"pass the optimizer that it wraps, {BLOCKING_HINT}",
            )
    if not given:
        raise UsageError("usage", "optimizer= is empty", f"pass an optimizer, {BLOCKING_HINT}")
    return given


def _refuse(what: str, hint: str) -> UsageError:
    return UsageError("usage", f"staging='overlap' cannot hold: {what}", f"{hint}, {BLOCKING_HINT}")


def _dense(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that fill all memory from their first element to their last. The other
    tensors have gaps between their elements.
    """
    return [
        tensor
        for tensor in tensors
        if tensor.is_contiguous() or _strided_extent(tensor) == tensor.nbytes
    ]


class Selection(NamedTuple):
    """The part of a state that may be copied after `save()` returns."""

    spans: Spans
    """The memory that the optimizers change."""
    items: frozenset[int]
    """The items that lie in this memory."""


class _Matching:
    """Finds the items of a state that lie in memory that optimizers change.

    Remembers the last answer, which is valid as long as nothing has moved. Keeps addresses and
    shapes, but no tensor.
    """

    def __init__(self) -> None:
        self._known: tuple[Any, frozenset[int], bool] | None = None
        """The last question, and the answer."""

    def find(
        self, parameters: list[torch.Tensor], state: list[torch.Tensor], items: Items
    ) -> tuple[Selection, bool]:
        """Return the items, and whether each parameter has the address of one of them."""
        sources = items.sources
        # An optimizer's state dict holds its very tensors, and identity is cheaper than addresses.
        # A model's state dict holds other tensors over the memory of its parameters.
        own = set(map(id, state))
        found = [item for item, source in enumerate(sources) if id(source) in own] if own else []
        if found:
            own.difference_update([id(sources[item]) for item in found])
        unmatched = [tensor for tensor in state if id(tensor) in own] if own else []
        others = _without(items, found)
        given = [sources[item] for item in others]
        asked = (
            found,
            items.addresses,
            items.sizes,
            items.dtypes,
            _are_contiguous(given) or _extents(given),
            _ranges(parameters),
            _ranges(unmatched),
        )
        known = self._known
        if known is None or known[0] != asked:
            # Set both in one step: after an interrupt, an old answer must not go with a new
            # question. See docs/design/0010-interrupts.md.
            known = self._known = (
                asked,
                *self._match(parameters, state, unmatched, found, others, given),
            )
        _, selected, is_whole = known
        return Selection(Spans(parameters + state), selected), is_whole

    @staticmethod
    def _match(
        parameters: list[torch.Tensor],
        state: list[torch.Tensor],
        unmatched: list[torch.Tensor],
        found: list[int],
        others: list[int],
        given: list[torch.Tensor],
    ) -> tuple[frozenset[int], bool]:
        pointers, lengths = _ranges(given)
        parameters = _dense(parameters)
        near = Spans(parameters + _dense(unmatched))
        is_held = near.cover(pointers, lengths)
        if found and not all(is_held):
            # Buffers, or tensors that are in the state twice: look at all ranges together.
            is_held = Spans(parameters + _dense(state)).cover(pointers, lengths)
        # 0 stands for tensors without bytes.
        begin = {0, *compress(pointers, is_held)}
        return (
            frozenset([*found, *compress(others, is_held)]),
            begin.issuperset(near.pointers[: len(parameters)]),
        )


def _without(items: Items, found: Sequence[int]) -> list[int]:
    """Return the items that are tensors and not among those in `found`."""
    left = bytearray(items.kinds.translate(_IS_TENSOR))
    for item in found:
        left[item] = 0
    return list(compress(range(len(left)), left))


_IS_TENSOR: Final = bytes(kind != Kind.OBJECT for kind in range(256))


class Selector:
    """Finds the items of a state that the steps of some optimizers change.

    Args:
        optimizers: one or several.

    Raises UsageError for optimizers that cannot be guarded. Used by one thread at a time.
    """

    def __init__(self, optimizers: Optimizers | None) -> None:
        self.optimizers = check_optimizers(optimizers)
        self._matching = _Matching()

    def select(self, items: Items) -> Selection:
        """Find the items that the optimizers change.

        Raises UsageError, naming the parameter, for a save that overlap cannot protect.
        """
        is_cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if is_cuda_in_use and torch.cuda.is_current_stream_capturing():
            raise _refuse(
                "a CUDA graph is being captured", "save outside of the capture, with the graph idle"
            )
        for optimizer in self.optimizers:
            if any(group.get("capturable") for group in optimizer.param_groups):
                raise _refuse(
                    f"{type(optimizer).__name__} is capturable, and a replayed CUDA graph does not "
                    "announce its steps",
                    "make it with capturable=False",
                )
            if any(map(attrgetter("_post_accumulate_grad_hooks"), _parameters(optimizer))):
                index, _ = self._find(optimizer, attrgetter("_post_accumulate_grad_hooks"))
                raise _refuse(
                    f"parameter {index} of {type(optimizer).__name__} has a post-accumulate-grad "
                    "hook, which may change it during backward",
                    "step after backward",
                )
        parameters = _memory([each for of in self.optimizers for each in _parameters(of)])
        state = _memory([each for of in self.optimizers for each in _state(of)])
        selection, is_whole = self._matching.find(parameters, state, items)
        if not is_whole:
            self._check_saved([items.sources[item] for item in selection.items])
        return selection

    def _check_saved(self, held: Sequence[torch.Tensor]) -> None:
        """Refuse an optimizer whose parameters are not those of the state."""
        for optimizer in self.optimizers:

            def is_missing(parameter: torch.Tensor) -> bool:
                parts = _dense([part for part in _memory([parameter]) if part.numel()])
                # The state may hold views of one flat parameter.
                return bool(parts) and not any(Spans(parts).held(held))

            index, missing = self._find(optimizer, is_missing)
            if missing is not None:
                raise _refuse(
                    f"parameter {index} of {type(optimizer).__name__}, of shape "
                    f"{tuple(missing.shape)}, is not in the state, or only as a copy",
                    "pass the optimizers of the parameters that are saved",
                )

    @staticmethod
    def _find(
        optimizer: Optimizer, is_it: Callable[[torch.Tensor], Any]
    ) -> tuple[int, torch.Tensor | None]:
        """Return the first parameter for which `is_it` is true, with its index."""
        for index, parameter in enumerate(_parameters(optimizer)):
            if is_it(parameter):
                return index, parameter
        return -1, None
