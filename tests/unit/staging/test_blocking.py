"""Staging at once: the image is complete when `fill` returns, and there is nothing to wait for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from milepost.errors import MilepostError, SaveFailed
from milepost.staging.blocking import BlockingStaging
from milepost.staging.pinning import NoPinner
from milepost.staging.stager import StagedImage, Stager
from milepost.state.collecting import collect
from milepost.state.fingerprint import fingerprint
from milepost.state.flattening import flatten
from milepost.wire.messages import SaveRef

SAVE = SaveRef(job="job", save_id="1-1", step=1, name="step_1")


class Heard:
    """Notes what a listener is told."""

    def __init__(self) -> None:
        self.images: list[StagedImage] = []

    def staged(self, image: StagedImage) -> None:
        self.images.append(image)

    def failed(self, error: MilepostError) -> None:
        raise AssertionError("what goes wrong is raised")

    def waited(self, waited_s: float) -> None:
        raise AssertionError("nobody is kept")


def test_an_image_is_complete_when_its_filling_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(tmp_path))
    stager, staging, heard = Stager("job", 1, 0, pinner=NoPinner()), BlockingStaging(), Heard()
    items = collect(*flatten({"w": torch.arange(4.0), "count": 3}))
    stager.lay_out(items, range(len(items)), fingerprint(items))
    staging.arm()
    filling = staging.choose(items)
    filling.prepare(stager)
    assert filling.fill(stager, stager.slots[0], SAVE, None, heard, lambda: b"said")
    (image,) = heard.images
    assert b"said" == image.slot.record().digests
    assert image.slot is stager.slots[0]
    assert SAVE.save_id == image.slot.record().save_id
    target = stager.targets(image.slot)[0]
    assert target is not None
    assert torch.equal(torch.arange(4.0), target)
    del target
    other = collect(*flatten({"w": torch.arange(5.0), "count": 3}))
    with pytest.raises(SaveFailed, match="structure-changed"):
        staging.choose(other).fill(stager, stager.slots[1], SAVE, None, heard)
    assert [stager.slots[1]] == stager.free_slots()
    for wait in (staging.guard, staging.settle, staging.close):
        wait()
    stager.close()
