"""The order of checkpoints and the save that wrote each, read from a manifest's beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgpack
import msgspec

from milepost.errors import CorruptCheckpoint
from milepost.format.manifest import MANIFEST_NAME, decode_manifest
from milepost.format.opening import IrregularFile, opened


class Heading(msgspec.Struct, frozen=True):
    """The few fields at a manifest's beginning by which checkpoints are ordered; empty if there is
    no manifest.
    """

    save_id: str = ""
    step: int = -1
    job: str = ""


_HEAD_BYTES: Final = 16 << 10


def read_heading(checkpoint: Path) -> Heading:
    """Read job, save id and step without the columns, which may have many MB.

    Reads the whole manifest if these fields are not among its first. Raises CorruptCheckpoint,
    OSError.
    """
    try:
        with opened(checkpoint / MANIFEST_NAME) as file:
            data = file.read(_HEAD_BYTES)
            found: dict[str, object] = {}
            unpacker = msgpack.Unpacker()
            unpacker.feed(data)
            try:
                for _ in range(unpacker.read_map_header()):
                    key = unpacker.unpack()
                    found[key] = unpacker.unpack()
                    if found.keys() >= {"job", "save_id", "step"}:
                        return msgspec.convert(found, Heading)
            except (ValueError, TypeError, msgpack.UnpackException, msgspec.ValidationError):
                pass  # Torn, in another order, or damaged: the full decoder tells which.
            manifest = decode_manifest(data + file.read())
    except FileNotFoundError:
        return Heading()
    except (IsADirectoryError, IrregularFile) as error:
        text = f"{checkpoint / MANIFEST_NAME}: {error.strerror}"
        raise CorruptCheckpoint("corrupt", text) from error
    return Heading(manifest.save_id, manifest.step, manifest.job)


def order_of(save_id: str, step: int) -> tuple[int, int, int]:
    """Return (attempt, step, count of the save): the greatest is the newest."""
    attempt, _, count = save_id.partition("-")
    return (
        int(attempt) if attempt.isdecimal() else 0,
        step,
        int(count) if count.isdecimal() else 0,
    )
