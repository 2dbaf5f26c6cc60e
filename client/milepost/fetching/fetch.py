"""Reads what is wanted of a checkpoint's blobs into memory: in file order, in large blocks, with
several threads, and checked on the way.

Owns the passes over the files, the threads and their buffers. The first pass delivers all undamaged
data, and reads nothing twice for a checksum. Two cases are strange: a container is not the expected
one, or a stretch with a wrong checksum holds parts of several blobs. These are read once more, one
by one, and then are either right or named as damage.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import torch

from milepost.concurrency.collector import collector_paused
from milepost.fetching.blocks import BLOCK_BYTES, FileBlock, cut, hand_out
from milepost.fetching.checksums import Check, KnownChecksums
from milepost.fetching.devices import AnyBuffer, Buffers, Devices
from milepost.fetching.files import OpenFiles
from milepost.fetching.filling import BlockFilling
from milepost.fetching.neighbours import Neighbours
from milepost.fetching.planning import FetchPlanner, unreadable
from milepost.fetching.requests import Blob, Fetched, FoundDamage, ObjectRead, TensorRead
from milepost.fetching.tasks import FilePlan
from milepost.format.layout import PAGE_BYTES
from milepost.staging.streams import Streams, default_streams

THREADS_MIN: Final = 3
"""So that one thread waits for the device, another copies, and the device never waits."""

THREADS_MAX: Final = 8


def default_threads() -> int:
    """Return how many threads read at once."""
    return min(THREADS_MAX, max(THREADS_MIN, len(os.sched_getaffinity(0))))


def fetch(
    checkpoint: Path,
    tensors: Sequence[TensorRead],
    objects: Sequence[ObjectRead],
    checksums: KnownChecksums,
    *,
    is_checked: bool = True,
    threads: int | None = None,
    streams_of: Callable[[torch.device], Streams] = default_streams,
    neighbours: Neighbours | None = None,
) -> Fetched:
    """Read boxes of tensors into memory, and objects.

    Args:
        checkpoint: its directory.
        tensors, objects: what to read. The memory of two reads must not overlap.
        checksums: the manifest's; without a manifest, those in the containers are compared.
        is_checked: whether to compare checksums.
        threads: how many threads read; None: depends on the number of processors.
        streams_of: returns the queue of a device.
        neighbours: the ranks with which reads are shared, after `listen`.

    Damage is returned, not raised. Memory that was written before damage was found stays written,
    and is listed as touched. Raises CorruptCheckpoint for a manifest that contradicts itself, and
    torch's exceptions for memory to which it cannot copy.
    """
    files = OpenFiles(checkpoint, neighbours.is_shared) if neighbours else OpenFiles(checkpoint)
    # This makes many small objects, and drops all of them at its end.
    with collector_paused():
        return _Fetch(
            checkpoint, list(tensors), list(objects), checksums, is_checked, threads, streams_of,
            files,
        ).run()  # fmt: skip


class _Fetch:
    """One call of `fetch`."""

    def __init__(
        self,
        checkpoint: Path,
        tensors: list[TensorRead],
        objects: list[ObjectRead],
        checksums: KnownChecksums,
        is_checked: bool,
        threads: int | None,
        streams_of: Callable[[torch.device], Streams],
        files: OpenFiles,
    ) -> None:
        self._checkpoint = checkpoint
        self._tensors = tensors
        self._objects = objects
        self._reads: list[tuple[int, TensorRead | ObjectRead]] = [
            *enumerate(tensors),
            *enumerate(objects),
        ]
        self._checksums = checksums
        self._is_checked = is_checked
        self._threads = default_threads() if threads is None else threads
        self._devices = Devices(streams_of)
        self._files = files
        self._filling = BlockFilling(
            len(tensors), is_checked=is_checked, streams_of=self._devices.streams_of
        )
        self._result = Fetched()
        self._contents: dict[int, bytes] = {}

    def run(self) -> Fetched:
        """See `fetch`."""
        result, filling = self._result, self._filling
        self._devices.open(read.memory.device for read in self._tensors)
        try:
            sizes = self._find_files()
            if not result.damages:
                wrong = self._pass(sizes, range(len(self._tensors)), range(len(self._objects)))
                self._look_again(sizes, wrong)
        finally:
            # After an error, too, no copy may be under way into memory that the caller may free.
            self._devices.wait()
            self._files.close()
        result.touched = [number for number, done in enumerate(filling.touched) if done]
        _bump_versions([self._tensors[number].memory for number in result.touched])
        result.objects = [self._contents.get(n, b"") for n in range(len(self._objects))]
        result.read_bytes = self._files.read_bytes
        return result

    def _find_files(self) -> dict[str, int]:
        """Return the length of each file. A missing file, or one of another length, is damage."""
        sizes: dict[str, int] = {}
        for file in {read.blob.file: None for _, read in self._reads}:
            try:
                sizes[file] = size = os.stat(self._checkpoint / file).st_size
            except OSError as error:
                is_missing = isinstance(error, FileNotFoundError)
                self._damage_all(file, "the file is missing" if is_missing else unreadable(error))
                continue
            written = self._checksums.file_bytes.get(file, size)
            if size != written:
                text = f"{size} bytes long, but {written} were written"
                self._result.damages.append(FoundDamage(file, "", text))
        return sizes

    # --- passes

    def _pass(
        self, sizes: dict[str, int], tensors: Iterable[int], objects: Iterable[int]
    ) -> list[tuple[str, Check]]:
        """Read everything as expected; return the checks that failed."""
        return self._read(sizes, tensors, objects, self._filling.strange.add)

    def _look_again(self, sizes: dict[str, int], wrong: list[tuple[str, Check]]) -> None:
        """Read strange or possibly damaged data anew, container by container."""
        damaged, tensors, objects = set[str](), {*self._filling.strange}, set[int]()
        for file, check in wrong:
            held = self._held_by(file, check)
            keys = {read.key for _, read in held}
            if len(keys) == 1 and all(_is_within(check, read.blob) for _, read in held):
                self._damage(file, check, held[0][1].key)
                damaged |= keys
                continue
            for number, read in held:
                (tensors if isinstance(read, TensorRead) else objects).add(number)
        tensors = {number for number in tensors if self._tensors[number].key not in damaged}
        objects = {number for number in objects if self._objects[number].key not in damaged}
        if tensors or objects:
            for file, check in self._read(sizes, sorted(tensors), sorted(objects), None):
                for key in dict.fromkeys(read.key for _, read in self._held_by(file, check)):
                    self._damage(file, check, key)

    def _read(
        self,
        sizes: dict[str, int],
        tensors: Iterable[int],
        objects: Iterable[int],
        when_strange: Callable[[int], None] | None,
    ) -> list[tuple[str, Check]]:
        planner = FetchPlanner(
            self._tensors,
            self._objects,
            self._checksums,
            sizes,
            self._files.read_few,
            is_checked=self._is_checked,
            touched=self._filling.touched,
        )
        plans = planner.plan(tensors, objects, when_strange)
        # Find files that cannot be read at all before anything is written.
        is_served = not planner.damages
        if is_served:
            blocks = [
                (plan.name, block)
                for _, plan in sorted(plans.items())
                for block in self._blocks(plan)
            ]
            self._serve(blocks)
        self._contents |= planner.contents
        self._result.damages += planner.damages
        self._result.unchecked += dict.fromkeys(planner.unchecked)
        failed = self._files.failed
        return [
            (plan.name, check)
            for plan in plans.values()
            for check in plan.checks
            if plan.name not in failed and is_served and not check.is_right()
        ]

    def _blocks(self, plan: FilePlan) -> list[FileBlock]:
        ranges = list(cut(plan.spans))
        return hand_out(plan, ranges, self._filling.when_small, self._filling.give_element)

    # --- naming damage

    def _held_by(self, file: str, check: Check) -> list[tuple[int, TensorRead | ObjectRead]]:
        """Return the reads, with their numbers, whose blobs overlap a checked range."""
        return [
            (number, read)
            for number, read in self._reads
            if read.blob.file == file
            and read.blob.offset < check.end
            and read.blob.offset + read.blob.length > check.begin
        ]

    def _damage_all(self, file: str, text: str) -> None:
        keys = {read.key: None for _, read in self._reads if read.blob.file == file}
        self._result.damages += [FoundDamage(file, key, text) for key in keys]

    def _damage(self, file: str, check: Check, key: str) -> None:
        text = (
            f"CRC-32 of bytes {check.begin} to {check.end} is {check.found():08x}, written was "
            f"{check.crc:08x}"
        )
        self._result.damages.append(FoundDamage(file, key, text))

    # --- threads

    def _serve(self, blocks: list[tuple[str, FileBlock]]) -> None:
        """Read all blocks. Raises a thread's exception after all threads have ended."""
        self._files.expect(name for name, _ in blocks)
        queue = iter(blocks)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                with torch.no_grad():
                    # A block may begin and end within a page.
                    buffers = self._devices.buffers(BLOCK_BYTES + 2 * PAGE_BYTES)
                    try:
                        while not errors and (task := next(queue, None)) is not None:
                            self._serve_block(*task, buffers)
                    finally:
                        buffers.close()
            except BaseException as error:
                errors.append(error)

        threads = []
        for number in range(1, min(self._threads, len(blocks))):
            thread = threading.Thread(target=work, name=f"milepost-fetch-{number}", daemon=True)
            thread.start()
            threads.append(thread)
        work()
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                # The threads write to the caller's memory, so wait until all have ended.
                except BaseException as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _serve_block(self, name: str, block: FileBlock, buffers: Buffers) -> None:
        """Read one block and serve its tasks."""
        try:
            if name in self._files.failed:
                return
            buffer = buffers.take()
            try:
                self._read_block(name, block, buffer)
            finally:
                buffers.give_back(buffer)
        except OSError as error:
            self._fail(name, block, error)
        finally:
            self._files.let_go(name)

    def _read_block(self, name: str, block: FileBlock, buffer: AnyBuffer) -> None:
        file = self._files.get(name)
        begin = block.begin // PAGE_BYTES * PAGE_BYTES
        skip = block.begin - begin
        is_cached = self._files.is_cached(name, file, block.begin, block.end)
        if not is_cached:
            file.read_past_cache(buffer.view, begin, block.end - begin)
        view = buffer.view[skip : skip + block.end - block.begin]
        self._files.count(block.end - block.begin)
        self._filling.fill(block, view, buffer.address + skip, file if is_cached else None)

    def _fail(self, name: str, block: FileBlock, error: OSError) -> None:
        """Note a file that cannot be read; read nothing more of it."""
        self._files.failed.add(name)
        text = f"bytes {block.begin} to {block.end}: {unreadable(error)}"
        held = self._held_by(name, Check(block.begin, block.end, 0))
        keys = dict.fromkeys(read.key for _, read in held)
        self._result.damages += [FoundDamage(name, key, text) for key in keys or ("",)]


def _is_within(check: Check, blob: Blob) -> bool:
    return blob.offset <= check.begin and check.end <= blob.offset + blob.length


def _bump_versions(tensors: list[torch.Tensor]) -> None:
    """Tell autograd about memory that was written by address, as about any change in place."""
    torch.autograd.graph.increment_version(
        [tensor for tensor in tensors if not tensor.is_inference()]
    )
