"""Every exception a caller can meet, each with a stable code.

A class says what the caller can do about it, the code says what happened, the hint what to try.
Codes are kebab-case and never change meaning: the same word is on the wire, in the log, as a metric
label and as a heading in `docs/errors.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NAMED_MAX: Final = 8
"""How many keys, ranks or nodes a sentence names before it counts the rest."""

CODES: Final[dict[str, str]] = {
    "usage": "an argument or a setting is wrong",
    "unsupported-tensor": "a tensor of a kind that cannot be saved exactly",
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
    "rank-missing": "a rank did not take part in the save in time",
    "node-missing": "a node did not take part in the save in time",
    "save-mismatch": "ranks disagree about which save this is",
    "structure-changed": "the structure changed on some ranks, beyond what one save can mend",
    "torn-snapshot": "tensors changed while they were copied in the background",
    "coverage-gap": "the shards of a tensor leave a gap",
    "coverage-overlap": "the shards of a tensor overlap",
    "coverage-bounds": "a shard lies outside its tensor",
    "busy": "no slot was free and on_busy is skip",
    "aborted": "somebody asked for the save to be aborted",
    "shm-too-small": "the memory file system cannot hold the image",
    "arena-invalid": "the shared memory a client named is not what it says",
    "no-space": "the file system is full",
    "quota": "a quota was reached",
    "file-too-large": "a file size limit was reached",
    "read-only": "the file system is read-only",
    "permission": "the file system refused access",
    "io-error": "reading or writing failed",
    "plan-failed": "planning failed",
    "planner-failed": "the user's SavePlanner raised",
    "timeout": "the save's deadline passed",
    "outcome-unknown": "whether the save was published could not be found out",
    "not-found": "no such checkpoint",
    "load-failed": "the checkpoint could not be loaded",
    "shape-mismatch": "a tensor of the checkpoint has another shape than the state's",
    "dtype-mismatch": "a tensor of the checkpoint has another dtype than the state's",
    "unsafe-object": "an object of the checkpoint names what is not loaded unasked",
    "corrupt": "bytes on disk are not what was written",
    "protocol": "a message that does not follow the protocol",
    "internal": "a fault of milepost's own",
}
"""All codes with their one-line meaning; `docs/errors.md` has a section for each."""


def listed(values: Sequence[object], joint: str = ", ") -> str:
    """Return the values as a sentence names them: `3, 5`, or eight of them `and 4 more`."""
    text = joint.join(map(str, values[:NAMED_MAX]))
    more = len(values) - NAMED_MAX
    return f"{text} and {more} more" if more > 0 else text


class MilepostError(Exception):
    """The root of all errors a caller can meet.

    Args:
        code: one of `CODES`.
        message: lower case, no full stop: the act, the object, the numbers.
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
        path: what it was applied to.
        errno: the system's number, 0 where there is none.
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
