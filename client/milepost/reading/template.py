"""What a load has to fill: the leaves of a template, each with the container that holds it, and the
containers themselves.

Keys are the flattened keys of `state.flattening`. A container keeps its own keys, which need not be
text, so that each value lands where it was asked for. This module loads nothing and does not change
the template. Sources: torch/distributed/checkpoint/state_dict_loader.py and planner_helpers.py
(2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from milepost.concurrency.collector import collector_paused
from milepost.errors import LoadFailed, UsageError
from milepost.state.flattening import (
    LEAF,
    LIST,
    Path,
    call_stateful,
    collision,
    form_of,
    is_traversed,
)


class Leaf(NamedTuple):
    """A value of the template: `holder[name]`. A tensor on the meta device is replaced by one with
    memory, which is not yet in its place.
    """

    key: str
    path: Path
    holder: Any
    name: Any
    value: Any


class Branch(NamedTuple):
    """A dict or list of the template that is flattened: `holder[name]`, and its leaves in order."""

    key: str
    path: Path
    holder: Any
    name: Any
    value: Any
    first: int
    end: int


@dataclass
class Template:
    """A state that a load has to fill."""

    state: MutableMapping[Any, Any]
    """As the caller gave it."""
    roots: dict[Any, Any]
    """Its entries, each Stateful one replaced by its `state_dict()`."""
    leaves: dict[str, Leaf] = field(default_factory=dict)
    branches: list[Branch] = field(default_factory=list)
    """Each branch comes before the branches in it."""
    materialised: list[Leaf] = field(default_factory=list)
    """Leaves that were on the meta device."""
    stateful: list[Any] = field(default_factory=list)
    """Names of the Stateful entries, in an order that is the same on all ranks."""


def read_template(state: Any) -> Template:
    """Return what a state asks for.

    Raises:
        UsageError: it is not a mutable mapping, it contains itself, or two of its keys are the same
            when flattened.
        LoadFailed: a `state_dict()` raised; names the entry.
    """
    if isinstance(state, Mapping) and not isinstance(state, MutableMapping):
        raise UsageError("usage", f"the state is a {type(state).__name__}, which cannot be filled")
    roots = _call(state)
    stateful = [name for name in sorted(roots, key=str) if roots[name] is not state[name]]
    template = Template(state, roots, stateful=stateful)
    try:
        with collector_paused():
            count = _walk(roots.items(), False, roots, "", (), template, {})
    except RecursionError as error:
        raise UsageError(
            "usage", "the state contains itself, or is nested too deeply", "pass a finite state"
        ) from error
    if count != len(template.leaves):
        raise collision(roots)
    return template


def _call(state: Any) -> dict[Any, Any]:
    """Call `state_dict()` of the Stateful entries. The order is the same on all ranks, since some
    of these calls talk to other ranks.
    """
    if not isinstance(state, Mapping):
        return call_stateful(state)
    called = {}
    for name in sorted(state, key=str):
        try:
            called.update(call_stateful({name: state[name]}))
        except Exception as error:
            text = f"the state_dict() of {name!r} raised {type(error).__name__}: {error}"
            raise LoadFailed("load-failed", text) from error
    return {name: called[name] for name in state}


def _walk(
    entries: Iterable[tuple[Any, Any]],
    is_list: bool,
    holder: Any,
    prefix: str,
    path: Path,
    template: Template,
    forms: dict[type, int],
) -> int:
    """Add everything below `holder`; return the number of leaves.

    forms: the form of each class that was met so far; filled here.
    """
    count = 0
    for name, value in entries:
        part = name if is_list or type(name) is str else str(name)
        key = f"{prefix}{part}"
        cls = type(value)
        form = forms.get(cls, -1)
        if form < 0:
            form = forms[cls] = form_of(cls)
        if form == LEAF or (form == LIST and not is_traversed(value)):
            leaf = Leaf(key, (*path, part), holder, name, value)
            if isinstance(value, torch.Tensor) and value.device.type == "meta":
                leaf = leaf._replace(value=_materialise(key, value))
                template.materialised.append(leaf)
            template.leaves[key] = leaf
            count += 1
            continue
        at, first = len(template.branches), len(template.leaves)
        branch = Branch(key, (*path, part), holder, name, value, first, first)
        template.branches.append(branch)
        inner = enumerate(value) if form == LIST else value.items()
        count += _walk(inner, form == LIST, value, f"{key}.", branch.path, template, forms)
        template.branches[at] = branch._replace(end=len(template.leaves))
    return count


def _materialise(key: str, value: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor on the meta device, as torch's `_init_state_dict` does."""
    if isinstance(value, DTensor):
        mesh = value.device_mesh
        local = torch.empty_like(value.to_local(), device=_device(mesh.device_type))
        # Pass shape and stride, since it may be sharded unevenly.
        return DTensor.from_local(
            local, mesh, value.placements, run_check=False, shape=value.size(),
            stride=value.stride(),
        )  # fmt: skip
    if hasattr(value, "local_shards"):
        raise LoadFailed(
            "load-failed",
            f"{key!r} is a {type(value).__name__} on the meta device",
            "materialise it first",
        )
    return torch.empty_like(value, device=_device(_device_type()))


def _device_type() -> str:
    """Return the kind of device that this process computes on."""
    if dist.is_available() and dist.is_initialized():
        return str(dist.distributed_c10d._get_object_coll_device(dist.group.WORLD))
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())
