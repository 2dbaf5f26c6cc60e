"""`milepost export`: a checkpoint becomes one torch.save file, or safetensors as Hugging Face lays
them out. Reads every byte once (tied weights twice), compares checksums, holds a few blocks.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from milepost.errors import UsageError, listed
from milepost.storage.claims import reading
from milepost.storage.root import Root
from milepost.tools.listing import require_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from milepost.exchange.checkpoint import CheckpointSource
    from milepost.exchange.source import Source

TORCH: Final = "torch"
SAFETENSORS: Final = "safetensors"

MAX_SHARD: Final = "5GB"
"""Default of `--max-shard-size`, as in huggingface_hub."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """What was written."""

    checkpoint: str
    out: str
    files: tuple[str, ...]
    """Paths of the files, the index last."""
    tensors: int
    bytes: int
    """Of the tensors that were written."""
    objects: int
    left_out: tuple[str, ...]
    """Keys of the objects that were not written."""
    tied: dict[str, str]
    """For each name that was not written, the name under which the same tensor was written."""
    unchecked: tuple[str, ...]
    """Keys whose bytes carry no checksum."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to export.

    prefix: export only keys with this prefix, and remove it; a dot is added if it has none.
    """

    to: str
    prefix: str = ""
    max_shard_bytes: int = 5_000_000_000
    tensors_only: bool = False
    tied_copies: bool = False
    overwrite: bool = False
    allow_pickle: bool = False


def size_of(text: str) -> int:
    """Return the bytes of a size such as `500MB` (powers of 1,000) or `2GiB` (of 1,024). Raises
    UsageError.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError("usage", f"{text!r} is not a size", "write 500MB, 5GB or 2GiB")
    unit = (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ")
    size = int(float(found[1]) * unit)
    if size < 1:
        raise UsageError("usage", f"{text!r} is not a size above 0", "write 500MB, 5GB or 2GiB")
    return size


def export(
    checkpoint: Path,
    out: Path,
    options: Options,
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Export:
    """Write `out`, or leave nothing behind.

    Args:
        on_more: called with the number of bytes that will be read or written in addition.
        on_bytes: called with the number of bytes done since its last call.

    Raises:
        UsageError: `out` exists, or the target format cannot hold something; names it.
        LoadFailed: this is not a checkpoint, or an object is not plain data.
        CorruptCheckpoint: damage; names file and key.
        StorageError: what the system refused.
    """
    from milepost.exchange.checkpoint import CheckpointSource

    if options.to not in (TORCH, SAFETENSORS):
        raise UsageError("usage", f"cannot export to {options.to!r}", "--to torch or safetensors")
    path = require_directory(checkpoint).resolve()
    # A name like `latest` is resolved: retention has to know which checkpoint is being read.
    with reading(Root(path.parent), path.name):
        source = CheckpointSource(path, allow_pickle=options.allow_pickle)
        try:
            return _export(source, checkpoint, out, options, on_more, on_bytes)
        finally:
            source.close()


def _export(
    source: CheckpointSource,
    checkpoint: Path,
    out: Path,
    options: Options,
    on_more: Callable[[int], None],
    on_bytes: Callable[[int], None],
) -> Export:
    from milepost.exchange.drafts import resolved

    names = _names(source, checkpoint, options.prefix)
    source.require_readable(list(names))
    tensors = [key for key in names if key in source.tensors]
    objects = [key for key in names if key not in source.tensors]
    target = resolved(out)
    on_more(sum(source.tensors[key].bytes for key in tensors))
    tied: dict[str, str] = {}
    if options.to == TORCH:
        left_out = objects if options.tensors_only else []
        files = _write_torch(source, names, set(left_out), target, options, on_bytes)
    else:
        left_out = _left_out(objects, options)
        tied, files = _write_safetensors(
            source, tensors, names, target, options, (on_more, on_bytes)
        )
    written = [key for key in tensors if key not in tied]
    return Export(
        checkpoint=str(checkpoint),
        out=str(out),
        files=tuple(map(str, files)),
        tensors=len(written),
        bytes=sum(source.tensors[key].bytes for key in written),
        objects=len(objects) - len(left_out),
        left_out=tuple(names[key] for key in left_out),
        tied={names[alias]: names[kept] for alias, kept in tied.items()},
        unchecked=tuple(source.unchecked),
    )


def _names(source: Source, checkpoint: Path, prefix: str) -> dict[str, str]:
    """Return for each chosen key its name without the prefix, in the order of the state."""
    start = _start(prefix)
    names = {key: key[len(start) :] for key in source.paths if key.startswith(start)}
    if start and not names:
        tops = sorted({key.partition(".")[0] for key in source.paths})
        raise UsageError(
            "usage",
            f"no key of {checkpoint} begins with {start!r}",
            f"its keys begin with {listed(tops)}",
        )
    return names


def _start(prefix: str) -> str:
    """Return the prefix of the chosen keys."""
    return f"{prefix.removesuffix('.')}." if prefix else ""


def _left_out(objects: Sequence[str], options: Options) -> list[str]:
    """Return the objects, which safetensors cannot hold. Raises UsageError unless the caller chose
    what to export.
    """
    if objects and not options.tensors_only and not options.prefix:
        raise UsageError(
            "usage",
            f"safetensors holds tensors only, and {len(objects)} entries are objects: "
            f"{listed(objects)}",
            "--prefix model. takes the model alone, --tensors-only leaves objects out",
        )
    return list(objects)


def _write_torch(
    source: CheckpointSource,
    names: Mapping[str, str],
    left_out: set[str],
    target: Path,
    options: Options,
    on_bytes: Callable[[int], None],
) -> list[Path]:
    from milepost.exchange.drafts import file_draft
    from milepost.exchange.nesting import Step, nested, steps_of, without_prefix
    from milepost.exchange.torch_archive import write_archive
    from milepost.reading.nesting import SavedNesting

    saved = SavedNesting(source.checkpoint)
    chosen = [key for key in names if key not in left_out]
    start = _start(options.prefix)
    steps = {key: without_prefix(steps_of(source.paths[key], saved), start) for key in chosen}
    empty = [without_prefix(steps_of(path, saved), start) for path in saved.empty()]
    with file_draft(target, overwrite=options.overwrite) as path:
        objects = {key: source.value(key) for key in chosen if key not in source.tensors}

        def nest(tensors: Mapping[str, Any]) -> Any:
            # In the order of the state.
            values = {key: tensors[key] if key in tensors else objects[key] for key in chosen}
            known = {key: found or (Step(names[key], False),) for key, found in steps.items()}
            return nested(values, known, filter(None, empty))

        write_archive(
            path,
            source,
            {key: source.tensors[key] for key in chosen if key in source.tensors},
            nest,
            on_bytes,
        )
    return [target]


def _write_safetensors(
    source: Source,
    tensors: Sequence[str],
    names: Mapping[str, str],
    target: Path,
    options: Options,
    progress: tuple[Callable[[int], None], Callable[[int], None]],
) -> tuple[dict[str, str], list[Path]]:
    """Write the shards. Returns the tied tensors, by alias, and the files."""
    from milepost.exchange.drafts import file_draft, folder_draft
    from milepost.exchange.hugging_face import is_own, split, write_file, write_folder
    from milepost.exchange.safetensors import require_dtypes
    from milepost.exchange.ties import tied_to

    on_more, on_bytes = progress
    require_dtypes({names[key]: source.tensors[key] for key in tensors})

    def find() -> tuple[dict[str, str], list[list[str]]]:
        tied = {} if options.tied_copies else tied_to(source, tensors, on_more, on_bytes)
        on_more(-sum(source.tensors[alias].bytes for alias in tied))
        kept = [key for key in tensors if key not in tied]
        return tied, split(kept, source.tensors, options.max_shard_bytes)

    if target.suffix == ".safetensors":
        with file_draft(target, overwrite=options.overwrite) as path:
            tied, shards = find()
            if len(shards) > 1:
                raise UsageError(
                    "usage",
                    f"{target} would be larger than {options.max_shard_bytes} bytes",
                    "name a directory, which holds several files, or raise --max-shard-size",
                )
            write_file(path, source, shards[0], names, tied, on_bytes)
        return tied, [target]
    with folder_draft(target, overwrite=options.overwrite, is_replaced=is_own) as folder:
        tied, shards = find()
        files = write_folder(folder, source, shards, names, tied, on_bytes)
    return tied, [target / file for file in files]
