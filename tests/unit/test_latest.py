"""`latest` follows the newest branch, and never goes back to a slower save."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.format.manifest import MANIFEST_NAME, Manifest, encode
from milepost.protocol import SaveRef
from milepost.storage import Root


def publish(root: Root, save_id: str, step: int) -> SaveRef:
    save = SaveRef(job="j", save_id=save_id, step=step, name=f"step_{step}", overwrite=True)
    folder = root.open_save(save)
    manifest = Manifest(job="j", save_id=save_id, step=step)
    root.write_file(folder / MANIFEST_NAME, encode(manifest))
    root.write_file(folder / ".metadata", b"index")
    root.publish(save)
    return save


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.prepare()
    return made


def test_a_slower_earlier_save_does_not_move_latest_back(root: Root) -> None:
    later, earlier = publish(root, "1-6", 60), publish(root, "1-5", 50)
    assert root.advance_latest(later)
    assert not root.advance_latest(earlier)
    assert "step_60" == root.latest_target()


def test_a_lower_step_of_a_newer_attempt_becomes_latest(root: Root) -> None:
    assert root.advance_latest(publish(root, "1-6", 60))
    assert root.advance_latest(publish(root, "2-1", 50))
    assert "step_50" == root.latest_target()


def test_latest_heals_if_what_it_named_is_gone(root: Root) -> None:
    root.move_latest("step_7")
    assert root.latest_target() is None
    assert root.advance_latest(publish(root, "1-1", 3))
    assert "step_3" == root.latest()
