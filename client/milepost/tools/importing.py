"""`milepost import`: a torch.save file, safetensors, or a sharded directory of either becomes a
checkpoint, with a manifest. Tensors stream from the file into the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from milepost.errors import UsageError
from milepost.format.manifest import METADATA_NAME
from milepost.format.nesting import Nesting

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
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
    prefix: str = "",
    tied: Sequence[str] = (),
    overwrite: bool = False,
    allow_pickle: bool = False,
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Import:
    """Write the checkpoint `out`, or leave nothing behind.

    Args:
        prefix: put before every key; with `model.`, the checkpoint is that of `{"model": ...}`.
        tied: further names of tensors, each as `lm_head.weight=wte.weight`.
        on_more: called with the number of bytes that will be read in addition.
        on_bytes: called with the number of bytes read since its last call.

    Raises:
        UsageError: the file has neither format, `out` exists, or an entry cannot be stored; names
            it.
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
            keys = _keys(source, tied)
            on_more(sum(source.tensors[k].bytes for k in keys.values() if k in source.tensors))
            written = _write(folder, source, keys, prefix, target, on_bytes)
            return Import(
                source=str(file),
                checkpoint=str(out),
                tensors=sum(key in source.tensors for key in keys.values()),
                objects=len(source.objects),
                bytes=written,
                unchecked=tuple(source.unchecked),
            )
        finally:
            source.close()


def _keys(source: Source, tied: Sequence[str]) -> dict[str, str]:
    """Return the source's key for each name in the checkpoint; the names are without the prefix.
    Raises UsageError.
    """
    keys = {key: key for key in source.paths}
    for each in tied:
        alias, sign, key = each.partition("=")
        if not sign or not alias:
            raise UsageError(
                "usage", f"{each!r} is not NAME=KEY", "such as lm_head.weight=wte.weight"
            )
        if key not in source.tensors:
            raise UsageError("usage", f"there is no tensor {key!r} for {alias!r} to be tied to")
        if alias in keys:
            raise UsageError("usage", f"{alias!r} is there already")
        keys[alias] = key
    return keys


def _write(
    folder: Path,
    source: Source,
    keys: Mapping[str, str],
    prefix: str,
    target: Path,
    on_bytes: Callable[[int], None],
) -> int:
    from milepost.exchange.dcp import write_checkpoint

    source.require_readable(list(source.paths))
    before = tuple(prefix.removesuffix(".").split(".")) if prefix else ()
    names = {name: ".".join((*before, name)) for name in keys}
    paths = {names[name]: (*before, *source.paths.get(name, (name,))) for name in keys}
    nesting = Nesting(
        tuple(((*before, *path), texts, forms) for path, texts, forms in source.nesting.names),
        tuple((*before, *path) for path in source.nesting.empty),
    )
    named = {names[name]: key for name, key in keys.items()}
    return write_checkpoint(folder, source, named, paths, nesting, target, on_bytes)
