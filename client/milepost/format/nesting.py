"""What torch's index does not say about the nesting of a state: dict keys that are not text, and
empty dicts.

Packed as msgpack, once in each rank's offer and once in the manifest. A key is stored in a plain
form, which `state.keys` makes and reads. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgpack
import msgspec

from milepost.format.manifest import MANIFEST_NAME
from milepost.format.opening import opened

StatePath: TypeAlias = tuple[str | int, ...]
"""Where a value is in the nested state, in torch's form: an int is an index into a list."""


class Nesting(msgspec.Struct, frozen=True):
    """What torch's index loses."""

    names: tuple[tuple[StatePath, tuple[str, ...], tuple[Any, ...]], ...] = ()
    """For each dict with keys that are not text: its path, and the keys' texts and plain forms."""
    empty: tuple[StatePath, ...] = ()
    """Paths of empty dicts."""


def pack_nesting(nesting: Nesting) -> bytes:
    """Return the packed form; empty if there is nothing to pack."""
    if not nesting.names and not nesting.empty:
        return b""
    packed: bytes = msgpack.packb((nesting.names, nesting.empty))
    return packed


def unpack_nesting(packed: bytes) -> Nesting:
    """Read back what `pack_nesting` returned. Raises ValueError."""
    if not packed:
        return Nesting()
    names, empty = msgpack.unpackb(packed, use_list=False, strict_map_key=False)
    return msgspec.convert({"names": names, "empty": empty}, Nesting)


def merge_nestings(packed: Iterable[bytes]) -> bytes:
    """Merge what several ranks have packed. If they disagree about a dict, the first rank counts.
    Raises ValueError.
    """
    distinct = list(dict.fromkeys(packed))
    if len(distinct) < 2:
        return distinct[0] if distinct else b""
    names: dict[StatePath, dict[str, Any]] = {}
    empty: dict[StatePath, None] = {}
    for each in map(unpack_nesting, distinct):
        for path, texts, forms in each.names:
            known = names.setdefault(path, {})
            for text, form in zip(texts, forms, strict=True):
                known.setdefault(text, form)
        empty.update(dict.fromkeys(each.empty))
    return pack_nesting(
        Nesting(
            tuple((path, tuple(of), tuple(of.values())) for path, of in names.items()),
            tuple(empty),
        )
    )


def read_nesting(checkpoint: Path) -> Nesting:
    """Return the nesting from a checkpoint's manifest, without reading its columns, which may have
    many MB. Empty if there is no manifest, or an unreadable one, which other code reports.
    """
    try:
        with opened(checkpoint / MANIFEST_NAME) as file:
            return unpack_nesting(next(_values(file, "nesting"), b""))
    except (OSError, ValueError, TypeError, msgpack.UnpackException, msgspec.ValidationError):
        return Nesting()


def _values(file: Any, wanted: str) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(file)
    for _ in range(unpacker.read_map_header()):
        if unpacker.unpack() == wanted:
            yield unpacker.unpack()
        else:
            unpacker.skip()
