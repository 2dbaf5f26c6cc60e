"""Publishing and giving up: exactly one wins, and what has a final name is whole."""

from __future__ import annotations

import threading

import msgpack
import pytest
from tests.unit.storage.saves import SAVE, commit, content_of, fill, names, save_of

from milepost.errors import MilepostError, Rejected, SaveFailed
from milepost.format.manifest import Manifest, encode_manifest
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef


def test_a_published_save_is_a_checkpoint_and_nothing_else_is_left(root: Root) -> None:
    fill(root, SAVE)
    assert [] == root.checkpoints()
    assert root.path / "step_30" == root.publish(SAVE)
    assert [".metadata", ".milepost", "__0_0.distcp"] == names(root.path / "step_30")
    assert [] == names(root.path / ".partial")
    (entry,) = root.checkpoints()
    assert ("step_30", 30, "2-3", (2, 30, 3)) == (
        entry.name,
        entry.step,
        entry.save_id,
        entry.order,
    )
    assert entry.manifest is not None
    assert ("__0_0.distcp",) == entry.manifest.files


def test_publishing_removes_fragments_and_leftovers_of_broken_attempts(root: Root) -> None:
    directory = root.open_save(SAVE)
    for name in ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp", ".fragment-a", ".tmp-00ff"):
        (directory / name).touch()
    manifest = Manifest(save_id="2-3", step=30, files=("__0_1.distcp", "__1_0.distcp"))
    root.write_file(directory / ".milepost", encode_manifest(manifest))
    root.write_file(directory / ".metadata", b"index")
    root.publish(SAVE)
    assert [".metadata", ".milepost", "__0_1.distcp", "__1_0.distcp"] == names(
        root.path / "step_30"
    )


def test_a_save_without_its_index_is_never_published(root: Root) -> None:
    directory = fill(root, SAVE)
    (directory / ".metadata").unlink()
    with pytest.raises(SaveFailed, match=r"has no \.metadata"):
        root.publish(SAVE)
    assert [] == root.checkpoints()
    assert directory.exists()


def test_giving_up_after_publishing_finds_the_checkpoint(root: Root) -> None:
    commit(root, SAVE)
    assert "committed" == root.give_up(SAVE)
    assert root.path / "step_30" == root.publish(SAVE)


def test_publishing_after_giving_up_is_refused(root: Root) -> None:
    fill(root, SAVE)
    assert ["aborted", "aborted"] == [root.give_up(SAVE), root.give_up(SAVE)]
    with pytest.raises(SaveFailed) as caught:
        root.publish(SAVE)
    assert "aborted" == caught.value.code
    assert [] == root.checkpoints()
    root.discard(SAVE)
    root.discard(SAVE)
    assert [] == names(root.path / ".partial")


def test_a_save_in_neither_place_has_an_unknown_outcome(root: Root) -> None:
    assert "unknown" == root.give_up(SAVE)
    with pytest.raises(SaveFailed) as caught:
        root.publish(SAVE)
    assert "outcome-unknown" == caught.value.code


def test_another_save_under_the_same_name_is_not_taken_for_ours(root: Root) -> None:
    commit(root, save_of(30, "1-9"))
    assert "unknown" == root.give_up(SAVE)


def test_a_late_node_cannot_bring_a_save_back_to_life(root: Root) -> None:
    fill(root, SAVE)
    root.give_up(SAVE)
    with pytest.raises(SaveFailed) as caught:
        root.open_save(SAVE)
    assert "aborted" == caught.value.code
    assert ["step_30.2-3.aborted"] == names(root.path / ".partial")


def test_a_late_node_cannot_begin_a_published_save_again(root: Root) -> None:
    commit(root, SAVE)
    with pytest.raises(Rejected) as caught:
        root.open_save(SAVE)
    assert "already-committed" == caught.value.code
    assert [] == names(root.path / ".partial")


def test_giving_up_a_directory_made_again_after_publishing_finds_the_checkpoint(root: Root) -> None:
    commit(root, SAVE)
    (root.path / ".partial" / "step_30.2-3").mkdir()
    assert "committed" == root.give_up(SAVE)
    assert [] == names(root.path / ".partial")
    assert [30] == [each.step for each in root.checkpoints()]


def test_a_directory_made_again_after_giving_up_is_given_up_again(root: Root) -> None:
    fill(root, SAVE)
    root.give_up(SAVE)
    (root.path / ".partial" / "step_30.2-3").mkdir()
    assert "aborted" == root.give_up(SAVE)
    assert ["step_30.2-3.aborted"] == names(root.path / ".partial")


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_publishing_and_giving_up_at_once_exactly_one_wins(root: Root, overwrite: bool) -> None:
    winners = set()
    for count in range(60):
        save = save_of(count, f"2-{count}", overwrite=overwrite)
        if overwrite:
            commit(root, save_of(count, f"1-{count}"), b"old")
        fill(root, save, b"new")
        start = threading.Barrier(3)
        said: dict[str, str] = {}

        def publish(save: SaveRef, start: threading.Barrier, said: dict[str, str]) -> None:
            start.wait()
            try:
                Root(root.path).publish(save)
                said["publish"] = "committed"
            except MilepostError as error:
                said["publish"] = error.code

        def give_up(
            who: str, save: SaveRef, start: threading.Barrier, said: dict[str, str]
        ) -> None:
            start.wait()
            said[who] = Root(root.path).give_up(save)

        threads = [
            threading.Thread(target=publish, args=(save, start, said)),
            threading.Thread(target=give_up, args=("one", save, start, said)),
            threading.Thread(target=give_up, args=("two", save, start, said)),
        ]
        for thread in threads if count % 2 else threads[::-1]:
            thread.start()
        for thread in threads:
            thread.join()

        outcomes = set(said.values())
        assert 1 == len(outcomes), said
        winners |= outcomes
        expected = b"new" if outcomes == {"committed"} else b"old"
        if outcomes == {"committed"} or overwrite:
            assert expected == content_of(root, save.name)
        else:
            assert not (root.path / save.name).exists()
        root.discard(save)
    assert winners <= {"committed", "aborted"}
    assert [] == names(root.path / ".partial")
    assert [] == names(root.path / ".milepost-run")


def test_a_save_is_unpublished_only_where_it_was_and_without_an_intent(
    root: Root,
) -> None:
    save = SaveRef(job="j", save_id="1-7", step=70, name="step_70", overwrite=True)
    assert not root.is_unpublished(save, was_begun=True)
    assert root.is_unpublished(save, was_begun=False)
    folder = root.open_save(save)
    assert root.is_unpublished(save, was_begun=True)
    intent = root.run_path / "replace-step_70"
    intent.write_bytes(msgpack.packb({"name": "step_70", "save_id": "1-7", "aside": "x"}))
    assert not root.is_unpublished(save, was_begun=False)
    intent.unlink()
    folder.rename(root.path / "step_70")
    assert not root.is_unpublished(save, was_begun=True)
