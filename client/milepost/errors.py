"""Every exception that a caller can meet, each with a stable code.

The class says what the caller can do, the code says what happened, the hint says what to try.
Codes are kebab-case and never change their meaning. The same code is on the wire, in the log, in a
metric's label and in a heading of `docs/errors.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NAMED_MAX: Final = 8
"""How many keys, ranks or nodes a sentence names. It only counts the others."""

CODES: Final[dict[str, str]] = {
    "usage": "an argument or a setting is wrong",
    "unsupported-tensor": "a tensor is of a kind that cannot be saved exactly",
    "unpicklable": "an object in the state cannot be pickled",
    "key-collision": "two entries of the state have the same flattened key",
    "key-conflict": "ranks disagree about what one key is",
    "replicas-differ": "copies of one value differ between ranks, and one of them is written",
    "already-committed": "this step is a checkpoint already",
    "closed": "the checkpointer is closed",
    "nested-call": "a call was made within another one of the same thread",
    "daemon-lost": "the node's daemon went away",
    "daemon-unreachable": "no daemon answers",
    "version-mismatch": "two sides speak different protocol or torch versions",
    "root-refused": "the daemon was not given this root",
    "root-not-shared": "two nodes do not see the same files under the root",
    "root-locked": "another job uses this root",
    "attempt-superseded": "a newer attempt of the job has started",
    "rank-missing": "a rank did not take part in time, or has ended",
    "node-missing": "a node did not take part in the save in time",
    "save-mismatch": "ranks disagree about which save this is",
    "structure-changed": "the structure changed on some ranks only; the save cannot be completed",
    "torn-snapshot": "tensors changed while they were copied in the background",
    "coverage-gap": "the shards of a tensor leave a gap",
    "coverage-overlap": "the shards of a tensor overlap",
    "coverage-bounds": "a shard lies outside its tensor",
    "busy": "no slot was free and on_busy is skip",
    "aborted": "somebody asked for the save to be aborted",
    "shm-too-small": "the memory file system cannot hold the image",
    "arena-invalid": "the shared memory that a trainer named is not what the trainer says",
    "no-space": "the file system is full",
    "quota": "a quota was reached",
    "file-too-large": "a file size limit was reached",
    "read-only": "the file system is read-only",
    "permission": "the file system refused access",
    "io-error": "reading or writing failed",
    "plan-failed": "planning failed",
    "planner-failed": "the user's SavePlanner raised",
    "timeout": "the save's deadline passed",
    "outcome-unknown": "it could not be found out whether the save was published",
    "not-found": "no such checkpoint",
    "load-failed": "the checkpoint could not be loaded",
    "shape-mismatch": "a tensor of the checkpoint has another shape than the state's",
    "dtype-mismatch": "a tensor of the checkpoint has another dtype than the state's",
    "unsafe-object": "an object of the checkpoint names a class or function that is not allowed",
    "corrupt": "bytes on disk are not what was written",
    "protocol": "a message does not follow the protocol",
    "internal": "an error in milepost itself",
}
"""All codes with their one-line meaning; `docs/errors.md` has a section for each."""


def listed(values: Sequence[object], joint: str = ", ") -> str:
    """Return the values as a sentence names them: `3, 5`, or eight of them `and 4 more`."""
    text = joint.join(map(str, values[:NAMED_MAX]))
    more = len(values) - NAMED_MAX
    return f"{text} and {more} more" if more > 0 else text


class MilepostError(Exception):
    """The base of all errors that a caller can meet.

    Args:
        code: one of `CODES`.
        message: the action, the object and the numbers, in lower case without a full stop.
        hint: what to do about it; may be empty.
    """

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        if code not in CODES:
            raise AssertionError(f"unknown error code {code!r}")
        super().__init__(code, message, hint)
        self.code = code
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.message} [{self.code}]"
        return f"{text}\nhint: {self.hint}" if self.hint else text


class UsageError(MilepostError):
    """What the caller passed is wrong; raised at once, before anything is changed. Fix the code."""


class Unavailable(MilepostError):
    """No daemon answers, or it went away. Train on: the next save tries again."""


class Rejected(MilepostError):
    """The save did not begin: busy, over a limit, versions differ."""


class SaveFailed(MilepostError):
    """The save began and did not become a checkpoint; the last checkpoint stands."""


class LoadFailed(MilepostError):
    """The checkpoint could not be loaded into the given state."""


class CorruptCheckpoint(MilepostError):
    """Verification or a load found damage. Use another checkpoint."""


class StorageError(MilepostError):
    """A file operation failed.

    Attributes:
        operation: the call, such as `pwrite` or `rename`.
        path: the file or directory.
        errno: the system's error number; 0 if there is none.
        transient: whether trying again may help.
    """

    def __init__(
        self,
        code: str,
        message: str,
        hint: str = "",
        *,
        operation: str = "",
        path: str = "",
        errno: int = 0,
        transient: bool = False,
    ) -> None:
        super().__init__(code, message, hint)
        self.operation = operation
        self.path = path
        self.errno = errno
        self.transient = transient


class ProtocolError(MilepostError):
    """The other side sent something that does not follow the protocol; its session is closed."""
