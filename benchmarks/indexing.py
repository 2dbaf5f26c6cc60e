"""A load of one rank's part of a checkpoint of many ranks, up to its first data read.

`python -m benchmarks.indexing CHECKPOINT RANK RANKS TENSORS`, of a checkpoint that `planning` has
written; prints an `IndexRead`. The process group is torch's fake one, which has as many ranks as
one likes.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import milepost
from benchmarks.loads import forget_peak, memory_bytes
from benchmarks.planning import offer_of
from benchmarks.results import IndexRead
from milepost.wire.offers import Kind, Offer

DATA_SUFFIX: Final = ".distcp"


def template_of(offer: Offer, ranks: int) -> dict[str, Any]:
    """Return a state that asks for what a rank has offered."""
    mesh = init_device_mesh("cpu", (ranks,))
    state: dict[str, Any] = {}
    for key, kind, sizes in zip(offer.keys, offer.kinds, offer.sizes, strict=True):
        *path, name = key.split(".")
        inner = state
        for part in path:
            inner = inner.setdefault(part, {})
        local = torch.zeros(sizes)
        inner[name] = DTensor.from_local(local, mesh, [Shard(0)]) if kind == Kind.SHARD else local
    return state


class FirstRead:
    """Notes when this process first opens a data file.

    Attributes:
        at: wall clock and processor time then.
    """

    def __init__(self) -> None:
        self.at: tuple[float, float] | None = None
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.at is None and str(arguments[0]).endswith(DATA_SUFFIX):
            self.at = time.perf_counter(), time.process_time()


def read(checkpoint: Path, rank: int, ranks: int, tensors: int) -> IndexRead:
    """Measure it."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    offer = offer_of(rank, ranks, tensors)
    state = template_of(offer, ranks)
    first = FirstRead()
    forget_peak()
    before_bytes = memory_bytes("VmRSS")
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    # The data files hold nothing but zeros.
    with contextlib.suppress(milepost.CorruptCheckpoint):
        milepost.load(checkpoint, state, no_dist=True)
    grown_bytes = memory_bytes("VmHWM") - before_bytes
    if first.at is None:
        raise RuntimeError("the load has not come to its first read")
    stock_s = time.perf_counter()
    FileSystemReader(checkpoint).read_metadata()
    stock_s = time.perf_counter() - stock_s
    shards = sum(kind == Kind.SHARD for kind in offer.kinds)
    return IndexRead(
        ranks=ranks,
        tensors=tensors,
        chunks=shards * ranks + tensors - shards,
        read_s=first.at[0] - began_s,
        cpu_s=first.at[1] - began_cpu_s,
        memory_bytes=grown_bytes,
        stock_s=stock_s,
    )


def main() -> None:
    checkpoint, *numbers = sys.argv[1:]
    sys.stdout.buffer.write(msgspec.json.encode(read(Path(checkpoint), *map(int, numbers))))


if __name__ == "__main__":
    main()
