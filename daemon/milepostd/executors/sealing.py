"""Seals staged images: puts the CRC of each tensor into its container, just ahead of the writer.
Collects the checksums for the manifest on the way.

Knows the layout table and the image's bytes, nothing of files, saves or messages. It runs in a
thread of its own: to read an image takes a tenth or more of the time to write it, and the device
can work meanwhile. The GIL is free during large reads.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

from isal import isal_zlib

from milepost.errors import Rejected
from milepost.format.layout import unpack_table
from milepost.format.manifest import STRETCH_BYTES
from milepost.memory.arena import Arena
from milepost.storage.blocks import BLOCK_BYTES

SMALL_BYTES: Final = 8 << 10
"""Payloads up to this size are read a second time for the CRC of their container: that is faster
than to combine CRCs."""

STEP_BYTES: Final = 4 << 20
"""How much is sealed before the writer is told."""

AHEAD_BYTES: Final = 2 * BLOCK_BYTES
"""How far to seal ahead of the writer: so far that the writer never waits, and no farther, since a
burst of work would take a core from training."""

_CRC: Final = struct.Struct("<I")


@dataclass(slots=True)
class ImageChecksums:
    """The CRCs of one image. Complete once the whole image is sealed."""

    containers: list[int] = field(default_factory=list)
    """Of the whole containers, in the order of the table's rows."""
    stretches: list[int] = field(default_factory=list)
    """Of each `STRETCH_BYTES` of the image; the last one may be shorter."""


class Containers:
    """The tensors' containers in the images of one arena: what is the same in all saves.

    Raises Rejected("arena-invalid") if the table places a checksum outside its container: it would
    overwrite other bytes.
    """

    def __init__(self, arena: Arena) -> None:
        try:
            self._rows = unpack_table(arena.table)
        except ValueError as error:
            raise invalid_arena(arena, str(error)) from error
        self._order = sorted(range(len(self._rows)), key=lambda row: self._rows[row].blob_at)
        """The rows' indices in the order in which they lie in the image."""
        self._heads: list[int] = []
        """CRC of the bytes before each payload; empty until the first image is sealed."""
        self.end = 0
        """Where the last container ends."""
        for _, blob, blob_bytes, payload, payload_bytes, crc, central_crc in self._rows:
            payload_end, end = payload + payload_bytes, blob + blob_bytes
            if not (
                blob <= payload
                and payload_end <= crc
                # An empty payload has one checksum field only, and both offsets name it.
                and (crc + _CRC.size <= central_crc or crc == central_crc)
                and central_crc + _CRC.size <= end
            ):
                raise invalid_arena(arena, f"layout names bytes outside the container at {blob}")
            self.end = max(self.end, end)

    def seal(self, image: memoryview, sums: ImageChecksums) -> Iterator[int]:
        """Put each payload's CRC into its container, from the image's start to its end.

        Yields every few MiB how many bytes from the start are ready to be written; in the end, all.
        Fills `sums` on the way.
        """
        crc32, combine, put = isal_zlib.crc32, isal_zlib.crc32_combine, _CRC.pack_into
        heads = self._heads or [
            crc32(image[blob:payload]) for _, blob, _, payload, _, _, _ in self._rows
        ]
        crcs = sums.containers
        crcs[:] = [0] * len(self._rows)
        known: dict[int, int] = {}
        told = 0
        for row in self._order:
            _, blob, blob_bytes, payload, payload_bytes, crc_at, central_crc_at = self._rows[row]
            payload_end, end = payload + payload_bytes, blob + blob_bytes
            crc, at = 0, payload
            while at < payload_end:
                begin, at = at, min((at // STRETCH_BYTES + 1) * STRETCH_BYTES, payload_end)
                part = crc32(image[begin:at])
                crc = combine(crc, part, at - begin) if begin > payload else part
                if at - begin == STRETCH_BYTES:
                    known[begin] = part
                # Up to here the bytes are final: the payload's own CRC comes after the payload.
                if at < payload_end and at - told >= STEP_BYTES:
                    yield (told := at)
            put(image, crc_at, crc)
            put(image, central_crc_at, crc)
            if payload_bytes <= SMALL_BYTES:
                crcs[row] = crc32(image[payload:end], heads[row])
            else:
                crcs[row] = crc32(image[payload_end:end], combine(heads[row], crc, payload_bytes))
            _add_stretches(sums.stretches, image, end, known)
            if end - told >= STEP_BYTES:
                yield (told := end)
        self._heads = heads
        _add_stretches(sums.stretches, image, len(image), known)
        if len(image) % STRETCH_BYTES:
            last = len(sums.stretches) * STRETCH_BYTES
            sums.stretches.append(crc32(image[last:]))
        yield len(image)


def _add_stretches(
    stretches: list[int], image: memoryview, end: int, known: dict[int, int]
) -> None:
    """Append the CRCs of all whole stretches before `end`. `known` has some of them already, by
    where they begin.
    """
    for at in range(len(stretches) * STRETCH_BYTES, end - STRETCH_BYTES + 1, STRETCH_BYTES):
        crc = known.pop(at, None)
        stretches.append(isal_zlib.crc32(image[at : at + STRETCH_BYTES]) if crc is None else crc)


class Sealing:
    """Seals one image in a thread, while another thread writes what is sealed.

    Args:
        containers: of the image's arena.
        image: all bytes of the file; used until `__exit__` returns.
    """

    def __init__(self, containers: Containers, image: memoryview) -> None:
        self._containers = containers
        self._image = image
        self._sums = ImageChecksums()
        self._changed = threading.Condition()
        self._sealed = 0
        """How many bytes from the image's start are ready to be written."""
        self._wanted = 0
        self._is_stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="milepostd-sealer", daemon=True)

    def __enter__(self) -> Sealing:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._thread.join()

    def await_sealed(self, end: int) -> None:
        """Wait until all bytes before `end` are sealed. Raises what sealing raised."""
        with self._changed:
            self._wanted = max(self._wanted, end)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._sealed >= end or self._error is not None)
            if self._error is not None:
                raise self._error

    def checksums(self) -> ImageChecksums:
        """Wait until the whole image is sealed; return its checksums."""
        self.await_sealed(len(self._image))
        return self._sums

    def _run(self) -> None:
        try:
            for sealed in self._containers.seal(self._image, self._sums):
                with self._changed:
                    self._sealed = sealed
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: self._is_stopped or self._sealed < self._wanted + AHEAD_BYTES
                    )
                    if self._is_stopped:
                        return
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


def invalid_arena(arena: Arena, what: str) -> Rejected:
    return Rejected("arena-invalid", f"arena {arena.path}: {what}")
