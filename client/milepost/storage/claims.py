"""Who uses a root: the job that saves to it, and those who are reading a checkpoint.

A claim is a small file below `<root>/.milepost-run/` that its owner touches again and again. If it
is not touched, it expires. `owner` belongs to rank 0's trainer of the job that saves.
`reading-<name>-<random>` is a lease: each reader has one, and retention leaves the checkpoint alone
meanwhile. Ages are measured by the file system's own clock, since the clocks of hosts differ.
Nothing here has to be durable. No torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgpack
import msgspec
import psutil

from milepost.errors import Rejected, UsageError
from milepost.format.manifest import MANIFEST_NAME
from milepost.storage.catalog import CheckpointEntry
from milepost.storage.contents import holds_own
from milepost.storage.retention import doomed
from milepost.storage.root import Root
from milepost.wire.messages import Keep

BEAT_S: Final = 10.0
"""How often a claim is touched."""

EXPIRY_S: Final = 45.0
"""Age at which a claim has expired: several beats, since a file system may stall for some seconds,
and a trainer may hold its interpreter for as long."""

OWNER_NAME: Final = "owner"
_READING: Final = re.compile(r"reading-(.+)-[0-9a-f]{16}")


class _Owner(msgspec.Struct, frozen=True):
    """Content of the owner file."""

    job: str
    host: str
    pid: int
    pid_created_s: float


def _age_s(folder: Path, path: Path) -> float:
    """Return how long ago a file was touched. Raises FileNotFoundError if it is gone."""
    probe = folder / f".tmp-{secrets.token_hex(8)}"
    probe.touch()
    try:
        return probe.stat().st_mtime - path.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


class _Beat:
    """Touches a file until `close`; makes a missing file again only if `comes_back`."""

    def __init__(self, path: Path, *, comes_back: bool = False) -> None:
        self._path = path
        self._comes_back = comes_back
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="milepost-claim", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(BEAT_S):
            # If the file is gone or the file system stalls, the claim may expire.
            with contextlib.suppress(OSError):
                if self._comes_back:
                    self._path.touch()
                else:
                    os.utime(self._path)

    def close(self) -> None:
        self._end.set()


class Ownership:
    """A job's claim on a root, held by this process until `close`."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content
        self._beat = _Beat(path)

    @classmethod
    def take(cls, root: Root, job: str) -> Ownership:
        """Claim the root for a job. A job of the same name takes over: that is a restart.

        Raises Rejected("root-locked") while another job is alive; names its job, host and pid.
        """
        folder = root.run_path
        path = folder / OWNER_NAME
        other = find_other(root, job)
        if other:
            raise Rejected(
                "root-locked",
                other,
                f"choose another root, or end that job; a job that is dead is forgotten after "
                f"{EXPIRY_S:g} s",
            )
        me = psutil.Process()
        content: bytes = msgpack.packb(
            msgspec.to_builtins(_Owner(job, socket.gethostname(), me.pid, me.create_time()))
        )
        draft = folder / f".tmp-{secrets.token_hex(8)}"
        draft.write_bytes(content)
        draft.rename(path)
        return cls(path, content)

    def close(self) -> None:
        """End the claim, unless another job has taken over. Idempotent."""
        self._beat.close()
        with contextlib.suppress(OSError):
            if self._path.read_bytes() == self._content:
                self._path.unlink()


def find_other(root: Root, job: str) -> str:
    """Describe the other living job that has claimed the root; empty if there is none."""
    folder = root.run_path
    path = folder / OWNER_NAME
    with contextlib.suppress(FileNotFoundError):
        other = _read_owner(path)
        if other is not None and other.job != job and _is_alive(other, folder, path):
            return f"{root.path} is in use by job {other.job} (pid {other.pid} on {other.host})"
    return ""


def _read_owner(path: Path) -> _Owner | None:
    """Read the owner; None if the file is damaged. Raises FileNotFoundError."""
    try:
        return msgspec.convert(msgpack.unpackb(path.read_bytes()), _Owner)
    except (ValueError, msgspec.ValidationError):
        return None


def _is_alive(owner: _Owner, folder: Path, path: Path) -> bool:
    if owner.host == socket.gethostname():
        try:
            return abs(psutil.Process(owner.pid).create_time() - owner.pid_created_s) < 1.0
        except psutil.Error:
            return False
    return _age_s(folder, path) < EXPIRY_S


@contextlib.contextmanager
def reading(root: Root, name: str) -> Iterator[None]:
    """Keep retention from removing a checkpoint while this block runs.

    If the root cannot be written to, reads without a lease: no daemon of this user can remove
    anything there.
    """
    path = root.run_path / f"reading-{name}-{secrets.token_hex(8)}"
    try:
        path.touch(exist_ok=False)
    except OSError:
        yield
        return
    # The lease may have expired and been removed while this reader was held up.
    beat = _Beat(path, comes_back=True)
    try:
        yield
    finally:
        beat.close()
        path.unlink(missing_ok=True)


def being_read(root: Root) -> frozenset[str]:
    """Return the names of checkpoints with a live lease; expired leases are removed."""
    folder = root.run_path
    found: set[str] = set()
    for path in folder.glob("reading-*"):
        match = _READING.fullmatch(path.name)
        with contextlib.suppress(FileNotFoundError):
            if match is None or _age_s(folder, path) >= EXPIRY_S:
                path.unlink(missing_ok=True)
            else:
                found.add(match[1])
    return frozenset(found)


def check_ours(path: Path) -> None:
    """Raise UsageError("already-committed") if milepost did not write this directory.

    A directory without any part of a checkpoint is fine: its content is kept.
    """
    is_free = path.is_dir() and not holds_own(path)
    if path.exists() and not (path / MANIFEST_NAME).exists() and not is_free:
        raise UsageError(
            "already-committed",
            f"{path} exists and was not written by milepost",
            "save under another name, or make the Checkpointer with overwrite=True",
        )


def removable(root: Root, entries: Sequence[CheckpointEntry], keep: Keep) -> list[str]:
    """Return which of the root's checkpoints may be removed now, oldest first.

    These are the checkpoints that no rule keeps. A checkpoint that is being read, or that `latest`
    still names, is left for later.
    """
    names = doomed(
        [(entry.name, entry.step, entry.order) for entry in entries],
        keep,
        foreign={entry.name for entry in entries if not entry.save_id},
    )
    held = {*being_read(root), root.latest_target()}
    return [name for name in names if name not in held]
