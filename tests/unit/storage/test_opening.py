"""Preparing a root, and claiming attempts in it."""

from __future__ import annotations

import os
import threading

import msgpack
from tests.unit.storage.saves import names

from milepost.format.manifest import Manifest, encode_manifest
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef


def test_preparing_twice_is_fine(root: Root) -> None:
    root.prepare()
    assert [".milepost-run", ".partial"] == names(root.path)


def test_attempts_are_numbered_on_from_the_newest(root: Root) -> None:
    assert [1, 2] == [root.claim_attempt("run-7"), root.claim_attempt("run-8")]
    (root.path / ".milepost-run" / "attempt-41").touch()
    assert 42 == root.claim_attempt("run-7")
    old = root.open_save(SaveRef("run-7", "57-3", 10, "step_10"))
    root.write_file(old / ".milepost", encode_manifest(Manifest(save_id="57-3", step=10)))
    root.write_file(old / ".metadata", b"index")
    old.rename(root.path / "step_10")
    assert 58 == root.claim_attempt("run-7"), "a checkpoint from elsewhere is older than ours"
    claim = msgpack.unpackb((root.path / ".milepost-run" / "attempt-2").read_bytes())
    assert ("run-8", os.getpid()) == (claim["job"], claim["pid"])


def test_no_two_claims_get_the_same_number(root: Root) -> None:
    claimed: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: claimed.extend(Root(root.path).claim_attempt("j") for _ in range(10))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(range(1, 41)) == sorted(claimed)


def test_an_old_draft_is_swept_and_a_fresh_one_stays(root: Root) -> None:
    old, fresh = (root.run_path / f".tmp-{name}" for name in ("old", "fresh"))
    link = root.path / ".partial" / "latest.0123"
    for draft in (old, fresh):
        draft.write_bytes(b"")
    link.symlink_to("step_1")
    os.utime(old, (1.0, 1.0))
    root.prepare()
    assert not old.exists()
    assert fresh.exists()
    assert not link.is_symlink()
