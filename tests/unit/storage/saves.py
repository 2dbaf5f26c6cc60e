"""Saves with data, complete but for their publication, and what is found of them."""

from __future__ import annotations

from pathlib import Path

from milepost.format.manifest import Manifest, encode_manifest
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef

SAVE = SaveRef("run-7", "2-3", 30, "step_30")


def save_of(step: int, save_id: str, *, overwrite: bool = False) -> SaveRef:
    return SaveRef("run-7", save_id, step, f"step_{step}", overwrite)


def fill(root: Root, save: SaveRef, content: bytes = b"data") -> Path:
    """Make the save complete, but for its publication."""
    directory = root.open_save(save)
    root.write_image(directory / "__0_0.distcp", memoryview(content))
    manifest = Manifest(save_id=save.save_id, step=save.step, files=("__0_0.distcp",))
    root.write_file(directory / ".milepost", encode_manifest(manifest))
    root.write_file(directory / ".metadata", b"index")
    return directory


def commit(root: Root, save: SaveRef, content: bytes = b"data") -> Path:
    fill(root, save, content)
    return root.publish(save)


def content_of(root: Root, name: str) -> bytes:
    return (root.path / name / "__0_0.distcp").read_bytes()


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


class Power(Exception):
    """The machine stops here."""


class Crash(BaseException):
    """The process ends here."""
