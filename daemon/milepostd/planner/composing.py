"""Answers the requests to the planner's process: makes plans, writes `.milepost` and `.metadata`.

Writes below a root only through `milepost.storage`. Opens offers, as msgpack; unpickles nothing and
imports nothing by a name it was sent. torch is imported by the first index, or when asked.
"""

from __future__ import annotations

import logging
import time
from functools import cache, cached_property
from importlib.metadata import version
from itertools import chain, compress, repeat
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from isal import isal_zlib

from milepost.concurrency.collector import collector_paused
from milepost.errors import MilepostError, StorageError
from milepost.format import manifest
from milepost.format.layout import place
from milepost.format.nesting import merge_nestings
from milepost.storage.homes import home_of
from milepost.wire.messages import Cause, SaveRef
from milepost.wire.offers import Kind, Offer, decode_offer
from milepostd.core.job import save_order
from milepostd.core.plan import PlanRefused, make_plan
from milepostd.core.replicas import Differences, compare_digests, is_refused
from milepostd.planner import fragments
from milepostd.planner.frames import (
    AnyAnswer,
    AnyRequest,
    FileUnseen,
    IndexReady,
    IndexWanted,
    PlanReady,
    PlanWanted,
    RequestFailed,
    Warm,
    Warmed,
)
from milepostd.planner.layouts import JOBS_KEPT, LayoutStore, StoredLayout
from milepostd.planner.refusals import RequestRefused, UnseenFile, fault_of_ours

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from milepost.dcp_format.index import IndexDraft

log = logging.getLogger(__name__)


class _FileTensors(NamedTuple):
    """The tensors of one rank's file, as the manifest describes them."""

    is_counted: bytes
    """One 0 or 1 for each tensor in the file: whether the index names it. The other columns hold
    only the tensors that it names."""
    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    end: int
    """Where the last tensor ends, in bytes from the start of the file."""


class _Composition:
    """What a set of layouts makes together; every save with the same layouts uses it again."""

    def __init__(
        self,
        layouts: dict[int, str],
        offers: dict[int, Offer],
        assigned: dict[int, list[int]],
        counted: Mapping[int, list[int]],
    ) -> None:
        self.layouts = layouts
        self.offers = offers
        self._assigned = assigned
        self.counted = {rank: frozenset(items) for rank, items in counted.items()}
        self._files: dict[int, str] = {}
        self._draft: IndexDraft | None = None

    @cached_property
    def tensors(self) -> dict[int, _FileTensors]:
        """The tensors of each rank's file, ascending by rank."""
        columns: dict[object, object] = {}
        return {
            rank: _tensor_columns(offer, self._assigned[rank], self.counted[rank], columns)
            for rank, offer in sorted(self.offers.items())
        }

    @cached_property
    def nesting(self) -> bytes:
        """What the manifest says of the state's dicts."""
        return merge_nestings(offer.nesting for _, offer in sorted(self.offers.items()))

    def draft(self, files: dict[int, str]) -> IndexDraft:
        """Return the index for files of these names. Raises SaveFailed, UsageError."""
        from milepost.dcp_format.index import IndexDraft

        if self._draft is None or self._files != files:
            self._draft = IndexDraft(self.offers, self._assigned, files)
            self._files = files
        return self._draft


class Composer:
    """Answers requests. Not thread-safe; blocking."""

    def __init__(self, layouts: LayoutStore) -> None:
        self._layouts = layouts
        self._compositions: dict[str, _Composition] = {}
        self._told: dict[str, tuple[int, set[str]]] = {}
        """By job: the attempt, and the keys of which it was told that their replicas differ."""

    def answer(self, request: AnyRequest) -> AnyAnswer:
        """Return the answer. Never raises an Exception."""
        # A plan makes a million small lists and tuples that all stay; without the pause the
        # collector would walk them again and again.
        with collector_paused():
            return self._answer(request)

    def _answer(self, request: AnyRequest) -> AnyAnswer:
        call = request.call
        try:
            match request:
                case Warm():
                    warm()
                    return Warmed(call=call)
                case PlanWanted():
                    return self.plan(request)
                case IndexWanted():
                    return self.index(request)
        except (RequestRefused, PlanRefused) as refusal:
            return RequestFailed(call=call, cause=refusal.cause)
        except UnseenFile as unseen:
            return FileUnseen(call=call, cause=unseen.cause)
        except MilepostError as error:
            cause = Cause(error.code, error.message, error.hint)
            is_passing = isinstance(error, StorageError) and error.transient
            return RequestFailed(call=call, cause=cause, is_passing=is_passing)
        except Exception as error:
            log.exception("planner.failed", extra={"fields": {"type": type(request).__name__}})
            cause = Cause("internal", f"the planner failed: {type(error).__name__}: {error}")
            return RequestFailed(call=call, cause=cause)

    def plan(self, request: PlanWanted) -> PlanReady:
        """Make a plan and remember its layouts.

        Raises RequestRefused, PlanRefused, ProtocolError.
        """
        offers: dict[int, Offer] = {}
        fixed: dict[int, list[int]] = {}
        columns: dict[object, object] = {}
        for report in request.reports:
            if report.layout_id:
                layout = self._layout(request.job, report.rank, report.layout_id)
                offers[report.rank] = layout.offer
                fixed[report.rank] = layout.assigned
            else:
                offers[report.rank] = _with_shared_columns(decode_offer(report.offer), columns)
        plan = make_plan(offers, fixed)
        # Nobody compares them any more.
        offers = {
            rank: msgspec.structs.replace(offer, digests=()) for rank, offer in offers.items()
        }
        made = tuple(
            self._layouts.put(
                request.job,
                report.rank,
                report.fingerprint,
                offers[report.rank],
                report.offer,
                plan.assigned[report.rank],
            )
            for report in sorted(request.reports, key=lambda report: report.rank)
            if not report.layout_id
        )
        made = tuple(
            msgspec.structs.replace(layout, rota=plan.rotas.get(layout.rank, b""))
            for layout in made
        )
        self._layouts.prune(request.job)
        # The first save with this plan asks for this composition. Composing it again from the
        # layouts would give the same.
        layouts = {report.rank: report.layout_id for report in request.reports}
        layouts.update((layout.rank, layout.layout_id) for layout in made)
        self._keep(request.job, _Composition(layouts, offers, plan.assigned, plan.counted))
        warnings = self._tell(request.job, request.attempt, plan.differences)
        return PlanReady(call=request.call, layouts=made, warnings=warnings)

    def index(self, request: IndexWanted) -> IndexReady:
        """Compare the replicas that are due; then write `.milepost`, then `.metadata`, durably.

        Raises:
            RequestRefused, PlanRefused, MilepostError: it cannot be written.
            UnseenFile: a file is missing here; trying again may help.
        """
        warm()
        save = request.save
        home = home_of(request.root, save, request.umask)
        directory = home.save_dir(save)
        try:
            files = fragments.read_fragments(directory, request)
        except UnseenFile:
            # Publishing removes the fragments before the rename. A coordinator that was killed in
            # between finds none of them, but the finished index.
            built = fragments.built_before(directory, request)
            if built is None:
                raise
            return built
        composition = self._compose(request)
        warnings = self._compare(save, composition, files)
        objects = {
            rank: {item: (at, length) for item, at, length, _ in file.objects}
            for rank, file in files.items()
        }
        draft = composition.draft({rank: file.file for rank, file in files.items()})
        pickled = draft.fill(objects, save.save_id, str(home.checkpoint_dir(save)))
        described = msgspec.structs.replace(
            _manifest_of(request, composition, files),
            index_crc=isal_zlib.crc32(pickled),
            index=_columns_of(draft, composition, files),
        )
        parts = {
            manifest.MANIFEST_NAME: manifest.encode_manifest(described),
            manifest.METADATA_NAME: pickled,
        }
        for name, data in parts.items():
            home.write_file(directory / name, data)
        total = sum(file.file_bytes for file in files.values()) + sum(map(len, parts.values()))
        return IndexReady(call=request.call, checkpoint_bytes=total, warnings=warnings)

    def _compare(
        self,
        save: SaveRef,
        composition: _Composition,
        files: Mapping[int, manifest.FragmentFile],
    ) -> tuple[Cause, ...]:
        """Return a warning for each key whose replicas differ, if it was not told before.

        Raises RequestRefused if a rank does not allow any.
        """
        digests = {rank: file.digests for rank, file in files.items()}
        found = compare_digests(composition.offers, digests, composition.counted)
        if found and is_refused(composition.offers.values()):
            raise RequestRefused(found.refusal())
        attempt, _ = save_order(save)
        return self._tell(save.job, attempt, found)

    def _tell(self, job: str, attempt: int, found: Differences) -> tuple[Cause, ...]:
        """Return a warning for each key of which this attempt has heard nothing yet."""
        told_attempt, told = self._told.pop(job, (attempt, set()))
        if told_attempt != attempt:
            told = set()
        self._told[job] = attempt, told
        if len(self._told) > JOBS_KEPT:
            del self._told[next(iter(self._told))]
        warnings = found.warnings(told)
        told.update(found.keys)
        return warnings

    def _layout(self, job: str, rank: int, layout: str) -> StoredLayout:
        found = self._layouts.get(job, rank, layout)
        if found is None:
            raise RequestRefused(
                Cause(
                    "plan-failed",
                    f"the planner does not know layout {layout} of rank {rank} (any more)",
                    "the next save plans anew",
                    rank=rank,
                )
            )
        return found

    def _compose(self, request: IndexWanted) -> _Composition:
        """Return what the staged layouts make together; they may come from different plans."""
        job = request.save.job
        layouts = {file.rank: file.layout_id for file in request.files}
        known = self._compositions.get(job)
        if known is None or known.layouts != layouts:
            found = {rank: self._layout(job, rank, layout) for rank, layout in layouts.items()}
            offers = {rank: layout.offer for rank, layout in found.items()}
            assigned = {rank: layout.assigned for rank, layout in found.items()}
            plan = make_plan(offers, assigned)
            known = _Composition(layouts, offers, assigned, plan.counted)
        self._keep(job, known)
        return known

    def _keep(self, job: str, composition: _Composition) -> None:
        self._compositions.pop(job, None)
        self._compositions[job] = composition
        if len(self._compositions) > JOBS_KEPT:
            del self._compositions[next(iter(self._compositions))]


def warm() -> None:
    """Import torch and what of ours needs it, and limit torch to one thread. Idempotent."""
    import torch

    import milepost.dcp_format.index  # noqa: F401

    torch.set_num_threads(1)


def _with_shared_columns(offer: Offer, columns: dict[object, object]) -> Offer:
    """Return the offer, with columns that equal another rank's replaced by that rank's object."""
    names = (
        "keys", "kinds", "dtypes", "global_sizes", "offsets", "sizes", "container_bytes",
        "requires_grad", "pinned", "digests", "paths", "nesting",
    )  # fmt: skip
    shared = {
        name: columns.setdefault(getattr(offer, name), getattr(offer, name)) for name in names
    }
    return msgspec.structs.replace(offer, **shared)


def _tensor_columns(
    offer: Offer, assigned: Sequence[int], counted: Container[int], columns: dict[object, object]
) -> _FileTensors:
    """Describe the tensors of a rank's file; a column that equals another rank's is held once."""
    tensors = [item for item in assigned if offer.kinds[item] != Kind.OBJECT]
    blob_bytes = [offer.container_bytes[item] for item in tensors]
    blobs_at = place(blob_bytes).offsets
    is_counted = bytes(item in counted for item in tensors)
    described = _FileTensors(
        is_counted,
        tuple(offer.keys[item] for item in compress(tensors, is_counted)),
        tuple(compress(blobs_at, is_counted)),
        tuple(compress(blob_bytes, is_counted)),
        blobs_at[-1] + blob_bytes[-1] if tensors else 0,
    )
    return _FileTensors._make(columns.setdefault(column, column) for column in described)


def _manifest_of(
    request: IndexWanted, composition: _Composition, files: Mapping[int, manifest.FragmentFile]
) -> manifest.Manifest:
    """Describe every blob that the index names.

    Raises RequestRefused if a file cannot hold what it should.
    """
    import torch

    keys: list[str] = []
    files_of: list[int] = []
    offsets: list[int] = []
    lengths: list[int] = []
    crcs: list[int] = []
    names: list[str] = []
    sizes: list[int] = []
    stretches: list[bytes] = []
    for rank, tensors in composition.tensors.items():
        file, offer, counted = files[rank], composition.offers[rank], composition.counted[rank]
        if not file.file:
            continue
        if len(file.crcs) != len(tensors.is_counted):
            raise fault_of_ours(
                f"rank {rank} has {len(tensors.is_counted)} tensors, its file {len(file.crcs)} "
                "checksums"
            )
        if tensors.end > file.file_bytes:
            raise fault_of_ours(f"{file.file} ends before its tensors, at {file.file_bytes} bytes")
        keys += tensors.keys
        offsets += tensors.offsets
        lengths += tensors.lengths
        crcs += compress(file.crcs, tensors.is_counted)
        for item, at, length, crc in file.objects:
            if at + length > file.file_bytes:
                raise fault_of_ours(f"{file.file} ends before its blob of {offer.keys[item]!r}")
            if item in counted:
                keys.append(offer.keys[item])
                offsets.append(at)
                lengths.append(length)
                crcs.append(crc)
        files_of += repeat(len(names), len(keys) - len(files_of))
        names.append(file.file)
        sizes.append(file.file_bytes)
        stretches.append(file.stretches)
    save = request.save
    return manifest.Manifest(
        job=save.job,
        save_id=save.save_id,
        step=save.step,
        world=len(request.files),
        torch_version=str(torch.__version__),
        milepost_version=_milepost_version(),
        committed_at_ms=time.time_ns() // 1_000_000,
        nesting=composition.nesting,
        files=tuple(names),
        file_bytes=tuple(sizes),
        keys=tuple(keys),
        files_of=tuple(files_of),
        offsets=tuple(offsets),
        lengths=tuple(lengths),
        crcs=tuple(crcs),
        stretch_bytes=manifest.STRETCH_BYTES,
        stretches=tuple(stretches),
    )


def _columns_of(
    draft: IndexDraft, composition: _Composition, files: Mapping[int, manifest.FragmentFile]
) -> bytes:
    """Return the index as columns."""
    crcs = {
        file.file: compress(file.crcs, composition.tensors[rank].is_counted)
        for rank, file in files.items()
    }
    objects = {
        rank: {item: (at, length, crc) for item, at, length, crc in file.objects}
        for rank, file in files.items()
    }
    return draft.columns(objects, list(chain.from_iterable(crcs[file] for file in draft.files)))


@cache
def _milepost_version() -> str:
    return version("milepost")
