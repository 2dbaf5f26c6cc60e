"""Who this node is. A run directory is a node: it keeps the node's id and keys, and the lock that
lets only one daemon at a time be this node.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgpack
import msgspec
import zmq

from milepost.errors import UsageError

log = logging.getLogger(__name__)

IDENTITY_NAME: Final = "identity"
LOCK_NAME: Final = "lock"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this node is. Kept in the run directory, so that a restarted daemon is the same node to
    its peers.
    """

    node_id: str
    public_key: str
    secret_key: str
    port: int = 0
    """The peer port last used; taken again if it is free."""


def load_identity(run_dir: Path) -> Identity:
    """Read the node's identity, or draw a new one. The file is private to its owner."""
    path = run_dir / IDENTITY_NAME
    try:
        return msgspec.convert(msgpack.unpackb(path.read_bytes()), Identity)
    except FileNotFoundError:
        pass
    except (ValueError, msgspec.ValidationError):
        log.warning("identity.damaged", extra={"fields": {"file": str(path)}})
    public_key, secret_key = zmq.curve_keypair()
    host = socket.gethostname().split(".")[0][:24] or "node"
    identity = Identity(
        node_id=f"{host}-{os.urandom(3).hex()}",
        public_key=public_key.decode(),
        secret_key=secret_key.decode(),
    )
    save_identity(run_dir, identity)
    return identity


def save_identity(run_dir: Path, identity: Identity) -> None:
    """Keep the identity for the next start. Not synced: if it is lost, a new one is drawn."""
    path = run_dir / IDENTITY_NAME
    draft = path.with_suffix(".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgpack.packb(msgspec.to_builtins(identity)))
    draft.rename(path)


@contextlib.contextmanager
def only_daemon(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Hold the run directory's lock. The kernel frees it when the process ends.

    Yields a function that frees it earlier. Raises UsageError if another daemon holds it.
    """
    with (run_dir / LOCK_NAME).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise UsageError(
                "usage",
                f"run directory {run_dir} is in use by the daemon with pid {owner}",
                "choose another --run-dir, or stop that daemon",
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield lambda: fcntl.flock(lock, fcntl.LOCK_UN)
