"""Which checkpoint of a root is loaded."""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.reading.checkpoints import ALONE, WAIT_S, adopt, on_ranks, stock_save

from milepost.errors import CorruptCheckpoint, LoadFailed
from milepost.format.manifest import MANIFEST_NAME, METADATA_NAME
from milepost.link.rendezvous import Group
from milepost.reading.choice import Loaded, load_chosen
from milepost.reading.restore import LoadOptions
from milepost.storage.root import Root

# Stock torch warns that it saves for one process, which is what is wanted.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1, 20 and 3 of an attempt, and step 2 of the next one, which is the newest."""
    for save_id, step in (("1-1", 1), ("1-2", 20), ("1-3", 3), ("2-1", 2)):
        path = stock_save(
            tmp_path / f"step_{step}", {"w": torch.full((1000,), float(step)), "n": save_id}
        )
        adopt(path, step, save_id)
    return tmp_path


def damage(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    at = data.index(struct.pack("<f", int(checkpoint.name[5:])) * 100)
    data[at] ^= 1
    file.write_bytes(data)


def chosen(
    root: Path, state: Any, group: Group = ALONE, step: int | None = None, fallback: bool = False
) -> Loaded:
    return load_chosen(
        Root(root),
        state,
        LoadOptions(),
        step=step,
        fallback=fallback,
        group=group,
        topic="load/1",
        timeout_s=WAIT_S,
    )


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(1000), "n": ""}


def test_the_newest_is_loaded_or_the_step_that_was_asked_for(root: Path) -> None:
    for step, wanted, name in ((None, 2, "2-1"), (20, 20, "1-2"), (1, 1, "1-1")):
        state = blank()
        loaded = chosen(root, state, step=step)
        assert (wanted, f"step_{wanted}", name) == (loaded.report.step, loaded.name, state["n"])
        assert torch.equal(torch.full((1000,), float(wanted)), state["w"])


def test_a_step_that_is_not_there_is_an_error_that_names_those_that_are(root: Path) -> None:
    with pytest.raises(LoadFailed, match="step 9; steps there: 1, 2, 3, 20") as caught:
        chosen(root, blank(), step=9)
    assert "not-found" == caught.value.code


@pytest.mark.parametrize("step", [None, 2])
def test_fallback_takes_the_newest_older_one_that_is_whole_and_says_so(
    root: Path, caplog: pytest.LogCaptureFixture, step: int | None
) -> None:
    damage(root / "step_2")
    damage(root / "step_20")
    with pytest.raises(CorruptCheckpoint, match=r"step_2 is damaged: .*'?w"):
        chosen(root, blank(), step=step)
    states = [blank(), blank()]
    with caplog.at_level(logging.WARNING, "milepost"):
        told = on_ranks(
            2, lambda group: chosen(root, states[group.rank], group, step=step, fallback=True)
        )
    for loaded, state in zip(told, states, strict=True):
        assert isinstance(loaded, Loaded)
        assert (3, (2, 20), "step_3") == (
            loaded.report.step, loaded.report.damaged, loaded.name
        )  # fmt: skip
        assert "1-3" == state["n"]
        assert torch.equal(torch.full((1000,), 3.0), state["w"])
    assert 1 == caplog.text.count("step 2 is damaged, so an older one is loaded")
    assert 1 == caplog.text.count("step 20 is damaged, so an older one is loaded")


@pytest.mark.parametrize("kind", ["index", "no data file", "manifest"])
def test_fallback_passes_over_every_kind_of_damage(root: Path, kind: str) -> None:
    (root / "latest").symlink_to("step_2")
    if kind == "index":
        path = root / "step_2" / METADATA_NAME
        # Still an index, but of another key.
        path.write_bytes(path.read_bytes().replace(b"\x01w", b"\x01v"))
    elif kind == "manifest":
        (root / "step_2" / MANIFEST_NAME).write_bytes(b"damaged")
    else:
        next((root / "step_2").glob("*.distcp")).unlink()
    with pytest.raises(CorruptCheckpoint, match="step_2"):
        chosen(root, blank())
    assert 20 == chosen(root, blank(), fallback=True).report.step


def test_fallback_is_for_damage_and_not_for_what_does_not_fit(root: Path) -> None:
    with pytest.raises(LoadFailed, match=r"step_2 lacks 1 of the keys"):
        chosen(root, {"gone": 1}, fallback=True)


def test_fallback_that_finds_none_that_is_whole_says_which_it_tried(root: Path) -> None:
    for path in root.glob("step_*"):
        damage(path)
    told = on_ranks(2, lambda group: chosen(root, blank(), group, fallback=True))
    for error in told:
        assert isinstance(error, CorruptCheckpoint)
        assert "no older checkpoint is whole either: steps 2, 20, 3, 1 are damaged" in error.message
