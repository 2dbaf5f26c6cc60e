"""Checkpoints that stock torch writes, and loading them by milepost on one rank or on several that
are threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from isal import isal_zlib
from torch.distributed import HashStore
from torch.distributed.checkpoint.state_dict_saver import save

from milepost.dcp_format.index import read_metadata
from milepost.format.manifest import MANIFEST_NAME, METADATA_NAME, Manifest, encode_manifest
from milepost.link.rendezvous import Group
from milepost.reading.restore import LoadOptions, LoadReport, load_checkpoint

T = TypeVar("T")

ALONE = Group(0, 1, None)

WAIT_S = 20.0


def stock_save(path: Path, state: Mapping[Any, Any]) -> Path:
    """Save with stock torch on one rank."""
    save(dict(state), checkpoint_id=path, no_dist=True)
    return path


def adopt(checkpoint: Path, step: int, save_id: str = "1-1", nesting: bytes = b"") -> None:
    """Write the manifest of a checkpoint, as if milepost had written it."""
    places = [
        (index.fqn, info.relative_path, info.offset, info.length)
        for index, info in read_metadata(checkpoint).storage_data.items()
    ]
    files = sorted({file for _, file, _, _ in places})
    content = {file: (checkpoint / file).read_bytes() for file in files}
    manifest = Manifest(
        job="a-job",
        save_id=save_id,
        step=step,
        world=1,
        torch_version="2.13.0",
        committed_at_ms=1_700_000_000_000,
        nesting=nesting,
        files=tuple(files),
        file_bytes=tuple(len(content[file]) for file in files),
        keys=tuple(key for key, _, _, _ in places),
        files_of=tuple(files.index(file) for _, file, _, _ in places),
        offsets=tuple(offset for _, _, offset, _ in places),
        lengths=tuple(length for _, _, _, length in places),
        crcs=tuple(
            isal_zlib.crc32(content[file][offset : offset + length])
            for _, file, offset, length in places
        ),
        index_crc=isal_zlib.crc32((checkpoint / METADATA_NAME).read_bytes()),
    )
    (checkpoint / MANIFEST_NAME).write_bytes(encode_manifest(manifest))


def load(
    path: Path, state: Any, group: Group = ALONE, topic: str = "load/1", **options: bool
) -> LoadReport:
    """Load as `Checkpointer.load` does."""
    return load_checkpoint(
        path,
        7,
        state,
        LoadOptions(**options),
        group=group,
        topic=topic,
        timeout_s=WAIT_S,
    )


def on_ranks(world: int, act: Callable[[Group], T]) -> list[T | BaseException]:
    """Return what `act` returned or raised on each rank."""
    store = HashStore()

    def run(rank: int) -> T | BaseException:
        try:
            return act(Group(rank, world, store))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as ranks:
        return list(ranks.map(run, range(world)))
