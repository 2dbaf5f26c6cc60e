"""The directory that all nodes share, and what `milepost.storage` does in it, call by call.

Owns a small file system of directories, files and links. At a crash, a coin decides for each
unsynced change whether it is lost. Owns also twins of the storage module's operations. They are
generators that name a call before they make it, so that the world can cut, fail, delay or hang them
anywhere. Knows no node and no network, and of time only the clock by which files are touched.
`test_simulation.py` compares the twins with the real modules.

Sources: `client/milepost/storage/`, `daemon/milepostd/executors/writer.py` and
`planner/composing.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, TypeVar

from milepost.errors import Rejected, SaveFailed
from milepost.storage.claims import EXPIRY_S
from milepost.storage.contents import is_own
from milepost.storage.names import is_pruned, name_of_pruned
from milepost.storage.refusals import storage_error
from milepost.storage.retention import doomed
from milepost.wire.messages import Keep, SaveRef, WrittenFile

Result = TypeVar("Result")
Calls: TypeAlias = Generator[str, None, Result]
"""An operation: it yields the name of each system call before it makes it, and returns."""

PARTIAL: Final = ".partial"
RUN: Final = ".milepost-run"
METADATA: Final = ".metadata"
MANIFEST: Final = ".milepost"
FRAGMENT: Final = ".fragment-"
TEMP: Final = ".tmp-"
ABORTED: Final = ".aborted"
REPLACED: Final = ".replaced"
RETIRED: Final = ".retired"
READING: Final = "reading-"
LATEST: Final = "latest"
BLOCKS: Final = 2
"""How many write calls an image takes."""


class Image(NamedTuple):
    """What one rank staged, as the bytes of its data file."""

    job: str
    save_id: str
    step: int
    name: str
    rank: int
    layout_id: str
    is_torn: bool = False
    """The slot changed while it was read, or bytes were lost at a crash."""


class Fragment(NamedTuple):
    """A node's manifest fragment."""

    save_id: str
    files: tuple[WrittenFile, ...]


class Manifest(NamedTuple):
    """`.milepost`; `.metadata` holds the same here."""

    job: str
    save_id: str
    step: int
    files: tuple[tuple[int, str], ...]
    """(rank, file) of every rank."""
    layouts: tuple[str, ...] = ()


class Replacement(NamedTuple):
    """The intent to replace a checkpoint."""

    name: str
    save_id: str
    aside: str


class Torn(NamedTuple):
    """The rest of a file that was not synced before a crash."""


Content: TypeAlias = Image | Fragment | Manifest | Replacement | Torn | str


@dataclass(eq=False)
class File:
    """A regular file, or a symbolic link with its target as content."""

    content: Content
    is_synced: bool = False
    changes: dict[int, Change] = field(default_factory=dict)
    is_link: bool = False
    made_ns: int = 0
    touched_ns: int = 0


@dataclass(eq=False)
class Folder:
    """A directory: the names that everybody sees, and those that survive a crash."""

    entries: dict[str, Inode] = field(default_factory=dict)
    durable: dict[str, Inode] = field(default_factory=dict)
    changes: dict[int, Change] = field(default_factory=dict)
    """Changes of this folder's names that are not synced yet."""
    moves: dict[int, Change] = field(default_factory=dict)
    """Moves of this folder itself that are not synced yet."""


Inode: TypeAlias = File | Folder


@dataclass(eq=False)
class Change:
    """A name that was given, taken or moved, and is not durable yet."""

    number: int
    owner: str
    inode: Inode
    source: tuple[Folder, str] | None
    target: tuple[Folder, str] | None

    def folders(self) -> Iterator[Folder]:
        for place in (self.source, self.target):
            if place is not None:
                yield place[0]

    def own(self) -> dict[int, Change]:
        return self.inode.changes if isinstance(self.inode, File) else self.inode.moves

    def applies(self) -> bool:
        """Whether the change fits the visible names as they are."""
        if self.source is not None and self.source[0].entries.get(self.source[1]) is not self.inode:
            return False
        if self.target is None:
            return True
        old = self.target[0].entries.get(self.target[1])
        return old is None or not (isinstance(old, Folder) and old.entries)


class Disk:
    """The file system. `coin(owner)` says whether an unsynced change survives a crash."""

    def __init__(self) -> None:
        self.root = Folder()
        self.changes: dict[int, Change] = {}
        self.unsynced: dict[File, str] = {}
        """Files whose bytes are not synced, and the owner that wrote each."""
        self.count = 0
        for name in (PARTIAL, RUN):
            self.root.entries[name] = self.root.durable[name] = Folder()
        self.on_named: Callable[[str, Inode | None], None] = lambda name, inode: None
        """Called for each change of a name in the root, with the new inode or None."""
        self.clock: Callable[[], int] = lambda: 0
        """The file system's own clock, in nanoseconds."""

    @property
    def partial(self) -> Folder:
        folder = self.root.entries[PARTIAL]
        assert isinstance(folder, Folder)
        return folder

    @property
    def run(self) -> Folder:
        folder = self.root.entries[RUN]
        assert isinstance(folder, Folder)
        return folder

    # --- system calls

    def change(
        self,
        owner: str,
        inode: Inode,
        source: tuple[Folder, str] | None,
        target: tuple[Folder, str] | None,
    ) -> None:
        self.count += 1
        change = Change(self.count, owner, inode, source, target)
        self.changes[self.count] = change
        change.own()[self.count] = change
        for folder in change.folders():
            folder.changes[self.count] = change
        if source is not None:
            del source[0].entries[source[1]]
        if target is not None:
            target[0].entries[target[1]] = inode
        for place, what in ((source, None), (target, inode)):
            if place is not None and place[0] is self.root:
                self.on_named(place[1], what)

    def make_file(self, owner: str, folder: Folder, name: str, content: Content) -> File:
        if name in folder.entries:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        file = File(content, made_ns=self.clock(), touched_ns=self.clock())
        self.unsynced[file] = owner
        self.change(owner, file, None, (folder, name))
        return file

    def make_folder(self, owner: str, folder: Folder, name: str) -> Folder:
        found = folder.entries.get(name)
        if isinstance(found, Folder):
            return found
        made = Folder()
        self.change(owner, made, None, (folder, name))
        return made

    def unlink(self, owner: str, folder: Folder, name: str) -> None:
        inode = folder.entries.get(name)
        if inode is not None:
            self.change(owner, inode, (folder, name), None)

    def rename(self, owner: str, source: Folder, name: str, target: Folder, new: str) -> None:
        inode = source.entries.get(name)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        old = target.entries.get(new)
        if isinstance(old, Folder) and old.entries:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        self.change(owner, inode, (source, name), (target, new))

    def age_s(self, file: File) -> float:
        """How long ago the file was touched."""
        return (self.clock() - file.touched_ns) / 1e9

    def sync_file(self, file: File) -> None:
        file.is_synced = True
        self.unsynced.pop(file, None)

    def sync_folder(self, folder: Folder) -> None:
        for change in list(folder.changes.values()):
            self._make_durable(change)

    def _make_durable(self, change: Change) -> None:
        for earlier in list(change.own().values()):
            if earlier.number > change.number:
                break
            self._forget(earlier)
            if earlier.source is not None:
                folder, name = earlier.source
                if folder.durable.get(name) is earlier.inode:
                    del folder.durable[name]
            if earlier.target is not None:
                earlier.target[0].durable[earlier.target[1]] = earlier.inode

    def _forget(self, change: Change) -> None:
        self.changes.pop(change.number, None)
        change.own().pop(change.number, None)
        for folder in change.folders():
            folder.changes.pop(change.number, None)

    # --- crashes

    def crash(self, owner: str | None, rng: random.Random, *, keeps: float = 0.5) -> int:
        """Lose unsynced changes of this owner (None: of all owners); a coin decides for each.
        Return how many were lost.
        """
        lost = 0
        for file, writer in list(self.unsynced.items()):
            if owner in (None, writer):
                if rng.random() >= keeps:
                    lost += 1
                    torn = file.content
                    file.content = (
                        torn._replace(is_torn=True) if isinstance(torn, Image) else Torn()
                    )
                self.sync_file(file)
        dropped = [
            change
            for change in self.changes.values()
            if owner in (None, change.owner) and rng.random() >= keeps
        ]
        if not dropped:
            return lost
        touched: dict[Folder, None] = {}
        for change in self.changes.values():
            touched.update(dict.fromkeys(change.folders()))
        for change in dropped:
            self._forget(change)
        before = dict(self.root.entries)
        for folder in touched:
            folder.entries = dict(folder.durable)
        for change in list(self.changes.values()):
            if not change.applies():
                self._forget(change)
                lost += 1
                continue
            if change.source is not None:
                del change.source[0].entries[change.source[1]]
            if change.target is not None:
                change.target[0].entries[change.target[1]] = change.inode
        for name in {**before, **self.root.entries}:
            if before.get(name) is not self.root.entries.get(name):
                self.on_named(name, self.root.entries.get(name))
        return lost + len(dropped)


def lease_on(lease: str) -> str:
    """The checkpoint that a lease protects, from the name of the lease's file."""
    return lease.removeprefix(READING).rpartition("-")[0]


def reported(operation: str, path: str, calls: Calls[Result]) -> Calls[Result]:
    """Turn an OSError into a StorageError, as the storage module does."""
    try:
        return (yield from calls)
    except OSError as error:
        raise storage_error(operation, path, error, None) from error


class Root:
    """The twin of `milepost.storage.root.Root`, as one node (`owner`) sees it."""

    def __init__(self, disk: Disk, owner: str, rng: random.Random, path: str) -> None:
        self.disk = disk
        self.owner = owner
        self.rng = rng
        self.path = path

    # --- small things

    def _token(self) -> str:
        return f"{self.rng.getrandbits(32):08x}"

    @staticmethod
    def source_of(save: SaveRef) -> str:
        return f"{save.name}.{save.save_id}"

    def _aborted_of(self, save: SaveRef) -> str:
        return self.source_of(save) + ABORTED

    def heading(self, folder: Inode | None) -> tuple[str, int]:
        """Return save id and step of a checkpoint's directory."""
        if isinstance(folder, Folder):
            file = folder.entries.get(MANIFEST)
            if isinstance(file, File) and isinstance(file.content, Manifest):
                return file.content.save_id, file.content.step
        return "", -1

    def has_index(self, name: str) -> bool:
        folder = self.disk.root.entries.get(name)
        return isinstance(folder, Folder) and METADATA in folder.entries

    def _is_published(self, save: SaveRef) -> bool:
        return self.heading(self.disk.root.entries.get(save.name))[0] == save.save_id

    def _sync(self, folder: Folder) -> Calls[None]:
        yield "fsync"
        self.disk.sync_folder(folder)

    def _sync_names(self) -> Calls[None]:
        yield from self._sync(self.disk.root)
        yield from self._sync(self.disk.partial)

    def _write_new(self, folder: Folder, name: str, content: Content) -> Calls[File]:
        yield "open"
        file = self.disk.make_file(self.owner, folder, name, content)
        try:
            yield "write"
            yield "fsync"
        except OSError:
            self.disk.unlink(self.owner, folder, name)
            raise
        self.disk.sync_file(file)
        return file

    def write_file(self, folder: Folder, name: str, content: Content) -> Calls[None]:
        temp = TEMP + self._token()
        yield from self._write_new(folder, temp, content)
        try:
            yield "rename"
            self.disk.rename(self.owner, folder, temp, folder, name)
        except OSError:
            self.disk.unlink(self.owner, folder, temp)
            raise
        yield from self._sync(folder)

    def _delete_tree(self, folder: Folder, name: str) -> Calls[None]:
        inode = folder.entries.get(name)
        if isinstance(inode, Folder):
            names = list(inode.entries)
            # No file system promises the order in which a directory is listed.
            self.rng.shuffle(names)
            for each in names:
                yield "unlink"
                self.disk.unlink(self.owner, inode, each)
        yield "rmdir"
        if folder.entries.get(name) is inode:
            self.disk.unlink(self.owner, folder, name)

    # --- the root itself

    def prepare(self) -> Calls[None]:
        yield from reported("prepare", self.path, self._prepare())

    def _prepare(self) -> Calls[None]:
        disk = self.disk
        yield from self._sync(disk.root)
        for name in [name for name in disk.run.entries if name.startswith("replace-")]:
            intent = self._replacement(name.removeprefix("replace-"))
            if intent is not None:
                yield from self._settle(intent)
        for name in list(disk.partial.entries):
            inode = disk.partial.entries.get(name)
            if isinstance(inode, File):
                yield "unlink"
                disk.unlink(self.owner, disk.partial, name)
            elif is_pruned(name):
                yield from self._delete_pruned(name)
            elif name.endswith((REPLACED, RETIRED)):
                yield from self._restore(name.rsplit(".", 2)[0], name)
                if self._is_spent(name):
                    yield from self._remove(disk.partial, name)

    def claim_attempt(self) -> Calls[int]:
        run = self.disk.run
        yield "listdir"
        taken = [int(name[8:]) for name in run.entries if name.startswith("attempt-")]
        attempt = max(taken, default=0) + 1
        yield from self._write_new(run, f"attempt-{attempt}", "claim")
        yield from self._sync(run)
        return attempt

    # --- one save

    def open_save(self, save: SaveRef) -> Calls[Folder]:
        name = self.source_of(save)
        yield "mkdir"
        folder = self.disk.make_folder(self.owner, self.disk.partial, name)
        yield "stat"
        published = self._is_published(save)
        if published or self._aborted_of(save) in self.disk.partial.entries:
            yield "rmdir"
            if not folder.entries and self.disk.partial.entries.get(name) is folder:
                self.disk.unlink(self.owner, self.disk.partial, name)
            if published:
                raise Rejected("already-committed", f"save {save.save_id} was published")
            raise SaveFailed("aborted", f"save {save.save_id} of {save.name} was given up")
        return folder

    def write_image(self, save: SaveRef, rank: int, read: Callable[[], Image]) -> Calls[str]:
        """Write the image into a new file; `read` is called at each block."""
        folder = yield from reported("open", self.path, self.open_save(save))
        return (yield from reported("write", self.path, self._write_image(folder, rank, read)))

    def _write_image(self, opened: Folder, rank: int, read: Callable[[], Image]) -> Calls[str]:
        yield "open"
        number = 0
        while (name := f"__{rank}_{number}.distcp") in opened.entries:
            number += 1
        first = read()
        file = self.disk.make_file(self.owner, opened, name, first._replace(is_torn=True))
        try:
            for _ in range(BLOCKS):
                yield "write"
                if read() != first:
                    first = first._replace(is_torn=True)
            yield "fsync"
        except OSError:
            # Use the descriptor: the directory may have another name by now.
            self.disk.unlink(self.owner, opened, name)
            raise
        file.content = first
        self.disk.sync_file(file)
        return name

    def write_fragment(
        self, save: SaveRef, node_id: str, files: tuple[WrittenFile, ...]
    ) -> Calls[str]:
        name = FRAGMENT + node_id
        content = Fragment(save.save_id, files)
        yield from reported("write", self.path, self.write_into(save, name, content))
        return name

    def write_into(self, save: SaveRef, name: str, content: Content) -> Calls[None]:
        temp = TEMP + self._token()
        yield from self._write_new(self._opened(save), temp, content)
        # Use the path: the directory may have another name by now.
        yield "rename"
        folder = self._opened(save)
        self.disk.rename(self.owner, folder, temp, folder, name)
        yield "open"
        yield from self._sync(self._opened(save))

    def _opened(self, save: SaveRef) -> Folder:
        folder = self.disk.partial.entries.get(self.source_of(save))
        if not isinstance(folder, Folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return folder

    def build_index(
        self, save: SaveRef, files: tuple[WrittenFile, ...], fragments: tuple[str, ...]
    ) -> Calls[int]:
        yield "open"
        folder = self.disk.partial.entries.get(self.source_of(save))
        found: dict[int, WrittenFile] = {}
        for name in fragments:
            file = folder.entries.get(name) if isinstance(folder, Folder) else None
            if not isinstance(file, File):
                built = self._built_before(save, folder)
                if built:
                    return built
                raise SaveFailed("root-not-shared", f"{name} is not there")
            if not isinstance(file.content, Fragment) or file.content.save_id != save.save_id:
                raise SaveFailed("plan-failed", f"{name} is of another save")
            assert isinstance(folder, Folder)
            for each in file.content.files:
                if each.rank in found or each.file not in folder.entries:
                    raise SaveFailed("plan-failed", f"rank {each.rank}: {each.file}")
                found[each.rank] = each
        if found != {each.rank: each for each in files}:
            raise SaveFailed("plan-failed", "fragments and reports differ")
        rows = tuple((rank, found[rank].file) for rank in sorted(found))
        layouts = tuple(found[rank].layout_id for rank in sorted(found))
        manifest = Manifest(save.job, save.save_id, save.step, rows, layouts)
        for name in (MANIFEST, METADATA):
            yield from reported("write", self.path, self.write_into(save, name, manifest))
        return 4096 * len(rows)

    @staticmethod
    def _built_before(save: SaveRef, folder: object) -> int:
        """Return the size of the index that an earlier life of the coordinator built; 0 if none."""
        if not isinstance(folder, Folder) or METADATA not in folder.entries:
            return 0
        file = folder.entries.get(MANIFEST)
        found = file.content if isinstance(file, File) else None
        if not isinstance(found, Manifest) or found.save_id != save.save_id:
            return 0
        return 4096 * len(found.files) * all(name in folder.entries for _, name in found.files)

    def publish(self, save: SaveRef) -> Calls[str]:
        yield from reported("publish", self.path, self._publish(save))
        return f"{self.path}/{save.name}"

    def _publish(self, save: SaveRef) -> Calls[None]:
        disk = self.disk
        aside: str | None = None
        try:
            yield "listdir"
            source = disk.partial.entries.get(self.source_of(save))
            if not isinstance(source, Folder):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            manifest = source.entries.get(MANIFEST)
            listed = (
                {file for _, file in manifest.content.files}
                if isinstance(manifest, File) and isinstance(manifest.content, Manifest)
                else None
            )
            yield "stat"
            if METADATA not in source.entries:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            for name in list(source.entries):
                is_late = listed is not None and name.endswith(".distcp") and name not in listed
                if name.startswith((FRAGMENT, TEMP)) or is_late:
                    yield "unlink"
                    disk.unlink(self.owner, source, name)
            yield from self._sync(source)
            if save.overwrite:
                aside = yield from self._put_aside(save)
            yield "rename"
            disk.rename(
                self.owner, disk.partial, self.source_of(save), disk.root, save.name
            )  # fmt: skip
        except FileNotFoundError:
            if aside is not None:
                yield from self._restore(save.name, aside)
            yield from self._confirm(save)
            return
        except OSError as error:
            if aside is not None:
                with contextlib.suppress(OSError):
                    yield from self._restore(save.name, aside)
            if error.errno != errno.ENOTEMPTY:
                raise
            raise Rejected("already-committed", f"{save.name} exists already") from error
        yield from self._sync_names()
        if aside is not None:
            with contextlib.suppress(OSError):
                yield from self._carry_over(disk.partial.entries.get(aside), save.name)
        if save.overwrite:
            yield "unlink"
            disk.unlink(self.owner, disk.run, f"replace-{save.name}")

    def advance_latest(self, save: SaveRef) -> Calls[None]:
        yield from reported("move", self.path, self._advance_latest(save))

    def _advance_latest(self, save: SaveRef) -> Calls[None]:
        disk = self.disk
        yield "open"
        if not self._is_published(save):
            return
        target = save.name
        order = (self._attempt(save.save_id)[0], save.step, self._attempt(save.save_id)[1])
        seen = set(map(id, disk.root.entries.values()))
        yield "readlink"
        name = self.latest_target()
        is_other = name is not None and name != save.name
        if is_other and self.order(disk.root.entries.get(str(name))) > order:
            return
        while True:
            yield from self._move_latest(target)
            yield "listdir"
            found = dict(disk.root.entries)
            newer = [
                (self.order(inode), name)
                for name, inode in found.items()
                if isinstance(inode, Folder) and not name.startswith(".") and id(inode) not in seen
            ]
            if max(newer, default=(order, target))[0] <= order:
                return
            (order, target), seen = max(newer), set(map(id, found.values()))

    def _move_latest(self, name: str) -> Calls[None]:
        disk = self.disk
        temp = f"{LATEST}.{self._token()}"
        yield "symlink"
        link = File(name, is_synced=True, is_link=True)
        disk.change(self.owner, link, None, (disk.partial, temp))
        try:
            yield "rename"
            disk.rename(self.owner, disk.partial, temp, disk.root, LATEST)
        except OSError:
            disk.unlink(self.owner, disk.partial, temp)
            raise
        yield from self._sync(disk.root)

    def give_up(self, save: SaveRef) -> Calls[str]:
        return (yield from reported("give up", self.path, self._give_up(save)))

    def _give_up(self, save: SaveRef) -> Calls[str]:
        disk, source, aborted = self.disk, self.source_of(save), self._aborted_of(save)
        try:
            yield "rename"
            disk.rename(self.owner, disk.partial, source, disk.partial, aborted)
        except FileNotFoundError:
            return (yield from self._where(save))
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            yield from self._remove(disk.partial, source)
        if self._is_published(save):
            yield from self._remove(disk.partial, aborted)
        return (yield from self._where(save))

    def forestall(self, save: SaveRef) -> Calls[str]:
        found = yield from self.give_up(save)
        if found != "unknown":
            return found
        yield from reported("give up", self.path, self._make_aborted(save))
        return (yield from self.give_up(save))

    def _make_aborted(self, save: SaveRef) -> Calls[None]:
        yield "mkdir"
        self.disk.make_folder(self.owner, self.disk.partial, self._aborted_of(save))

    def is_unpublished(self, save: SaveRef, *, was_begun: bool) -> Calls[bool]:
        return (yield from reported("look for", self.path, self._is_unpublished(save, was_begun)))

    def _is_unpublished(self, save: SaveRef, was_begun: bool) -> Calls[bool]:
        yield "stat"
        intent = self._replacement(save.name)
        return (
            (self.source_of(save) in self.disk.partial.entries or not was_begun)
            and not self._is_published(save)
            and (intent is None or intent.save_id != save.save_id)
        )

    def discard(self, save: SaveRef) -> Calls[None]:
        yield from reported("discard", self.path, self._discard(save))

    def _discard(self, save: SaveRef) -> Calls[None]:
        partial = self.disk.partial
        yield from self._delete_tree(partial, self._aborted_of(save))
        if self.has_index(save.name):
            yield "listdir"
        for name in list(partial.entries):
            was_replaced = name.endswith(REPLACED) and name.rsplit(".", 2)[0] == save.name
            if was_replaced and self._is_spent(name):
                yield from self._remove(partial, name)
            elif is_pruned(name):
                yield from self._delete_pruned(name)

    # --- what is there

    @staticmethod
    def _attempt(save_id: str) -> tuple[int, int]:
        attempt, _, count = save_id.partition("-")
        return int(attempt) if attempt else 0, int(count) if count else 0

    def order(self, folder: Inode | None) -> tuple[int, int, int]:
        save_id, step = self.heading(folder)
        attempt, count = self._attempt(save_id)
        return attempt, step, count

    def checkpoints(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Name, step and order of each committed checkpoint, newest first."""
        found = [
            (name, self.heading(inode)[1], self.order(inode))
            for name, inode in self.disk.root.entries.items()
            if isinstance(inode, Folder) and not name.startswith(".") and METADATA in inode.entries
        ]
        return sorted(found, key=lambda each: (each[2], each[0]), reverse=True)

    def latest_target(self) -> str | None:
        link = self.disk.root.entries.get(LATEST)
        name = link.content if isinstance(link, File) else None
        return name if isinstance(name, str) and self.has_index(name) else None

    def remove_checkpoint(self, name: str, save_id: str) -> Calls[bool]:
        return (yield from reported("remove", self.path, self._retire(name, save_id)))

    def _retire(self, name: str, save_id: str) -> Calls[bool]:
        disk = self.disk
        aside = f"{name}.{save_id or '0-0'}{RETIRED}"
        yield "rename"
        try:
            disk.rename(self.owner, disk.root, name, disk.partial, aside)
        except OSError:
            return False
        yield "open"
        if self.heading(disk.partial.entries.get(aside))[0] != save_id:
            yield from self._restore(name, aside)
            return False
        yield from self._sync(disk.root)
        yield from self._remove(disk.partial, aside)
        return True

    # --- leases of readers

    def take_lease(self, name: str) -> Calls[str]:
        """Return the lease's file; "" if none can be made, so that the reader reads without one."""
        lease = f"{READING}{name}-{self._token()}"
        try:
            yield "open"
            file = self.disk.make_file(self.owner, self.disk.run, lease, "lease")
        except OSError:
            return ""
        # It has no bytes that could be lost.
        self.disk.sync_file(file)
        return lease

    def renew_lease(self, lease: str) -> Calls[None]:
        with contextlib.suppress(OSError):
            yield "utime"
            file = self.disk.run.entries.get(lease)
            if isinstance(file, File):
                file.touched_ns = self.disk.clock()

    def drop_lease(self, lease: str) -> Calls[None]:
        yield "unlink"
        self.disk.unlink(self.owner, self.disk.run, lease)

    def being_read(self) -> Calls[frozenset[str]]:
        """Return the names of checkpoints with a live lease; expired ones are removed."""
        run = self.disk.run
        yield "listdir"
        found: set[str] = set()
        for lease in [name for name in run.entries if name.startswith(READING)]:
            # A probe file tells the file system's time. Its name does not matter.
            yield from ("open", "stat", "stat", "unlink")
            file = run.entries.get(lease)
            if not isinstance(file, File):
                continue
            if self.disk.age_s(file) >= EXPIRY_S:
                yield "unlink"
                self.disk.unlink(self.owner, run, lease)
            else:
                found.add(lease_on(lease))
        return frozenset(found)

    def removable(self, keep: Keep) -> Calls[dict[str, str]]:
        """Return the checkpoints that no rule keeps, nobody reads, and `latest` does not name: the
        save id by name, oldest first.
        """
        names = doomed(self.checkpoints(), keep)
        save_ids = {name: self.heading(self.disk.root.entries[name])[0] for name in names}
        held = {*(yield from self.being_read()), self.latest_target()}
        return {name: save_ids[name] for name in names if name not in held}

    # --- where a save went, and replacing

    def _where(self, save: SaveRef) -> Calls[str]:
        yield "stat"
        if self._is_published(save):
            yield from self._sync_names()
            return "committed"
        yield "stat"
        if self._aborted_of(save) in self.disk.partial.entries:
            yield from self._sync(self.disk.partial)
            intent = self._replacement(save.name)
            if intent is not None and intent.save_id == save.save_id:
                yield from self._restore(save.name, intent.aside)
                yield "unlink"
                self.disk.unlink(self.owner, self.disk.run, f"replace-{save.name}")
            return "aborted"
        return "unknown"

    def _confirm(self, save: SaveRef) -> Calls[None]:
        if self.source_of(save) in self.disk.partial.entries:
            raise SaveFailed("internal", f"save {save.save_id} has no {METADATA}")
        where = yield from self._where(save)
        if where == "committed":
            return
        if where == "aborted":
            raise SaveFailed("aborted", f"save {save.save_id} of {save.name} was given up")
        raise SaveFailed("outcome-unknown", f"save {save.save_id} is in neither place")

    def _replacement(self, name: str) -> Replacement | None:
        file = self.disk.run.entries.get(f"replace-{name}")
        if isinstance(file, File) and isinstance(file.content, Replacement):
            return file.content
        return None

    def _is_newer(self, old_id: str, save: SaveRef) -> bool:
        return self._attempt(old_id) > self._attempt(save.save_id)

    def _put_aside(self, save: SaveRef) -> Calls[str | None]:
        disk = self.disk
        yield "stat"
        old = disk.root.entries.get(save.name)
        if old is None:
            return None
        old_id = self.heading(old)[0]
        if old_id == save.save_id:
            return None
        if self._is_newer(old_id, save):
            raise Rejected("already-committed", f"{save.name} holds {old_id} by now")
        assert isinstance(old, Folder)
        if METADATA not in old.entries and any(map(is_own, old.entries)):
            raise Rejected("already-committed", f"{save.name} holds parts of a checkpoint")
        aside = f"{save.name}.{old_id or '0-0'}{REPLACED}"
        yield from self._remove(disk.partial, aside)
        intent = Replacement(save.name, save.save_id, aside)
        yield from self.write_file(disk.run, f"replace-{save.name}", intent)
        yield "rename"
        try:
            disk.rename(self.owner, disk.root, save.name, disk.partial, aside)
        except FileNotFoundError:
            return None
        return aside

    def _restore(self, name: str, aside: str) -> Calls[None]:
        disk = self.disk
        yield "stat"
        if name in disk.root.entries:
            return
        try:
            yield "rename"
            disk.rename(self.owner, disk.partial, aside, disk.root, name)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        yield from self._sync_names()

    def _settle(self, intent: Replacement) -> Calls[None]:
        disk = self.disk
        source = f"{intent.name}.{intent.save_id}"
        yield "stat"
        if intent.name not in disk.root.entries:
            waiting = disk.partial.entries.get(source)
            if isinstance(waiting, Folder) and METADATA in waiting.entries:
                yield "rename"
                if source in disk.partial.entries:
                    disk.rename(self.owner, disk.partial, source, disk.root, intent.name)
                yield from self._sync_names()
            else:
                yield from self._restore(intent.name, intent.aside)
        yield "stat"
        if source not in disk.partial.entries:
            yield "unlink"
            disk.unlink(self.owner, disk.run, f"replace-{intent.name}")

    def _remove(self, folder: Folder, name: str) -> Calls[None]:
        disk = self.disk
        pruned = f"{name}.pruned-{self._token()}"
        yield "rename"
        if name not in folder.entries:
            return
        disk.rename(self.owner, folder, name, disk.partial, pruned)
        yield from self._sync(folder)
        yield from self._sync(disk.partial)
        yield from self._delete_pruned(pruned)

    # --- entries that people put into a checkpoint's directory

    def _is_spent(self, aside: str) -> bool:
        name = aside.rsplit(".", 2)[0]
        old = self.disk.partial.entries.get(aside)
        is_checkpoint = isinstance(old, Folder) and METADATA in old.entries
        is_taken = isinstance(self.disk.root.entries.get(name), Folder)
        return self.has_index(name) or (is_taken and not is_checkpoint)

    @staticmethod
    def foreign_in(folder: Inode | None) -> list[str]:
        names = folder.entries if isinstance(folder, Folder) else {}
        return sorted(name for name in names if not is_own(name))

    def _carry_over(self, source: Inode | None, name: str) -> Calls[None]:
        target = self.disk.root.entries.get(name)
        names = self.foreign_in(source)
        if not names or not isinstance(source, Folder) or not isinstance(target, Folder):
            return
        for each in names:
            free, number = each, 0
            while free in target.entries:
                number += 1
                free = f"{each}.{number}"
            with contextlib.suppress(OSError):
                yield "rename"
                self.disk.rename(self.owner, source, each, target, free)
        yield from self._sync(target)
        yield from self._sync(source)

    def _delete_pruned(self, pruned: str) -> Calls[None]:
        disk = self.disk
        name, folder = name_of_pruned(pruned), disk.partial.entries.get(pruned)
        if name is None or not self.foreign_in(folder):
            yield from self._delete_tree(disk.partial, pruned)
            return
        assert isinstance(folder, Folder)
        yield "stat"
        if name not in disk.root.entries and not self._is_replacing(name):
            yield "mkdir"
            disk.make_folder(self.owner, disk.root, name)
            yield from self._sync(disk.root)
        yield from self._carry_over(folder, name)
        if not self.foreign_in(folder):
            yield from self._delete_tree(disk.partial, pruned)
            return
        for entry in filter(is_own, list(folder.entries)):
            yield "unlink"
            disk.unlink(self.owner, folder, entry)

    def _is_replacing(self, name: str) -> bool:
        intent = self._replacement(name)
        there = self.disk.partial.entries
        return intent is not None and all(
            each in there for each in (intent.aside, f"{name}.{intent.save_id}")
        )


def finish(calls: Calls[Result]) -> Result:
    """Run an operation without faults, at once. Raises the operation's exceptions."""
    while True:
        try:
            next(calls)
        except StopIteration as ended:
            result: Result = ended.value
            return result
