"""A user's SavePlanner: its local half in each trainer, its global half in rank 0's.

Owns the sequence of calls that torch promises to a planner, the exchange of plans between ranks
through the process group's store, and the offer that says that a planner has decided. It must not
know of daemons, arenas or files. Plans travel as pickles, as in torch's own collectives: between
the trainers of one process group, never to a daemon.

Every save calls `set_up_planner` and `create_local_plan` again, so that `resolve_data` sees the
current tensors. The ranks then agree over the store, with a few short messages each, whether their
global plan is still valid. If a local plan has changed on some rank, plans travel and rank 0 makes
a new global plan. (If each rank decided by itself, a rank with a changed plan would wait for others
that have no reason to come.)

Sources: torch/distributed/checkpoint/planner.py, default_planner.py, state_dict_saver.py and
utils.py (2.13).
"""

from __future__ import annotations

import hashlib
import inspect
import io
import pickle
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType

from milepost.dcp_format.index import to_global_metadata
from milepost.errors import SaveFailed, UsageError
from milepost.state.items import Items, explicit_placement
from milepost.state.offering import container_bytes
from milepost.state.tensors import dtype_names, plain_tensor
from milepost.wire.offers import Kind, Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch._C._distributed_c10d import Store
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

_Result = TypeVar("_Result")

_KINDS: Final = {
    WriteItemType.TENSOR: Kind.TENSOR,
    WriteItemType.SHARD: Kind.SHARD,
    WriteItemType.BYTE_IO: Kind.OBJECT,
}

_PLANNER_HINT: Final = "fix the SavePlanner, or leave `planner` out to use the default plan"


def is_default(planner: SavePlanner | None) -> bool:
    """Return whether milepost's own plan is equivalent to this planner's. If so, the planner is not
    called.

    `dedup_save_to_lowest_rank` travels in the offer. A subclass may do anything, so it runs.
    """
    return planner is None or (
        type(planner) is DefaultSavePlanner
        and planner.flatten_state_dict
        and planner.flatten_sharded_tensors
    )


def wants_lowest_rank(planner: SavePlanner | None) -> bool:
    """Return `Offer.to_lowest_rank` for a default planner."""
    return isinstance(planner, DefaultSavePlanner) and planner.dedup_save_to_lowest_rank


def storage_meta_of(checkpoint: str, save_id: str) -> StorageMeta:
    """Return what planners are told of where a save goes, as torch's `FileSystemWriter` gives it.

    Args:
        checkpoint: path of the directory that the save becomes.
    """
    return StorageMeta(checkpoint_id=checkpoint, save_id=save_id)


class PlannerFailed(SaveFailed):
    """The user's SavePlanner raised.

    Attributes:
        raised: by rank, what it raised there; a RuntimeError of its text, if that does not travel.
    """

    raised: Mapping[int, Exception] = MappingProxyType({})


class _Fault(NamedTuple):
    """Why a rank cannot go on."""

    rank: int
    text: str
    error: bytes
    """The exception, pickled; empty if that is impossible."""


def _fault_of(rank: int, text: str, error: Exception) -> _Fault:
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:
        packed = b""
    return _Fault(rank, text, packed)


def _planner_failed(faults: Sequence[_Fault]) -> PlannerFailed:
    text = "; ".join(fault.text for fault in faults)
    failed = PlannerFailed("planner-failed", f"the SavePlanner failed: {text}", _PLANNER_HINT)
    failed.raised = {
        fault.rank: pickle.loads(fault.error) if fault.error else RuntimeError(fault.text)
        for fault in faults
    }
    return failed


class FinalPlan(NamedTuple):
    """What a planner has decided. Only rank 0 has `metadata`.

    plan_id: the exchange that made the plan, the same on all ranks. It is part of the fingerprint,
    since the global plan may change while this rank's part stays the same.
    """

    plan: SavePlan
    metadata: Metadata | None
    plan_id: str


def _signature(plan: SavePlan) -> tuple[object, ...]:
    """Return a value that is equal for two local plans exactly if one global plan serves both."""
    items: list[tuple[object, ...]] = []
    for item in plan.items:
        data, index = item.tensor_data, item.index
        entry = (index.fqn, index.offset, index.index, item.type, item.bytes_io_data)
        if data is None:
            items.append(entry)
            continue
        box, known = (data.size, data.chunk.offsets, data.chunk.sizes), data.properties
        properties = (known.dtype, known.layout, known.requires_grad, known.pin_memory)
        items.append((*entry, *box, *properties))
    try:
        # By content, since a planner may change its data in place.
        extra = pickle.dumps((plan.planner_data, plan.storage_data))
    except Exception:
        # A plan that cannot be compared counts as changed. Its error is reported when it has to
        # travel.
        return (items, object())
    return (items, hashlib.blake2b(extra, digest_size=16).digest())


class PlannerExchange:
    """Takes one planner through the saves of one rank. One thread at a time.

    Args:
        planner: the user's.
        rank, world: this rank and the number of ranks that save together; rank 0 coordinates.
        store: shared by these ranks; its keys below `exchange_id` belong to this object. None if
            there is only one rank.
        timeout_s: how long to wait for a rank in each round; a save has at most three.
    """

    def __init__(
        self,
        planner: SavePlanner,
        *,
        rank: int,
        world: int,
        store: Store | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        assert world == 1 or store is not None, "more than one rank needs a store"
        self._planner = planner
        self._rank = rank
        self._world = world
        self._store = store if world > 1 else None
        self._timeout_s = timeout_s
        self._signature: tuple[object, ...] = ()
        self._part: SavePlan | None = None
        """This rank's part of the present global plan, as rank 0 returned it."""
        self._metadata: Metadata | None = None
        self._plan_id = ""
        self._spent: list[str] = []
        """Rank 0: answers that can be deleted once all ranks have reached the next round."""

    def plan(
        self,
        state_dict: Mapping[Any, Any],
        exchange_id: str,
        storage_meta: StorageMeta | None = None,
    ) -> FinalPlan:
        """Take the planner through its steps for one save, together with all other ranks.

        Args:
            state_dict: as `dcp.save` passes it to planners: nested, with Stateful entries called.
            exchange_id: the save's id: the same on all ranks, and never used before.
            storage_meta: handed to `set_up_planner`.

        Raises:
            SaveFailed: on every rank. "planner-failed": the planner raised on a rank; names the
                rank and the exception. "rank-missing": names the ranks that did not come. The
                earlier plan is kept only if no new one was begun.
        """
        planner = self._planner

        def create_local() -> tuple[SavePlan, tuple[object, ...]]:
            self._set_up(dict(state_dict), storage_meta)
            plan = planner.create_local_plan()
            return plan, _signature(plan)

        made, fault = self._try("making its local plan", create_local)
        # With torch's plan cache, an unusable plan means that nothing has changed.
        is_kept = (
            made is not None
            and self._part is not None
            and (not made[0].usable or made[1] == self._signature)
        )
        if self._agree(f"{exchange_id}/local", "same" if is_kept else "new", fault) == "new":
            self._part, self._metadata, self._plan_id = None, None, exchange_id
            assert made is not None
            parts = self._exchange(exchange_id, made[0])
        else:
            assert self._part is not None
            parts = self._part

        def finish() -> tuple[SavePlan, SavePlan]:
            part = pickle.loads(parts) if isinstance(parts, bytes) else parts
            return part, planner.finish_plan(part)

        finished, fault = self._try("finishing its plan", finish)
        self._agree(f"{exchange_id}/finished", "same", fault)
        assert made is not None
        assert finished is not None
        self._part, final = finished
        if made[0].usable:
            self._signature = made[1]
        return FinalPlan(final, self._metadata, self._plan_id)

    def _set_up(self, state_dict: dict[Any, Any], storage_meta: StorageMeta | None) -> None:
        """Call `set_up_planner`, also one of before torch 2.3, which had no `storage_meta`."""
        is_first = self._rank == 0
        if "storage_meta" in inspect.signature(self._planner.set_up_planner).parameters:
            self._planner.set_up_planner(state_dict, storage_meta, is_first)
        else:
            self._planner.set_up_planner(state_dict, is_first)  # type: ignore[arg-type]

    def refuse(self, exchange_id: str, fault: str, error: Exception | None = None) -> None:
        """Take part in a save's first round only to say that this rank cannot go on.

        The other ranks then fail with an error that names this rank, instead of waiting for it.
        Returns once they know, or did not come in time.
        """
        text = f"rank {self._rank}, {fault}"
        with suppress(SaveFailed):
            self._agree(
                f"{exchange_id}/local",
                "same",
                _fault_of(self._rank, text, error or RuntimeError(text)),
            )

    def _exchange(self, exchange_id: str, local: SavePlan) -> SavePlan | bytes:
        """Return this rank's part of a new global plan, pickled if it comes from rank 0."""
        if self._rank:
            packed, fault = self._try("sending its local plan", lambda: pickle.dumps(local))
            self._put(f"{exchange_id}/plan/{self._rank}", packed or b"")
            self._agree(f"{exchange_id}/planned", "same", fault)
            key = f"{exchange_id}/part/{self._rank}"
            part = self._get(key)
            self._delete([key])
            return part
        plans = [local]
        keys = [f"{exchange_id}/plan/{rank}" for rank in range(1, self._world)]
        packed_plans = self._gather(f"{exchange_id}/planned", keys)

        def create_global() -> tuple[list[SavePlan], list[bytes]]:
            # An empty plan is from a rank that reports its own error.
            plans.extend(pickle.loads(packed) for packed in packed_plans if packed)
            if len(plans) < self._world:
                return [], []
            parts, self._metadata = self._planner.create_global_plan(plans)
            if len(parts) != self._world:
                raise ValueError(f"create_global_plan returned {len(parts)} of {self._world} plans")
            return parts, [pickle.dumps(part) for part in parts[1:]]

        made, fault = self._try("making the global plan", create_global)
        for rank, packed in enumerate(made[1] if made else [], start=1):
            self._put(f"{exchange_id}/part/{rank}", packed)
        self._agree(f"{exchange_id}/planned", "same", fault)
        assert made is not None
        return made[0][0]

    def _try(self, act: str, call: Callable[[], _Result]) -> tuple[_Result | None, _Fault | None]:
        """Run user code; return its result, or what it raised."""
        try:
            return call(), None
        except Exception as error:
            text = f"rank {self._rank}, {act}, raised {type(error).__name__}: {error}"
            return None, _fault_of(self._rank, text, error)

    # --- rounds: every rank writes a message, and rank 0 answers all of them -------------------

    def _agree(self, name: str, word: str, fault: _Fault | None) -> str:
        """Return "new" if any rank says "new", else "same". All ranks get the same answer.

        Raises SaveFailed on every rank if any rank has an error or is missing.
        """
        said = f"{word}\n" if fault is None else _told([fault])
        if self._store is not None:
            self._put(f"{name}/{self._rank}", said.encode())
            if self._rank == 0:
                self._answer(name)
            said = self._get(f"{name}/answer").decode()
        kind, _, text = said.partition("\n")
        if kind == "missing":
            self._raise_missing(text)
        if kind == "fault":
            raise _planner_failed(_heard(text))
        return kind

    def _answer(self, name: str) -> None:
        words = self._gather(name, [f"{name}/{rank}" for rank in range(self._world)])
        said = [word.decode().partition("\n") for word in words]
        faults = [fault for kind, _, text in said if kind == "fault" for fault in _heard(text)]
        if faults:
            answer = _told(faults)
        else:
            answer = "new\n" if any(kind == "new" for kind, _, _ in said) else "same\n"
        self._put(f"{name}/answer", answer.encode())
        self._delete(self._spent)
        self._spent = [f"{name}/answer"]

    def _gather(self, name: str, keys: list[str]) -> list[bytes]:
        """Return what the ranks wrote under these keys; each key ends with a rank.

        Rank 0 only. If a rank does not come, tells the other ranks so in round `name`, and raises.
        """
        if not keys:
            return []
        store = cast("Store", self._store)
        try:
            store.wait(keys, timedelta(seconds=self._timeout_s))
        except Exception:
            missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
            text = f"nothing came from rank {', '.join(missing)} within {self._timeout_s:g} s"
            self._put(f"{name}/answer", f"missing\n{text}".encode())
            self._raise_missing(text)
        values = [store.get(key) for key in keys]
        self._delete(keys)
        return values

    def _raise_missing(self, text: str) -> NoReturn:
        raise SaveFailed(
            "rank-missing",
            f"planning with a SavePlanner: {text}",
            "look at the log of that rank: every rank has to call save() for the same step",
        )

    def _get(self, key: str) -> bytes:
        """Wait for what rank 0 writes, for longer than rank 0 itself waits for the other ranks."""
        store, wait_s = cast("Store", self._store), 2 * self._timeout_s
        try:
            store.wait([key], timedelta(seconds=wait_s))
        except Exception:
            self._raise_missing(f"nothing came from rank 0 within {wait_s:g} s")
        return store.get(key)

    def _put(self, key: str, value: bytes) -> None:
        # The store takes bytes as well; only torch's annotation says str.
        cast("Store", self._store).set(key, cast("str", value))

    def _delete(self, keys: list[str]) -> None:
        """Delete keys from the store. Otherwise it would keep them until the end of the run."""
        for key in keys:
            # A store that cannot delete keeps a few bytes for each save.
            with suppress(RuntimeError):
                cast("Store", self._store).delete_key(key)


def _told(faults: Sequence[_Fault]) -> str:
    """Return a word that tells of faults."""
    return f"fault\n{pickle.dumps([tuple(fault) for fault in faults]).hex()}"


def _heard(text: str) -> list[_Fault]:
    """Return the faults that a word tells of."""
    return [_Fault(*fault) for fault in pickle.loads(bytes.fromhex(text))]


class Resolved(NamedTuple):
    """The items of a final plan in this save; `objects` are serialised, by item."""

    items: Items
    objects: dict[int, bytes]


def resolve(plan: SavePlan, planner: SavePlanner) -> Resolved:
    """Let the planner resolve everything that this rank writes; item i is entry i of the plan.

    Call it in each save, after `PlannerExchange.plan`. Tensors are live unless the planner made
    them, so stage them before the state changes.

    Raises:
        SaveFailed: "planner-failed" if the planner raised, or returned anything but a tensor for a
            tensor and a BytesIO for an object.
        UsageError: "unsupported-tensor" for a tensor that cannot be stored exactly.
    """
    items, objects = Items(), {}
    for at, write_item in enumerate(plan.items):
        key, kind = write_item.index.fqn, _KINDS[write_item.type]
        try:
            value = planner.resolve_data(write_item)
        except Exception as error:
            raise SaveFailed(
                "planner-failed",
                f"the SavePlanner failed: resolve_data for {key!r} raised "
                f"{type(error).__name__}: {error}",
                _PLANNER_HINT,
            ) from error
        if isinstance(value, torch.Tensor) and kind != Kind.OBJECT:
            global_size, offsets, _ = _boxes(write_item)
            try:
                source = plain_tensor(value)
            except ValueError as error:
                raise UsageError(
                    "unsupported-tensor",
                    f"the SavePlanner resolved {key!r} to a value that cannot be stored exactly: "
                    f"{error}",
                    _PLANNER_HINT,
                ) from error
            items.add(
                key,
                kind,
                source,
                global_size=global_size,
                offsets=offsets,
                placement=explicit_placement("own", global_size, offsets),
            )
        elif isinstance(value, io.BytesIO) and kind == Kind.OBJECT:
            items.add(key, kind, value)
            objects[at] = value.getvalue()
        else:
            raise SaveFailed(
                "planner-failed",
                f"the SavePlanner failed: resolve_data returned a {type(value).__name__} for "
                f"{key!r}, planned as {write_item.type.name}",
                _PLANNER_HINT,
            )
    return Resolved(items, objects)


def _boxes(write_item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return global size, offsets and sizes as planned; empty where the plan says nothing."""
    data = write_item.tensor_data
    if data is None:
        return (), tuple(write_item.index.offset or ()), ()
    return tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)


def make_final_offer(final: FinalPlan, resolved: Resolved) -> Offer:
    """Return the offer of a rank whose planner has decided: the rank writes every item of it.

    Lengths and dtypes are those of the resolved tensors, boxes those of the plan. Raises UsageError
    if the planner's data is not plain data.
    """
    items, planned = resolved.items, final.plan.items
    properties = [None if i.tensor_data is None else i.tensor_data.properties for i in planned]
    return Offer(
        keys=tuple(items.keys),
        kinds=bytes(items.kinds),
        dtypes=tuple(dtype_names(items.dtypes)),
        global_sizes=tuple(map(tuple, items.global_sizes)),
        offsets=tuple(items.offsets),
        sizes=tuple(_boxes(item)[2] for item in planned),
        container_bytes=container_bytes(items),
        requires_grad=bytes(known is not None and known.requires_grad for known in properties),
        pinned=bytes(known is not None and known.pin_memory for known in properties),
        digests=(-1,) * len(items),
        paths=tuple((key,) for key in items.keys),
        final=True,
        metadata=None if final.metadata is None else to_global_metadata(final.metadata),
    )
