"""Opening a root: its directories, its identity, and the attempts that claim numbers in it.

`prepare` also finishes what a crash has interrupted.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from contextlib import suppress
from typing import Final

import msgpack

from milepost.errors import StorageError
from milepost.storage.aside import read_intent, restore_or_remove, settle
from milepost.storage.catalog import checkpoints
from milepost.storage.durable import (
    TEMP_PREFIX,
    create_file,
    make_directories,
    sync_directory,
    temporary,
    unlink,
)
from milepost.storage.names import REPLACED, RootPaths
from milepost.storage.refusals import reported
from milepost.storage.removals import finish_removals

TEMPORARY_S_MAX: Final = 3600.0
"""Age from which a temporary file counts as left behind: it is a few KiB, so its writer needs
milliseconds, and clocks differ.
"""

_IDENTITY_NAME: Final = "root-id"


def prepare(root: RootPaths) -> None:
    """See `Root.prepare`."""
    with reported("prepare", root.top):
        make_directories(root.top)
        root.partial.mkdir(exist_ok=True)
        root.run.mkdir(exist_ok=True)
        sync_directory(root.top)
        for file in root.run.glob(f"{TEMP_PREFIX}*"):
            with suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime > TEMPORARY_S_MAX:
                    unlink(file)  # Its writer was killed.
        for intent in root.run.glob("replace-*"):
            replacement = read_intent(intent)
            if replacement is not None:
                settle(root, replacement)
        for entry in list(os.scandir(root.partial)):
            if entry.is_symlink():
                unlink(entry.path)
            elif entry.name.endswith(REPLACED):
                restore_or_remove(root, entry.name)
        finish_removals(root)


def identity(root: RootPaths) -> str:
    """See `Root.identity`."""
    path = root.run / _IDENTITY_NAME
    with reported("read", path):
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            pass
        draft = temporary(root.run)
        create_file(draft, f"{secrets.token_hex(4)}\n".encode())
        try:
            # If two processes come here at once, the first one decides: a link never replaces a
            # file.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            unlink(draft)
        sync_directory(root.run)
        return path.read_text().strip()


def check_shared(root: RootPaths, job: str) -> None:
    """See `Root.check_shared`."""
    _, at, expected = job.rpartition("@")
    if not at:
        return
    try:
        found = (root.run / _IDENTITY_NAME).read_text().strip()
    except FileNotFoundError:
        found = ""
    if found != expected:
        raise StorageError(
            "root-not-shared",
            f"{root.top} is {f'root {found}' if found else 'no root'} on this node, and root "
            f"{expected} on the node of rank 0",
            "mount the same file system at the same path on all nodes",
            operation="open",
            path=str(root.top),
        )


def claim_attempt(root: RootPaths, job: str) -> int:
    """See `Root.claim_attempt`."""
    content: bytes = msgpack.packb(
        {"job": job, "host": socket.gethostname(), "pid": os.getpid(), "at": time.time()}
    )
    with reported("claim an attempt in", root.run, len(content)):
        taken = [
            int(name[len("attempt-") :])
            for name in os.listdir(root.run)
            if re.fullmatch(r"attempt-\d+", name)
        ]
        there = [entry.order[0] for entry in checkpoints(root)]
        attempt = max([0, *taken, *there]) + 1
        while True:
            try:
                create_file(root.run / f"attempt-{attempt}", content)
            except FileExistsError:
                attempt += 1
                continue
            sync_directory(root.run)
            return attempt
