"""What a layout_id stands for: the offer and the assignment behind it, in memory and in files.

So neither the death of the planner's process nor that of the daemon costs a plan. Opens offers, as
msgpack. Must not import torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgpack
import msgspec

from milepost.errors import MilepostError
from milepost.wire.messages import RankLayout
from milepost.wire.offers import Offer, decode_offer, layout_id, pack_assigned, unpack_assigned

log = logging.getLogger(__name__)

LAYOUTS_KEPT: Final = 16
"""How many layouts of each rank are remembered, newest first. A trainer remembers fewer; states
that alternate (with and without an optimizer, say) keep theirs."""

JOBS_KEPT: Final = 4
"""How many jobs are held in memory, most recently used first. Others are read from files again."""

JOB_DIRS_KEPT: Final = 32
"""How many jobs keep their layouts on disk."""

_LAYOUT_ID: Final = re.compile(r"[0-9a-f]{24}")
_DIGEST_BYTES: Final = 16


class StoredLayout(msgspec.Struct, frozen=True):
    """What a layout_id stands for: an offer, and the items that the rank writes, ascending."""

    offer: Offer
    assigned: list[int]


class _LayoutRecord(msgspec.Struct, frozen=True):
    """A layout as a file holds it."""

    fingerprint: str
    assigned: bytes
    offer: bytes


class LayoutStore:
    """The newest layouts of every rank, in memory and below a directory. Not thread-safe.

    Each layout is one file, `<hash of job>/<rank>-<layout_id>`, written under another name and
    renamed, but not synced. A power failure may tear it; its digest shows that, the layout is then
    unknown, and the next save plans anew. A file that cannot be written (disk full) costs only this
    persistence.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._jobs: dict[str, dict[int, dict[str, StoredLayout]]] = {}
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, job: str, rank: int, layout: str) -> StoredLayout | None:
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
        """Remember what a rank was assigned, and return its layout.

        Args:
            job: its name.
            rank: whose layout it is.
            fingerprint: of the structure that was offered.
            offer: what the rank could write.
            encoded: the same offer, as it was sent.
            items: which of it the rank writes, ascending.
        """
        assigned = pack_assigned(items, len(offer.keys))
        layout = layout_id(fingerprint, assigned)
        known = self._of_rank(job, rank)
        known.pop(layout, None)
        self._remember(known, layout, StoredLayout(offer, items))
        record = _LayoutRecord(fingerprint, assigned, encoded)
        body: bytes = msgpack.packb(msgspec.to_builtins(record, builtin_types=(bytes,)))
        path = self._path(job, rank, layout)
        draft = path.with_name(f".{path.name}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            draft.write_bytes(_body_digest(body) + body)
            draft.rename(path)
        except OSError as error:
            log.warning(
                "layout.unkept", extra={"fields": {"job": job, "rank": rank, "cause": str(error)}}
            )
            with suppress(OSError):
                draft.unlink()
        return RankLayout(rank, layout, assigned)

    def prune(self, job: str) -> None:
        """Delete files of layouts and jobs over the limits, the least recently used first."""
        of_rank: dict[str, list[tuple[int, Path]]] = {}
        for path in _entries(self.job_dir(job)):
            of_rank.setdefault(path.name.partition("-")[0], []).append((_used_at_ns(path), path))
        for files in of_rank.values():
            for _, path in sorted(files, reverse=True)[LAYOUTS_KEPT:]:
                with suppress(OSError):
                    path.unlink()
        jobs = sorted(
            ((_used_at_ns(path), path) for path in _entries(self._directory)), reverse=True
        )
        for _, path in jobs[JOB_DIRS_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)

    def job_dir(self, job: str) -> Path:
        """Return where a job's layouts are kept."""
        return self._directory / hashlib.blake2b(job.encode(), digest_size=12).hexdigest()

    def _of_rank(self, job: str, rank: int) -> dict[str, StoredLayout]:
        ranks = self._jobs.pop(job, {})
        self._jobs[job] = ranks
        if len(self._jobs) > JOBS_KEPT:
            del self._jobs[next(iter(self._jobs))]
        return ranks.setdefault(rank, {})

    @staticmethod
    def _remember(known: dict[str, StoredLayout], layout: str, found: StoredLayout) -> None:
        known[layout] = found
        if len(known) > LAYOUTS_KEPT:
            del known[next(iter(known))]

    def _path(self, job: str, rank: int, layout: str) -> Path:
        return self.job_dir(job) / f"{rank}-{layout}"

    @staticmethod
    def _read(path: Path, layout: str) -> StoredLayout | None:
        try:
            data = path.read_bytes()
            body = data[_DIGEST_BYTES:]
            if data[:_DIGEST_BYTES] != _body_digest(body):
                raise ValueError("it was damaged")
            record = msgspec.convert(msgpack.unpackb(body), _LayoutRecord, builtin_types=(bytes,))
            if layout_id(record.fingerprint, record.assigned) != layout:
                raise ValueError("it holds another layout")
            offer = decode_offer(record.offer)
            return StoredLayout(offer, unpack_assigned(record.assigned, len(offer.keys)))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, MilepostError) as error:
            fields = {"file": str(path), "cause": str(error)}
            log.warning("layout.unreadable", extra={"fields": fields})
            return None


def _body_digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _used_at_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
