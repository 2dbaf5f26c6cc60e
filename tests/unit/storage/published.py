"""Saves that are complete but for their publication, for tests of what comes after."""

from __future__ import annotations

from milepost.format.manifest import MANIFEST_NAME, METADATA_NAME, Manifest, encode_manifest
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef


def filled(root: Root, save: SaveRef) -> SaveRef:
    """Put manifest and index into the save's directory; return the save."""
    folder = root.open_save(save)
    manifest = Manifest(job=save.job, save_id=save.save_id, step=save.step)
    root.write_file(folder / MANIFEST_NAME, encode_manifest(manifest))
    root.write_file(folder / METADATA_NAME, b"index")
    return save


def publish(root: Root, save_id: str, step: int) -> SaveRef:
    """Publish a checkpoint of this save, in place of what has its name."""
    save = SaveRef(job="j", save_id=save_id, step=step, name=f"step_{step}", overwrite=True)
    root.publish(filled(root, save))
    return save
