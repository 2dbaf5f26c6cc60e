"""The modes of new files: by the umask that was said, whatever that of this process is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from milepost.storage.homes import home_of
from milepost.storage.modes import UNKNOWN, make_directory, open_new, own_umask
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef


@contextmanager
def umask_of(umask: int) -> Iterator[None]:
    """Give this process a umask while the block runs."""
    before = os.umask(umask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027, 0o077])
def test_a_process_knows_its_own_umask_without_changing_it(umask: int) -> None:
    with umask_of(umask):
        assert umask == own_umask()
        assert umask == os.umask(umask)


def test_where_the_system_does_not_say_it_the_umask_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("milepost.storage.modes.open", refuse, raising=False)
    assert UNKNOWN == own_umask()


def refuse(*args: object, **kwargs: object) -> None:
    raise FileNotFoundError


@pytest.mark.parametrize("own", [0o022, 0o077, 0o000])
@pytest.mark.parametrize(
    ("said", "of_file", "of_directory"),
    [
        (0o077, 0o600, 0o700),
        (0o022, 0o644, 0o755),
        (0o002, 0o664, 0o775),
        (0o000, 0o666, 0o777),
        # The owner has to write them, and to remove them again.
        (0o777, 0o600, 0o700),
    ],
)
def test_the_umask_that_was_said_gives_the_modes(
    tmp_path: Path, own: int, said: int, of_file: int, of_directory: int
) -> None:
    with umask_of(own):
        os.close(open_new(tmp_path / "file", said))
        make_directory(tmp_path / "folder", said)
        make_directory(tmp_path / "folder", 0o077)
    assert (of_file, of_directory) == (mode_of(tmp_path / "file"), mode_of(tmp_path / "folder"))


def test_if_no_umask_was_said_that_of_the_process_counts(tmp_path: Path) -> None:
    with umask_of(0o037):
        os.close(open_new(tmp_path / "file"))
        make_directory(tmp_path / "folder")
    assert (0o640, 0o740) == (mode_of(tmp_path / "file"), mode_of(tmp_path / "folder"))


@pytest.mark.parametrize("has_place", [True, False])
def test_a_save_has_the_modes_of_its_trainer_s_umask(tmp_path: Path, has_place: bool) -> None:
    root = tmp_path / "root"
    Root(root).prepare()
    place = str(tmp_path / "above" / "best") if has_place else ""
    save = SaveRef("job", "1-1", 1, "step_1", place=place)
    with umask_of(0o022):
        home = home_of(str(root), save, 0o077)
        folder = home.open_save(save)
        home.write_image(folder / "__0_0.distcp", memoryview(b"data"))
        home.write_file(folder / ".milepost", b"")
        home.write_file(folder / ".metadata", b"index")
        final = home.publish(save) if not has_place else folder
    assert 0o700 == mode_of(final)
    assert {0o600} == {mode_of(path) for path in final.iterdir()}
    if has_place:
        assert [0o700, 0o700] == [mode_of(path) for path in (final.parent, final.parent.parent)]
