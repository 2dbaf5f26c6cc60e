"""What crashed attempts left unfinished goes with a later commit, and nothing else does."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.executors.test_directories import Bench
from tests.unit.storage.published import filled

from milepost.errors import SaveFailed
from milepost.storage.removals import ABANDONED_S
from milepost.storage.root import Root
from milepost.wire.messages import Keep, SaveRef
from milepostd.core.commands import Discard
from milepostd.core.events import Discarded, Published
from milepostd.executors.latest import Latest


def aged(path: Path, age_s: float) -> Path:
    """Have a directory and its files look as if nobody had touched them for so long."""
    at_s = time.time() - age_s
    for each in (*path.iterdir(), path):
        os.utime(each, (at_s, at_s))
    return path


def begun(root: Root, save_id: str, name: str) -> Path:
    folder = root.open_save(SaveRef("run-7", save_id, 10, name))
    root.write_file(folder / "__0_0.distcp", b"half")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.prepare()
    return made


def test_unfinished_saves_of_earlier_attempts_are_cleared_once_untouched_for_long(
    root: Root,
) -> None:
    old, given_up = begun(root, "1-1", "step_10"), begun(root, "2-9", "x.1-1")
    root.give_up(SaveRef("run-7", "2-9", 10, "x.1-1"))
    given_up = given_up.with_name(given_up.name + ".aborted")
    busy, recent, own = (
        begun(root, "2-1", "step_20"),
        begun(root, "2-2", "step_30"),
        begun(root, "3-1", "step_40"),
    )
    for path in (old, given_up, busy, own):
        aged(path, 2 * ABANDONED_S)
    # Its writer is at work on one file.
    os.utime(busy / "__0_0.distcp")
    aged(recent, ABANDONED_S / 2)
    save = SaveRef("run-7", "3-2", 50, "step_50")
    root.publish(filled(root, save))

    assert sorted([old.name, given_up.name]) == sorted(root.clear_abandoned(save))
    assert sorted([busy, recent, own]) == sorted(root.partials())
    assert [] == root.clear_abandoned(save)
    assert ["step_50"] == [entry.name for entry in root.checkpoints()]
    with pytest.raises(SaveFailed):
        root.publish(SaveRef("run-7", "1-1", 10, "step_10"))


def test_a_commit_clears_and_stands_whether_it_can_or_not(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(root: Root, save: SaveRef) -> list[str]:
        raise OSError(5, "input/output error", str(root.path))

    save = SaveRef("run-7", "9-1", 50, "step_50", overwrite=True)
    old = aged(begun(root, "1-1", "step_1"), 2 * ABANDONED_S)
    monkeypatch.setattr("tests.unit.executors.test_directories.SAVE", save)
    for is_refused in (True, False):
        bench = Bench(root)
        filled(root, save)
        with monkeypatch.context() as patched:
            if is_refused:
                patched.setattr(Root, "clear_abandoned", refuse)
            assert isinstance(bench.publish(for_s=9), Published)
            assert old.exists(), "nobody waits for it to hear of a commit"
            command = Discard(save=save, root=str(root.path))
            assert isinstance(bench.end(command), Discarded)
        assert is_refused == old.exists()
        root.remove_checkpoint(save.name)


def test_what_a_failed_save_left_is_discarded_and_nothing_else(root: Root) -> None:
    old = aged(begun(root, "1-1", "step_1"), 2 * ABANDONED_S)
    failed = begun(root, "9-1", "step_50")
    command = Discard(save=SaveRef("run-7", "9-1", 50, "step_50"), root=str(root.path))
    assert isinstance(Bench(root).end(command), Discarded)
    assert old.exists()
    assert not failed.exists()


@pytest.mark.parametrize("is_deleted_half", [False, True])
def test_what_a_daemon_was_killed_removing_goes_with_the_next_commit(
    root: Root, is_deleted_half: bool
) -> None:
    for count in range(1, 6):
        root.publish(filled(root, SaveRef("run-7", f"1-{count}", count, f"step_{count}")))
    partial = root.path / ".partial"
    if is_deleted_half:
        half = partial / "step_1.pruned-0123abcd"
        (root.path / "step_1").rename(half)
        (half / ".metadata").unlink()
    else:
        (root.path / "step_1").rename(partial / "step_1.1-1.retired")

    async def in_files(work: Any) -> Any:
        return work()

    removed = asyncio.run(Latest(in_files, lambda work: None).retain(root, Keep(last=3)))
    assert [] == list(partial.iterdir())
    assert {"step_3", "step_4", "step_5"} == {entry.name for entry in root.checkpoints()}
    assert ("step_1" in removed) == (not is_deleted_half)
