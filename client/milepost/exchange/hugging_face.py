"""Writing a source as Hugging Face lays a model out: safetensors in shards, and their index.

One tensor at a time goes through memory. Sources: huggingface_hub, `serialization/_torch.py` and
`constants.py`; https://github.com/huggingface/safetensors, README.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from milepost.exchange.drafts import Draft
from milepost.exchange.safetensors import aligned_first, encode_header
from milepost.storage.durable import create_file
from milepost.storage.refusals import reported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from milepost.exchange.source import Source, TensorForm

SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

_OWN: Final = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def is_own(name: str) -> bool:
    """Whether a file's name belongs to the layout, so that loaders would take it for this
    model's.
    """
    return _OWN.fullmatch(name) is not None


def split(
    keys: Iterable[str], forms: Mapping[str, TensorForm], max_shard_bytes: int
) -> list[list[str]]:
    """Divide tensors among shards, in order. A shard exceeds the limit only if a single tensor
    does.
    """
    shards: list[list[str]] = [[]]
    size = 0
    for key in keys:
        if shards[-1] and size + forms[key].bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += forms[key].bytes
    return shards


def write_file(
    path: Path,
    source: Source,
    keys: Sequence[str],
    names: Mapping[str, str],
    tied: Mapping[str, str],
    on_bytes: Callable[[int], None],
) -> None:
    """Write a new safetensors file and sync it.

    Args:
        keys: keys of the source's tensors.
        names: the name of each key in the file; aliases, too.
        tied: for each alias, the key that it stands for. The file's metadata names the aliases of
            its keys, as `safetensors.torch.save_model` does.
        on_bytes: called with the number of the tensors' bytes written since its last call.

    Raises: StorageError, and whatever reading the source raises.
    """
    ordered = aligned_first(keys, source.tensors)
    forms = {names[key]: source.tensors[key] for key in ordered}
    aliases = {names[alias]: names[kept] for alias, kept in tied.items() if kept in set(keys)}
    header = encode_header(forms, {"format": "pt"} | aliases)
    with Draft(path, len(header) + sum(form.bytes for form in forms.values())) as draft:
        draft.write(header)
        for key in ordered:
            for block in source.blocks(key):
                draft.write(block)
                on_bytes(len(block))


def write_folder(
    folder: Path,
    source: Source,
    shards: Sequence[Sequence[str]],
    names: Mapping[str, str],
    tied: Mapping[str, str],
    on_bytes: Callable[[int], None],
) -> list[str]:
    """Write the shards and, if there are several, their index into an empty directory; return the
    names of the files. See `write_file`.
    """
    count = len(shards)
    files = [SINGLE_NAME]
    if count > 1:
        files = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for file, keys in zip(files, shards, strict=True):
        write_file(folder / file, source, keys, names, tied, on_bytes)
    if count == 1:
        return files
    index = {
        "metadata": {
            "total_size": sum(source.tensors[key].bytes for keys in shards for key in keys)
        },
        "weight_map": {
            names[key]: file for file, keys in zip(files, shards, strict=True) for key in keys
        },
    }
    text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    with reported("write", folder / INDEX_NAME):
        create_file(folder / INDEX_NAME, text.encode())
    return [*files, INDEX_NAME]
