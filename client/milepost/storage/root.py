"""Durable file operations under a checkpoint root; the only code that writes there.

Owns the names below a root (`.partial`, `.milepost-run`, `latest`), what is synced in which order,
and what a rename decides. Knows nothing of plans, tensors or messages, and never imports torch. All
calls block: use a thread. A `Root` has no state beside its path, so any number of threads and
processes may use the same one.

Publishing renames `.partial/X` to its final name, giving up renames it to `.partial/X.aborted`.
Both take the same source, so exactly one of them can win; who finds the source gone looks where it
went.

Errors: StorageError for what the system refused, UsageError for a name that is none.
Sources: rename(2), fsync(2), fallocate(2), fcntl(2) on O_DIRECT, and for the names of files
torch/distributed/checkpoint/filesystem.py (2.13).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgpack
import msgspec

from milepost.errors import CorruptCheckpoint, Rejected, SaveFailed, StorageError, UsageError
from milepost.format.heading import Heading, order_of, read_heading
from milepost.format.manifest import (
    FRAGMENT_PREFIX,
    METADATA_NAME,
    Manifest,
    read_manifest,
)
from milepost.storage.blocks import write_blocks
from milepost.storage.refusals import reported
from milepost.wire.messages import SaveRef

if TYPE_CHECKING:
    from collections.abc import Callable


PARTIAL_NAME: Final = ".partial"
RUN_NAME: Final = ".milepost-run"
LATEST_NAME: Final = "latest"

BLOCK_BYTES: Final = 16 << 20
"""One direct write: large enough that the device, not the call, sets the speed; small enough to
report progress.
"""

NAME_BYTES_MAX: Final = 200
"""Longest checkpoint name: with save id and suffix it must stay below the 255 bytes of a path
component.
"""

DRAFT_S_MAX: Final = 3600.0
"""Age from which a file that was to get its name by a rename is taken for left behind: it is a few
KiB, and clocks differ.
"""

ABANDONED_S: Final = 3600.0
"""Age from which what an earlier attempt has not finished is taken for left behind: a daemon that
is at work on it touches it every second or so, or its storage has long ended the save."""

_TEMP_PREFIX: Final = ".tmp-"
_ABORTED: Final = ".aborted"
_REPLACED: Final = ".replaced"
_RETIRED: Final = ".retired"
_UNKNOWN_ID: Final = "0-0"
_DELETE_TRIES: Final = 100
_STEP_NAME: Final = re.compile(r"step_(\d+)")
_SAVE_ID: Final = re.compile(r"\d[A-Za-z0-9_-]*")
_UNFINISHED: Final = re.compile(r"(?P<name>.+)\.(?P<save_id>\d+-\d+)(\.aborted)?")
_LATER_FILE: Final = re.compile(r"__\d+_[1-9]\d*\.distcp")


def check_name(name: str) -> str:
    """Return the name if it may stand below a root: one visible path component that is not ours.
    Raises UsageError.
    """
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        length = 0
    if (
        not 0 < length <= NAME_BYTES_MAX
        or name.startswith(".")
        or "/" in name
        or name == LATEST_NAME
        or not name.isprintable()
    ):
        raise UsageError(
            "usage",
            f"{name!r} cannot name a checkpoint",
            f"use one path component of at most {NAME_BYTES_MAX} bytes, printable, without a"
            f" leading dot, and not {LATEST_NAME!r}",
        )
    return name


@dataclass(frozen=True)
class CheckpointEntry:
    """One committed checkpoint below a root."""

    name: str
    path: Path
    step: int
    """From the manifest, else from a name like `step_12`, else -1."""
    save_id: str
    """Empty if milepost did not write it."""
    order: tuple[int, int, int]
    """(attempt, step, count of the save): the greatest is the newest. A step that was rolled back
    is older than a lower step of the attempt that followed.
    """

    @cached_property
    def manifest(self) -> Manifest | None:
        """The whole manifest, read at first use; None for what stock torch wrote. Raises
        CorruptCheckpoint, OSError.
        """
        return read_manifest(self.path)


class _Replacement(msgspec.Struct, frozen=True):
    """Intent to replace a checkpoint: which save does it, and where the old one is put meanwhile
    (below `.partial`).
    """

    name: str
    save_id: str
    aside: str


class Root:
    """One directory of checkpoints on a file system that all nodes share.

    Args:
        path: made absolute, not resolved: the daemon and its peers compare it as it was given.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Final = Path(os.path.abspath(path))
        self._partial: Final = self.path / PARTIAL_NAME
        self._run: Final = self.path / RUN_NAME

    @property
    def run_path(self) -> Path:
        """Where locks, attempts and leases are."""
        return self._run

    # --- the root itself --------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the root and its own directories, durably, and finish what a crash interrupted.

        A replacement that was cut in two is rolled forward if the new checkpoint waits under
        `.partial`, else back; what was being deleted goes. Safe at any time, beside other nodes and
        an older attempt that still publishes.
        """
        with reported("prepare", self.path):
            _make_directories(self.path)
            self._partial.mkdir(exist_ok=True)
            self._run.mkdir(exist_ok=True)
            _sync_directory(self.path)
            for draft in self._run.glob(f"{_TEMP_PREFIX}*"):
                # Its writer was killed: others take milliseconds.
                with suppress(FileNotFoundError):
                    if time.time() - draft.stat().st_mtime > DRAFT_S_MAX:
                        _unlink(draft)
            for intent in self._run.glob("replace-*"):
                replacement = self._replacement(intent)
                if replacement is not None:
                    self._settle(replacement)
            for entry in list(os.scandir(self._partial)):
                if entry.is_symlink():
                    _unlink(entry.path)
                elif entry.name.endswith(_REPLACED):
                    self._put_back_aside(entry.name)
            self.finish_removals()

    def identity(self) -> str:
        """Return the root's own name, drawn when it was first used.

        A root that was deleted and made again at the same path is another one. `prepare` must have
        run.
        """
        path = self._run / "root-id"
        with reported("read", path):
            try:
                return path.read_text().strip()
            except FileNotFoundError:
                pass
            draft = self._run / f"{_TEMP_PREFIX}{secrets.token_hex(8)}"
            _write_new(draft, f"{secrets.token_hex(4)}\n".encode())
            try:
                # Of two that come here together one gives the name; a link never replaces.
                with suppress(FileExistsError):
                    os.link(draft, path)
            finally:
                _unlink(draft)
            _sync_directory(self._run)
            return path.read_text().strip()

    def check_shared(self, job: str) -> None:
        """Make sure that this is the root that the job's ranks agreed on, seen from this node.

        Args:
            job: its name on the wire, `<name>@<root identity>`; a name without `@` claims nothing.

        Raises:
            StorageError: "root-not-shared": another directory, or an empty one, lies at this path.
        """
        _, at, expected = job.rpartition("@")
        if not at:
            return
        try:
            found = (self._run / "root-id").read_text().strip()
        except FileNotFoundError:
            found = ""
        if found != expected:
            raise StorageError(
                "root-not-shared",
                f"{self.path} is {f'root {found}' if found else 'no root'} on this node, and root "
                f"{expected} on the node of rank 0",
                "mount the same file system at the same path on all nodes",
                operation="open",
                path=str(self.path),
            )

    def claim_attempt(self, job: str) -> int:
        """Take the next attempt number of this root, durably; no two callers get the same one.

        It is above those of all checkpoints that lie there, also of one copied from another root:
        what is saved from now on is to be newer.
        """
        content: bytes = msgpack.packb(
            {"job": job, "host": socket.gethostname(), "pid": os.getpid(), "at": time.time()}
        )
        with reported("claim an attempt in", self._run, len(content)):
            taken = [
                int(name[len("attempt-") :])
                for name in os.listdir(self._run)
                if re.fullmatch(r"attempt-\d+", name)
            ]
            there = [entry.order[0] for entry in self.checkpoints()]
            attempt = max([0, *taken, *there]) + 1
            while True:
                claim = self._run / f"attempt-{attempt}"
                try:
                    _write_new(claim, content)
                except FileExistsError:
                    attempt += 1
                    continue
                _sync_directory(self._run)
                return attempt

    # --- one save ---------------------------------------------------------------------------------

    def save_dir(self, save: SaveRef) -> Path:
        """Return where the save's files lie until it is published. Raises UsageError for a name
        that is none.
        """
        if not _SAVE_ID.fullmatch(save.save_id):
            raise UsageError("usage", f"{save.save_id!r} is not a save id")
        return self._partial / f"{check_name(save.name)}.{save.save_id}"

    def open_save(self, save: SaveRef) -> Path:
        """Make the save's directory if it is not there, and return it.

        A late node must not bring a save back to life that has ended.

        Raises:
            SaveFailed: "aborted" if the save was given up.
            Rejected: "already-committed" if it was published.
        """
        path = self.save_dir(save)
        with reported("open", path):
            if self._run.exists():
                # Only `.partial` was removed, by somebody who tidied up.
                self._partial.mkdir(exist_ok=True)
            path.mkdir(exist_ok=True)
            published = self._is_published(save)
            if published or self._aborted_dir(save).exists():
                with suppress(OSError):
                    path.rmdir()
                if published:
                    raise Rejected("already-committed", f"save {save.save_id} was published")
                raise SaveFailed("aborted", f"save {save.save_id} of {save.name} was given up")
        return path

    def write_file(self, path: Path, data: bytes) -> None:
        """Make `path` hold `data`, durably, or leave it as it was. Its directory must exist."""
        temp = path.with_name(f"{_TEMP_PREFIX}{secrets.token_hex(8)}")
        with reported("write", path, len(data)):
            _write_new(temp, data)
            try:
                os.rename(temp, path)
            except OSError:
                _unlink(temp)
                raise
            _sync_directory(path.parent)

    def write_image(
        self,
        path: Path,
        image: memoryview,
        *,
        on_block: Callable[[int], None] | None = None,
        before_block: Callable[[int, int], None] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """Write `image` as the new file `path` and sync it; on any failure no such file remains.

        Direct I/O where the file system, the memory's alignment and the length (whole pages) allow,
        else buffered; the page cache does not keep it. The directory is not synced: the
        `write_file` that follows does that. The GIL is free while blocks are written.

        Args:
            on_block: called with the number of bytes after each block; what it raises ends the
                write.
            before_block: called before each block with its bytes and all that are left, this
                block's among them; may wait, and what it raises ends the write.
            block_bytes: the largest block, whole pages.

        Raises:
            StorageError: also if the file exists already.
        """
        flat = image.cast("B")
        with reported("write", path, len(flat)):
            # By descriptor, so that the file can be removed even if the directory was renamed
            # meanwhile.
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                file = os.open(path.name, flags, 0o666, dir_fd=folder)
                try:
                    try:
                        write_blocks(file, flat, on_block, before_block, block_bytes)
                    finally:
                        os.close(file)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(path.name, dir_fd=folder)
                    raise
            finally:
                os.close(folder)

    def publish(self, save: SaveRef) -> Path:
        """Turn the save into a checkpoint by one rename, durably, and return its directory.

        Safe to repeat: a save that was published already is confirmed. Manifest fragments and what
        broken attempts left among the files go first. With `save.overwrite` an older checkpoint of
        that name is put aside (`discard` deletes it) and put back if the save turns out to be given
        up.

        Raises:
            Rejected: "already-committed" if the name is taken, by a newer save or without
                `save.overwrite`; the save is untouched.
            SaveFailed: "aborted" if it was given up, "outcome-unknown" if it is in neither place,
                "internal" if it has no `.metadata`.
        """
        source, final = self.save_dir(save), self.path / save.name
        aside = None
        with reported("publish", final):
            try:
                os.stat(source / METADATA_NAME)
                _tidy(source)
                _sync_directory(source)
                if save.overwrite:
                    aside = self._put_aside(save)
                os.rename(source, final)
            except FileNotFoundError:
                if aside is not None:
                    self._restore(save.name, aside)
                return self._confirm(save)
            except OSError as error:
                if aside is not None:
                    with suppress(OSError):
                        self._restore(save.name, aside)
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                is_other = error.errno == errno.ENOTDIR
                raise Rejected(
                    "already-committed",
                    f"save {save.save_id}: {final} exists already"
                    + (", and is no directory" if is_other else ""),
                    "save under another step or name, or "
                    + ("move it away" if is_other else "set overwrite=True"),
                ) from error
            _sync_directory(self.path)
            _sync_directory(self._partial)
            if save.overwrite:
                _unlink(self._intent(save.name))
        return final

    def move_latest(self, name: str) -> None:
        """Let `latest` point at the checkpoint, durably; there is no instant without a `latest`."""
        link = self.path / LATEST_NAME
        temp = self._partial / f"{LATEST_NAME}.{secrets.token_hex(8)}"
        with reported("move", link):
            os.symlink(check_name(name), temp)
            try:
                os.rename(temp, link)
            except OSError:
                _unlink(temp)
                raise
            _sync_directory(self.path)

    def advance_latest(self, save: SaveRef) -> bool:
        """Let `latest` point at the published save, unless it points at a newer one; say which.

        Newer by (attempt, step): a save that was slower than its successor must not move it back,
        also if it was held up between looking and moving.
        """
        if not self._is_published(save):
            return False  # Retention was quicker.
        target, order = save.name, order_of(save.save_id, save.step)
        seen = self._folders()
        name = self.latest_target()
        if name is not None and name != save.name:
            with reported("read", self.path / name):
                there = read_heading(self.path / name)
            if order_of(there.save_id, there.step) > order:
                return False
        while True:
            self.move_latest(target)
            newer: list[tuple[tuple[int, int, int], str]] = []
            found = self._folders()
            for name, _ in found - seen:
                with suppress(CorruptCheckpoint, OSError):
                    there = read_heading(self.path / name)
                    newer.append((order_of(there.save_id, there.step), name))
            if max(newer, default=(order, target))[0] <= order:
                return target == save.name
            # Published while this call was held up: `latest` may have been there already.
            (order, target), seen = max(newer), found

    def _folders(self) -> set[tuple[str, int]]:
        """Names and inodes of what may be a checkpoint: a replaced one has another inode."""
        with reported("list", self.path):
            return {
                (entry.name, entry.inode())
                for entry in os.scandir(self.path)
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
            }

    def give_up(self, save: SaveRef) -> str:
        """End the save unless it was published, and say which it was: safe to repeat, and from any
        node.

        Returns:
            "aborted": it can no longer become a checkpoint. "committed": it is one, durably.
            "unknown": it is in neither place as far as can be seen (attribute caching, or long
            ago): look again.
        """
        source, aborted = self.save_dir(save), self._aborted_dir(save)
        with reported("give up", source):
            try:
                os.rename(source, aborted)
            except FileNotFoundError:
                return self._where(save)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                # Given up before, and a late node made the directory anew.
                self._remove(source)
            if self._is_published(save):
                # What we renamed was made anew by a late node, after the publication.
                self._remove(aborted)
            return self._where(save)

    def forestall(self, save: SaveRef) -> str:
        """Give the save up for the one who alone publishes: what was never begun is "aborted", too.

        A late node finds the given-up directory and does not begin. Returns as `give_up` does.
        """
        found = self.give_up(save)
        if found != "unknown":
            return found
        aborted = self._aborted_dir(save)
        with reported("give up", aborted):
            try:
                aborted.mkdir(exist_ok=True)
            except FileNotFoundError:
                return "aborted"  # The root itself is gone, and with it every way to publish.
        # A node that made the directory before it could see ours is caught by the second rename.
        return self.give_up(save)

    def is_unpublished(self, save: SaveRef, *, was_begun: bool) -> bool:
        """Whether the save, which could not be moved, can be published by the caller only.

        For the one who alone publishes, if none of its renames may still take effect: its files are
        where they were (or nowhere, unless it `was_begun`), and no intent to replace would have
        `prepare` roll them forward. Raises StorageError.
        """
        with reported("look for", self.save_dir(save)):
            replacement = self._replacement(self._intent(save.name))
            return (
                (self.save_dir(save).is_dir() or not was_begun)
                and not self._is_published(save)
                and (replacement is None or replacement.save_id != save.save_id)
            )

    def discard(self, save: SaveRef) -> None:
        """Delete what the ended save left under `.partial`: its given-up files, and the checkpoint
        it replaced. What somebody was killed deleting goes, too.
        """
        self.save_dir(save)
        with reported("discard", self._partial):
            _delete_tree(self._aborted_dir(save))
            is_there = (self.path / save.name / METADATA_NAME).exists()
            for name in os.listdir(self._partial):
                was_replaced = name.endswith(_REPLACED) and name.rsplit(".", 2)[0] == save.name
                if (was_replaced and is_there) or _is_pruned(name):
                    self._remove(self._partial / name)

    def clear_abandoned(self, save: SaveRef) -> list[str]:
        """Give up and delete what earlier attempts have left unfinished; return its names.

        For the one who has published `save`. Spared is what was touched within `ABANDONED_S`:
        what all ranks had staged is finished also after a newer attempt has begun.
        """
        attempt, cleared = order_of(save.save_id, 0)[0], []
        with reported("clear", self._partial):
            # Publishing has touched it, if nothing has since: the file system's own time.
            now_s = self._partial.stat().st_mtime
            for path in self.partials():
                found = _UNFINISHED.fullmatch(path.name)
                if found is None or order_of(found["save_id"], 0)[0] >= attempt:
                    continue
                touched_s = [
                    entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)
                ]
                if now_s - max([path.stat().st_mtime, *touched_s]) < ABANDONED_S:
                    continue
                left = SaveRef(save.job, found["save_id"], 0, found["name"])
                if self.give_up(left) == "aborted":
                    self.discard(left)
                    cleared.append(path.name)
        return cleared

    # --- what is there ----------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointEntry]:
        """Return the committed checkpoints, newest first: directories with `.metadata`, also those
        of stock torch.

        A checkpoint whose manifest is damaged is listed by its name; reading `manifest` tells.
        """
        found: list[CheckpointEntry] = []
        with reported("list", self.path):
            for entry in os.scandir(self.path):
                path = Path(entry.path)
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                try:
                    heading = read_heading(path)
                except CorruptCheckpoint:
                    heading = Heading()
                if not (path / METADATA_NAME).exists():
                    continue  # Asked last, since it may be deleted at this moment.
                step = heading.step
                if step < 0 and (match := _STEP_NAME.fullmatch(entry.name)):
                    step = int(match[1])
                order = order_of(heading.save_id, step)
                found.append(CheckpointEntry(entry.name, path, step, heading.save_id, order))
        return sorted(found, key=lambda each: (each.order, each.name), reverse=True)

    def partials(self) -> list[Path]:
        """Return the directories that are not checkpoints: saves in flight, given up, or being
        replaced or deleted.
        """
        with reported("list", self._partial):
            try:
                entries = list(os.scandir(self._partial))
            except FileNotFoundError:
                return []
            return sorted(Path(each.path) for each in entries if each.is_dir(follow_symlinks=False))

    def latest(self) -> str | None:
        """Return the name of the checkpoint `latest` points at, else of the newest there is, else
        None.
        """
        return self.latest_target() or next((each.name for each in self.checkpoints()), None)

    def latest_target(self) -> str | None:
        """Return the name of the checkpoint `latest` points at; None if there is no such link, or
        no such checkpoint.
        """
        with reported("read", self.path / LATEST_NAME):
            try:
                name = os.readlink(self.path / LATEST_NAME)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EINVAL):
                    raise
                return None
            is_there = "/" not in name and (self.path / name / METADATA_NAME).exists()
            return name if is_there else None

    def remove_checkpoint(self, name: str, save_id: str | None = None) -> bool:
        """Delete a checkpoint: it loses its name first, so that a crash leaves no half of one.

        Args:
            save_id: which save's it has to be: another may have got the name meanwhile, and is left
                alone. None: whichever it is.

        Returns whether it was there.
        """
        path = self.path / check_name(name)
        with reported("remove", path):
            if save_id is None:
                return self._remove(path)
            # Aside it can be looked at without its name being given to another; who is cut off here
            # leaves what `finish_removals` puts back.
            aside = self._aside(name, save_id, _RETIRED)
            try:
                os.rename(path, aside)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False  # Gone, or another is at it.
            if self._save_id(aside) != save_id:
                self._restore(name, aside.name)
                return False
            _sync_directory(self.path)
            return self._remove(aside)

    def finish_removals(self) -> None:
        """Mend what somebody was killed removing: half deleted, it is deleted; only put aside, it
        gets its name back, and can be looked at again.

        For the one who removes, before it does; safe beside others that do.
        """
        with reported("clear", self._partial):
            for name in os.listdir(self._partial):
                if _is_pruned(name):
                    _delete_tree(self._partial / name)
                elif name.endswith(_RETIRED):
                    self._put_back_aside(name)

    def _put_back_aside(self, aside: str) -> None:
        name = aside.rsplit(".", 2)[0]
        self._restore(name, aside)
        if (self.path / name / METADATA_NAME).exists():
            self._remove(self._partial / aside)

    # --- where a save went, and replacing ---------------------------------------------------------

    def _aborted_dir(self, save: SaveRef) -> Path:
        path = self.save_dir(save)
        return path.with_name(path.name + _ABORTED)

    def _is_published(self, save: SaveRef) -> bool:
        try:
            return read_heading(self.path / save.name).save_id == save.save_id
        except (CorruptCheckpoint, NotADirectoryError):
            return False

    def _where(self, save: SaveRef) -> str:
        """Say where a save went whose directory is gone; durable when this returns."""
        if self._is_published(save):
            _sync_directory(self.path)
            _sync_directory(self._partial)
            return "committed"
        if self._aborted_dir(save).exists():
            _sync_directory(self._partial)
            self._put_back(save)
            return "aborted"
        return "unknown"

    def _confirm(self, save: SaveRef) -> Path:
        """Return the checkpoint if the save, whose rename found nothing, is one; else raise what
        became of it.
        """
        source = self.save_dir(save)
        if source.exists():
            raise SaveFailed("internal", f"save {save.save_id}: {source} has no {METADATA_NAME}")
        where = self._where(save)
        if where == "committed":
            return self.path / save.name
        if where == "aborted":
            raise SaveFailed("aborted", f"save {save.save_id} of {save.name} was given up")
        raise SaveFailed(
            "outcome-unknown",
            f"save {save.save_id}: {source} is gone, and neither published nor given up",
            "look again: a network file system may show old names for a while",
        )

    def _intent(self, name: str) -> Path:
        return self._run / f"replace-{name}"

    def _replacement(self, intent: Path) -> _Replacement | None:
        try:
            data = intent.read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.convert(msgpack.unpackb(data), _Replacement)

    def _put_aside(self, save: SaveRef) -> str | None:
        """Free the save's final name. Returns where the old checkpoint is now, below `.partial`, or
        None.

        The intent is durable before the rename, so that a crash right after it can be mended.
        """
        final = self.path / save.name
        if not os.path.lexists(final):
            return None
        if final.is_symlink() or not final.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        old_id = self._save_id(final)
        if old_id == save.save_id:
            return None  # Ours, published by another hand: the rename will find its source gone.
        if order_of(old_id, 0) > order_of(save.save_id, 0):
            # A save that was held up while another attempt went back and saved this name anew.
            raise Rejected(
                "already-committed",
                f"save {save.save_id}: {final} holds save {old_id} by now, which is newer",
                "nothing: this save was of a future that was given up",
            )
        aside = self._aside(save.name, old_id, _REPLACED).name
        self._remove(self._partial / aside)
        intent: bytes = msgpack.packb(
            msgspec.to_builtins(_Replacement(save.name, save.save_id, aside))
        )
        self.write_file(self._intent(save.name), intent)
        try:
            os.rename(final, self._partial / aside)
        except FileNotFoundError:
            return None  # Retention was quicker.
        return aside

    def _put_back(self, save: SaveRef) -> None:
        """Restore the checkpoint that was put aside for a save that will not replace it."""
        replacement = self._replacement(self._intent(save.name))
        if replacement is not None and replacement.save_id == save.save_id:
            self._restore(save.name, replacement.aside)
            _unlink(self._intent(save.name))

    def _restore(self, name: str, aside: str) -> None:
        """Give a checkpoint that was put aside its name back, unless the name is taken."""
        final = self.path / name
        if os.path.lexists(final):
            return
        try:
            os.rename(self._partial / aside, final)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Another node was quicker.
        _sync_directory(self.path)
        _sync_directory(self._partial)

    def _settle(self, replacement: _Replacement) -> None:
        """Mend a replacement that was cut off between its two renames; forget one that is over."""
        final = self.path / replacement.name
        source = self._partial / f"{replacement.name}.{replacement.save_id}"
        if not os.path.lexists(final):
            try:
                os.stat(source / METADATA_NAME)
                os.rename(source, final)
                _sync_directory(self.path)
                _sync_directory(self._partial)
            except FileNotFoundError:
                self._restore(replacement.name, replacement.aside)
        if not source.exists():
            _unlink(self._intent(replacement.name))

    def _aside(self, name: str, save_id: str, suffix: str) -> Path:
        """Where a checkpoint lies that has lost its name to another, or is about to be deleted."""
        known = save_id if _SAVE_ID.fullmatch(save_id) else _UNKNOWN_ID
        return self._partial / f"{name}.{known}{suffix}"

    @staticmethod
    def _save_id(path: Path) -> str:
        """Return whose checkpoint it is; empty if it is nobody's, or its manifest is damaged."""
        try:
            return read_heading(path).save_id
        except CorruptCheckpoint:
            return ""

    def _remove(self, path: Path) -> bool:
        """Delete a directory under the root, and return whether it was there; by rename first, so
        that no half of it can be taken for a whole.
        """
        aside = self._partial / f"{path.name}.pruned-{secrets.token_hex(4)}"
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            return False
        _sync_directory(path.parent)
        _sync_directory(self._partial)
        _delete_tree(aside)
        return True


def _is_pruned(name: str) -> bool:
    return re.search(r"\.pruned-[0-9a-f]{8}$", name) is not None


def _unlink(path: str | os.PathLike[str]) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _make_directories(path: Path) -> None:
    """Make `path` and what is missing above it, each name synced into its parent."""
    if not path.parent.exists():
        _make_directories(path.parent)
    path.mkdir(exist_ok=True)
    # Also if another node made it: that one may have died before it synced. A parent that we may
    # not read, we did not make anything in.
    with suppress(PermissionError):
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems know no fsync of a directory; their names are as
        # durable as they get.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def _write_new(path: Path, data: bytes) -> None:
    """Make the new file `path` with `data`, synced, or nothing. Raises FileExistsError, OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest) :]
            os.fsync(file)
        finally:
            os.close(file)
    except BaseException:
        _unlink(path)
        raise


def _tidy(directory: Path) -> None:
    """Remove from a save's directory what is not the checkpoint's: fragments, and what broken
    attempts left.
    """
    names = os.listdir(directory)
    unwanted = {name for name in names if name.startswith((FRAGMENT_PREFIX, _TEMP_PREFIX))}
    if any(_LATER_FILE.fullmatch(name) for name in names):
        # A rank's file was written more than once; the manifest says which one counts.
        manifest = read_manifest(directory)
        if manifest is not None:
            data_files = {name for name in names if name.endswith(".distcp")}
            unwanted |= data_files - set(manifest.files)
    for name in unwanted:
        _unlink(directory / name)


def _delete_tree(path: Path) -> None:
    """Delete a directory, also while another process deletes it; missing is fine."""
    for _ in range(_DELETE_TRIES):
        try:
            shutil.rmtree(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        if not os.path.lexists(path):
            return
    raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
