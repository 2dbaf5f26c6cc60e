"""From wanted blobs to the tasks of each file: where payloads lie, what to read, and with which
checksums to compare it.

Decides how to open a container. A container of milepost, and a small one of stock torch, is
expected to be what `container.template` makes; its first bytes prove it. Any other container is
examined first: a large one at its ends, a small one in memory.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from math import prod
from operator import itemgetter
from typing import Final, TypeAlias

import torch
from isal import isal_zlib

from milepost.dcp_format.archive import (
    ArchiveError,
    StoredTensor,
    check_archive,
    find_tensor,
    looks_like_an_archive,
    storage_order,
)
from milepost.dcp_format.container import ContainerTemplate, template
from milepost.errors import UsageError
from milepost.fetching.blocks import Range, merge
from milepost.fetching.checksums import Check, KnownChecksums
from milepost.fetching.copying import PLAIN, row_major
from milepost.fetching.intersection import flat_range
from milepost.fetching.requests import Blob, FoundDamage, ObjectRead, TensorRead
from milepost.fetching.tasks import GAP_BYTES, FilePlan, SmallTask, copy_box, put_view
from milepost.wire.offers import Box

SMALL_BYTES: Final = 1 << 20
"""Containers up to this length are read completely, whatever part is wanted."""

_Widen: TypeAlias = Callable[[int, int], Range]

LOOKING_THREADS: Final = 4

ReadFew: TypeAlias = Callable[[str, int, int], bytes]
"""Reads a few bytes of a file: name, offset, length."""


class FetchPlanner:
    """Plans one pass over the files of a checkpoint.

    Args:
        tensors, objects: everything that is wanted.
        checksums: the manifest's.
        sizes: the length of each file; missing files are left out.
        read_few: reads the ends of large containers.
        is_checked: whether to compare checksums.
        touched: for each tensor read, whether its memory was written to.

    Attributes:
        damages: what was found during planning, and later by the planned tasks.
        unchecked: keys without a checksum.
        contents: the objects' bytes, by number; the tasks fill them.
    """

    def __init__(
        self,
        tensors: list[TensorRead],
        objects: list[ObjectRead],
        checksums: KnownChecksums,
        sizes: dict[str, int],
        read_few: ReadFew,
        *,
        is_checked: bool,
        touched: bytearray,
    ) -> None:
        self._tensors = tensors
        self._objects = objects
        self._checksums = checksums
        self._sizes = sizes
        self._read_few = read_few
        self._is_checked = is_checked
        self._touched = touched
        self._whole_blobs: dict[str, dict[Blob, str]] = {}
        """For each file, the large containers that are read completely, with their keys."""
        self._templates: dict[tuple[Box, torch.dtype, int], ContainerTemplate | None] = {}
        """By sizes, dtype and the container's length."""
        self._plans: dict[str, FilePlan] = {}
        self.damages: list[FoundDamage] = []
        self.unchecked: list[str] = []
        self.contents: dict[int, bytes] = {}

    # --- what is wanted

    def plan(
        self,
        tensors: Iterable[int],
        objects: Iterable[int],
        when_strange: Callable[[int], None] | None,
    ) -> dict[str, FilePlan]:
        """Plan these reads.

        Args:
            when_strange: called with the number of each tensor read whose container is not the
                expected one. None: expect nothing, and compare containers instead of stretches.
        """
        is_close = when_strange is None
        expects = not is_close and (self._checksums.is_known or self._is_usual())
        closely: dict[Blob, list[int]] = {}
        for number in self._plan_smalls(tensors) if expects else tensors:
            read = self._tensors[number]
            if read.memory.shape != read.sizes:
                text = f"{list(read.sizes)} of {read.key!r} do not fill {list(read.memory.shape)}"
                raise ValueError(text)
            if 0 in read.sizes or not self._is_inside(read.key, read.blob):
                continue
            around = self._expected(read) if self._checksums.is_known else None
            if around is None or read.blob.length <= SMALL_BYTES or when_strange is None:
                closely.setdefault(read.blob, []).append(number)
            else:
                self._plan_large(number, read, around, when_strange)
        if closely:
            self._plan_closely(closely)
        for number in objects:
            self._plan_object(number)
        for plan in self._plans.values():
            self._close(plan, is_close)
        return self._plans

    def _expected(self, read: TensorRead) -> ContainerTemplate | None:
        kind = read.chunk, read.dtype, read.blob.length
        try:
            return self._templates[kind]
        except KeyError:
            around = self._templates[kind] = _expected(read)
            return around

    def _is_usual(self) -> bool:
        """Whether a checkpoint without a manifest has containers as this torch makes them. Judges
        by the first one.
        """
        for read in self._tensors:
            around = self._expected(read)
            if around is not None and self._is_there(read.blob):
                found = self._read_few(read.blob.file, read.blob.offset, len(around.prefix))
                return found == around.prefix
        return False

    def _is_there(self, blob: Blob) -> bool:
        size = self._sizes.get(blob.file, -1)
        return blob.offset >= 0 and blob.length > 0 and blob.offset + blob.length <= size

    def _is_inside(self, key: str, blob: Blob) -> bool:
        """Whether a blob lies in its file; if not, note the damage."""
        if self._is_there(blob):
            return True
        if blob.file in self._sizes:
            end, size = blob.offset + blob.length, self._sizes[blob.file]
            text = f"bytes {blob.offset} to {end} lie beyond its end at {size}"
            self.damages.append(FoundDamage(blob.file, key, text))
        return False

    def _plan_of(self, file: str) -> FilePlan:
        plan = self._plans.get(file)
        if plan is None:
            plan = self._plans[file] = FilePlan(file)
        return plan

    # --- containers as they are expected

    def _plan_smalls(self, tensors: Iterable[int]) -> list[int]:
        """Plan all small containers of which one run of bytes is wanted in host memory; return the
        other reads.

        The code is written out and makes each check once, since there may be tens of thousands.
        """
        reads, templates, others = self._tensors, self._templates, list[int]()
        is_known, plain, strided, file = self._checksums.is_known, PLAIN, torch.strided, ""
        smalls, size = list[SmallTask](), -1
        for number in tensors:
            _, blob, dtype, chunk, where, sizes, memory = reads[number]
            name, begin, length, _ = blob
            if name != file:
                file, size = name, self._sizes.get(name, -1)
                smalls = self._plan_of(name).smalls
            end = begin + length
            kind = chunk, dtype, length
            around = templates[kind] if kind in templates else self._expected(reads[number])
            if (
                around is None
                or length > SMALL_BYTES
                or begin < 0
                or end > size
                or 0 in sizes
                or memory.shape != sizes
                # As `address_of`.
                or memory.dtype is not dtype
                or type(memory) not in plain
                or not memory.is_cpu
                or memory.layout is not strided
                or not memory.is_contiguous()
                or memory.is_neg()
                or (dtype.is_complex and memory.is_conj())
            ):
                others.append(number)
                continue
            at, nbytes = begin + len(around.prefix), around.payload_bytes
            if sizes != chunk:
                run = flat_range(chunk, where, sizes)
                if run is None:
                    others.append(number)
                    continue
                at, nbytes = at + run[0] * dtype.itemsize, run[1] * dtype.itemsize
            crc_at = 0 if is_known else begin + around.crc_at
            smalls.append(
                SmallTask(
                    begin, end, around.prefix, at, nbytes, memory.data_ptr(), number, crc_at,
                    around.payload_bytes,
                )
            )  # fmt: skip
        return others

    def _plan_large(
        self,
        number: int,
        read: TensorRead,
        around: ContainerTemplate,
        when_strange: Callable[[int], None],
    ) -> None:
        """Plan a large container of ours: the wanted part of its payload, and its first bytes."""
        blob = read.blob
        begin, end = blob.offset, blob.offset + blob.length
        plan, stretches = self._plan_of(blob.file), self._checksums.stretches(blob.file)
        widen: _Widen = _as_it_is
        if stretches is not None:
            widen = partial(stretches.round_out, file_bytes=self._sizes[blob.file])
        elif self._is_checked:
            widen = _always(begin, end)
            self._whole_blobs.setdefault(blob.file, {})[blob] = read.key
        plan.add_box(
            begin + around.payload_at, read.dtype, read.chunk, read.at, read.sizes, read.memory,
            number, widen,
        )  # fmt: skip

        def compare(head: bytearray) -> None:
            if head != around.prefix:
                when_strange(number)

        plan.add_whole(begin, begin + len(around.prefix), compare)

    # --- containers that are looked at

    def _plan_closely(self, blobs: dict[Blob, list[int]]) -> None:
        large = [blob for blob in blobs if blob.length > SMALL_BYTES]
        with ThreadPoolExecutor(LOOKING_THREADS, thread_name_prefix="milepost-look") as looking:
            found = dict(zip(large, looking.map(self._look, large), strict=True))
        for blob, numbers in blobs.items():
            begin, end = blob.offset, blob.offset + blob.length
            plan, stored = self._plan_of(blob.file), found.get(blob)
            if self._checksums.is_known and self._is_checked:
                self._whole_blobs.setdefault(blob.file, {})[blob] = self._tensors[numbers[0]].key
                plan.wanted.append((begin, end))
            if isinstance(stored, FoundDamage):
                for number in numbers:
                    self.damages.append(stored._replace(key=self._tensors[number].key))
            elif stored is None:
                plan.add_whole(begin, end, partial(self._open, blob, numbers))
            else:
                self._plan_stored(plan, blob, numbers, stored)

    def _look(self, blob: Blob) -> StoredTensor | FoundDamage | None:
        """Find the tensor in a large container, by its ends."""

        def read_at(at: int, length: int) -> bytes:
            return self._read_few(blob.file, blob.offset + at, length)

        try:
            return find_tensor(read_at, blob.length)
        except ArchiveError as error:
            return FoundDamage(blob.file, "", _not_whole(blob, error))
        except OSError as error:
            return FoundDamage(blob.file, "", unreadable(error))

    def _plan_stored(
        self, plan: FilePlan, blob: Blob, numbers: list[int], stored: StoredTensor
    ) -> None:
        """Plan the wanted part of a large payload that was found."""
        begin = blob.offset + stored.payload_at
        end = begin + stored.payload_bytes
        order = storage_order(stored.size, stored.stride)
        widen: _Widen = _as_it_is
        is_own = self._is_checked and not self._checksums.is_known
        if is_own and stored.crc is not None:
            widen = _always(begin, end)
            plan.checks.append(Check(begin, end, stored.crc))
        elif is_own:
            self.unchecked.append(self._tensors[numbers[0]].key)
        for number in numbers:
            read = self._tensors[number]
            if not self._fits(read, stored.size):
                continue
            if order is None:
                plan.add_whole(begin, end, partial(self._put_view, number, stored))
                continue
            plan.add_box(
                begin + stored.offset * stored.dtype.itemsize,
                stored.dtype,
                tuple(stored.size[dim] for dim in order),
                tuple(read.at[dim] for dim in order),
                tuple(read.sizes[dim] for dim in order),
                read.memory.permute(order),
                number,
                widen,
            )

    def _fits(self, read: TensorRead, size: Box) -> bool:
        """Whether a container holds a tensor of the size that the index says."""
        if size == read.chunk:
            return True
        text = (
            f"the container at {read.blob.offset} holds a tensor of size {list(size)}, the index "
            f"asks for {list(read.chunk)}"
        )
        self.damages.append(FoundDamage(read.blob.file, read.key, text))
        return False

    def _put_view(self, number: int, stored: StoredTensor, payload: bytearray) -> None:
        read = self._tensors[number]
        self._touched[number] = 1
        put_view(
            payload, stored.dtype, stored.size, stored.stride, stored.offset, read.at, read.sizes,
            read.memory,
        )  # fmt: skip

    def _open(self, blob: Blob, numbers: list[int], memory: bytearray) -> None:
        """Take what is wanted out of a container that is in memory."""
        view = memoryview(memory)
        first = self._tensors[numbers[0]]
        try:
            stored = _find_in(view, first)
            is_own = self._is_checked and not self._checksums.is_known
            if is_own and not self._is_right(view, stored):
                self.unchecked.append(first.key)
            loaded = None if stored is not None else _load(memory)
        except ArchiveError as error:
            for number in numbers:
                key = self._tensors[number].key
                self.damages.append(FoundDamage(blob.file, key, _not_whole(blob, error)))
            return
        for number in numbers:
            read = self._tensors[number]
            if loaded is not None:
                if self._fits(read, tuple(loaded.shape)):
                    self._touched[number] = 1
                    copy_box(loaded, read.at, read.sizes, read.memory)
            elif stored is not None and self._fits(read, stored.size):
                end = stored.payload_at + stored.payload_bytes
                self._put_view(number, stored, memory[stored.payload_at : end])

    @staticmethod
    def _is_right(view: memoryview, stored: StoredTensor | None) -> bool:
        """Compare a container in memory with its own checksums; False if it has none. Raises
        ArchiveError.
        """
        if stored is None:
            return check_archive(view)
        if stored.crc is None:
            return False
        end = stored.payload_at + stored.payload_bytes
        found = isal_zlib.crc32(view[stored.payload_at : end])
        if found != stored.crc:
            raise ArchiveError(
                f"CRC-32 of its payload is {found:08x}, written was {stored.crc:08x}"
            )
        return True

    # --- objects

    def _plan_object(self, number: int) -> None:
        key, blob = self._objects[number]
        if not self._is_inside(key, blob):
            return
        begin, end = blob.offset, blob.offset + blob.length

        def keep(memory: bytearray) -> None:
            self.contents[number] = data = bytes(memory)
            if not self._is_checked or self._checksums.is_known:
                return
            try:
                # A user's planner may have written anything.
                if not looks_like_an_archive(data) or not check_archive(data):
                    self.unchecked.append(key)
            except ArchiveError as error:
                self.damages.append(FoundDamage(blob.file, key, _not_whole(blob, error)))

        self._plan_of(blob.file).add_whole(begin, end, keep)
        if self._checksums.is_known:
            self._whole_blobs.setdefault(blob.file, {})[blob] = key

    # --- checksums

    def _close(self, plan: FilePlan, is_close: bool) -> None:
        """Settle what to read, and what to compare with the manifest: whole stretches, and the
        containers outside of them.
        """
        file_bytes = self._sizes[plan.name]
        plan.smalls.sort()
        spans = merge(chain(plan.wanted, map(_RANGE, plan.smalls)))
        if spans and self._checksums.is_known and file_bytes - spans[-1][1] <= GAP_BYTES:
            # So that the last stretch is whole.
            spans[-1] = spans[-1][0], file_bytes
        plan.spans = spans
        if not self._is_checked or not self._checksums.is_known:
            return
        stretches = None if is_close else self._checksums.stretches(plan.name)
        covered: list[Range] = []
        for begin, end in spans if stretches is not None else ():
            whole = list(stretches.whole(begin, end, file_bytes)) if stretches else []
            plan.checks += [Check(*each) for each in whole]
            if whole:
                covered.append((whole[0][0], whole[-1][1]))
        starts = [begin for begin, _ in covered]
        smalls = (
            small
            for small in plan.smalls
            if not _is_within(small.begin, small.end, starts, covered)
        )
        apart = {self._tensors[small.read].blob: self._tensors[small.read].key for small in smalls}
        for blob, key in (self._whole_blobs.get(plan.name, {}) | apart).items():
            begin, end = blob.offset, blob.offset + blob.length
            if _is_within(begin, end, starts, covered):
                continue
            if blob.crc < 0:
                self.unchecked.append(key)
            else:
                plan.checks.append(Check(begin, end, blob.crc))


_RANGE: Final = itemgetter(0, 1)


def _is_within(begin: int, end: int, starts: list[int], covered: list[Range]) -> bool:
    """Whether a range lies within one of the covered ranges; `starts` are where these begin."""
    at = bisect_right(starts, begin) - 1
    return at >= 0 and end <= covered[at][1]


def _as_it_is(begin: int, end: int) -> Range:
    return begin, end


def _always(begin: int, end: int) -> Callable[[int, int], Range]:
    return lambda *_: (begin, end)


def _expected(read: TensorRead) -> ContainerTemplate | None:
    """Return the container that a chunk is expected to have; None if its length differs."""
    if prod(read.chunk) * read.dtype.itemsize >= read.blob.length:
        return None
    try:
        around = template(read.chunk, read.dtype)
    except UsageError:
        return None
    return around if around.total_bytes == read.blob.length else None


def _find_in(view: memoryview, read: TensorRead) -> StoredTensor | None:
    """Find the tensor in a container in memory. Raises ArchiveError."""
    around = _expected(read)
    if around is None or view[: len(around.prefix)] != around.prefix:
        return find_tensor(lambda at, length: view[at : at + length], len(view))
    return StoredTensor(
        read.dtype,
        read.chunk,
        row_major(read.chunk),
        0,
        around.payload_at,
        around.payload_bytes,
        int.from_bytes(view[around.crc_at : around.crc_at + 4], "little"),
    )


def _load(memory: bytearray) -> torch.Tensor:
    """Let torch read a tensor of a kind that this module does not know. Raises ArchiveError."""
    try:
        loaded = torch.load(io.BytesIO(memory), map_location="cpu", weights_only=True)
    # torch may raise anything, depending on the archive.
    except Exception as error:
        text = str(error).splitlines()[:1]
        raise ArchiveError(f"{type(error).__name__}: {''.join(text)}") from error
    if not isinstance(loaded, torch.Tensor):
        raise ArchiveError(f"it holds a {type(loaded).__name__}")
    return loaded


def _not_whole(blob: Blob, error: ArchiveError) -> str:
    return f"not a whole torch container at {blob.offset}: {error}"


def unreadable(error: OSError) -> str:
    """Return the text for a file that the system does not read."""
    return f"cannot be read: {str(error.strerror or error).lower()}"
