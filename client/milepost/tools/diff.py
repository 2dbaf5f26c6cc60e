"""`milepost diff`: do two checkpoints hold the same? Either may also be a file that `milepost
import` reads.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from milepost.errors import UsageError
from milepost.format.manifest import METADATA_NAME
from milepost.storage.claims import reading
from milepost.storage.root import Root

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from milepost.exchange.source import Source


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A key that only one side has."""

    key: str
    dtype: str
    """Empty for an object."""
    size: tuple[int, ...]


class FormDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A key that differs in form: another shape or dtype, or an object on one side."""

    key: str
    a: Entry
    b: Entry


class ValueDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the same shape and dtype with other elements, or another object."""

    key: str
    crc_a: int
    """CRC-32 of all elements, contiguous and row-major; -1 for objects."""
    crc_b: int
    elements: int
    """Number of elements; 0 for objects."""
    differing: int
    """How many of them differ, by their bytes."""
    largest: float | None
    """Largest difference of two elements; null where one of them is not a number, and for
    objects."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What differs."""

    a: str
    b: str
    equal: bool
    same: int
    """Keys with the same form and value."""
    only_in_a: tuple[Entry, ...]
    only_in_b: tuple[Entry, ...]
    forms: tuple[FormDifference, ...]
    values: tuple[ValueDifference, ...]
    unread: int
    """Number of keys that count as equal only by the checksums of both manifests."""


def diff(
    a: Path,
    b: Path,
    *,
    quick: bool,
    allow_pickle: bool,
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Comparison:
    """Compare keys, shapes, dtypes and every byte.

    Args:
        quick: if both manifests list a tensor in the same shards with the same checksums, count it
            as equal without reading it.
        on_more: called with the number of bytes that will be read in addition.
        on_bytes: called with the number of bytes read since its last call.

    Raises:
        UsageError: one of them is neither a checkpoint nor such a file.
        LoadFailed, CorruptCheckpoint: one of them cannot be read, or is damaged.
    """
    with ExitStack() as stack:
        sources = [_open(path, allow_pickle, stack, on_more, on_bytes) for path in (a, b)]
        return _compare((str(a), str(b)), sources[0], sources[1], quick, on_more, on_bytes)


def _open(
    path: Path,
    allow_pickle: bool,
    stack: ExitStack,
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Source:
    from milepost.exchange.checkpoint import CheckpointSource
    from milepost.exchange.files import measure, open_file

    source: Source
    if (path / METADATA_NAME).exists():
        folder = path.resolve()
        stack.enter_context(reading(Root(folder.parent), folder.name))
        source = CheckpointSource(folder, allow_pickle=allow_pickle)
    else:
        on_more(measure(path))
        try:
            source = open_file(path, allow_pickle=allow_pickle, on_checked=on_bytes)
        except UsageError as error:
            if path.is_dir():
                raise UsageError(
                    "usage", f"{path} is not a checkpoint: it has no {METADATA_NAME}", error.message
                ) from error
            raise
    stack.callback(source.close)
    return source


def _compare(
    names: tuple[str, str],
    a: Source,
    b: Source,
    quick: bool,
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Comparison:
    from milepost.exchange.comparison import compare_tensors, equal_objects, same_by_manifests

    shared = [key for key in a.paths if key in b.paths]
    a.require_readable(shared)
    b.require_readable(shared)
    entries = {key: (_entry(a, key), _entry(b, key)) for key in shared}
    forms = {key: pair for key, pair in entries.items() if pair[0] != pair[1]}
    alike = [key for key in shared if key not in forms]
    unread = {key for key in alike if quick and same_by_manifests(a, b, key)}
    to_read = [key for key in alike if key not in unread]
    on_more(2 * sum(a.tensors[key].bytes for key in to_read if key in a.tensors))
    values = []
    for key in to_read:
        if key in a.tensors:
            found = compare_tensors(a, b, key, lambda count: on_bytes(2 * count))
            if found is not None:
                elements = a.tensors[key].elements
                values.append(ValueDifference(key=key, elements=elements, **found._asdict()))
        elif not equal_objects(a, b, key):
            values.append(
                ValueDifference(key=key, crc_a=-1, crc_b=-1, elements=0, differing=0, largest=None)
            )
    only_in_a = tuple(_entry(a, key) for key in a.paths if key not in b.paths)
    only_in_b = tuple(_entry(b, key) for key in b.paths if key not in a.paths)
    return Comparison(
        a=names[0],
        b=names[1],
        equal=not (only_in_a or only_in_b or forms or values),
        same=len(alike) - len(values),
        only_in_a=only_in_a,
        only_in_b=only_in_b,
        forms=tuple(FormDifference(key=key, a=pair[0], b=pair[1]) for key, pair in forms.items()),
        values=tuple(values),
        unread=len(unread),
    )


def _entry(source: Source, key: str) -> Entry:
    form = source.tensors.get(key)
    if form is None:
        return Entry(key=key, dtype="", size=())
    return Entry(key=key, dtype=form.name, size=form.size)
