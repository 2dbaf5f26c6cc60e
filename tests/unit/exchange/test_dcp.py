"""What is imported is a checkpoint like any other: for stock torch, for verify, and bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from isal import isal_zlib
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

from milepost.dcp_format.index import read_metadata
from milepost.exchange.comparison import equal
from milepost.exchange.dcp import DATA_NAME, write_checkpoint
from milepost.exchange.files import StateSource
from milepost.format.manifest import STRETCH_BYTES, pack_crcs, read_manifest
from milepost.reading.verification import verify

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATE: dict[str, Any] = {
    "model": {
        "large": torch.arange(700_000.0),
        "w": torch.arange(12.0).reshape(3, 4),
        "t": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "f8": torch.arange(5.0).to(torch.float8_e4m3fn),
        "p": torch.nn.Parameter(torch.ones(2, 2)),
    },
    "groups": [{"lr": 0.1, "w": torch.ones(3)}],
    "epoch": 3,
}


def write(folder: Path, state: dict[str, Any]) -> Path:
    folder.mkdir()
    source = StateSource(state)
    names = {key: key for key in source.paths}
    paths = dict(source.paths)
    write_checkpoint(folder, source, names, paths, source.nesting, folder, lambda _: None)
    return folder


def test_stock_torch_loads_it_without_a_template(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", STATE)
    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    expected = STATE | {"model": STATE["model"] | {"p": STATE["model"]["p"].detach()}}
    assert equal(expected, found)


def test_it_is_whole_by_its_manifest(tmp_path: Path) -> None:
    found = verify(write(tmp_path / "c", STATE))
    assert ("manifest", (), ()) == (found.method, found.damages, found.unchecked)


def test_its_index_says_what_stock_torch_would_have_said(tmp_path: Path) -> None:
    ours = read_metadata(write(tmp_path / "c", STATE))
    stock_save(STATE, checkpoint_id=tmp_path / "stock", no_dist=True)
    theirs = read_metadata(tmp_path / "stock")
    assert theirs.state_dict_metadata == ours.state_dict_metadata
    assert list(theirs.state_dict_metadata) == list(ours.state_dict_metadata)
    assert theirs.planner_data == ours.planner_data
    assert set(theirs.storage_data) == set(ours.storage_data)
    lengths = {index: info.length for index, info in theirs.storage_data.items()}
    assert lengths == {index: info.length for index, info in ours.storage_data.items()}


def test_every_stretch_of_its_file_has_its_checksum(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", STATE)
    data = (folder / DATA_NAME).read_bytes()
    manifest = read_manifest(folder)
    assert manifest is not None
    assert (STRETCH_BYTES, (len(data),)) == (manifest.stretch_bytes, manifest.file_bytes)
    crcs = [
        isal_zlib.crc32(data[at : at + STRETCH_BYTES]) for at in range(0, len(data), STRETCH_BYTES)
    ]
    assert (pack_crcs(crcs),) == manifest.stretches
    assert len(crcs) > 2


def test_a_source_without_anything_is_a_checkpoint_without_anything(tmp_path: Path) -> None:
    found = verify(write(tmp_path / "c", {}))
    assert ((), 0) == (found.damages, found.blobs)
