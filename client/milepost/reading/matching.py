"""Compares a template with an index: what a load takes from a checkpoint, and where each value
goes.

Reads no data and changes nothing. Matches keys as torch's `DefaultLoadPlanner` does, including keys
of torch before 2.4, which stored a dict without tensors as one object. Besides, empty places of the
template are filled with what the checkpoint holds there. An empty place is an empty dict or list,
None, the state of an optimizer for a parameter that it has not stepped, or the end of a list.
Source: torch/distributed/checkpoint/default_planner.py (2.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.nn.parameter import is_lazy

from milepost.reading.nesting import Naming, as_text, parameter_names
from milepost.reading.template import Branch, Leaf, Template
from milepost.state.flattening import PER_RANK, Path, per_rank_prefix

_PER_RANK: Final = re.compile(rf"{PER_RANK}/(\d+)/")


class Landing(NamedTuple):
    """Where the value of a key goes: to `holder[name]`, or along `path` below that."""

    key: str
    holder: Any
    name: Any
    base: Path
    """Where `holder[name]` is in the state."""
    path: Path
    name_of: Naming


class Saved(Protocol):
    """What a checkpoint says about the nesting of its state."""

    def names(self, path: Path) -> Mapping[str, Any]:
        """Return those keys of the dict at a path that were not text, by their text."""
        ...

    def empty(self) -> Iterable[Path]:
        """Return the paths of empty dicts."""
        ...


@dataclass
class Match:
    """What this rank has to load."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By key, the memory to fill: the template's, or memory that was made for it."""
    objects: dict[str, None] = field(default_factory=dict)
    """Keys of objects, in order."""
    landings: list[Landing] = field(default_factory=list)
    """Where objects go, and tensors whose memory was made."""
    empty: list[Landing] = field(default_factory=list)
    """Where empty dicts go, if nothing is there."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    """Keys for which the template had only an empty place."""
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """What does not fit, one sentence for each key: shapes, dtypes, and anything else."""
    casts: set[str] = field(default_factory=set)
    """Tensors that are converted to another dtype."""
    per_rank: dict[str, Any] = field(default_factory=dict)
    """Filled with this rank's own state."""
    saved_ranks: set[int] = field(default_factory=set)
    """Ranks that have state of their own in the checkpoint."""
    wanted: int = 0
    """How many keys the template asks for."""


class _Hollow(NamedTuple):
    """An empty place of the template."""

    holder: Any
    name: Any
    leaf: str = ""
    """Its key, if the template asks for it as a value."""
    first_index: int = 0
    """For a list: the first index that is missing."""
    is_asked: bool = False
    """The caller wrote None. Then tensors that lie in several shards are loaded, too."""
    parameters: Mapping[str, torch.Tensor] | None = None
    """The parameters of the optimizer whose state this is, by their names in the state."""


def match(
    template: Template,
    metadata: Metadata,
    *,
    rank: int,
    cast: bool,
    is_whole: bool,
    saved: Saved,
) -> Match:
    """Return what to load.

    Args:
        template: what the caller asks for.
        metadata: the checkpoint's index.
        rank: the rank whose own state to load, too.
        cast: convert tensors of another dtype instead of refusing them.
        is_whole: load everything that the checkpoint holds; the template is empty.
        saved: used only if the template has empty places, or for a rank's own state.
    """
    matcher = _Matcher(template, metadata, cast, saved)
    matcher.match_template(is_whole)
    matcher.match_rank(rank)
    return matcher.found


class _Matcher:
    """One call of `match`."""

    def __init__(self, template: Template, metadata: Metadata, cast: bool, saved: Saved) -> None:
        self.found = Match(wanted=len(template.leaves))
        self._template = template
        self._held = metadata.state_dict_metadata
        paths = getattr(metadata, "planner_data", None)
        self._paths: Mapping[str, Any] = paths if isinstance(paths, Mapping) else {}
        self._cast = cast
        self._saved = saved
        self._branches = {branch.path: branch for branch in template.branches}
        self._own_names: dict[Path, Mapping[str, Any]] = {}

    def match_template(self, is_whole: bool) -> None:
        found, held = self.found, self._held
        absent: dict[str, Leaf] = {}
        for key, leaf in self._template.leaves.items():
            entry = held.get(key)
            if entry is None:
                absent[key] = leaf
            else:
                self._pair(leaf, entry)
        taken = {*self._template.leaves, *self._take_whole_branches(absent)}
        hollows = self._hollows(absent, is_whole)
        for key, entry in held.items():
            if key in taken or _PER_RANK.match(key):
                continue
            filled = self._fill(key, entry, hollows)
            if filled is None:
                found.unexpected.append(key)
            else:
                found.added.append(key)
                absent.pop(filled.leaf, None)
        for path in self._saved.empty() if hollows else ():
            at = next((at for at in range(len(path), -1, -1) if path[:at] in hollows), None)
            if at is not None and not _PER_RANK.match(str(path[0])):
                hollow = hollows[path[:at]]
                landing = Landing(
                    "", hollow.holder, hollow.name, path[:at], path[at:], self._name_of
                )
                found.empty.append(landing)
                if at == len(path):
                    absent.pop(hollow.leaf, None)
        found.missing += absent

    def match_rank(self, rank: int) -> None:
        """Match the rank's own state."""
        found, box = self.found, {"": self.found.per_rank}
        prefix = per_rank_prefix(rank)

        def name_of(path: Path, text: str) -> Any:
            if path:
                return self._saved.names((f"{prefix}{path[0]}", *path[1:])).get(text, text)
            return self._saved.names(()).get(f"{prefix}{text}", text)

        for key, entry in self._held.items():
            own = _PER_RANK.match(key)
            if own is None:
                continue
            found.saved_ranks.add(int(own[1]))
            first, *others = self._path(key)
            if key.startswith(prefix) and str(first).startswith(prefix):
                path = (str(first).removeprefix(prefix), *others)
                self._land(entry, Landing(key, box, "", (), path, name_of))
        for first, *others in self._saved.empty():
            if str(first).startswith(prefix):
                path = (str(first).removeprefix(prefix), *others)
                found.empty.append(Landing("", box, "", (), path, name_of))

    # --- exact keys

    def _pair(self, leaf: Leaf, entry: Any) -> None:
        """Match a key that both sides have."""
        if isinstance(entry, TensorStorageMetadata) and isinstance(leaf.value, torch.Tensor):
            self._pair_tensor(leaf, entry)
        elif isinstance(leaf.holder, MutableMapping | list):
            self._land(entry, Landing(leaf.key, leaf.holder, leaf.name, leaf.path, (), as_text))
        else:
            self.found.others.append(f"{leaf.key!r}: a {type(leaf.holder).__name__} cannot be set")

    def _pair_tensor(self, leaf: Leaf, entry: TensorStorageMetadata) -> None:
        key, value, found = leaf.key, leaf.value, self.found
        if is_lazy(value):
            found.others.append(f"{key!r}: a {type(value).__name__} has no shape yet")
            return
        saved, wanted, dtype = tuple(entry.size), tuple(value.size()), entry.properties.dtype
        if saved != wanted:
            found.shapes.append(f"{key!r} is {list(saved)}, wanted {list(wanted)}")
            return
        if dtype != value.dtype:
            is_cut = dtype.is_complex and not value.dtype.is_complex
            if is_cut or not self._cast:
                found.dtypes.append(f"{key!r} is {_dtype(dtype)}, wanted {_dtype(value.dtype)}")
                return
            found.casts.add(key)
        found.tensors[key] = value

    def _land(self, entry: Any, landing: Landing, memory: torch.Tensor | None = None) -> None:
        """Match a key whose value the load makes."""
        found, key = self.found, landing.key
        found.landings.append(landing)
        if isinstance(entry, BytesStorageMetadata):
            found.objects[key] = None
        elif key not in found.tensors:
            if memory is None:
                memory = torch.empty(entry.size, dtype=entry.properties.dtype)
            found.tensors[key] = memory

    # --- a dict or list that the checkpoint has as one object

    def _take_whole_branches(self, absent: dict[str, Leaf]) -> Iterator[str]:
        """Match each branch that the checkpoint holds as one object, and yield its key. That is a
        list without tensors, or, with torch before 2.4, a dict.
        """
        keys = list(self._template.leaves)
        taken: list[Path] = []
        for branch in self._template.branches:
            entry = self._held.get(branch.key)
            leaves = keys[branch.first : branch.end]
            if (
                not isinstance(entry, BytesStorageMetadata)
                or branch.key in self._template.leaves
                or any(key not in absent for key in leaves)
                or any(branch.path[: len(path)] == path for path in taken)
                or not isinstance(branch.holder, MutableMapping | list)
            ):
                continue
            taken.append(branch.path)
            for key in leaves:
                del absent[key]
            landing = Landing(branch.key, branch.holder, branch.name, branch.path, (), as_text)
            self._land(entry, landing)
            yield branch.key

    # --- empty places

    def _hollows(self, absent: Mapping[str, Leaf], is_whole: bool) -> dict[Path, _Hollow]:
        found: dict[Path, _Hollow] = {}
        if is_whole:
            found[()] = _Hollow({"": self._template.roots}, "", is_asked=True)
        for branch in self._template.branches:
            if isinstance(branch.value, list):
                end = len(branch.value)
                found[branch.path] = _Hollow(branch.holder, branch.name, first_index=end)
            elif not branch.value:
                found[branch.path] = _Hollow(branch.holder, branch.name)
            if branch.name == "state" and isinstance(branch.holder, Mapping):
                groups = branch.holder.get("param_groups")
                if isinstance(groups, list):
                    found[branch.path] = self._optimizer_state(branch, groups)
        for leaf in absent.values():
            if leaf.value is None or leaf.value == []:
                is_asked = leaf.value is None
                found[leaf.path] = _Hollow(leaf.holder, leaf.name, leaf.key, is_asked=is_asked)
        return found

    def _optimizer_state(self, branch: Branch, groups: list[Any]) -> _Hollow:
        """Return the place of an optimizer's state, which fills parameter by parameter."""
        names = parameter_names(groups)
        self._own_names[branch.path] = {str(name): name for name in (*names, *branch.value)}
        optimizer = None
        if len(branch.path) == 2:
            roots = {str(name): name for name in self._template.stateful}
            root = roots.get(str(branch.path[0]), self)
            optimizer = self._template.state.get(root)
        parameters = None
        if isinstance(optimizer, torch.optim.Optimizer):
            own = [each for group in optimizer.param_groups for each in group["params"]]
            if len(own) == len(names):
                parameters = dict(zip(map(str, names), own, strict=True))
        return _Hollow(branch.holder, branch.name, parameters=parameters)

    def _fill(self, key: str, entry: Any, hollows: Mapping[Path, _Hollow]) -> _Hollow | None:
        """Match a key for which the template has an empty place; return this place."""
        path = self._path(key)
        for at in range(len(path) - 1, -1, -1):
            hollow = hollows.get(path[:at])
            if hollow is None:
                continue
            first = path[at]
            if isinstance(first, int) and first < hollow.first_index:
                continue
            memory = None
            if isinstance(entry, TensorStorageMetadata):
                memory = _like_parameter(entry, str(first), hollow.parameters)
                if memory is None and len(entry.chunks) > 1 and not hollow.is_asked:
                    # It is sharded, and nothing says how this rank wants it.
                    return None
            landing = Landing(key, hollow.holder, hollow.name, path[:at], path[at:], self._name_of)
            self._land(entry, landing, memory)
            return hollow
        return None

    def _path(self, key: str) -> Path:
        """Return where a key of the checkpoint was in the state."""
        path = self._paths.get(key)
        if not isinstance(path, tuple) or not path:
            return (key,)
        is_plain = all(type(part) in (str, int) for part in path) and type(path[0]) is str
        return path if is_plain else (key,)

    def _name_of(self, path: Path, text: str) -> Any:
        """Return the template's own key, else the one that was saved."""
        own = self._own_names.get(path)
        if own is None:
            branch = self._branches.get(path)
            names = branch.value if branch is not None else ()
            own = self._own_names[path] = {str(name): name for name in names}
        if text in own:
            return own[text]
        return self._saved.names(path).get(text, text)


def _like_parameter(
    entry: TensorStorageMetadata, name: str, parameters: Mapping[str, torch.Tensor] | None
) -> torch.Tensor | None:
    """Return memory placed as the parameter is, for a tensor of its shape; None if there is no such
    parameter.
    """
    parameter = (parameters or {}).get(name)
    if parameter is None or parameter.device.type == "meta":
        return None
    if tuple(parameter.shape) != tuple(entry.size):
        return None
    return torch.empty_like(parameter.detach(), dtype=entry.properties.dtype)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
