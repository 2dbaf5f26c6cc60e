"""Images and fragments: what the core hears, and in which order the files are named."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.unit.executors.test_writer import SAVE, Stage

from milepost.errors import SaveFailed
from milepost.format.manifest import decode_fragment
from milepost.storage.blocks import BLOCK_BYTES
from milepost.wire.messages import SaveRef
from milepostd.core.commands import AbandonWrite, WriteFragment, WriteImage
from milepostd.core.events import BytesWritten, FileDurable, FragmentDurable
from milepostd.executors import images
from milepostd.executors.arenas import OpenArenas
from milepostd.executors.images import Images
from milepostd.executors.threads import Threads
from milepostd.ops.faults import FaultPoints, parse_faults
from milepostd.ops.metrics import Counters


class Bench:
    """A staged image, and the executors that write it."""

    def __init__(self, path: Path, payloads: list[int], faults: str = "") -> None:
        self.stage = Stage(path, payloads, [])
        self.told: list[BytesWritten] = []
        self.faults = FaultPoints(parse_faults(faults))
        self.images = Images(
            "node",
            arenas=OpenArenas(),
            writers=Threads("writers", 1),
            files=Threads("files", 1),
            faults=self.faults,
            counters=Counters(),
            limit=None,
            post=self.told.append,
        )

    async def write(self, save: SaveRef = SAVE) -> FileDurable:
        return await self.images.write_image(
            WriteImage(
                save=save,
                root=str(self.stage.root.path),
                rank=3,
                arena=self.stage.path,
                slot=1,
                layout_id="l-1",
                until_ns=time.monotonic_ns() + 60 * 10**9,
            )
        )

    async def fragment(self) -> FragmentDurable:
        command = WriteFragment(save=SAVE, root=str(self.stage.root.path), files=(), until_ns=0)
        return await self.images.write_fragment(command)


@pytest.mark.parametrize("progress_s", [0.0, 1000.0], ids=["each-block", "at-the-end"])
def test_the_core_hears_of_every_byte_however_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress_s: float
) -> None:
    monkeypatch.setattr(images, "PROGRESS_S", progress_s)
    bench = Bench(tmp_path, [BLOCK_BYTES, 5000])
    durable = asyncio.run(bench.write())
    assert sum(event.count for event in bench.told) == durable.file.file_bytes > BLOCK_BYTES
    assert (2 if progress_s == 0 else 1) == len(bench.told)


def test_the_fragment_names_what_was_written_and_then_it_is_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [5000])

    async def main() -> FileDurable:
        durable = await bench.write()
        ended = await bench.fragment()
        path = bench.stage.root.save_dir(SAVE) / ended.fragment
        (file,) = decode_fragment(path.read_bytes()).files
        assert (3, durable.file.file, durable.file.file_bytes) == (
            file.rank, file.file, file.file_bytes
        )  # fmt: skip
        with pytest.raises(KeyError):
            await bench.fragment()
        return durable

    assert "__3_0.distcp" == asyncio.run(main()).file.file


def test_an_abandoned_write_ends_at_its_next_block_and_lets_others_write(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [5000], "after-staged:sleep:0")

    async def main() -> None:
        writing = asyncio.create_task(bench.write())
        await asyncio.sleep(0)
        bench.images.abandon(AbandonWrite(save=SAVE, rank=3))
        with pytest.raises(SaveFailed, match="its image is not written any further"):
            await writing
        assert [] == bench.images.paces()

    asyncio.run(main())
    assert [] == bench.stage.files()


def test_a_save_that_ended_without_a_fragment_is_forgotten(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [5000])

    async def main() -> None:
        await bench.write()
        bench.images.forget(SAVE)
        with pytest.raises(KeyError):
            await bench.fragment()

    asyncio.run(main())
