"""The known checksums of a checkpoint, and comparing them with bytes that are read in parts.

A stretch has a CRC of its own, a blob has the CRC of its container. If a whole stretch with a known
CRC is read, that CRC is compared. At the ends of what is read, and in checkpoints from before there
were stretches, the CRCs of blobs are compared. Without a manifest, nothing is known here. No torch,
no files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from isal import isal_zlib

from milepost.errors import CorruptCheckpoint
from milepost.format.manifest import Summary


class Stretches(NamedTuple):
    """The checksums of one file's stretches, from the file's start on."""

    nbytes: int
    crcs: Sequence[int]

    def whole(self, begin: int, end: int, file_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield begin, end and CRC of each stretch that lies within a range."""
        for number in range(-(-begin // self.nbytes), len(self.crcs)):
            at = number * self.nbytes
            until = min(at + self.nbytes, file_bytes)
            if until > end or at >= until:
                return
            yield at, until, self.crcs[number]

    def round_out(self, begin: int, end: int, file_bytes: int) -> tuple[int, int]:
        """Return the whole stretches that a range touches."""
        return (
            begin // self.nbytes * self.nbytes,
            min(-(-end // self.nbytes) * self.nbytes, file_bytes),
        )


class KnownChecksums:
    """What a manifest says about the files of a checkpoint; empty without a manifest.

    Attributes:
        is_known: whether there is a manifest.
        file_bytes: the length of each file when it was written.

    Raises CorruptCheckpoint for a manifest whose columns do not agree.
    """

    def __init__(self, manifest: Summary | None) -> None:
        self.is_known = manifest is not None
        manifest = manifest or Summary()
        files, stretches = manifest.files, manifest.stretches
        if len(files) != len(manifest.file_bytes) or len(stretches) not in (0, len(files)):
            raise CorruptCheckpoint("corrupt", "the manifest's columns do not agree")
        self.file_bytes = dict(zip(files, manifest.file_bytes, strict=True))
        self._stretch_bytes = manifest.stretch_bytes
        self._packed = dict(zip(files, stretches, strict=False))
        self._stretches: dict[str, Stretches | None] = {}

    def stretches(self, file: str) -> Stretches | None:
        """Return the known checksums of a file's stretches. Raises CorruptCheckpoint."""
        if file not in self._stretches:
            self._stretches[file] = self._unpack(file)
        return self._stretches[file]

    def _unpack(self, file: str) -> Stretches | None:
        packed, nbytes = self._packed.get(file, b""), self._stretch_bytes
        if not packed:
            return None
        if nbytes <= 0 or len(packed) != -(-self.file_bytes[file] // nbytes) * 4:
            text = f"the manifest has {len(packed)} bytes of checksums for {file}"
            raise CorruptCheckpoint("corrupt", text)
        return Stretches(nbytes, struct.unpack(f"<{len(packed) // 4}I", packed))


class Check:
    """A range of a file with a known CRC-32, and the CRCs of its parts that were found so far.
    Several threads may add parts, each part once.
    """

    __slots__ = ("_parts", "begin", "crc", "end")

    def __init__(self, begin: int, end: int, crc: int) -> None:
        self.begin = begin
        self.end = end
        self.crc = crc
        self._parts: list[tuple[int, int, int]] = []

    def add(self, begin: int, end: int, crc: int) -> None:
        """Note the CRC of a part."""
        self._parts.append((begin, end, crc))

    def found(self) -> int:
        """Return the CRC of all parts; -1 if one is missing."""
        at, found = self.begin, 0
        for begin, end, crc in sorted(self._parts):
            if begin != at:
                return -1
            found = isal_zlib.crc32_combine(found, crc, end - begin)
            at = end
        return found if at == self.end else -1

    def is_right(self) -> bool:
        """Whether the bytes are what was written. Only when all parts were added."""
        return self.found() == self.crc
