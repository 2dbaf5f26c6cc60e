"""Storage: what is under a final name is whole, exactly one of publish and give-up wins, errors say
why.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import MilepostError, Rejected, SaveFailed, StorageError, UsageError
from milepost.format.layout import PAGE_BYTES
from milepost.format.manifest import Manifest, encode
from milepost.storage import blocks
from milepost.storage import root as storage_module
from milepost.storage.refusals import storage_error
from milepost.storage.root import BLOCK_BYTES, Root, check_name
from milepost.wire.messages import SaveRef

SAVE = SaveRef("run-7", "2-3", 30, "step_30")


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path / "deep" / "root")
    root.prepare()
    return root


def save_of(step: int, save_id: str, *, overwrite: bool = False) -> SaveRef:
    return SaveRef("run-7", save_id, step, f"step_{step}", overwrite)


def fill(root: Root, save: SaveRef, content: bytes = b"data") -> Path:
    """Make the save complete, but for its publication."""
    directory = root.open_save(save)
    root.write_image(directory / "__0_0.distcp", memoryview(content))
    manifest = Manifest(save_id=save.save_id, step=save.step, files=("__0_0.distcp",))
    root.write_file(directory / ".milepost", encode(manifest))
    root.write_file(directory / ".metadata", b"index")
    return directory


def commit(root: Root, save: SaveRef, content: bytes = b"data") -> Path:
    fill(root, save, content)
    return root.publish(save)


def content_of(root: Root, name: str) -> bytes:
    return (root.path / name / "__0_0.distcp").read_bytes()


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/a", "latest", "a\0b", "a\nb", "x" * 201, "\udc80"]
)
def test_a_name_that_is_not_one_plain_component_is_refused(root: Root, name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)
    with pytest.raises(UsageError):
        root.open_save(SaveRef("run-7", "1-1", 1, name))
    with pytest.raises(UsageError):
        root.remove_checkpoint(name)
    with pytest.raises(UsageError):
        root.move_latest(name)


@pytest.mark.parametrize("save_id", ["", "../1", "1.1", "aborted", "1-1/x", "-1"])
def test_a_save_id_that_is_none_is_refused(root: Root, save_id: str) -> None:
    with pytest.raises(UsageError):
        root.open_save(SaveRef("run-7", save_id, 1, "step_1"))


@pytest.mark.parametrize("name", ["step_1", "best model", "a.b-1_c", "épreuve", "x" * 200])
def test_other_names_are_taken_and_become_directories(root: Root, name: str) -> None:
    save = SaveRef("run-7", "1-1", 1, name)
    assert root.path / name == commit(root, save)
    assert [name] == [each.name for each in root.checkpoints()]


@given(st.text(max_size=12))
def test_no_accepted_name_leaves_the_root(name: str) -> None:
    try:
        check_name(name)
    except UsageError:
        return
    assert Path("/root") == (Path("/root") / name).parent
    assert "/root/" + name == os.path.normpath("/root/" + name)


# --- the root -------------------------------------------------------------------------------------


def test_preparing_twice_is_fine(root: Root) -> None:
    root.prepare()
    assert [".milepost-run", ".partial"] == names(root.path)


def test_attempts_are_numbered_on_from_the_newest(root: Root) -> None:
    assert [1, 2] == [root.claim_attempt("run-7"), root.claim_attempt("run-8")]
    (root.path / ".milepost-run" / "attempt-41").touch()
    assert 42 == root.claim_attempt("run-7")
    old = root.open_save(SaveRef("run-7", "57-3", 10, "step_10"))
    root.write_file(old / ".milepost", encode(Manifest(save_id="57-3", step=10)))
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


# --- files ----------------------------------------------------------------------------------------


def test_writing_a_file_replaces_it_whole_and_leaves_nothing_else(root: Root) -> None:
    directory = root.open_save(SAVE)
    root.write_file(directory / "f", b"old")
    root.write_file(directory / "f", b"new" * 100_000)
    assert b"new" * 100_000 == (directory / "f").read_bytes()
    assert ["f"] == names(directory)


def test_a_file_that_cannot_be_replaced_stays_and_the_temporary_one_goes(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root.open_save(SAVE)
    root.write_file(directory / "f", b"old")

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    for call in ("fsync", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse)
            with pytest.raises(StorageError):
                root.write_file(directory / "f", b"new")
        assert ["f"] == names(directory)
        assert b"old" == (directory / "f").read_bytes()


LENGTHS = [0, 1, 4095, 4096, 4097, 3 * 4096, BLOCK_BYTES, BLOCK_BYTES + 4096, BLOCK_BYTES + 5]


def image_of(length: int) -> memoryview:
    """Page-aligned memory, as in an arena."""
    import mmap

    memory = mmap.mmap(-1, max(length, 1))
    view = memoryview(memory)[:length]
    for at in range(0, length, 4096):
        view[at : at + 8] = at.to_bytes(8, "little")[: length - at]
    return view


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("direct", [True, False])
def test_an_image_of_any_length_is_written_exactly(
    root: Root, monkeypatch: pytest.MonkeyPatch, length: int, direct: bool
) -> None:
    if not direct:
        monkeypatch.setattr(blocks, "_set_direct", lambda file, direct: False)
    image = image_of(length)
    counts: list[int] = []
    path = root.open_save(SAVE) / "__0_0.distcp"
    root.write_image(path, image, on_block=counts.append)
    assert image == path.read_bytes()
    assert length == sum(counts)
    assert all(0 < count <= BLOCK_BYTES for count in counts)


def test_memory_that_is_not_aligned_is_written_all_the_same(root: Root) -> None:
    image = image_of(3 * PAGE_BYTES)[100:-100]
    path = root.open_save(SAVE) / "__0_0.distcp"
    root.write_image(path, image)
    assert image == path.read_bytes()


def test_an_existing_file_is_never_written_to(root: Root) -> None:
    path = root.open_save(SAVE) / "__0_0.distcp"
    path.write_bytes(b"another writer's")
    with pytest.raises(StorageError) as caught:
        root.write_image(path, image_of(4096))
    assert errno.EEXIST == caught.value.errno
    assert b"another writer's" == path.read_bytes()


class Writes:
    """`os.pwrite` with one scripted misbehaviour at the n-th call; notes which were direct."""

    def __init__(self, at: int, behave: int | str) -> None:
        self.at = at
        self.behave = behave
        self.direct: list[bool] = []
        self._real = os.pwrite

    def __call__(self, file: int, data: memoryview, offset: int) -> int:
        self.direct.append(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        if len(self.direct) - 1 == self.at:
            if self.behave == "short":
                return self._real(file, data[:512], offset)
            assert isinstance(self.behave, int)
            raise OSError(self.behave, "injected")
        return self._real(file, data, offset)


def takes_direct_writes(directory: Path) -> bool:
    path = directory / "probe"
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_DIRECT)
        os.pwrite(file, image_of(4096), 0)
    except OSError:
        return False
    finally:
        os.close(file)
        path.unlink()
    return True


@pytest.mark.parametrize("behave", [errno.EINVAL, errno.EOPNOTSUPP, "short"])
@pytest.mark.parametrize("at", [0, 1])
def test_after_a_direct_write_is_refused_or_cut_short_the_rest_goes_buffered(
    root: Root, monkeypatch: pytest.MonkeyPatch, at: int, behave: int | str
) -> None:
    if not takes_direct_writes(root.path):
        pytest.skip("no direct I/O here")
    image = image_of(3 * BLOCK_BYTES)
    path = root.open_save(SAVE) / "__0_0.distcp"
    writes = Writes(at, behave)
    monkeypatch.setattr(os, "pwrite", writes)
    counts: list[int] = []
    root.write_image(path, image, on_block=counts.append)
    assert [True] * (at + 1) == writes.direct[: at + 1]
    assert {False} == set(writes.direct[at + 1 :])
    assert len(image) == sum(counts)
    assert image == path.read_bytes()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EIO, "io-error"),
        (errno.ENOSPC, "no-space"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "file-too-large"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission"),
    ],
)
def test_a_write_that_fails_half_way_leaves_no_file_and_says_why(
    root: Root, monkeypatch: pytest.MonkeyPatch, number: int, code: str
) -> None:
    monkeypatch.setattr(blocks, "_set_direct", lambda file, direct: False)
    monkeypatch.setattr(os, "pwrite", Writes(1, number))
    directory = root.open_save(SAVE)
    with pytest.raises(StorageError) as caught:
        root.write_image(directory / "__0_0.distcp", image_of(2 * BLOCK_BYTES))
    assert (code, number) == (caught.value.code, caught.value.errno)
    assert str(directory / "__0_0.distcp") in caught.value.message
    assert os.strerror(number).lower() in caught.value.message
    assert f"{2 * BLOCK_BYTES} bytes wanted" in caught.value.message
    assert caught.value.hint
    assert [] == names(directory)


def test_an_io_error_of_a_direct_write_is_not_written_again(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(0, errno.EIO)
    monkeypatch.setattr(os, "pwrite", writes)
    directory = root.open_save(SAVE)
    with pytest.raises(StorageError) as caught:
        root.write_image(directory / "__0_0.distcp", image_of(BLOCK_BYTES))
    assert "io-error" == caught.value.code
    assert 1 == len(writes.direct)
    assert [] == names(directory)


def test_a_sync_that_fails_is_not_tried_again_and_leaves_no_file(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def refuse(file: int) -> None:
        calls.append(file)
        raise OSError(errno.EIO, "injected")

    directory = root.open_save(SAVE)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageError, match="input/output error"):
        root.write_image(directory / "__0_0.distcp", image_of(4096))
    assert 1 == len(calls)
    assert [] == names(directory)


def test_what_the_progress_callback_raises_ends_the_write_and_leaves_no_file(root: Root) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    directory = root.open_save(SAVE)
    with pytest.raises(KeyboardInterrupt):
        root.write_image(directory / "__0_0.distcp", image_of(4096), on_block=stop)
    assert [] == names(directory)


def test_a_broken_write_is_cleaned_up_even_after_its_directory_was_given_up(root: Root) -> None:
    def stop(count: int) -> None:
        root.give_up(SAVE)
        raise OSError(errno.EIO, "injected")

    with pytest.raises(StorageError):
        root.write_image(root.open_save(SAVE) / "__0_0.distcp", image_of(4096), on_block=stop)
    assert [[]] == [names(each) for each in root.partials()]


def test_a_written_image_does_not_stay_in_the_page_cache(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = root.open_save(SAVE)
    if os.statvfs(directory).f_fsid == os.statvfs("/dev/shm").f_fsid:
        pytest.skip("a memory file system is its own page cache")
    image = image_of(4 * PAGE_BYTES)
    libc = ctypes.CDLL(None)
    root.write_image(directory / "direct", image)
    monkeypatch.setattr(blocks, "_set_direct", lambda file, direct: False)
    root.write_image(directory / "buffered", image)
    (directory / "plain").write_bytes(image)

    def is_cached(name: str) -> bool:
        # Not by a read that must not wait: it starts one, which may have ended when it looks.
        with (directory / name).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            anchor = ctypes.c_char.from_buffer(mapped)
            pages = (ctypes.c_ubyte * 4)()
            assert 0 == libc.mincore(
                ctypes.c_void_p(ctypes.addressof(anchor)), mapped.size(), pages
            )
            del anchor
            return any(page & 1 for page in pages)

    assert is_cached("plain")
    assert [False, False] == [is_cached("direct"), is_cached("buffered")]


LIMITED = """
import resource, signal, sys
from milepost.errors import StorageError
from milepost.wire.messages import SaveRef
from milepost.storage.root import Root
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
root = Root(sys.argv[1])
directory = root.open_save(SaveRef("j", "1-1", 1, "step_1"))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from milepost.storage import blocks
if sys.argv[2] == "late":
    blocks._reserve = lambda file, length: None
import mmap
try:
    root.write_image(directory / "f", memoryview(mmap.mmap(-1, 409_600)))
except StorageError as error:
    print(error.code, error.errno)
    print(error.message)
root.write_image(directory / "small", memoryview(mmap.mmap(-1, 40_960)))
"""


@pytest.mark.parametrize("found", ["early", "late"])
def test_a_file_size_limit_is_named_as_such_with_path_and_bytes(root: Root, found: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(root.path), found],
        capture_output=True,
        text=True,
        check=True,
    )
    code, message = run.stdout.splitlines()
    directory = root.path / ".partial" / "step_1.1-1"
    assert f"file-too-large {errno.EFBIG}" == code
    assert f"write {directory / 'f'}: file too large (409600 bytes wanted)" == message
    assert ["small"] == names(directory)


@pytest.mark.parametrize(
    ("number", "code", "transient"),
    [
        (errno.ENOSPC, "no-space", False),
        (errno.EDQUOT, "quota", False),
        (errno.EPERM, "permission", False),
        (errno.ESTALE, "io-error", True),
        (errno.ETIMEDOUT, "io-error", True),
        (errno.ENOENT, "io-error", False),
    ],
)
def test_errors_say_whether_trying_again_may_help(number: int, code: str, transient: bool) -> None:
    error = storage_error("rename", "/ckpt/a", OSError(number, "x"))
    assert (code, transient) == (error.code, error.transient)
    assert f"rename /ckpt/a: {os.strerror(number).lower()}" == error.message
    assert "none" not in storage_error("rename", "/a", OSError("odd")).message.lower()


# --- publishing and giving up ---------------------------------------------------------------------


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


def test_publishing_leaves_out_fragments_and_what_broken_attempts_left(root: Root) -> None:
    directory = root.open_save(SAVE)
    for name in ("__0_0.distcp", "__0_1.distcp", "__1_0.distcp", ".fragment-a", ".tmp-00ff"):
        (directory / name).touch()
    manifest = Manifest(save_id="2-3", step=30, files=("__0_1.distcp", "__1_0.distcp"))
    root.write_file(directory / ".milepost", encode(manifest))
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


def test_a_checkpoint_with_a_damaged_manifest_is_not_taken_for_ours(root: Root) -> None:
    (commit(root, SAVE) / ".milepost").write_bytes(b"\xc1")
    assert "unknown" == root.give_up(SAVE)


def test_a_late_node_cannot_bring_a_save_back_to_life(root: Root) -> None:
    fill(root, SAVE)
    root.give_up(SAVE)
    with pytest.raises(SaveFailed) as caught:
        root.open_save(SAVE)
    assert "aborted" == caught.value.code
    assert ["step_30.2-3.aborted"] == names(root.path / ".partial")


def test_a_late_node_cannot_begin_a_save_anew_that_was_published(root: Root) -> None:
    commit(root, SAVE)
    with pytest.raises(Rejected) as caught:
        root.open_save(SAVE)
    assert "already-committed" == caught.value.code
    assert [] == names(root.path / ".partial")


def test_giving_up_a_directory_made_anew_after_publishing_finds_the_checkpoint(root: Root) -> None:
    commit(root, SAVE)
    (root.path / ".partial" / "step_30.2-3").mkdir()
    assert "committed" == root.give_up(SAVE)
    assert [] == names(root.path / ".partial")
    assert [30] == [each.step for each in root.checkpoints()]


def test_a_directory_made_anew_after_giving_up_is_given_up_again(root: Root) -> None:
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


# --- overwriting ----------------------------------------------------------------------------------


def test_a_taken_name_is_refused_and_both_stay_as_they_were(root: Root) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    fill(root, SAVE, b"new")
    with pytest.raises(Rejected) as caught:
        root.publish(SAVE)
    assert "already-committed" == caught.value.code
    assert b"old" == content_of(root, "step_30")
    assert "aborted" == root.give_up(SAVE)


@pytest.mark.parametrize("in_the_way", ["file", "link", "directory"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_not_replaced_in_silence(
    root: Root, in_the_way: str, overwrite: bool
) -> None:
    path = root.path / "step_30"
    if in_the_way == "file":
        path.touch()
    elif in_the_way == "link":
        path.symlink_to(root.path / ".milepost-run")
    else:
        path.mkdir()
        (path / "notes").touch()
    save = save_of(30, "2-3", overwrite=overwrite)
    fill(root, save)
    if in_the_way == "directory" and overwrite:
        root.publish(save)
        assert ["step_30.0-0.replaced"] == names(root.path / ".partial")
        return
    with pytest.raises(Rejected) as caught:
        root.publish(save)
    assert ("move it away" in caught.value.hint) == (in_the_way != "directory")
    assert path.is_symlink() or path.exists()


def test_what_a_killed_daemon_had_begun_to_delete_goes_with_the_next_discard(root: Root) -> None:
    commit(root, save_of(1, "1-1"))
    half_deleted = root.path / ".partial" / "step_0.pruned-0123abcd"
    half_deleted.mkdir()
    (half_deleted / "__0_0.distcp").write_bytes(b"data")
    root.discard(save_of(1, "1-1"))
    assert [] == names(root.path / ".partial")


def test_overwriting_replaces_a_checkpoint_and_discarding_deletes_the_old_one(root: Root) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    commit(root, save, b"new")
    assert b"new" == content_of(root, "step_30")
    assert ["step_30.1-1.replaced"] == names(root.path / ".partial")
    root.discard(save)
    assert [] == names(root.path / ".partial")
    assert b"new" == content_of(root, "step_30")
    assert "committed" == root.give_up(save)


@pytest.mark.parametrize("late_id", ["1-7", "2-2"])
def test_a_save_that_was_held_up_does_not_replace_a_newer_one(root: Root, late_id: str) -> None:
    late = save_of(30, late_id, overwrite=True)
    fill(root, late, b"abandoned")
    commit(root, save_of(30, "2-3", overwrite=True), b"kept")
    with pytest.raises(Rejected) as caught:
        root.publish(late)
    assert "already-committed" == caught.value.code
    assert b"kept" == content_of(root, "step_30")
    assert "aborted" == root.give_up(late)
    root.discard(late)
    assert [] == names(root.path / ".partial")
    assert b"kept" == content_of(root, "step_30")


def test_overwriting_what_is_not_there_is_plain_publishing(root: Root) -> None:
    commit(root, save_of(30, "2-3", overwrite=True))
    assert [] == names(root.path / ".partial")
    assert ["step_30"] == [each.name for each in root.checkpoints()]


class Power(Exception):
    """The machine stops here."""


def cut_off_after_putting_aside(
    root: Root, save: SaveRef, monkeypatch: pytest.MonkeyPatch, *, before: bool = False
) -> None:
    """Publish up to the second rename of an overwriting, or up to the first one."""
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if target == root.path / save.name or (before and source == root.path / save.name):
            raise Power
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(Power):
            root.publish(save)


@pytest.fixture
def torn(root: Root, monkeypatch: pytest.MonkeyPatch) -> SaveRef:
    """A save whose publication was cut off when the old checkpoint had lost its name."""
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    fill(root, save, b"new")
    cut_off_after_putting_aside(root, save, monkeypatch)
    assert not (root.path / "step_30").exists()
    return save


def test_an_overwriting_cut_in_two_is_rolled_forward_at_the_next_start(
    root: Root, torn: SaveRef
) -> None:
    root.prepare()
    assert b"new" == content_of(root, "step_30")
    assert [[], []] == [names(root.path / each) for each in (".partial", ".milepost-run")]
    assert "committed" == root.give_up(torn)


def test_an_overwriting_cut_in_two_can_be_published_again(root: Root, torn: SaveRef) -> None:
    root.publish(torn)
    assert b"new" == content_of(root, "step_30")
    root.discard(torn)
    assert [] == names(root.path / ".partial")


def test_giving_up_an_overwriting_cut_in_two_puts_the_old_checkpoint_back(
    root: Root, torn: SaveRef
) -> None:
    assert "aborted" == root.give_up(torn)
    assert b"old" == content_of(root, "step_30")
    root.discard(torn)
    assert [[], []] == [names(root.path / each) for each in (".partial", ".milepost-run")]


def test_a_start_puts_the_old_checkpoint_back_if_the_new_one_was_given_up(
    root: Root, torn: SaveRef
) -> None:
    source = root.save_dir(torn)
    os.rename(source, source.with_name(source.name + ".aborted"))
    root.prepare()
    assert b"old" == content_of(root, "step_30")
    assert [] == names(root.path / ".milepost-run")


def test_a_start_puts_an_old_checkpoint_back_even_without_the_intent(
    root: Root, torn: SaveRef
) -> None:
    (root.path / ".milepost-run" / "replace-step_30").unlink()
    root.prepare()
    assert b"old" == content_of(root, "step_30")
    assert "aborted" == root.give_up(torn)


def test_an_overwriting_cut_off_before_it_began_leaves_the_old_checkpoint(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    fill(root, save, b"new")
    cut_off_after_putting_aside(root, save, monkeypatch, before=True)
    root.prepare()
    assert b"old" == content_of(root, "step_30")
    root.publish(save)
    assert b"new" == content_of(root, "step_30")


@pytest.mark.parametrize("another_start", [False, True])
def test_a_give_up_between_the_two_renames_leaves_the_old_checkpoint(
    root: Root, monkeypatch: pytest.MonkeyPatch, another_start: bool
) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    source = fill(root, save, b"new")
    real = os.rename

    def rename(one: Path, two: Path) -> None:
        if two == root.path / "step_30" and one == source:
            real(source, source.with_name(source.name + ".aborted"))
            if another_start:  # It ran before the old checkpoint was put aside: all was over then.
                (root.path / ".milepost-run" / "replace-step_30").unlink()
        real(one, two)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(SaveFailed) as caught:
        root.publish(save)
    assert "aborted" == caught.value.code
    assert b"old" == content_of(root, "step_30")


def test_a_second_hand_that_publishes_the_same_save_does_not_move_the_new_checkpoint(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    fill(root, save, b"new")
    real = storage_module._sync_directory
    moved: list[Path] = []

    def first_hand_meanwhile(path: Path) -> None:
        monkeypatch.setattr(storage_module, "_sync_directory", real)
        Root(root.path).publish(save)
        rename = os.rename

        def noted(one: Path, two: Path) -> None:
            moved.append(one)
            rename(one, two)

        monkeypatch.setattr(os, "rename", noted)

    monkeypatch.setattr(storage_module, "_sync_directory", first_hand_meanwhile)
    assert root.path / "step_30" == root.publish(save)
    assert root.path / "step_30" not in moved
    assert b"new" == content_of(root, "step_30")


def test_a_rename_that_fails_after_the_old_checkpoint_was_put_aside_puts_it_back(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "1-1"), b"old")
    save = save_of(30, "2-3", overwrite=True)
    source = fill(root, save, b"new")
    real = os.rename

    def rename(one: Path, two: Path) -> None:
        if one == source:
            raise OSError(errno.ESTALE, "injected")
        real(one, two)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(StorageError) as caught:
            root.publish(save)
    assert caught.value.transient
    assert b"old" == content_of(root, "step_30")
    root.publish(save)
    assert b"new" == content_of(root, "step_30")


def test_a_start_keeps_an_old_checkpoint_whose_name_something_else_has_taken(
    root: Root, torn: SaveRef
) -> None:
    root.give_up(torn)
    os.rename(root.path / "step_30", root.path / ".partial" / "step_30.1-1.replaced")
    (root.path / "step_30").mkdir()
    root.prepare()
    assert (root.path / ".partial" / "step_30.1-1.replaced" / ".metadata").exists()


# --- what is there --------------------------------------------------------------------------------


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
    long = encode(Manifest(save_id="3-1", step=5, keys=tuple(f"key{n}" for n in range(10_000))))
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


def test_a_checkpoint_loses_its_name_before_its_files(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, SAVE)

    def refuse(path: Path) -> None:
        raise Power

    with monkeypatch.context() as patch:
        patch.setattr(storage_module, "_delete_tree", refuse)
        with pytest.raises(Power):
            root.remove_checkpoint("step_30")
    assert [] == root.checkpoints()
    (left,) = root.partials()
    assert [".metadata", ".milepost", "__0_0.distcp"] == names(left)
    root.prepare()
    assert [] == root.partials()
    root.remove_checkpoint("step_30")


def test_what_was_saved_anew_under_a_name_is_not_removed_for_what_was_there(root: Root) -> None:
    commit(root, save_of(30, "1-1"))
    commit(root, save_of(30, "2-1", overwrite=True), b"new")
    root.discard(save_of(30, "2-1"))
    assert not root.remove_checkpoint("step_30", "1-1")
    assert b"new" == content_of(root, "step_30")
    assert [] == root.partials()
    assert root.remove_checkpoint("step_30", "2-1")
    assert not root.remove_checkpoint("step_30", "2-1")
    assert [] == root.checkpoints()
    assert [] == root.partials()


def test_a_removal_that_is_cut_off_before_it_has_looked_is_undone_at_the_next_start(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "2-1"), b"new")

    def power_off(path: Path) -> str:
        raise Power

    with monkeypatch.context() as patch:
        patch.setattr(Root, "_save_id", staticmethod(power_off))
        with pytest.raises(Power):
            root.remove_checkpoint("step_30", "1-1")
    assert [] == root.checkpoints()
    root.prepare()
    assert b"new" == content_of(root, "step_30")
    assert [] == root.partials()


def test_publishing_goes_on_if_what_it_replaces_is_removed_at_that_moment(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(root, save_of(30, "1-1"))
    save = save_of(30, "2-1", overwrite=True)
    fill(root, save, b"new")
    write = Root.write_file

    def removed_meanwhile(self: Root, path: Path, content: bytes) -> None:
        write(self, path, content)
        assert self.remove_checkpoint("step_30", "1-1")

    with monkeypatch.context() as patch:
        patch.setattr(Root, "write_file", removed_meanwhile)
        root.publish(save)
    assert b"new" == content_of(root, "step_30")
    root.discard(save)
    assert [] == root.partials()
    assert [] == list(root.run_path.glob("replace-*"))


def test_two_may_delete_the_same_directory_at_once(tmp_path: Path) -> None:
    for _ in range(5):
        victim = tmp_path / "victim"
        for number in range(50):
            (victim / str(number % 5)).mkdir(parents=True, exist_ok=True)
            (victim / str(number % 5) / str(number)).touch()
        threads = [
            threading.Thread(target=storage_module._delete_tree, args=(victim,)) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not victim.exists()


def test_a_root_that_is_missing_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="gone"):
        Root(tmp_path / "gone").checkpoints()
    assert [] == Root(tmp_path / "gone").partials()
