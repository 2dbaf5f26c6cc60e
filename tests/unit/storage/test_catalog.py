"""What lies below a root, and which of it is the newest."""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import pytest
from tests.unit.storage.saves import SAVE, commit, names, save_of

from milepost.errors import StorageError
from milepost.format.manifest import Manifest, encode_manifest
from milepost.storage.root import Root


def test_a_checkpoint_with_a_damaged_manifest_is_not_taken_for_ours(root: Root) -> None:
    (commit(root, SAVE) / ".milepost").write_bytes(b"\xc1")
    assert "unknown" == root.give_up(SAVE)


def test_checkpoints_are_listed_newest_first_by_attempt_then_step(root: Root) -> None:
    for step, save_id in [(100, "1-1"), (200, "1-2"), (150, "2-1"), (90, "10-1")]:
        commit(root, save_of(step, save_id))
    assert [90, 150, 200, 100] == [each.step for each in root.checkpoints()]
    assert "step_90" == root.latest()


def test_checkpoints_of_stock_torch_are_listed_too_and_nothing_without_an_index(root: Root) -> None:
    for name in ("step_12", "mine", ".hidden"):
        (root.path / name).mkdir()
        (root.path / name / ".metadata").touch()
    (root.path / "step_13").mkdir()
    (root.path / "step_14").symlink_to("step_12")
    (root.path / "notes").touch()
    found = root.checkpoints()
    assert [("step_12", 12), ("mine", -1)] == [(each.name, each.step) for each in found]
    assert [None, None] == [each.manifest for each in found]


def test_listing_reads_no_more_of_a_manifest_than_its_beginning(root: Root) -> None:
    save = save_of(5, "3-1")
    path = commit(root, save) / ".milepost"
    long = encode_manifest(
        Manifest(save_id="3-1", step=5, keys=tuple(f"key{n}" for n in range(10_000)))
    )
    path.write_bytes(long[: len(long) // 2])
    assert [(5, "3-1")] == [(each.step, each.save_id) for each in root.checkpoints()]


def test_a_manifest_in_any_field_order_is_understood(root: Root) -> None:
    packed = msgpack.packb({"keys": ["k"] * 9000, "step": 7, "novel": {}, "save_id": "4-2"})
    (commit(root, SAVE) / ".milepost").write_bytes(packed)
    assert [(7, "4-2")] == [(each.step, each.save_id) for each in root.checkpoints()]


def test_a_checkpoint_with_a_damaged_manifest_is_listed_by_its_name(root: Root) -> None:
    (commit(root, SAVE) / ".milepost").write_bytes(b"\xc1 nonsense")
    assert [(30, "")] == [(each.step, each.save_id) for each in root.checkpoints()]


def test_latest_points_where_it_was_moved_to_and_falls_back_to_the_newest(root: Root) -> None:
    assert root.latest() is None
    commit(root, save_of(1, "1-1"))
    commit(root, save_of(2, "1-2"))
    root.move_latest("step_1")
    assert "step_1" == root.latest()
    assert "step_1" == os.readlink(root.path / "latest")
    root.move_latest("step_2")
    assert "step_2" == os.readlink(root.path / "latest")
    root.remove_checkpoint("step_2")
    assert "step_1" == root.latest()
    assert [] == names(root.path / ".partial")


def test_a_root_that_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone"):
        Root(tmp_path / "gone").checkpoints()
    assert [] == Root(tmp_path / "gone").partials()
