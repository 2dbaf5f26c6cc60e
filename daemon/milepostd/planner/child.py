"""The planner's process: makes global plans, remembers layouts, writes manifest and `.metadata`.

`python -m milepostd.planner.child <plans dir> <niceness>` reads requests from stdin and answers on
stdout, one after the other, until stdin ends (see `milepostd.planner.process` for the frames). It
owns what a layout_id stands for: for each job and rank the offer and the assignment behind its
newest layouts, in memory and as files, so that its own death or the daemon's costs no plan. It
opens offers, as msgpack; it unpickles nothing and imports nothing by a name it was sent. torch is
imported by the first index, or when asked. It writes below a root only through `milepost.storage`.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from functools import cache, cached_property
from importlib.metadata import version
from itertools import compress, repeat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

import msgpack
import msgspec
from isal import isal_zlib

from milepost.concurrency.collector import collector_paused
from milepost.errors import MilepostError, ProtocolError, StorageError
from milepost.format import manifest
from milepost.format.layout import place
from milepost.storage.refusals import storage_error
from milepost.storage.root import Root
from milepost.wire.messages import Cause, RankLayout, WrittenFile
from milepost.wire.offers import (
    Kind,
    Offer,
    decode_offer,
    layout_id,
    pack_assigned,
    unpack_assigned,
)
from milepostd.core.plan import PlanRefused, make_plan
from milepostd.ops import logs
from milepostd.planner.process import (
    FRAME_BYTES_MAX,
    FRAME_HEADER,
    AnyAnswer,
    AnyRequest,
    Failed,
    FileUnseen,
    IndexBuilt,
    IndexWanted,
    PlanMade,
    PlanWanted,
    Warm,
    Warmed,
    decode_body,
    encode_frame,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from milepost.dcp_format.index import Draft

log = logging.getLogger(__name__)

LAYOUTS_KEPT: Final = 16
"""Newest layouts remembered of each rank of a job: more than a trainer remembers, so that states
that alternate (with and without an optimizer, say) keep theirs."""

JOBS_KEPT: Final = 4
"""Jobs held in memory, the most recently used; the others are read from their files again."""

JOB_DIRS_KEPT: Final = 32
"""Jobs whose layouts stay on disk."""

_LAYOUT_ID: Final = re.compile(r"[0-9a-f]{24}")
_DIGEST_BYTES: Final = 16


class PlanFailed(Exception):
    """What was asked cannot be done; `cause` is the answer."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


class _FileUnseenError(Exception):
    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


# --- layouts ----------------------------------------------------------------------------------


class Layout(msgspec.Struct, frozen=True):
    """What a layout_id stands for: an offer, and the items that the rank writes, ascending."""

    offer: Offer
    assigned: list[int]


class _Record(msgspec.Struct, frozen=True):
    """A layout as a file holds it."""

    fingerprint: str
    assigned: bytes
    offer: bytes


class Layouts:
    """The newest layouts of every rank, in memory and below a directory.

    One file a layout, `<hash of job>/<rank>-<layout_id>`, written under another name and renamed.
    It is not synced: after a power failure a file may be torn, which its digest shows, and then its
    layout is unknown and made anew. A file that cannot be written (disk full) costs only this
    persistence.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._jobs: dict[str, dict[int, dict[str, Layout]]] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, job: str, rank: int, layout: str) -> Layout | None:
        """Return a layout, or None if it is unknown. It counts as used now."""
        if not _LAYOUT_ID.fullmatch(layout):
            return None
        path = self._path(job, rank, layout)
        known = self._of_rank(job, rank)
        found = known.pop(layout, None)
        if found is None:
            found = self._read(path, layout)
            if found is None:
                return None
        self._remember(known, layout, found)
        with suppress(OSError):
            os.utime(path)
        return found

    def put(
        self, job: str, rank: int, fingerprint: str, offer: Offer, encoded: bytes, items: list[int]
    ) -> RankLayout:
        """Remember what a rank was assigned, and return its layout."""
        assigned = pack_assigned(items, len(offer.keys))
        layout = layout_id(fingerprint, assigned)
        known = self._of_rank(job, rank)
        known.pop(layout, None)
        self._remember(known, layout, Layout(offer, items))
        body: bytes = msgpack.packb(
            msgspec.to_builtins(_Record(fingerprint, assigned, encoded), builtin_types=(bytes,))
        )
        path = self._path(job, rank, layout)
        temp = path.with_name(f".{path.name}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            temp.write_bytes(_digest(body) + body)
            temp.rename(path)
        except OSError as error:
            log.warning(
                "layout.unkept", extra={"fields": {"job": job, "rank": rank, "cause": str(error)}}
            )
            with suppress(OSError):
                temp.unlink()
        return RankLayout(rank, layout, assigned)

    def prune(self, job: str) -> None:
        """Delete files of layouts and jobs over the limits, the least recently used first."""
        of_rank: dict[str, list[tuple[int, Path]]] = {}
        for path in _listed(self._directory / _hash(job)):
            of_rank.setdefault(path.name.partition("-")[0], []).append((_age(path), path))
        for files in of_rank.values():
            for _, path in sorted(files, reverse=True)[LAYOUTS_KEPT:]:
                with suppress(OSError):
                    path.unlink()
        jobs = sorted(((_age(path), path) for path in _listed(self._directory)), reverse=True)
        for _, path in jobs[JOB_DIRS_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)

    def _of_rank(self, job: str, rank: int) -> dict[str, Layout]:
        ranks = self._jobs.pop(job, {})
        self._jobs[job] = ranks
        if len(self._jobs) > JOBS_KEPT:
            del self._jobs[next(iter(self._jobs))]
        return ranks.setdefault(rank, {})

    @staticmethod
    def _remember(known: dict[str, Layout], layout: str, found: Layout) -> None:
        known[layout] = found
        if len(known) > LAYOUTS_KEPT:
            del known[next(iter(known))]

    def _path(self, job: str, rank: int, layout: str) -> Path:
        return self._directory / _hash(job) / f"{rank}-{layout}"

    @staticmethod
    def _read(path: Path, layout: str) -> Layout | None:
        try:
            data = path.read_bytes()
            body = data[_DIGEST_BYTES:]
            if data[:_DIGEST_BYTES] != _digest(body):
                raise ValueError("it was damaged")
            record = msgspec.convert(msgpack.unpackb(body), _Record, builtin_types=(bytes,))
            if layout_id(record.fingerprint, record.assigned) != layout:
                raise ValueError("it holds another layout")
            offer = decode_offer(record.offer)
            return Layout(offer, unpack_assigned(record.assigned, len(offer.keys)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, MilepostError) as error:
            fields = {"file": str(path), "cause": str(error)}
            log.warning("layout.unreadable", extra={"fields": fields})
            return None


def _hash(job: str) -> str:
    return hashlib.blake2b(job.encode(), digest_size=12).hexdigest()


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _listed(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _age(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


# --- the two tasks ----------------------------------------------------------------------------


class _Blobs(NamedTuple):
    """The tensors of one rank's file, as the manifest describes them."""

    is_counted: bytes
    """One 0 or 1 for each tensor in the file: whether the index names it. The columns hold those
    that it names."""
    keys: tuple[str, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    end: int
    """Of all tensors together."""


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
        self._draft: Draft | None = None

    @cached_property
    def blobs(self) -> dict[int, _Blobs]:
        """Of each rank, ascending."""
        columns: dict[object, object] = {}
        return {
            rank: _blobs(offer, self._assigned[rank], self.counted[rank], columns)
            for rank, offer in sorted(self.offers.items())
        }

    def draft(self, files: dict[int, str]) -> Draft:
        """Return the index for files of these names. Raises SaveFailed, UsageError."""
        from milepost.dcp_format.index import Draft

        if self._draft is None or self._files != files:
            self._draft = Draft(self.offers, self._assigned, files)
            self._files = files
        return self._draft


class Composer:
    """Answers requests. Not thread-safe; blocking."""

    def __init__(self, layouts: Layouts) -> None:
        self._layouts = layouts
        self._compositions: dict[str, _Composition] = {}

    def answer(self, request: AnyRequest) -> AnyAnswer:
        """Return the answer, whatever happens."""
        # A million small lists and tuples that all stay: the collector would walk them over and
        # over.
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
        except (PlanFailed, PlanRefused) as refusal:
            return Failed(call=call, cause=refusal.cause)
        except _FileUnseenError as unseen:
            return FileUnseen(call=call, cause=unseen.cause)
        except MilepostError as error:
            cause = Cause(error.code, error.message, error.hint)
            is_passing = isinstance(error, StorageError) and error.transient
            return Failed(call=call, cause=cause, is_passing=is_passing)
        except Exception as error:
            log.exception("planner.failed", extra={"fields": {"type": type(request).__name__}})
            cause = Cause("internal", f"the planner failed: {type(error).__name__}: {error}")
            return Failed(call=call, cause=cause)

    def plan(self, request: PlanWanted) -> PlanMade:
        """Make a plan and remember its layouts. Raises PlanFailed, PlanRefused, ProtocolError."""
        offers: dict[int, Offer] = {}
        fixed: dict[int, list[int]] = {}
        columns: dict[object, object] = {}
        for report in request.reports:
            if report.layout_id:
                layout = self._layout(request.job, report.rank, report.layout_id)
                offers[report.rank] = layout.offer
                fixed[report.rank] = layout.assigned
            else:
                offers[report.rank] = _share(decode_offer(report.offer), columns)
        plan = make_plan(offers, fixed)
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
        self._layouts.prune(request.job)
        # What the first save with this plan asks for. The plan made of its own result is the same.
        layouts = {report.rank: report.layout_id for report in request.reports}
        layouts.update((layout.rank, layout.layout_id) for layout in made)
        self._keep(request.job, _Composition(layouts, offers, plan.assigned, plan.counted))
        return PlanMade(call=request.call, layouts=made, warnings=plan.warnings)

    def index(self, request: IndexWanted) -> IndexBuilt:
        """Write `.milepost`, then `.metadata`.

        Raises: PlanFailed, PlanRefused, MilepostError; _FileUnseenError, for which trying again may
        help.
        """
        warm()
        save = request.save
        root = Root(request.root)
        directory = root.save_dir(save)
        try:
            files = _read_fragments(directory, request)
        except _FileUnseenError:
            # Fragments go before the rename: a coordinator that was killed in between finds none.
            built = _built_before(directory, request)
            if built is None:
                raise
            return built
        composition = self._compose(request)
        objects = {
            rank: {item: (at, length) for item, at, length, _ in file.objects}
            for rank, file in files.items()
        }
        draft = composition.draft({rank: file.file for rank, file in files.items()})
        pickled = draft.fill(objects, save.save_id, str(root.path / save.name))
        described = msgspec.structs.replace(
            _manifest(request, composition, files), index_crc=isal_zlib.crc32(pickled)
        )
        parts = {
            manifest.MANIFEST_NAME: manifest.encode(described),
            manifest.METADATA_NAME: pickled,
        }
        for name, data in parts.items():
            root.write_file(directory / name, data)
        total = sum(file.file_bytes for file in files.values()) + sum(map(len, parts.values()))
        return IndexBuilt(call=request.call, checkpoint_bytes=total)

    def _layout(self, job: str, rank: int, layout: str) -> Layout:
        found = self._layouts.get(job, rank, layout)
        if found is None:
            raise PlanFailed(
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
    """Import torch and what of ours needs it. Idempotent; one thread is enough for its use here."""
    import torch

    import milepost.dcp_format.index  # noqa: F401

    torch.set_num_threads(1)


def _share(offer: Offer, columns: dict[object, object]) -> Offer:
    """Return the offer with columns that other ranks' offers have too held only once."""
    names = (
        "keys", "kinds", "dtypes", "global_sizes", "offsets", "sizes", "container_bytes",
        "requires_grad", "pinned", "digests", "paths",
    )  # fmt: skip
    shared = {
        name: columns.setdefault(getattr(offer, name), getattr(offer, name)) for name in names
    }
    return msgspec.structs.replace(offer, **shared)


def _read_fragments(directory: Path, request: IndexWanted) -> dict[int, manifest.FragmentFile]:
    """Return every rank's file, each seen at its full length.

    Raises: _FileUnseenError, PlanFailed, CorruptCheckpoint, StorageError.
    """
    files: dict[int, manifest.FragmentFile] = {}
    for name in request.fragments:
        if not name.startswith(manifest.FRAGMENT_PREFIX) or "/" in name:
            raise _broken(f"{name!r} is not a name of a manifest fragment")
        node = name.removeprefix(manifest.FRAGMENT_PREFIX)
        path = directory / name
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise _unseen(node, path) from error
        except OSError as error:
            raise storage_error("read", path, error) from error
        fragment = manifest.decode_fragment(data)
        if fragment.save_id != request.save.save_id:
            raise _broken(f"{path} is of save {fragment.save_id}, not {request.save.save_id}", node)
        for file in fragment.files:
            if file.rank in files:
                raise _broken(f"two fragments name a file of rank {file.rank}", node)
            if file.file and not re.fullmatch(rf"__{file.rank}_\d+\.distcp", file.file):
                raise _broken(f"{path} names {file.file!r} as a file of rank {file.rank}", node)
            if file.file:
                _check_length(directory / file.file, file.file_bytes, node)
            files[file.rank] = file
    told = {
        file.rank: WrittenFile(file.rank, file.layout_id, file.file, file.file_bytes)
        for file in files.values()
    }
    wanted = {file.rank: file for file in request.files}
    if told != wanted:
        ranks = sorted(r for r in told.keys() | wanted.keys() if told.get(r) != wanted.get(r))
        raise _broken(f"fragments and reports differ about the files of ranks {ranks}")
    return files


def _built_before(directory: Path, request: IndexWanted) -> IndexBuilt | None:
    """Return what an earlier life of the coordinator built of this very save, if that is whole."""
    try:
        described = manifest.read_manifest(directory)
        pickled = (directory / manifest.METADATA_NAME).read_bytes()
        if (
            described is None
            or described.save_id != request.save.save_id
            or described.world != len(request.files)
            or described.index_crc != isal_zlib.crc32(pickled)
        ):
            return None
        for name, length in zip(described.files, described.file_bytes, strict=True):
            _check_length(directory / name, length, "")
        own = (directory / manifest.MANIFEST_NAME).stat().st_size + len(pickled)
    except (OSError, MilepostError, _FileUnseenError):
        return None
    return IndexBuilt(call=request.call, checkpoint_bytes=sum(described.file_bytes) + own)


def _check_length(path: Path, length: int, node: str) -> None:
    # Opened rather than only looked up: that is when a networked file system asks its server again.
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise _unseen(node, path) from error
    except OSError as error:
        raise storage_error("open", path, error) from error
    try:
        seen = os.fstat(file).st_size
    finally:
        os.close(file)
    if seen != length:
        raise _FileUnseenError(
            Cause(
                "corrupt",
                f"{path} has {seen} bytes, node {node} wrote {length}",
                "something else writes below the root, or the file system is damaged",
                node=node,
            )
        )


def _unseen(node: str, path: Path) -> _FileUnseenError:
    return _FileUnseenError(
        Cause(
            "root-not-shared",
            f"node {node} has written {path}, which this node cannot see",
            "the root must be one file system that all nodes mount at the same path",
            node=node,
        )
    )


def _broken(message: str, node: str = "") -> PlanFailed:
    return PlanFailed(Cause("internal", message, "please report this", node=node))


def _blobs(
    offer: Offer, assigned: Sequence[int], counted: Container[int], columns: dict[object, object]
) -> _Blobs:
    """Return the tensors of a rank's file; columns that other ranks have, too, are held once."""
    tensors = [item for item in assigned if offer.kinds[item] != Kind.OBJECT]
    blob_bytes = [offer.container_bytes[item] for item in tensors]
    blobs_at = place(blob_bytes).offsets
    is_counted = bytes(item in counted for item in tensors)
    blobs = _Blobs(
        is_counted,
        tuple(offer.keys[item] for item in compress(tensors, is_counted)),
        tuple(compress(blobs_at, is_counted)),
        tuple(compress(blob_bytes, is_counted)),
        blobs_at[-1] + blob_bytes[-1] if tensors else 0,
    )
    return _Blobs._make(columns.setdefault(column, column) for column in blobs)


def _manifest(
    request: IndexWanted, composition: _Composition, files: Mapping[int, manifest.FragmentFile]
) -> manifest.Manifest:
    """Describe every blob that the index names.

    Raises: PlanFailed if a file cannot hold what it should.
    """
    import torch

    keys: list[str] = []
    files_of: list[int] = []
    offsets: list[int] = []
    lengths: list[int] = []
    crcs: list[int] = []
    names: list[str] = []
    sizes: list[int] = []
    for rank, blobs in composition.blobs.items():
        file, offer, counted = files[rank], composition.offers[rank], composition.counted[rank]
        if not file.file:
            continue
        if len(file.crcs) != len(blobs.is_counted):
            raise _broken(
                f"rank {rank} has {len(blobs.is_counted)} tensors, its file {len(file.crcs)} "
                "checksums"
            )
        if blobs.end > file.file_bytes:
            raise _broken(f"{file.file} ends before its tensors, at {file.file_bytes} bytes")
        keys += blobs.keys
        offsets += blobs.offsets
        lengths += blobs.lengths
        crcs += compress(file.crcs, blobs.is_counted)
        for item, at, length, crc in file.objects:
            if at + length > file.file_bytes:
                raise _broken(f"{file.file} ends before its blob of {offer.keys[item]!r}")
            if item in counted:
                keys.append(offer.keys[item])
                offsets.append(at)
                lengths.append(length)
                crcs.append(crc)
        files_of += repeat(len(names), len(keys) - len(files_of))
        names.append(file.file)
        sizes.append(file.file_bytes)
    save = request.save
    return manifest.Manifest(
        job=save.job,
        save_id=save.save_id,
        step=save.step,
        world=len(request.files),
        torch_version=str(torch.__version__),
        milepost_version=_milepost_version(),
        committed_at_ms=time.time_ns() // 1_000_000,
        files=tuple(names),
        file_bytes=tuple(sizes),
        keys=tuple(keys),
        files_of=tuple(files_of),
        offsets=tuple(offsets),
        lengths=tuple(lengths),
        crcs=tuple(crcs),
    )


@cache
def _milepost_version() -> str:
    return version("milepost")


# --- the process ------------------------------------------------------------------------------


def serve(requests: BinaryIO, answers: BinaryIO, answer: Callable[[AnyRequest], AnyAnswer]) -> None:
    """Answer requests until the stream ends. Raises ProtocolError for what is no request."""
    while True:
        header = requests.read(FRAME_HEADER.size)
        if len(header) < FRAME_HEADER.size:
            return
        (length,) = FRAME_HEADER.unpack(header)
        if length > FRAME_BYTES_MAX:
            text = f"a request of {length} bytes is over the limit of {FRAME_BYTES_MAX}"
            raise ProtocolError("protocol", text)
        body = requests.read(length)
        if len(body) < length:
            return
        request: AnyRequest = decode_body(body, AnyRequest)
        del body
        answers.write(encode_frame(answer(request)))
        answers.flush()
        del request


def main() -> None:
    """Serve the daemon that started this process, until it closes the pipe or dies."""
    logs.setup("auto", "warning")
    # Signals to the whole process group are the daemon's to handle: while it drains it needs this
    # process. What ends it is the end of stdin, which comes even if the daemon is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Where a container refuses even 0, a planner that is too loud is better than none.
    with suppress(OSError):
        os.nice(int(sys.argv[2]))
    # Answers go where nothing else can print.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    composer = Composer(Layouts(Path(sys.argv[1])))

    def answer(request: AnyRequest) -> AnyAnswer:
        with collector_paused():
            made = composer.answer(request)
            if isinstance(made, PlanMade):
                # What a plan leaves behind stays for long: later collections need not walk it.
                gc.freeze()
            return made

    with suppress(BrokenPipeError):
        serve(sys.stdin.buffer, answers, answer)


if __name__ == "__main__":
    main()
