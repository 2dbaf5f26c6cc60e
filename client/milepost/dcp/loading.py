"""`load`: the signature, results and errors of torch's.

Owns what a call means: whether it is ours or stock torch's, and the order in which a planner and
the state's own methods are called. `Steps` keeps the ranks together, `Reader` reads.

Source: torch/distributed/checkpoint/state_dict_loader.py (2.13).
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import _api_bc_check

from milepost.dcp.reader import Reader
from milepost.dcp.steps import Steps, why_not_among
from milepost.errors import MilepostError
from milepost.link.presence import Presence
from milepost.link.rendezvous import Group, join_group

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.distributed.checkpoint.storage import StorageReader

log = logging.getLogger("milepost")

WAIT_S: Final = 1800.0
"""How long the ranks wait for one another at each step: as long as torch's collectives do. One may
read much more than another."""


@_api_bc_check  # type: ignore[untyped-decorator]
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint into a state, in place, as `torch.distributed.checkpoint.load` does.

    Reads and checks by `Reader`; see docs/dcp.md for what differs.

    Raises:
        CheckpointException: on all ranks: it could not be loaded; `failures` has the reasons by
            rank.
        RuntimeError: neither a path nor a reader was given.
    """
    no_dist = no_dist or not dist.is_available() or not dist.is_initialized()
    why = _why_not_ours(storage_reader, checkpoint_id) or why_not_among(
        process_group, no_dist=no_dist
    )
    if why:
        log.info("milepost.dcp.load leaves this one to torch.distributed.checkpoint: %s", why)
        stock.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
        return
    if no_dist:
        warnings.warn(
            "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is "
            "to load in a single process.",
            stacklevel=3,
        )
    # Do this before anything can fail on a single rank: all ranks must count the same calls.
    group = Group(0, 1, None) if no_dist else join_group(process_group)
    reader = _reader_of(storage_reader, checkpoint_id)
    _Load(state_dict, reader, planner or DefaultLoadPlanner(), group).run()


def _why_not_ours(
    storage_reader: StorageReader | None, checkpoint_id: str | os.PathLike[str] | None
) -> str:
    """Return why stock torch has to read this; "": we do."""
    if (
        storage_reader is not None
        and type(storage_reader) is not FileSystemReader
        and not isinstance(storage_reader, Reader)
    ):
        return f"the reader is a {type(storage_reader).__name__}"
    path = getattr(storage_reader, "path", "") if checkpoint_id is None else checkpoint_id
    return f"{path} is a URL" if "://" in str(path) else ""


def _reader_of(
    storage_reader: StorageReader | None, checkpoint_id: str | os.PathLike[str] | None
) -> Reader:
    """Return the reader of a load that is not left to torch. Raises RuntimeError as torch does if
    nothing says what to read.
    """
    if storage_reader is None:
        if not checkpoint_id:
            raise RuntimeError(
                "`checkpoint_id` must be specified if storage_reader/storage_writer is None."
            )
        return Reader(checkpoint_id)
    if checkpoint_id is not None:
        storage_reader.reset(checkpoint_id)
    if isinstance(storage_reader, Reader):
        return storage_reader
    assert isinstance(storage_reader, FileSystemReader)
    return Reader(storage_reader.path, storage_reader.transforms.extension_registry)


class _Load:
    """One load on one rank."""

    def __init__(
        self, state: dict[str, Any], reader: Reader, planner: LoadPlanner, group: Group
    ) -> None:
        self._state = state
        self._keys = sorted(state, key=str)
        """In an order that is the same on all ranks, since some entries talk to those of others."""
        self._reader = reader
        self._planner = planner
        self._group = group
        self._rank = group.rank
        self._sharing = ExitStack()
        """Ends when all ranks have read."""
        self._presence = Presence(group, "load")
        self._steps = Steps(group, WAIT_S, self._presence.has_ended)
        self._content: dict[str, Any] = {}
        """The state, with what its Stateful entries have said."""
        self._own_failure: Exception | None = None
        """An exception of the state itself, which torch passes on unchanged."""

    def run(self) -> None:
        """Load. Raises as `load`."""
        try:
            with self._sharing:
                plan = self._agree_on_plan()
                self._steps.agree("read", lambda: self._read(plan))
            self._steps.agree("load_state_dict", self._hand_over)
        except stock.CheckpointException:
            if self._own_failure is not None:
                raise self._own_failure from None
            raise
        finally:
            self._presence.close()

    def _agree_on_plan(self) -> LoadPlan:
        # If the global plan changes nothing in the local plans, they need not travel.
        is_usual = (
            type(self._planner).create_global_plan is DefaultLoadPlanner.create_global_plan
            and type(self._reader).prepare_global_plan is FileSystemReader.prepare_global_plan
        )
        if is_usual:
            return self._steps.agree("plan", self._plan)
        return self._steps.exchange("plan", self._plan, self._global_plan)

    def _plan(self) -> LoadPlan:
        self._content = self._own(self._read_state)
        metadata, is_of_all = self._read_metadata()
        planner, reader, is_coordinator = self._planner, self._reader, self._rank == 0
        planner.set_up_planner(self._content, metadata, is_coordinator)
        if "kwargs" in inspect.signature(reader.set_up_storage_reader).parameters:
            reader.set_up_storage_reader(
                metadata, is_coordinator, rank=self._rank, use_collectives=is_of_all
            )
        else:
            reader.set_up_storage_reader(metadata, is_coordinator)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        self._sharing.enter_context(reader.share_with(self._group, "load", plan))
        return plan

    def _global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return self._reader.prepare_global_plan(self._planner.create_global_plan(plans))

    def _read_state(self) -> dict[str, Any]:
        """Return the state, its Stateful entries called."""
        content = {}
        for key in self._keys:
            if key in self._state:
                value = self._state[key]
                content[key] = value.state_dict() if isinstance(value, Stateful) else value
        return content

    def _read_metadata(self) -> tuple[Metadata, bool]:
        """Return the index, and whether it is that of all ranks. If the ranks saved independently,
        it is that of this rank alone.
        """
        try:
            return self._reader.read_metadata(), True
        except MilepostError:
            raise
        except Exception as error:
            of_all = error
        try:
            return self._reader.read_metadata(rank=self._rank), False
        except MilepostError:
            raise
        except Exception as error:
            raise AssertionError(
                f"metadata is None; global metadata read failed: {of_all}; "
                f"rank local metadata read failed: {error}"
            ) from of_all

    def _read(self, plan: LoadPlan) -> None:
        self._reader.read_data(self._planner.finish_plan(plan), self._planner).wait()

    def _hand_over(self) -> None:
        """Give what was loaded to the state's entries."""

        def give() -> None:
            state, content = self._state, self._content
            # Beyond torch: what a planner has put into an empty state reaches the caller.
            made = [key for key in content if key not in self._keys]
            for key in [*(key for key in self._keys if key in state), *made]:
                value = state.get(key)
                if isinstance(value, Stateful):
                    value.load_state_dict(content[key])
                else:
                    state[key] = content[key]

        self._own(give)

    def _own(self, act: Callable[[], Any]) -> Any:
        """Do what calls the state's own methods."""
        try:
            return act()
        except Exception as error:
            self._own_failure = error
            raise
