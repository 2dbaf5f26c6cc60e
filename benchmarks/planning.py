"""Planning for many ranks: the real coordinator, and the real child process beside it.

One process plays all ranks: their offers, and later their manifest fragments and (sparse) data
files. Nine in ten tensors are sharded over all ranks, the rest are replicas.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from benchmarks.coordinator import RANKS_A_NODE, Coordinator
from benchmarks.results import Planned
from milepost.format.layout import PAGE_BYTES, align, place
from milepost.format.manifest import (
    FRAGMENT_PREFIX,
    STRETCH_BYTES,
    Fragment,
    FragmentFile,
    encode_fragment,
    pack_crcs,
)
from milepost.storage.root import Root
from milepost.wire.messages import RankReport, SaveRef, WrittenFile
from milepost.wire.offers import Kind, Offer, encode_offer, unpack_assigned
from milepostd.planner.frames import (
    FRAME_HEADER,
    AnyAnswer,
    AnyRequest,
    IndexReady,
    IndexWanted,
    PlanReady,
    PlanWanted,
    RequestFailed,
    Warm,
    decode_body,
    encode_frame,
)

JOB: Final = "planning"
COLUMNS: Final = 1024
CONTAINER_BYTES: Final = 4 * COLUMNS + 1536
REPLICA_EVERY: Final = 10
"""One tensor in so many is a replica."""


def offer_of(rank: int, ranks: int, tensors: int) -> Offer:
    """Return what a rank offers: one row of each sharded tensor, and every replica."""
    kinds = bytes(
        Kind.TENSOR if item % REPLICA_EVERY == 0 else Kind.SHARD for item in range(tensors)
    )
    is_shard = [kind == Kind.SHARD for kind in kinds]
    keys = tuple(f"model.layers.{item // 12}.part{item % 12}.weight" for item in range(tensors))
    return Offer(
        keys=keys,
        kinds=kinds,
        dtypes=("float32",) * tensors,
        global_sizes=tuple((ranks if shard else 1, COLUMNS) for shard in is_shard),
        offsets=tuple((rank if shard else 0, 0) for shard in is_shard),
        sizes=((1, COLUMNS),) * tensors,
        container_bytes=(CONTAINER_BYTES,) * tensors,
        requires_grad=bytes(tensors),
        pinned=bytes(tensors),
        digests=(-1,) * tensors,
        paths=tuple(tuple(key.split(".")) for key in keys),
    )


def plan(
    folder: Path, ranks: int, tensors: int, then: Callable[[Path], object] | None = None
) -> Planned:
    """Plan for so many ranks and index what they are said to have written; below `folder`, which is
    made and deleted.

    then: called with the checkpoint's directory when all is written; the planner has ended.
    """
    root = Root(folder / "root")
    root.prepare()
    reports = tuple(
        RankReport(
            rank, fingerprint="structure", offer=encode_offer(offer_of(rank, ranks, tensors))
        )
        for rank in range(ranks)
    )
    save = SaveRef(JOB, "1-1", 1, "step_1")
    before_bytes = _memory_bytes(os.getpid(), "VmRSS")
    coordinator = Coordinator(JOB, str(root.path), ranks)
    take = coordinator.offer(save, reports)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "milepostd.planner.child", str(folder / "plans"), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        ask = _Asking(child)
        ask(Warm(call=0))
        began_s = time.perf_counter()
        made = ask(PlanWanted(call=1, job=JOB, attempt=1, reports=take().reports))
        assert isinstance(made, PlanReady), made
        coordinator.plan_made(save, made.layouts)
        plan_s = time.perf_counter() - began_s
        grown_bytes = _memory_bytes(os.getpid(), "VmRSS") - before_bytes
        plan_memory_bytes = ask.memory_bytes() + max(0, grown_bytes)
        coordinator.commit(save, is_planned=True)
        steady_s, steady_wire_bytes = _steady(coordinator, ranks)
        index_s = []
        for count in (1, 2):
            save = SaveRef(JOB, f"1-{count}", count, f"step_{count}")
            wanted = _write(root, save, made, tensors)
            began_s = time.perf_counter()
            built = ask(wanted)
            index_s.append(time.perf_counter() - began_s)
            assert isinstance(built, IndexReady), built
        planned = Planned(
            ranks=ranks,
            tensors=tensors,
            plan_s=plan_s,
            plan_memory_bytes=plan_memory_bytes,
            steady_s=steady_s,
            steady_wire_bytes=steady_wire_bytes,
            index_s=index_s[0],
            later_index_s=index_s[1],
            index_memory_bytes=ask.memory_bytes(),
        )
        child.kill()
        child.communicate()
        if then is not None:
            then(root.open_save(save))
        return planned
    finally:
        child.kill()
        child.wait()
        shutil.rmtree(folder, ignore_errors=True)


class _Asking:
    """The daemon's side of the pipe."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdin is not None
        assert child.stdout is not None
        self._requests, self._answers = child.stdin, child.stdout
        self._pid = child.pid

    def __call__(self, request: AnyRequest) -> AnyAnswer:
        self._requests.write(encode_frame(request))
        self._requests.flush()
        (length,) = FRAME_HEADER.unpack(_read(self._answers, FRAME_HEADER.size))
        answer: AnyAnswer = decode_body(_read(self._answers, length), AnyAnswer)
        if isinstance(answer, RequestFailed):
            raise RuntimeError(f"the planner refused: {answer.cause.message}")
        return answer

    def memory_bytes(self) -> int:
        """Return the most memory that the child has had."""
        return _memory_bytes(self._pid, "VmHWM")


def _memory_bytes(pid: int, kind: str) -> int:
    found = re.search(rf"{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def _steady(coordinator: Coordinator, ranks: int) -> tuple[float, float]:
    """Return the coordinator's seconds for one more save, and a rank's share of its frames."""
    peers, locals_ = coordinator.peer_bytes, coordinator.rank_bytes
    took_s = coordinator.commit(SaveRef(JOB, "1-2", 2, "step_2"), is_planned=False)
    # Every node's own ranks say as much as those of this one.
    of_rank = (coordinator.rank_bytes - locals_) / min(RANKS_A_NODE, ranks)
    return took_s, (coordinator.peer_bytes - peers) / ranks + of_rank


def _read(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise RuntimeError("the planner's process has died")
    return data


def _write(root: Root, save: SaveRef, made: PlanReady, tensors: int) -> IndexWanted:
    """Leave behind what all nodes would have written by now, the data files sparse."""
    directory = root.open_save(save)
    files, fragments = [], []
    for layout in made.layouts:
        count = len(unpack_assigned(layout.assigned, tensors))
        length = align(place([CONTAINER_BYTES] * count).objects_at, PAGE_BYTES)
        written = WrittenFile(layout.rank, layout.layout_id, f"__{layout.rank}_0.distcp", length)
        with (directory / written.file).open("wb") as file:
            os.truncate(file.fileno(), length)
        files.append(written)
        fragments.append(
            FragmentFile(
                rank=layout.rank,
                layout_id=layout.layout_id,
                file=written.file,
                file_bytes=length,
                crcs=tuple(range(count)),
                objects=(),
                stretches=pack_crcs(range(-(-length // STRETCH_BYTES))),
            )
        )
    names = []
    for node, first in enumerate(range(0, len(fragments), RANKS_A_NODE)):
        fragment = Fragment(
            node_id=f"node{node}",
            save_id=save.save_id,
            files=tuple(fragments[first : first + RANKS_A_NODE]),
        )
        names.append(f"{FRAGMENT_PREFIX}node{node}")
        (directory / names[-1]).write_bytes(encode_fragment(fragment))
    return IndexWanted(
        call=2, root=str(root.path), save=save, files=tuple(files), fragments=tuple(names)
    )
