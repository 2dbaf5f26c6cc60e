"""A place: its checkpoint is whole at every instant; exactly one of publish and give-up wins."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.storage.saves import Crash

from milepost.errors import Rejected, SaveFailed, UsageError
from milepost.format.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
    encode_manifest,
    read_manifest,
)
from milepost.storage.homes import home_of
from milepost.storage.place import PUBLISHING, SAVE_PREFIX, Place
from milepost.storage.removals import ABANDONED_S
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef

RANKS = 2


def save_at(place: Path, save_id: str, *, job: str = "j", overwrite: bool = True) -> SaveRef:
    return SaveRef(job, save_id, 0, "best", overwrite, place=str(place))


def filled(save: SaveRef) -> SaveRef:
    """Write all files of a save into its directory, as the daemons do; return the save."""
    place = Place(save.place)
    folder = place.open_save(save)
    files = []
    for rank in range(RANKS):
        number = 0
        while place.is_taken(f"__{rank}_{number}.distcp"):
            number += 1
        files.append(f"__{rank}_{number}.distcp")
        (folder / files[-1]).write_bytes(data_of(save, rank))
    manifest = Manifest(job=save.job, save_id=save.save_id, step=0, files=tuple(files))
    place.write_file(folder / MANIFEST_NAME, encode_manifest(manifest))
    place.write_file(folder / METADATA_NAME, index_of(save, files))
    return save


def data_of(save: SaveRef, rank: int) -> bytes:
    return f"{save.job} {save.save_id} {rank}".encode()


def index_of(save: SaveRef, files: list[str]) -> bytes:
    return "\n".join([f"{save.job} {save.save_id}", *files]).encode()


def held_by(place: Path) -> str | None:
    """Return which save's checkpoint stands in a place, by its index; None: no checkpoint. Fails
    if any file that the index names is not that save's.
    """
    try:
        writer, *files = (place / METADATA_NAME).read_text().splitlines()
    except FileNotFoundError:
        return None
    for rank, name in enumerate(files):
        assert f"{writer} {rank}" == (place / name).read_text()
    manifest = read_manifest(place)
    assert manifest is None or f"{manifest.job} {manifest.save_id}" == writer
    return writer


def leftovers(place: Path) -> list[str]:
    return sorted(name for name in os.listdir(place) if name.startswith((SAVE_PREFIX, ".")))


# --- publishing -----------------------------------------------------------------------------------


def test_a_save_becomes_the_checkpoint_of_its_place_and_leaves_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "a" / "best"
    save = filled(save_at(place, "1-1"))
    assert None is held_by(place)
    assert place == Place(place).publish(save)
    assert "j 1-1" == held_by(place)
    assert {"__0_0.distcp", "__1_0.distcp", METADATA_NAME, MANIFEST_NAME} == {*os.listdir(place)}
    assert ["best"] == os.listdir(place.parent)


def test_overwriting_replaces_the_checkpoint_s_own_files_and_no_others(tmp_path: Path) -> None:
    Place(tmp_path).publish(filled(save_at(tmp_path, "1-1")))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "logs").mkdir()
    Place(tmp_path).publish(filled(save_at(tmp_path, "1-2")))
    assert "j 1-2" == held_by(tmp_path)
    assert {
        "__0_1.distcp", "__1_1.distcp", METADATA_NAME, MANIFEST_NAME, "config.json", "logs",
    } == {*os.listdir(tmp_path)}  # fmt: skip


def test_a_checkpoint_of_stock_torch_is_replaced_whole(tmp_path: Path) -> None:
    (tmp_path / METADATA_NAME).write_bytes(b"stock\n__0_0.distcp")
    (tmp_path / "__0_0.distcp").write_bytes(b"stock 0")
    assert "stock" == held_by(tmp_path)
    Place(tmp_path).publish(filled(save_at(tmp_path, "1-1")))
    assert "j 1-1" == held_by(tmp_path)
    assert not (tmp_path / "__0_0.distcp").exists()


def test_without_overwrite_a_checkpoint_stays_and_the_save_is_untouched(tmp_path: Path) -> None:
    Place(tmp_path).publish(filled(save_at(tmp_path, "1-1")))
    save = filled(save_at(tmp_path, "1-2", overwrite=False))
    with pytest.raises(Rejected, match="holds a checkpoint already") as caught:
        Place(tmp_path).publish(save)
    assert "already-committed" == caught.value.code
    assert "j 1-1" == held_by(tmp_path)
    assert "aborted" == Place(tmp_path).give_up(save)


def test_publishing_again_confirms(tmp_path: Path) -> None:
    save = filled(save_at(tmp_path, "1-1", overwrite=False))
    assert tmp_path == Place(tmp_path).publish(save)
    assert tmp_path == Place(tmp_path).publish(save)
    assert "committed" == Place(tmp_path).give_up(save)


def test_a_save_without_an_index_is_not_published(tmp_path: Path) -> None:
    save = save_at(tmp_path, "1-1")
    Place(tmp_path).open_save(save)
    with pytest.raises(SaveFailed, match=r"has no \.metadata"):
        Place(tmp_path).publish(save)


def test_a_save_that_another_one_is_publishing_over_is_refused(
    tmp_path: Path, crash_at: Callable[[int], None]
) -> None:
    first, second = filled(save_at(tmp_path, "1-1")), filled(save_at(tmp_path, "1-1", job="k"))
    crash_at(2)  # after the deciding rename; the list of old files was the first
    with pytest.raises(Crash):
        Place(tmp_path).publish(first)
    crash_at(-1)
    with pytest.raises(Rejected, match="another save is just being published"):
        Place(tmp_path).publish(second)
    Place(tmp_path).prepare()
    assert "j 1-1" == held_by(tmp_path)
    Place(tmp_path).publish(second)
    assert "k 1-1" == held_by(tmp_path)


def test_two_saves_at_once_have_files_of_their_own(tmp_path: Path) -> None:
    saves = [filled(save_at(tmp_path, "1-1", job=job)) for job in "jk"]
    for save in saves:
        Place(tmp_path).publish(save)
        assert f"{save.job} 1-1" == held_by(tmp_path)
    assert [] == [name for name in leftovers(tmp_path) if name.startswith(SAVE_PREFIX)]


# --- giving up ------------------------------------------------------------------------------------


def test_a_save_that_was_given_up_is_never_published_nor_begun_again(tmp_path: Path) -> None:
    save = filled(save_at(tmp_path, "1-1"))
    assert "aborted" == Place(tmp_path).give_up(save)
    with pytest.raises(SaveFailed, match="was given up"):
        Place(tmp_path).publish(save)
    with pytest.raises(SaveFailed, match="was given up"):
        Place(tmp_path).open_save(save)
    Place(tmp_path).discard(save)
    assert [] == os.listdir(tmp_path)


def test_a_save_that_was_never_begun_can_be_forestalled(tmp_path: Path) -> None:
    save = save_at(tmp_path, "1-1")
    assert "unknown" == Place(tmp_path).give_up(save)
    assert Place(tmp_path).is_unpublished(save, was_begun=False)
    assert "aborted" == Place(tmp_path).forestall(save)
    with pytest.raises(SaveFailed, match="was given up"):
        Place(tmp_path).open_save(save)


def test_a_save_in_a_place_that_is_gone_is_aborted(tmp_path: Path) -> None:
    assert "aborted" == Place(tmp_path / "gone").forestall(save_at(tmp_path / "gone", "1-1"))


def test_a_published_save_is_not_begun_again(tmp_path: Path) -> None:
    save = filled(save_at(tmp_path, "1-1"))
    Place(tmp_path).publish(save)
    with pytest.raises(Rejected, match="was published"):
        Place(tmp_path).open_save(save)
    assert [METADATA_NAME, MANIFEST_NAME] == leftovers(tmp_path)
    assert not Place(tmp_path).is_unpublished(save, was_begun=True)


# --- crashes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("finish", ["publish", "give_up", "prepare"])
def test_a_crash_at_any_step_leaves_a_whole_checkpoint_and_whoever_comes_finishes(
    tmp_path: Path, crash_at: Callable[[int], None], finish: str
) -> None:
    ends = set()
    for number in range(100):
        place = tmp_path / str(number)
        Place(place).publish(filled(save_at(place, "1-1")))
        save = filled(save_at(place, "1-2"))
        crash_at(number)
        try:
            Place(place).publish(save)
            is_over = True
        except Crash:
            is_over = False
        crash_at(-1)
        assert held_by(place) in ("j 1-1", "j 1-2")
        was_decided = not Place(place).save_dir(save).exists()
        if finish == "publish":
            Place(place).publish(save)
        elif finish == "give_up":
            outcome = Place(place).give_up(save)
            assert ("committed" if was_decided else "aborted") == outcome
            Place(place).discard(save)
        else:
            Place(place).prepare()
        is_new = was_decided or finish == "publish"
        assert ("j 1-2" if is_new else "j 1-1") == held_by(place)
        if finish != "prepare" or was_decided:
            assert [METADATA_NAME, MANIFEST_NAME] == leftovers(place)
            assert RANKS + 2 == len(os.listdir(place))
        ends.add(was_decided)
        if is_over:
            break
    else:
        pytest.fail("publishing does not end")
    assert {False, True} == ends


def test_a_crash_while_a_publication_is_finished_is_finished_too(
    tmp_path: Path, crash_at: Callable[[int], None]
) -> None:
    place = Place(tmp_path)
    place.publish(filled(save_at(tmp_path, "1-1")))
    save = filled(save_at(tmp_path, "1-2"))
    # One step further each time: each call stands on what the last one left.
    for _ in range(100):
        crash_at(2)
        try:
            place.publish(save)
            break
        except Crash:
            assert held_by(tmp_path) in ("j 1-1", "j 1-2")
    crash_at(-1)
    place.prepare()
    assert "j 1-2" == held_by(tmp_path)
    assert RANKS + 2 == len(os.listdir(tmp_path))


def test_what_a_crashed_save_left_goes_after_an_hour(tmp_path: Path) -> None:
    young, old = (filled(save_at(tmp_path, f"1-{count}")) for count in (1, 2))
    folder = Place(tmp_path).save_dir(old)
    for path in [*folder.iterdir(), folder]:
        status = path.stat()
        os.utime(path, (status.st_atime, status.st_mtime - ABANDONED_S - 60))
    Place(tmp_path).prepare()
    assert [Place(tmp_path).save_dir(young).name] == os.listdir(tmp_path)


# --- names ----------------------------------------------------------------------------------------


def test_a_save_without_a_place_belongs_below_its_job_s_root(tmp_path: Path) -> None:
    home = home_of(str(tmp_path), SaveRef("j", "1-1", 0, "step_0"))
    assert isinstance(home, Root)
    assert isinstance(home_of(str(tmp_path), save_at(tmp_path, "1-1")), Place)


def test_a_save_id_cannot_lead_out_of_the_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a save id"):
        Place(tmp_path).save_dir(save_at(tmp_path, "../1"))


def test_names_of_data_files_that_wait_in_any_save_s_directory_are_taken(tmp_path: Path) -> None:
    filled(save_at(tmp_path, "1-1"))
    assert Place(tmp_path).is_taken("__0_0.distcp")
    assert not Place(tmp_path).is_taken("__0_1.distcp")
    assert not PUBLISHING.startswith(SAVE_PREFIX)
