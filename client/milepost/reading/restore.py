"""Bringing one checkpoint back into a state.

Owns the order of a load: read the template and compare it with the index, check everything, read
objects, read tensors, and at last put everything in its place. No rank takes a step unless all
ranks can take it. `matching` decides what is wanted; a `BlobReader` reads bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from milepost.concurrency.collector import collector_paused
from milepost.errors import CorruptCheckpoint, LoadFailed, MilepostError, listed
from milepost.fetching.index import Destination, read_index
from milepost.fetching.neighbours import Neighbours
from milepost.link.rendezvous import Group
from milepost.reading.blobs import BlobReader, FetchReader, TorchReader, damaged
from milepost.reading.destinations import destinations_of
from milepost.reading.matching import Landing, Match, match
from milepost.reading.nesting import CannotNest, SavedNesting, add_empty, put, rename_parameters
from milepost.reading.objects import load_objects
from milepost.reading.template import Template, read_template
from milepost.reading.verdict import Verdicts
from milepost.reading.wrappers import find_mismatch

log = logging.getLogger("milepost")

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        step: the step that was loaded; -1 for a checkpoint that does not say.
        source: "storage" or "memory".
        per_rank: this rank's own state, as given to `save(per_rank=...)`; {} if there was none.
        missing: keys of the state that the checkpoint does not hold (only with `partial=True`).
        unexpected: keys of the checkpoint that were not loaded, since the state did not ask for
            them; without per-rank state.
        elapsed_s: how long it took.
        untouched: keys of the state that kept their values.
        added: keys for which the state had only an empty place, and that were loaded into it.
        unused_ranks: ranks whose own state is in the checkpoint, but which do not exist now.
        absent_ranks: ranks of now without state of their own in the checkpoint, if other ranks have
            some there.
        damaged: steps that were skipped as damaged (only with `fallback=True`).
        state: the given state; or the checkpoint's whole content, if no state was given.
    """

    step: int
    source: str
    per_rank: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    untouched: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    unused_ranks: tuple[int, ...] = ()
    absent_ranks: tuple[int, ...] = ()
    damaged: tuple[int, ...] = ()
    state: Any = field(default_factory=dict, repr=False)


class LoadOptions(NamedTuple):
    """How to load; see `Checkpointer.load`."""

    partial: bool = False
    verify: bool = True
    cast: bool = False
    allow_pickle: bool = False


def load_checkpoint(
    checkpoint: Path,
    step: int,
    state: Any,
    options: LoadOptions,
    *,
    group: Group,
    topic: str,
    timeout_s: float,
) -> LoadReport:
    """Load a checkpoint into `state`, in place, as `dcp.load` does; all ranks of the group call it.

    Args:
        checkpoint: its directory.
        step: for the report.
        state: the template; None: everything, nested as it was saved.
        options: see `Checkpointer.load`.
        group: the ranks that load together.
        topic: identifies the load in the group's store; never used before.
        timeout_s: how long ranks wait for one another, at each step of the load.

    Raises, on every rank:
        LoadFailed: it does not fit the state, or cannot be read.
        CorruptCheckpoint: it is damaged. If this is found only while tensors are read, a part of
            the state is overwritten.
        UsageError: the state is not a valid state.
    """
    started_s = time.monotonic()
    verdicts = Verdicts(group, topic, timeout_s)
    with Neighbours(group, topic, checkpoint) as neighbours:
        load = _Load(checkpoint, options, group.rank, neighbours)
        verdicts.share("wanted", lambda: load.prepare(state))
        verdicts.share("objects", load.read_objects)
        verdicts.share("tensors", load.read_tensors)
    verdicts.share("handed", load.hand_over)
    found = load.match
    ranks = range(group.world)
    report = LoadReport(
        step=step,
        source="storage",
        per_rank=found.per_rank,
        missing=tuple(found.missing),
        unexpected=tuple(found.unexpected),
        untouched=tuple(found.missing),
        added=tuple(found.added),
        unused_ranks=tuple(sorted(rank for rank in found.saved_ranks if rank not in ranks)),
        absent_ranks=tuple(
            rank for rank in ranks if found.saved_ranks and rank not in found.saved_ranks
        ),
        state=load.template.state,
        elapsed_s=time.monotonic() - started_s,
    )
    if group.rank == 0:
        _tell(report, options)
    return report


def _tell(report: LoadReport, options: LoadOptions) -> None:
    """Log what only one of checkpoint and state has. Otherwise nobody would notice that a resume
    loses state.
    """
    if report.unexpected and not options.partial:
        log.warning(
            "step %s holds %s keys that the state did not ask for and that were not loaded: %s",
            report.step, len(report.unexpected), listed(list(map(repr, report.unexpected))),
        )  # fmt: skip
    if report.untouched:
        log.info(
            "step %s does not hold %s keys of the state, which keep their values: %s",
            report.step, len(report.untouched), listed(list(map(repr, report.untouched))),
        )  # fmt: skip
    if report.unused_ranks or report.absent_ranks:
        log.warning(
            "step %s was saved on other ranks: the per-rank state of ranks [%s] is not used, and "
            "ranks [%s] have none",
            report.step, listed(report.unused_ranks), listed(report.absent_ranks),
        )  # fmt: skip


class _Load:
    """One load on one rank; its methods are called in this order."""

    template: Template
    match: Match

    def __init__(
        self, checkpoint: Path, options: LoadOptions, rank: int, neighbours: Neighbours
    ) -> None:
        self._checkpoint = checkpoint
        self._options = options
        self._rank = rank
        self._neighbours = neighbours
        self._is_whole = False
        self._direct: list[Destination] = []
        """Boxes that are filled in place."""
        self._checked: list[tuple[Destination, torch.Tensor]] = []
        """For casts that may change integers: the memory to fill first, and the final memory."""
        self._values: dict[str, Any] = {}
        self._reader: BlobReader

    def prepare(self, state: Any) -> None:
        """Find out what to load, and that it fits. Raises LoadFailed, CorruptCheckpoint,
        UsageError.
        """
        self._is_whole = state is None
        # Do this first, since a `state_dict()` may talk to the other ranks.
        self.template = read_template({} if state is None else state)
        # What is made for each key stays until the load is over.
        with collector_paused():
            self._decide()

    def _decide(self) -> None:
        """Hold the template against the index."""
        index = read_index(self._checkpoint, allow_pickle=self._options.allow_pickle)
        if self._options.verify and index.damage:
            raise damaged(self._checkpoint, index.damage)
        metadata = index.metadata
        self.match = match(
            self.template,
            metadata,
            rank=self._rank,
            cast=self._options.cast,
            is_whole=self._is_whole,
            saved=SavedNesting(self._checkpoint),
        )
        boxes, refused = destinations_of(self.match.tensors)
        self.match.others += [f"{key!r}: {text}" for key, text in refused]
        self._check()
        if self.match.casts:
            for box in boxes:
                self._place(box, metadata)
        else:
            self._direct = boxes
        self._reader = (
            TorchReader(self._checkpoint, metadata)
            if index.is_transformed
            else FetchReader(
                self._checkpoint,
                index,
                is_checked=self._options.verify,
                neighbours=self._neighbours,
            )
        )
        keys, scratch = list(self.match.objects), [box for box, _ in self._checked]
        self._reading(lambda: self._reader.expect(keys, [*scratch, *self._direct]))

    def _check(self) -> None:
        """Raise LoadFailed with everything that does not fit."""
        found, checkpoint = self.match, self._checkpoint
        told: list[tuple[str, str, str]] = []
        mismatch = find_mismatch(found.missing, found.unexpected)
        missing = listed(list(map(repr, found.missing)))
        if found.missing and not self._options.partial:
            hint = "load(partial=True) leaves them as they are"
            text = f"lacks {len(found.missing)} of the keys that the state asks for: {missing}"
            told.append(("load-failed", text, mismatch.hint if mismatch else hint))
        elif mismatch:
            text = f"holds {mismatch.keys} keys of the state under other names: {missing}"
            told.append(("load-failed", text, mismatch.hint))
        elif found.wanted and found.wanted == len(found.missing) and not found.added:
            held = listed(list(map(repr, found.unexpected)))
            text = f"holds none of the {found.wanted} keys that the state asks for: {missing}"
            told.append(("load-failed", text, f"it holds {held}" if held else "it is empty"))
        for code, count_of, differences, hint in (
            ("shape-mismatch", "tensors of other shapes than the state", found.shapes,
             "make the state with the shapes that were saved, or leave these keys out of it"),
            ("dtype-mismatch", "tensors of other dtypes than the state", found.dtypes,
             "make the state with the dtypes that were saved, or convert with load(cast=True)"),
            ("load-failed", "keys that cannot be loaded into", found.others, ""),
        ):  # fmt: skip
            if differences:
                text = f"has {len(differences)} {count_of}: {listed(differences, '; ')}"
                told.append((code, text, hint))
        if told:
            raise LoadFailed(
                told[0][0],
                f"{checkpoint} {'; it '.join(text for _, text, _ in told)}",
                "; ".join(hint for _, _, hint in told if hint),
            )

    def _place(self, box: Destination, metadata: Metadata) -> None:
        """Decide whether to fill a box in place, or to check its values before."""
        described = metadata.state_dict_metadata[box.key]
        assert isinstance(described, TensorStorageMetadata)
        saved = described.properties.dtype
        if box.key in self.match.casts and (_is_whole_number(saved, box.memory.dtype)):
            scratch = torch.empty(box.memory.shape, dtype=saved)
            self._checked.append((box._replace(memory=scratch), box.memory))
        else:
            self._direct.append(box)

    def read_objects(self) -> None:
        """Read everything that may be refused because of its content. Raises LoadFailed,
        CorruptCheckpoint.
        """
        keys = list(self.match.objects)
        data = self._reading(lambda: self._reader.objects(keys))
        self._values |= load_objects(
            self._checkpoint, data, allow_pickle=self._options.allow_pickle
        )
        self._reading(lambda: self._reader.fill([box for box, _ in self._checked]))
        changed = [
            f"{box.key!r} from {_dtype(box.memory)} to {_dtype(memory)}"
            for box, memory in self._checked
            if not _is_exact(box.memory, memory.dtype)
        ]
        if changed:
            raise LoadFailed(
                "dtype-mismatch",
                f"{self._checkpoint} has {len(changed)} tensors whose values the cast would "
                f"change: {listed(changed, '; ')}",
                "make the state with the dtypes that were saved",
            )

    def read_tensors(self) -> None:
        """Fill the tensors of the state, and put everything in its place.

        Raises LoadFailed, CorruptCheckpoint; then some may be filled, others not.
        """
        self._reading(lambda: self._reader.fill(self._direct))
        template, found = self.template, self.match
        for box, memory in self._checked:
            memory.copy_(box.memory)
        self._values.update(found.tensors)
        for leaf in template.materialised:
            if leaf.key in found.tensors:
                leaf.holder[leaf.name] = leaf.value
        for landing in found.landings:
            self._put(landing)
        for landing in found.empty:
            self._put_empty(landing)
        if self._is_whole:
            rename_parameters(template.roots)
        for name, value in template.roots.items():
            if name not in template.stateful and template.state.get(name, self) is not value:
                template.state[name] = value

    def hand_over(self) -> None:
        """Call `load_state_dict()` of the Stateful entries. Raises LoadFailed."""
        template = self.template
        for name in template.stateful:
            try:
                template.state[name].load_state_dict(template.roots[name])
            except Exception as error:
                raise LoadFailed(
                    "load-failed",
                    f"the load_state_dict() of {name!r} raised {type(error).__name__}: {error}",
                ) from error

    def _put(self, landing: Landing) -> None:
        key, holder, name, base, path, name_of = landing
        value = self._values[key]
        if not path:
            holder[name] = value
            return
        if holder[name] is None:
            holder[name] = [] if isinstance(path[0], int) else {}
        try:
            put(holder[name], base, path, value, name_of)
        except CannotNest as error:
            if self._is_whole:
                self.template.roots[key] = value
                return
            text = f"{self._checkpoint} holds {key!r}, which has no place in the state"
            raise LoadFailed("load-failed", text, "leave out what is in its place") from error

    @staticmethod
    def _put_empty(landing: Landing) -> None:
        """Put an empty dict where one was saved, unless something is there."""
        _, holder, name, base, path, name_of = landing
        if not path:
            if holder[name] is None or (isinstance(holder[name], list) and not holder[name]):
                holder[name] = {}
        elif isinstance(holder[name], dict | list):
            with suppress(CannotNest):
                add_empty(holder[name], base, path, name_of)

    def _reading(self, read: Callable[[], _Result]) -> _Result:
        """Read, and turn any exception into one of ours."""
        try:
            return read()
        except MilepostError:
            raise
        except OSError as error:
            raise LoadFailed(
                "io-error", f"{self._checkpoint} cannot be read: {_first_line(error)}"
            ) from error
        except Exception as error:
            raise CorruptCheckpoint(
                "corrupt",
                f"{self._checkpoint} cannot be read: {_first_line(error)}",
                f"`milepost verify {self._checkpoint}` tells whether it is damaged, `milepost "
                "inspect` what it holds",
            ) from error


def _is_whole_number(*dtypes: torch.dtype) -> bool:
    """Whether values of one of these dtypes are integers, which a cast must not change."""
    return any(not dtype.is_floating_point and not dtype.is_complex for dtype in dtypes)


def _is_exact(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all values survive the cast."""
    cast = values.to(dtype)
    # A sign may get lost in one cast and come back in the reverse one.
    return torch.equal(cast.to(values.dtype), values) and _is_below_0(cast) == _is_below_0(values)


def _is_below_0(values: torch.Tensor) -> bool:
    dtype = values.dtype
    return dtype.is_signed and not dtype.is_complex and bool((values < 0).any())


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {''.join(str(error).splitlines()[:1])}"
