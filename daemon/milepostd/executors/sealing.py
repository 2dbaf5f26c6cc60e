"""Seals staged images: puts the CRC of each tensor into its container, just ahead of the writer.

Knows the layout table and the image's bytes; nothing of files, saves or messages. A thread of its
own, since reading an image costs a tenth or more of the time that writing it does, and the device
can work meanwhile. The GIL is free while much is read.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from isal import isal_zlib

from milepost.errors import Rejected
from milepost.format.layout import unpack_table
from milepost.memory.arena import Arena
from milepost.storage.blocks import BLOCK_BYTES

SMALL_BYTES: Final = 8 << 10
"""Payloads up to this size are read once more for the CRC of their container, which is faster than
to combine CRCs."""

STRETCH_BYTES: Final = 4 << 20
"""How much is read at a time."""

AHEAD_BYTES: Final = 2 * BLOCK_BYTES
"""How far ahead of the writer: enough for it never to wait, and no burst of work that would take a
core from training."""

_CRC: Final = struct.Struct("<I")


class Containers:
    """The tensors' containers in the images of one arena: what is the same in every save.

    Raises Rejected("arena-invalid") for a table that has a checksum stand outside its container: it
    must never be put where it does not belong.
    """

    def __init__(self, arena: Arena) -> None:
        try:
            self._rows = unpack_table(arena.table)
        except ValueError as error:
            raise invalid(arena, str(error)) from error
        self._order = sorted(range(len(self._rows)), key=lambda row: self._rows[row].blob_at)
        """Rows as they lie in the image."""
        self._heads: list[int] = []
        """CRC of what stands before each payload, once it is known."""
        self.end = 0
        """Where the last one ends."""
        for _, blob, blob_bytes, payload, payload_bytes, crc, central_crc in self._rows:
            payload_end, end = payload + payload_bytes, blob + blob_bytes
            if not (
                blob <= payload
                and payload_end <= crc
                # An empty payload has one checksum field only, and both offsets name it.
                and (crc + _CRC.size <= central_crc or crc == central_crc)
                and central_crc + _CRC.size <= end
            ):
                raise invalid(arena, f"layout names bytes outside the container at {blob}")
            self.end = max(self.end, end)

    def seal(self, image: memoryview, crcs: list[int]) -> Iterator[int]:
        """Put each payload's CRC into its container, from the image's start to its end.

        Yields up to where the image is as it shall be written, every few MiB, at last all of it.
        `crcs` gets the CRCs of the whole containers, one a row of the table; all of them are there
        at the end.
        """
        crc32, combine, put = isal_zlib.crc32, isal_zlib.crc32_combine, _CRC.pack_into
        heads = self._heads or [
            crc32(image[blob:payload]) for _, blob, _, payload, _, _, _ in self._rows
        ]
        crcs[:] = [0] * len(self._rows)
        told = 0
        for row in self._order:
            _, blob, blob_bytes, payload, payload_bytes, crc_at, central_crc_at = self._rows[row]
            payload_end, end = payload + payload_bytes, blob + blob_bytes
            crc, at = 0, payload
            while payload_end - at > STRETCH_BYTES:
                crc = crc32(image[at : at + STRETCH_BYTES], crc)
                at += STRETCH_BYTES
                # The payload's CRC stands behind it.
                yield (told := at)
            crc = crc32(image[at:payload_end], crc)
            put(image, crc_at, crc)
            put(image, central_crc_at, crc)
            if payload_bytes <= SMALL_BYTES:
                crcs[row] = crc32(image[payload:end], heads[row])
            else:
                crcs[row] = crc32(image[payload_end:end], combine(heads[row], crc, payload_bytes))
            if end - told >= STRETCH_BYTES:
                yield (told := end)
        self._heads = heads
        yield len(image)


class Sealing:
    """Seals one image in a thread, while another one writes what is sealed.

    Args:
        containers: of the image's arena.
        image: all that is written; held until `__exit__` returns.
    """

    def __init__(self, containers: Containers, image: memoryview) -> None:
        self._containers = containers
        self._image = image
        self._crcs: list[int] = []
        self._changed = threading.Condition()
        self._sealed = 0
        """Bytes from the image's start that are as they shall be written."""
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
        """Return once all bytes before `end` are sealed. Raises what sealing raised."""
        with self._changed:
            self._wanted = max(self._wanted, end)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._sealed >= end or self._error is not None)
            if self._error is not None:
                raise self._error

    def crcs(self) -> tuple[int, ...]:
        """Return the CRC of each container, in the order of the table, once all are known."""
        self.await_sealed(len(self._image))
        return tuple(self._crcs)

    def _run(self) -> None:
        try:
            for sealed in self._containers.seal(self._image, self._crcs):
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


def invalid(arena: Arena, what: str) -> Rejected:
    return Rejected("arena-invalid", f"arena {arena.path}: {what}")
