"""The planner's real process: it plans, indexes what two ranks wrote, dies, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

from milepost.dcp_format.container import serialise, template
from milepost.format.layout import PAGE_BYTES, align, place
from milepost.format.manifest import (
    FRAGMENT_PREFIX,
    Fragment,
    FragmentFile,
    encode_fragment,
    read_manifest,
)
from milepost.storage.root import Root
from milepost.wire.messages import Cause, RankLayout, RankReport, SaveRef, WrittenFile
from milepost.wire.offers import Kind, Offer, encode_offer, unpack_assigned
from milepostd.planner import process as planner_module
from milepostd.planner.frames import IndexReady, PlanReady
from milepostd.planner.process import Planner

if TYPE_CHECKING:
    from collections.abc import Mapping

UNTIL_S = 60.0
"""How long the planner tries again after a passing refusal of storage."""

SAVE = SaveRef("job", "1-1", 10, "step_10")
WEIGHT = torch.arange(32, dtype=torch.float32).reshape(8, 4)
BIAS = torch.arange(5, dtype=torch.bfloat16)


class Rank:
    """One rank's half of the weight, the replicated bias and count, and perhaps something else."""

    def __init__(self, rank: int, **more: torch.Tensor) -> None:
        self.rank = rank
        self.attempt = 0
        """Number of its file."""
        half = (4 * rank, 0)
        self.values: list[tuple[str, Kind, tuple[int, ...], tuple[int, ...], Any]] = [
            ("model.w", Kind.SHARD, (8, 4), half, WEIGHT[4 * rank : 4 * rank + 4]),
            ("model.bias", Kind.TENSOR, (5,), (0,), BIAS),
            ("count", Kind.OBJECT, (), (), {"batches": 7}),
            *(
                (key, Kind.TENSOR, tuple(value.shape), (0,) * value.dim(), value)
                for key, value in more.items()
            ),
        ]

    def offer(self) -> Offer:
        count = len(self.values)
        kinds = [kind for _, kind, *_ in self.values]
        tensors = [value if isinstance(value, torch.Tensor) else None for *_, value in self.values]
        shapes = [() if tensor is None else tuple(tensor.shape) for tensor in tensors]
        return Offer(
            keys=tuple(key for key, *_ in self.values),
            kinds=bytes(kinds),
            dtypes=tuple("" if t is None else str(t.dtype).removeprefix("torch.") for t in tensors),
            global_sizes=tuple(of for _, _, of, _, _ in self.values),
            offsets=tuple(offset for _, _, _, offset, _ in self.values),
            sizes=tuple(shapes),
            container_bytes=tuple(
                0 if t is None else template(tuple(t.shape), t.dtype).total_bytes for t in tensors
            ),
            requires_grad=bytes(count),
            pinned=bytes(count),
            digests=(-1,) * count,
            paths=tuple(tuple(key.split(".")) for key, *_ in self.values),
        )

    def report(self) -> RankReport:
        keys = ",".join(key for key, *_ in self.values)
        offer = encode_offer(self.offer())
        return RankReport(self.rank, fingerprint=f"{self.rank}:{keys}", offer=offer)

    def write(self, directory: Path, layout: RankLayout) -> FragmentFile:
        """Write the rank's file as a trainer and a daemon would between them."""
        items = unpack_assigned(layout.assigned, len(self.values))
        tensors = [item for item in items if self.values[item][1] != Kind.OBJECT]
        blobs = [self.container(item) for item in tensors]
        offsets, end = place([len(blob) for blob in blobs])
        image = bytearray(end)
        for at, blob in zip(offsets, blobs, strict=True):
            image[at : at + len(blob)] = blob
        objects = []
        for item in items:
            if item not in tensors:
                blob = serialise(self.values[item][0], self.values[item][4])
                objects.append((item, len(image), len(blob), zlib.crc32(blob)))
                image += blob + bytes(align(len(blob), 64) - len(blob))
        image += bytes(align(len(image), PAGE_BYTES) - len(image))
        name = f"__{self.rank}_{self.attempt}.distcp"
        (directory / name).write_bytes(image)
        return FragmentFile(
            rank=self.rank,
            layout_id=layout.layout_id,
            file=name,
            file_bytes=len(image),
            crcs=tuple(map(zlib.crc32, blobs)),
            objects=tuple(objects),
        )

    def container(self, item: int) -> bytes:
        tensor = self.values[item][4]
        around = template(tuple(tensor.shape), tensor.dtype)
        payload = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        blob = bytearray(around.prefix + payload + around.suffix)
        crc = zlib.crc32(payload).to_bytes(4, "little")
        blob[around.crc_at : around.crc_at + 4] = crc
        blob[around.central_crc_at : around.central_crc_at + 4] = crc
        return bytes(blob)


class Save:
    """The files that the nodes `left` and `right`, with a rank each, have written for a save."""

    def __init__(self, root: Path, ranks: list[Rank], layouts: Mapping[int, RankLayout]) -> None:
        self.root = Root(root)
        self.root.prepare()
        self.directory = self.root.open_save(SAVE)
        self.files: list[WrittenFile] = []
        self.fragments: list[str] = []
        for node, rank in zip(("left", "right"), ranks, strict=True):
            file = rank.write(self.directory, layouts[rank.rank])
            fragment = Fragment(node_id=node, save_id=SAVE.save_id, files=(file,))
            self.fragments.append(FRAGMENT_PREFIX + node)
            (self.directory / self.fragments[-1]).write_bytes(encode_fragment(fragment))
            self.files.append(WrittenFile(file.rank, file.layout_id, file.file, file.file_bytes))

    async def index(self, planner: Planner) -> IndexReady | Cause:
        return await planner.build_index(
            SAVE, str(self.root.path), self.files, self.fragments, time.monotonic() + UNTIL_S
        )


async def plan(planner: Planner, *reports: RankReport) -> dict[int, RankLayout]:
    made = await planner.make_plan("job", 1, reports)
    assert isinstance(made, PlanReady), made
    return {layout.rank: layout for layout in made.layouts}


def load(checkpoint: Path, **more: torch.Tensor) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": {"w": torch.zeros(8, 4), "bias": torch.zeros(5, dtype=torch.bfloat16)},
        "count": {},
        **{key: torch.zeros_like(value) for key, value in more.items()},
    }
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        load_checkpoint(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def assert_loads(checkpoint: Path) -> None:
    state = load(checkpoint)
    assert torch.equal(WEIGHT, state["model"]["w"])
    assert torch.equal(BIAS, state["model"]["bias"])
    assert state["count"] == {"batches": 7}


async def has_ended(pid: int) -> bool:
    """Return once a child is gone; on a busy machine that is some time after its pipes are."""
    for _ in range(600):
        if not psutil.pid_exists(pid):
            return True
        await asyncio.sleep(0.05)
    return False


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_stock_torch_loads_what_two_ranks_wrote(tmp_path: Path) -> None:
    async def run() -> None:
        planner = Planner(tmp_path / "plans", nice=3)
        await planner.start()
        pid = planner.pid
        assert pid is not None
        ranks = [Rank(0), Rank(1)]
        save = Save(tmp_path / "root", ranks, await plan(planner, *[r.report() for r in ranks]))
        assert psutil.Process(pid).nice() == min(psutil.Process().nice() + 3, 19)
        assert not has_torch(pid), "torch is not there before it is needed"
        await planner.warm()
        assert has_torch(pid)

        built = await save.index(planner)

        await planner.stop()
        assert await has_ended(pid)
        assert isinstance(built, IndexReady), built
        checkpoint = save.root.publish(SAVE)
        files = [file for file in checkpoint.iterdir() if file.is_file()]
        assert built.checkpoint_bytes == sum(file.stat().st_size for file in files)
        assert {".metadata", ".milepost", "__0_0.distcp", "__1_0.distcp"} == {f.name for f in files}
        assert_loads(checkpoint)
        check_manifest(checkpoint)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_later_saves_of_a_plan_have_objects_of_other_lengths_and_files_of_other_names(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        planner = Planner(tmp_path / "plans")
        ranks = [Rank(0), Rank(1)]
        layouts = await plan(planner, *[rank.report() for rank in ranks])
        for number, attempt in enumerate((0, 0, 1, 1)):
            count = {"batches": 7, "names": ["x" * 1000] * number}
            for rank in ranks:
                rank.attempt = attempt
                rank.values[2] = ("count", Kind.OBJECT, (), (), count)
            save = Save(tmp_path / f"root{number}", ranks, layouts)
            built = await save.index(planner)
            assert isinstance(built, IndexReady), built
            checkpoint = save.root.publish(SAVE)
            state = load(checkpoint)
            assert torch.equal(WEIGHT, state["model"]["w"])
            assert count == state["count"]
            check_manifest(checkpoint)
        await planner.stop()

    asyncio.run(asyncio.wait_for(run(), 60))


def check_manifest(checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    assert (manifest.job, manifest.save_id, manifest.step, manifest.world) == ("job", "1-1", 10, 2)
    assert manifest.torch_version == torch.__version__
    assert sorted(manifest.keys) == ["count", "model.bias", "model.w", "model.w"]
    assert manifest.file_bytes == tuple((checkpoint / f).stat().st_size for f in manifest.files)
    columns = zip(manifest.files_of, manifest.offsets, manifest.lengths, manifest.crcs, strict=True)
    for file, offset, length, crc in columns:
        content = (checkpoint / manifest.files[file]).read_bytes()
        assert crc == zlib.crc32(content[offset : offset + length])


def test_a_killed_planner_comes_back_and_still_knows_its_layouts(tmp_path: Path) -> None:
    async def run() -> None:
        planner = Planner(tmp_path / "plans")
        ranks = [Rank(0), Rank(1)]
        layouts = await plan(planner, *[rank.report() for rank in ranks])
        first = planner.pid
        assert first is not None
        # Stopped, so that the call is surely pending when the process dies.
        os.kill(first, signal.SIGSTOP)
        pending = asyncio.create_task(planner.make_plan("job", 1, [ranks[0].report()]))
        await asyncio.sleep(0)
        os.kill(first, signal.SIGKILL)

        lost = await asyncio.wait_for(pending, 10)

        assert isinstance(lost, Cause)
        assert lost.code == "plan-failed"
        assert "signal 9" in lost.message
        assert planner.pid is None
        save = Save(tmp_path / "root", ranks, layouts)
        built = await save.index(planner)
        assert isinstance(built, IndexReady), built
        assert first != planner.pid
        await planner.stop()
        assert_loads(save.root.publish(SAVE))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_index_that_was_built_before_its_coordinator_was_killed_stands(tmp_path: Path) -> None:
    async def run() -> None:
        planner = Planner(tmp_path / "plans")
        ranks = [Rank(0), Rank(1)]
        save = Save(tmp_path / "root", ranks, await plan(planner, *[r.report() for r in ranks]))
        first = await save.index(planner)
        directory = save.root.save_dir(SAVE)
        # What `publish` does before its rename.
        for fragment in directory.glob(f"{FRAGMENT_PREFIX}*"):
            fragment.unlink()
        again = await save.index(planner)
        assert isinstance(first, IndexReady), first
        assert isinstance(again, IndexReady), again
        assert first.checkpoint_bytes == again.checkpoint_bytes
        data = (directory / "__1_0.distcp").read_bytes()
        (directory / "__1_0.distcp").write_bytes(data[:-1])
        torn = await save.index(planner)
        assert isinstance(torn, Cause)
        assert torn.code == "root-not-shared"
        (directory / "__1_0.distcp").write_bytes(data)
        await planner.stop()
        assert_loads(save.root.publish(SAVE))

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_planner_that_is_stuck_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        planner = Planner(tmp_path / "plans")
        await plan(planner, Rank(0).report(), Rank(1).report())
        first = planner.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        monkeypatch.setattr(planner_module, "ANSWER_S_MAX", 0.1)
        stuck = await planner.make_plan("job", 1, [])
        monkeypatch.setattr(planner_module, "ANSWER_S_MAX", 50)

        await plan(planner, Rank(0).report(), Rank(1).report())

        await planner.stop()
        assert isinstance(stuck, Cause)
        assert "did not answer within 0.1 s" in stuck.message
        assert await has_ended(first)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_ranks_that_staged_under_different_plans_make_one_checkpoint(tmp_path: Path) -> None:
    """Rank 1 gets a new key and offers again; rank 0 has staged under the first plan."""
    extra = torch.full((3,), 2.5)

    async def run() -> Path:
        planner = Planner(tmp_path / "plans")
        first = await plan(planner, Rank(0).report(), Rank(1).report())
        changed = Rank(1, extra=extra)
        staged = RankReport(0, layout_id=first[0].layout_id)
        second = await plan(planner, staged, changed.report())
        save = Save(tmp_path / "root", [Rank(0), changed], {0: first[0], 1: second[1]})
        built = await save.index(planner)
        # Rank 0 has not staged what it left to rank 1, which now goes on without it.
        without = Rank(1)
        del without.values[1:3]
        refused = await planner.make_plan("job", 1, [staged, without.report()])
        await planner.stop()
        assert isinstance(built, IndexReady), built
        assert isinstance(refused, Cause)
        assert refused.code == "structure-changed"
        return save.root.publish(SAVE)

    checkpoint = asyncio.run(asyncio.wait_for(run(), 60))

    assert_loads(checkpoint)
    assert torch.equal(extra, load(checkpoint, extra=extra)["extra"])


def test_a_file_that_this_node_cannot_see_is_looked_for_again_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        planner = Planner(tmp_path / "plans")
        ranks = [Rank(0), Rank(1)]
        save = Save(tmp_path / "root", ranks, await plan(planner, *[r.report() for r in ranks]))
        fragment = save.directory / save.fragments[1]
        data = save.directory / "__0_0.distcp"
        content = data.read_bytes()
        await planner.warm()
        monkeypatch.setattr(planner_module, "FILE_WAIT_S", 0.25)

        fragment.rename(tmp_path / "elsewhere")
        unseen = await save.index(planner)
        (tmp_path / "elsewhere").rename(fragment)
        data.write_bytes(content[:-PAGE_BYTES])
        short = await save.index(planner)
        data.unlink()
        gone = await save.index(planner)
        monkeypatch.setattr(planner_module, "FILE_WAIT_S", 10)
        looking = asyncio.create_task(save.index(planner))
        await asyncio.sleep(0.15)
        nothing_yet = not looking.done()
        data.write_bytes(content)
        built = await looking
        await planner.stop()

        assert isinstance(unseen, Cause)
        assert (unseen.code, unseen.node) == ("root-not-shared", "right")
        assert str(fragment) in unseen.message
        assert isinstance(short, Cause)
        assert (short.code, short.node) == ("corrupt", "left")
        assert f"{data} has {len(content) - PAGE_BYTES} bytes" in short.message
        assert isinstance(gone, Cause)
        assert (gone.code, gone.node) == ("root-not-shared", "left")
        assert nothing_yet
        assert isinstance(built, IndexReady), built

    asyncio.run(asyncio.wait_for(run(), 60))


def test_no_index_appears_where_the_fragments_and_the_reports_differ(tmp_path: Path) -> None:
    async def run() -> None:
        planner = Planner(tmp_path / "plans")
        ranks = [Rank(0), Rank(1)]
        save = Save(tmp_path / "root", ranks, await plan(planner, *[r.report() for r in ranks]))
        save.files[0] = WrittenFile(0, "0" * 24, "__0_0.distcp", save.files[0].file_bytes)
        refused = await save.index(planner)
        await planner.stop()

        assert isinstance(refused, Cause)
        assert "ranks [0]" in refused.message
        assert not (save.directory / ".metadata").exists()
        assert not (save.directory / ".milepost").exists()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_signals_to_the_process_group_leave_the_planner_to_a_daemon_that_drains(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        planner = Planner(tmp_path / "plans")
        await plan(planner, Rank(0).report(), Rank(1).report())
        pid = planner.pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
        await plan(planner, Rank(0).report(), Rank(1).report())
        assert pid == planner.pid

        await planner.stop()
        await planner.stop()
        after = await planner.make_plan("job", 1, [])

        assert isinstance(after, Cause)
        assert after.code == "plan-failed"
        assert await has_ended(pid)

    asyncio.run(asyncio.wait_for(run(), 60))
