"""`save` and `async_save`: signatures, results and errors of torch's.

Owns what a call means: whether it is ours or stock torch's, what is raised when, and the future of
an asynchronous save. `saver` does the work.

Source: torch/distributed/checkpoint/state_dict_saver.py (2.13).
"""

from __future__ import annotations

import logging
import os
import warnings
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)
from torch.distributed.checkpoint.utils import _api_bc_check

from milepost.dcp.futures import MetadataFuture
from milepost.dcp.saver import SaverLost
from milepost.dcp.savers import SAVERS
from milepost.dcp.steps import why_not_among
from milepost.dcp.writer import (
    target_of,
    why_not_ours,
    why_not_staged,
)
from milepost.state.flattening import call_stateful

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed._state_dict_utils import STATE_DICT_TYPE
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner
    from torch.distributed.checkpoint.staging import AsyncStager
    from torch.distributed.checkpoint.storage import StorageWriter

    from milepost.dcp.saver import Pending
    from milepost.dcp.writer import Target

log = logging.getLogger("milepost")

ASYNC_SLOTS: Final = 2
"""For how many images there is room after an asynchronous save: one is written while the other is
filled."""


@_api_bc_check  # type: ignore[untyped-decorator]
def save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state to a directory, as `torch.distributed.checkpoint.save` does; return its index.

    Returns once the checkpoint is durable and complete. See docs/dcp.md for what differs.

    Raises:
        CheckpointException: it could not be saved; `failures` has the reasons by rank.
        RuntimeError: neither a path nor a writer was given.
    """
    no_dist = no_dist or not dist.is_available() or not dist.is_initialized()
    why = why_not_ours(
        storage_writer, checkpoint_id, use_collectives=use_collectives
    ) or why_not_among(process_group, no_dist=no_dist)
    if why:
        _tell("save", why)
        metadata: Metadata = stock.save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
        return metadata
    if no_dist:
        # Past the wrapper that takes a writer by position.
        _warn_alone(stacklevel=4)
    target = target_of(storage_writer, checkpoint_id)
    # First, since it tells the other ranks about this process: a `state_dict()` may end it.
    SAVERS.of(process_group, no_dist=no_dist)
    state = _read(state_dict)
    try:
        pending = _begin(state, target, planner, process_group, no_dist=no_dist, slots=1)
    except stock.CheckpointException:
        if isinstance(state, Exception):
            raise state from None
        raise
    return pending.wait().metadata()


def async_save(
    state_dict: STATE_DICT_TYPE,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Metadata] | AsyncSaveResponse:
    """Save a state in the background, as `torch.distributed.checkpoint.async_save` does.

    Returns once the state is copied and may change; the future holds the index once the checkpoint
    is durable and complete. With a stager that stages in the background the answer is an
    `AsyncSaveResponse`, as torch's is.

    `async_checkpointer_type` and torch's own stagers have no effect: a daemon always writes. The
    exceptions of `save` are in the future, except those of a `state_dict()`.
    """
    why = (
        why_not_ours(storage_writer, checkpoint_id, use_collectives=use_collectives)
        or why_not_staged(async_stager)
        or why_not_among(process_group, no_dist=no_dist)
    )
    if why:
        _tell("async_save", why)
        return stock.async_save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=storage_writer,
            planner=planner,
            process_group=process_group,
            async_checkpointer_type=async_checkpointer_type,
            async_stager=async_stager,
            no_dist=no_dist,
            use_collectives=use_collectives,
        )
    no_dist = no_dist or not dist.is_available() or not dist.is_initialized()
    if no_dist:
        _warn_alone(stacklevel=3)
    SAVERS.of(process_group, no_dist=no_dist)  # First, as in `save`.
    state, future = _read(state_dict), MetadataFuture()
    try:
        target = target_of(storage_writer, checkpoint_id)
        pending = _begin(state, target, planner, process_group, no_dist=no_dist, slots=ASYNC_SLOTS)
    except (stock.CheckpointException, RuntimeError) as error:
        if isinstance(state, Exception):
            raise state from None
        future.set_exception(error)
    else:
        future.follow(pending)
    if isinstance(async_stager, DefaultStager) and async_stager._config.use_async_staging:
        staged: Future[None] = Future()
        staged.set_result(None)
        return AsyncSaveResponse(staging_completion=staged, upload_completion=future)  # type: ignore[arg-type]
    return future


def _read(state_dict: STATE_DICT_TYPE) -> Mapping[Any, Any] | Exception:
    """Return the state with its Stateful entries called, or the exception that one of them
    raised.
    """
    try:
        return call_stateful(state_dict)
    except Exception as error:
        return error


def _begin(
    state: Mapping[Any, Any] | Exception,
    target: Target,
    planner: SavePlanner | None,
    process_group: dist.ProcessGroup | None,
    *,
    no_dist: bool,
    slots: int,
) -> Pending:
    """Stage a state. Raises as `GroupSaver.save`; lost savers are replaced."""
    while True:
        saver = SAVERS.of(process_group, no_dist=no_dist)
        try:
            return saver.save(state, target, planner, slots=slots)
        except SaverLost:
            log.info("%r is replaced by a new one", saver)
            SAVERS.drop(saver)


def _tell(act: str, why: str) -> None:
    log.info("milepost.dcp.%s leaves this one to torch.distributed.checkpoint: %s", act, why)


def _warn_alone(stacklevel: int) -> None:
    """Warn as torch does; the warning names the caller's line."""
    warnings.warn(
        "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to "
        "save in a single process.",
        stacklevel=stacklevel,
    )
