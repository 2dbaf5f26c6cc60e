"""`milepost import`: a torch.save file, safetensors, or a sharded directory of either becomes a
checkpoint, with a manifest. Tensors stream from the file into the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from milepost.errors import UsageError
from milepost.format.manifest import METADATA_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from milepost.exchange.source import Source


class Import(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    source: str
    checkpoint: str
    tensors: int
    objects: int
    bytes: int
    """Of the checkpoint's files."""
    unchecked: tuple[str, ...]
    """Keys whose bytes carried no checksum in the source: all those of safetensors."""


def import_file(
    file: Path,
    out: Path,
    *,
    prefix: str,
    overwrite: bool,
    allow_pickle: bool,
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Import:
    """Write the checkpoint `out`, or leave nothing behind.

    Args:
        prefix: put before every key: with `model.`, the checkpoint of `{"model": ...}`.
        on_more: told how many bytes more will be read.
        on_bytes: told how many of them were.

    Raises:
        UsageError: the file is none, `out` is there, or an entry cannot be stored, named.
        LoadFailed: the file needs `allow_pickle`, or cannot be read.
        CorruptCheckpoint: it is damaged.
        StorageError: what the system refused.
    """
    from milepost.exchange.drafts import checkpoint_draft, resolved
    from milepost.exchange.files import measure, open_file

    if file.is_dir() and (file / METADATA_NAME).exists():
        raise UsageError("usage", f"{file} is a checkpoint already")
    target = resolved(out)
    with checkpoint_draft(target, overwrite=overwrite) as folder:
        on_more(measure(file))
        source = open_file(file, allow_pickle=allow_pickle, on_checked=on_bytes)
        try:
            on_more(sum(form.bytes for form in source.tensors.values()))
            written = _write(folder, source, prefix, target, on_bytes)
            return Import(
                source=str(file),
                checkpoint=str(out),
                tensors=len(source.tensors),
                objects=len(source.objects),
                bytes=written,
                unchecked=tuple(source.unchecked),
            )
        finally:
            source.close()


def _write(
    folder: Path, source: Source, prefix: str, target: Path, on_bytes: Callable[[int], None]
) -> int:
    from milepost.exchange.dcp import write_checkpoint
    from milepost.exchange.source import require_readable

    require_readable(source, list(source.paths))
    before = tuple(prefix.removesuffix(".").split(".")) if prefix else ()
    names = {key: ".".join((*before, key)) for key in source.paths}
    paths = {names[key]: (*before, *source.paths[key]) for key in source.paths}
    return write_checkpoint(folder, source, names, paths, target, on_bytes)
