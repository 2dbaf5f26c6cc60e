"""The planner's process, as the daemon sees it: start it, ask it, start it again when it died.

Global plans and `.metadata` are long pure-Python work and need torch's classes; neither may stall
the daemon's loop nor weigh on it, so both happen in a child process (`milepostd.planner.child`),
niced, with one thread and no GPU. This module owns the child's life and the messages between the
two: frames on the child's stdin and stdout, each 8 bytes little-endian length and then msgpack, in
the form of `milepost.wire.messages`. It must not import torch, nor open an offer.

In: what the core's MakePlan and BuildIndex ask. Out: an answer or a `Cause`; a call never raises
for what the child or the storage does, and never waits for a process that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import sys
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import msgpack
import msgspec

from milepost.errors import MilepostError, ProtocolError, Unavailable
from milepost.wire.messages import Cause, RankLayout, RankReport, SaveRef, WrittenFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

FRAME_BYTES_MAX: Final = 1 << 30
"""Largest frame in either direction. The offers of 1,024 ranks of 1,000 items are 83 MB; a child
that is asked for more is refused the request, one that answers more is ended."""

FRAME_HEADER: Final = struct.Struct("<Q")

FILE_WAIT_S: Final = 2.0
"""How long a file that another node has synced may stay invisible here: networked file systems
cache what they know of a directory, but not for ever."""

_FILE_RETRY_S: Final = 0.1
_FILE_RETRY_S_MAX: Final = 10.0
"""First and longest pause before storage is asked again."""

ANSWER_S_MAX: Final = 600.0
"""A child that has not answered for so long, the default deadline of a save, is stuck (stopped, or
in a file system that does not answer); it is ended, so that the next save finds another one."""

_EXIT_S: Final = 2.0
"""How long its exit status is waited for after its answers have ended."""

_STOP_S: Final = 5.0
"""How long the child may take to end by itself once its stdin is closed."""


# --- messages ---------------------------------------------------------------------------------


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what the daemon asks; `call` comes back in the answer."""

    call: int


class Warm(Request, frozen=True):
    """Import torch now. Answered by `Warmed`."""


class PlanWanted(Request, frozen=True):
    """Plan a structure; the reports are of all ranks. Answered by `PlanMade` or `Failed`."""

    job: str
    reports: tuple[RankReport, ...]


class IndexWanted(Request, frozen=True):
    """Write manifest and `.metadata`. Answered by `IndexBuilt`, `FileUnseen` or `Failed`."""

    root: str
    save: SaveRef
    files: tuple[WrittenFile, ...]
    """Of every rank, ascending."""
    fragments: tuple[str, ...]


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of what the child answers."""

    call: int


class Warmed(Answer, frozen=True):
    """torch is there."""


class PlanMade(Answer, frozen=True):
    """Layouts for the ranks that offered, ascending by rank."""

    layouts: tuple[RankLayout, ...]
    warnings: tuple[Cause, ...]


class IndexBuilt(Answer, frozen=True):
    """Manifest and `.metadata` are durable; `checkpoint_bytes` counts all files."""

    checkpoint_bytes: int


class FileUnseen(Answer, frozen=True):
    """A file that a node wrote is not to be seen from here, or not whole: worth another look."""

    cause: Cause


class Failed(Answer, frozen=True):
    """It cannot be done; `is_passing`: storage refused it for a reason that may pass."""

    cause: Cause
    is_passing: bool = False


AnyRequest: TypeAlias = Warm | PlanWanted | IndexWanted
AnyAnswer: TypeAlias = Warmed | PlanMade | IndexBuilt | FileUnseen | Failed

_Kind = TypeVar("_Kind")


def encode_frame(message: Request | Answer) -> bytes:
    """Return the message with its length before it. Raises ProtocolError over the limit."""
    body: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    if len(body) > FRAME_BYTES_MAX:
        raise ProtocolError(
            "protocol",
            f"a planner message of {len(body)} bytes is over the limit of {FRAME_BYTES_MAX}",
        )
    return FRAME_HEADER.pack(len(body)) + body


def decode_body(body: bytes, kind: Any) -> Any:
    """Decode what follows the length, as `AnyRequest` or `AnyAnswer`. Raises ProtocolError."""
    try:
        raw = msgpack.unpackb(body, strict_map_key=True, use_list=False)
        return msgspec.convert(raw, kind, builtin_types=(bytes,))
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError("protocol", f"malformed planner message: {error}") from error


# --- the parent's side ------------------------------------------------------------------------


class _Child:
    """One life of the child. Every call in `pending` gets an answer, whatever happens."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pending: dict[int, asyncio.Future[AnyAnswer]] = {}
        self.is_gone = False
        self.reader = asyncio.create_task(self._read(), name="planner-answers")

    async def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        reason = ""
        try:
            while True:
                (length,) = FRAME_HEADER.unpack(await stream.readexactly(FRAME_HEADER.size))
                if length > FRAME_BYTES_MAX:
                    reason = f"it answered {length} bytes, over the limit of {FRAME_BYTES_MAX}"
                    break
                answer: AnyAnswer = decode_body(await stream.readexactly(length), AnyAnswer)
                waiting = self.pending.pop(answer.call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            # The end of its answers is the end of the process, but for a moment.
            self.is_gone = True
            reason = await self._end()
        except ProtocolError as error:
            reason = error.message
        finally:
            self.is_gone = True
            self.kill()
            self._conclude(reason)

    async def _end(self) -> str:
        """Return how the process ended, in words. It is not waited for longer than it takes to die.

        (Up to Python 3.11.9 `wait()` also waits for pipes that somebody else may hold open.)
        """
        try:
            status = await asyncio.wait_for(self.process.wait(), _EXIT_S)
        except TimeoutError:
            return "it closed its answers"
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def kill(self) -> None:
        """End the process, if it has not ended."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()

    def _conclude(self, reason: str) -> None:
        """Answer all that is pending: nobody else will."""
        if self.pending:
            fields = {"pid": self.process.pid, "reason": reason}
            log.warning("planner.lost", extra={"fields": fields})
        cause = Cause(
            "plan-failed",
            f"the planner's process (pid {self.process.pid}) ended while it was at work: {reason}",
            "the next save starts it again; if it was killed for memory, give the node more",
        )
        for call, waiting in self.pending.items():
            if not waiting.done():
                waiting.set_result(Failed(call=call, cause=cause))
        self.pending.clear()


class Planner:
    """Asks the planner's process. Belongs to one event loop; calls are served in order.

    A child that died is started again by the next call, and still knows the layouts it gave out.

    Args:
        plans_dir: where the child keeps layouts; made if missing, belongs to one daemon at a time.
        nice: how much nicer than this process the child is: planning may take whole seconds of a
            core, and the trainers' data loaders go first.
    """

    def __init__(self, plans_dir: Path, nice: int = 10) -> None:
        self._plans_dir = plans_dir
        self._nice = nice
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._calls = count(1)
        self._is_stopped = False

    @property
    def pid(self) -> int | None:
        """Of the child that runs now, if one does."""
        child = self._child
        return None if child is None or child.is_gone else child.process.pid

    async def start(self) -> None:
        """Start the child. Raises OSError if that is impossible."""
        self._is_stopped = False
        await self._running()

    async def stop(self) -> None:
        """End the child; calls that are pending end with a cause. Idempotent."""
        self._is_stopped = True
        async with self._starting:
            child, self._child = self._child, None
        if child is None:
            return
        assert child.process.stdin is not None
        child.process.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(child.reader), _STOP_S)
        except TimeoutError:
            child.kill()
            await child.reader

    async def warm(self) -> None:
        """Have the child import torch, so that the first save does not wait for it.

        Returns when it has, or cannot.
        """
        answer = await self._ask(Warm(call=next(self._calls)))
        if isinstance(answer, Failed):
            log.warning("planner.cold", extra={"fields": {"cause": answer.cause.message}})

    async def make_plan(self, job: str, reports: Sequence[RankReport]) -> PlanMade | Cause:
        """Plan a job's structure.

        Args:
            job: its name; layouts are remembered by job, rank and layout.
            reports: of every rank of the job, an offer with its fingerprint, or the layout under
                which it has staged. A layout that the child does not know (any more) fails the plan
                with `plan-failed`.
        """
        call = next(self._calls)
        request = PlanWanted(call=call, job=job, reports=tuple(reports))
        return _expect(await self._ask(request), PlanMade)

    async def build_index(
        self,
        save: SaveRef,
        root: str,
        files: Sequence[WrittenFile],
        fragments: Sequence[str],
        until_s: float,
    ) -> IndexBuilt | Cause:
        """Write `.milepost` and then `.metadata` into the save's directory, durably.

        Every fragment is read and every data file looked at, which proves that the nodes share the
        root; a file that is not to be seen is looked for again during `FILE_WAIT_S`, and is then
        `root-not-shared`. What storage refuses for a passing reason is tried again.

        Args:
            save: which one; its directory is below `.partial`.
            root: where checkpoints are.
            files: what each rank has written and under which layout; one entry a rank.
            fragments: file names of the nodes' manifest fragments.
            until_s: when to stop trying, by the monotonic clock.
        """
        unseen_until_s = time.monotonic() + FILE_WAIT_S
        pause_s = _FILE_RETRY_S
        ordered = tuple(sorted(files, key=lambda file: file.rank))
        while True:
            request = IndexWanted(
                call=next(self._calls),
                root=root,
                save=save,
                files=ordered,
                fragments=tuple(fragments),
            )
            answer = await self._ask(request)
            match answer:
                case FileUnseen(cause=cause):
                    give_up_s = unseen_until_s
                case Failed(cause=cause, is_passing=True):
                    give_up_s = until_s
                    log.warning(
                        "storage.retried",
                        extra={"fields": {"code": cause.code, "cause": cause.message,
                                          "wait_s": pause_s}},
                    )  # fmt: skip
                case _:
                    return _expect(answer, IndexBuilt)
            if time.monotonic() + pause_s > give_up_s:
                return cause
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _FILE_RETRY_S_MAX)

    async def _running(self) -> _Child:
        async with self._starting:
            if self._is_stopped:
                raise Unavailable("plan-failed", "it is stopped, since the daemon is ending")
            if self._child is None or self._child.is_gone:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    # Whatever lies in the daemon's working directory is not to be imported.
                    "-P",
                    "-m",
                    "milepostd.planner.child",
                    str(self._plans_dir),
                    str(self._nice),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                )
                self._child = _Child(process)
                log.info("planner.started", extra={"fields": {"pid": process.pid}})
            return self._child

    async def _ask(self, request: AnyRequest) -> AnyAnswer:
        try:
            frame = encode_frame(request)
            child = await self._running()
        except (OSError, MilepostError) as error:
            text = error.message if isinstance(error, MilepostError) else str(error)
            cause = Cause("plan-failed", f"the planner's process cannot be asked: {text}")
            return Failed(call=request.call, cause=cause)
        waiting: asyncio.Future[AnyAnswer] = asyncio.get_running_loop().create_future()
        child.pending[request.call] = waiting
        assert child.process.stdin is not None
        # No drain: a frame is never left half-sent by a caller that is cancelled, and the few calls
        # at a time need no other bound than the frame's. A child that is gone loses the bytes; its
        # reader answers.
        child.process.stdin.write(frame)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await waiting
        except TimeoutError:
            # Not only killed: what hangs in the kernel does not die, and is not to be asked again.
            child.is_gone = True
            child.kill()
            text = f"the planner's process did not answer within {ANSWER_S_MAX:g} s and was ended"
            return Failed(call=request.call, cause=Cause("plan-failed", text))
        finally:
            child.pending.pop(request.call, None)


def _expect(answer: AnyAnswer, kind: type[_Kind]) -> _Kind | Cause:
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, Failed):
        return answer.cause
    return Cause("internal", f"the planner answered {type(answer).__name__}, not {kind.__name__}")
