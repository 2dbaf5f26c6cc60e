"""The order of syncs and renames as the kernel sees it: power may fail between any two calls."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.tracing import needs_strace, skip_if_forbidden

pytestmark = needs_strace

CHILD = """
import mmap, sys
from milepost.format.manifest import FRAGMENT_PREFIX, Manifest, encode_manifest
from milepost.wire.messages import SaveRef
from milepost.storage.root import Root
root = Root(sys.argv[1])
root.prepare()
attempt = root.claim_attempt("job")
for count, overwrite in ((1, False), (2, True)):
    save = SaveRef("job", f"{attempt}-{count}", 1, "step_1", overwrite)
    directory = root.open_save(save)
    root.write_image(directory / "__0_0.distcp", memoryview(mmap.mmap(-1, 40 << 20)))
    root.write_image(directory / "__1_0.distcp", memoryview(mmap.mmap(-1, 5000))[1:])
    root.write_file(directory / (FRAGMENT_PREFIX + "n"), b"fragment")
    manifest = Manifest(save_id=save.save_id, step=1)
    root.write_file(directory / ".milepost", encode_manifest(manifest))
    root.write_file(directory / ".metadata", b"index")
    root.publish(save)
    root.move_latest("step_1")
    root.discard(save)
"""


class Call(NamedTuple):
    name: str
    paths: tuple[str, ...]
    """What the call was applied to, below the root: of a rename source and target."""


def trace(tmp_path: Path) -> list[Call]:
    log = tmp_path / "log"
    root = tmp_path / "root"
    calls = "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,symlink,symlinkat"
    run = subprocess.run(
        [
            "strace",
            "-f",
            "-y",
            "-o",
            log,
            "-e",
            f"trace={calls}",
            sys.executable,
            "-c",
            CHILD,
            root,
        ],
        capture_output=True,
        text=True,
    )
    skip_if_forbidden(run.stderr)
    assert 0 == run.returncode, run.stderr
    found = []
    for line in log.read_text().splitlines():
        match = re.match(r"\d+ +(\w+)\((.*)\) += \d", line)
        if match is None or str(root) not in line:
            continue
        name, arguments = match.groups()
        name = {"pwrite64": "write", "fdatasync": "fsync"}.get(name, name)
        if name == "openat" and "O_WRONLY" not in arguments and "O_RDWR" not in arguments:
            continue
        if name in ("write", "fsync"):
            paths = re.findall(r"^\d+<([^>]*)>", arguments)
        else:
            paths = re.findall(r'"([^"]*)"', arguments)
        found.append(Call(name, tuple(path.removeprefix(f"{root}").strip("/") for path in paths)))
    return found


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    return trace(tmp_path_factory.mktemp("trace"))


def positions(calls: list[Call], name: str, path: str) -> list[int]:
    """Where calls of this name have the path as their last argument."""
    return [at for at, call in enumerate(calls) if call.name == name and call.paths[-1:] == (path,)]


def publications(calls: list[Call]) -> list[int]:
    return [
        at
        for at, call in enumerate(calls)
        if call.name.startswith("rename") and call.paths[-1] == "step_1"
    ]


def test_each_data_file_is_synced_after_its_last_write_and_before_publication(
    calls: list[Call],
) -> None:
    for count, published in enumerate(publications(calls), start=1):
        for name in ("__0_0.distcp", "__1_0.distcp"):
            path = f".partial/step_1.1-{count}/{name}"
            writes = positions(calls, "write", path)
            (synced,) = positions(calls, "fsync", path)
            assert writes, path
            assert max(writes) < synced < published


def test_each_small_file_is_written_synced_renamed_and_its_directory_synced_in_this_order(
    calls: list[Call],
) -> None:
    checked = []
    for at, call in enumerate(calls):
        if not call.name.startswith("rename") or "/.tmp-" not in call.paths[0]:
            continue
        temp, target = call.paths
        (written,) = positions(calls, "write", temp)
        (synced,) = positions(calls, "fsync", temp)
        assert written < synced < at
        assert calls[at + 1] == Call("fsync", (str(Path(target).parent),))
        checked.append(Path(target).name)
    assert [
        ".fragment-n",
        ".milepost",
        ".metadata",
        ".fragment-n",
        ".milepost",
        ".metadata",
        "replace-step_1",
    ] == checked


def test_the_index_appears_last_and_the_names_in_the_directory_are_durable_before_publication(
    calls: list[Call],
) -> None:
    for count, published in enumerate(publications(calls), start=1):
        directory = f".partial/step_1.1-{count}"
        (index,) = positions(calls, "rename", f"{directory}/.metadata")
        later = [
            call
            for call in calls[index + 1 : published]
            if call.name != "fsync" and call.paths[-1].startswith(directory)
        ]
        assert [] == later
        # Once for the index, and again after the fragments were removed.
        assert 2 <= len(
            [at for at in positions(calls, "fsync", directory) if index < at < published]
        )


def test_publication_is_durable_in_both_directories_before_latest_moves(
    calls: list[Call],
) -> None:
    moved = positions(calls, "rename", "latest")
    assert len(moved) == len(publications(calls)) == 2
    for published, latest in zip(publications(calls), moved, strict=True):
        between = {call.paths for call in calls[published:latest] if call.name == "fsync"}
        assert {("",), (".partial",)} <= between
        assert ("",) in {call.paths for call in calls[latest:] if call.name == "fsync"}


def test_the_intent_to_replace_is_durable_before_the_old_checkpoint_loses_its_name(
    calls: list[Call],
) -> None:
    (aside,) = positions(calls, "rename", ".partial/step_1.1-1.replaced")
    (intent,) = positions(calls, "rename", ".milepost-run/replace-step_1")
    assert intent < aside
    assert Call("fsync", (".milepost-run",)) in calls[intent:aside]
    assert aside < publications(calls)[1]


def test_an_attempt_is_claimed_durably(calls: list[Call]) -> None:
    claim = ".milepost-run/attempt-1"
    (written,) = positions(calls, "write", claim)
    (synced,) = positions(calls, "fsync", claim)
    assert written < synced < min(positions(calls, "fsync", ".milepost-run"))
