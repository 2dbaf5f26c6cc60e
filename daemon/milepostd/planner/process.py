"""The planner's process, as the daemon sees it: start it, ask it, start it again after it died.

Global plans and `.metadata` are long pure-Python work and need torch's classes. Neither may stall
the daemon's loop or grow its memory, so both happen in a child process (`milepostd.planner.child`)
with its own niceness, one thread and no GPU. This module owns the child's life. It must not import
torch, and opens no offer.

In: what the core's MakePlan and BuildIndex ask. Out: an answer or a `Cause`. A call never raises
for what the child or storage does, and never waits for a process that has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final, TypeVar

from milepost.errors import MilepostError, ProtocolError, Unavailable
from milepost.wire.messages import Cause, RankReport, SaveRef, WrittenFile
from milepostd.planner import frames
from milepostd.planner.frames import (
    FRAME_HEADER,
    AnyAnswer,
    AnyRequest,
    FileUnseen,
    IndexReady,
    IndexWanted,
    PlanReady,
    PlanWanted,
    RequestFailed,
    Warm,
    decode_body,
    encode_frame,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

FILE_WAIT_S: Final = 2.0
"""How long a file that another node has synced may be missing here. Networked file systems cache
what they know of a directory, for a short time."""

_FILE_RETRY_S: Final = 0.1
_FILE_RETRY_S_MAX: Final = 10.0
"""First and longest pause before the child is asked again."""

ANSWER_S_MAX: Final = 600.0
"""A child that has not answered for this long, the default deadline of a save, is stuck: stopped,
or in a file system that hangs. It is ended, and the next save starts another one."""

_EXIT_S: Final = 2.0
"""How long to wait for the child's exit status after its answers have ended."""

_STOP_S: Final = 5.0
"""How long the child may take to end by itself once its stdin is closed."""

_Kind = TypeVar("_Kind")


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
                if length > frames.FRAME_BYTES_MAX:
                    limit = frames.FRAME_BYTES_MAX
                    reason = f"it answered {length} bytes, over the limit of {limit}"
                    break
                answer: AnyAnswer = decode_body(await stream.readexactly(length), AnyAnswer)
                waiting = self.pending.pop(answer.call, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            # Its answers end when the process ends; the exit status follows a moment later.
            self.is_gone = True
            reason = await self._exit_reason()
        except ProtocolError as error:
            reason = error.message
        finally:
            self.is_gone = True
            was_killed = self.kill()
            self._answer_pending(reason)
            if was_killed:
                # On a busy machine torch may take seconds to exit; nobody else waits for that.
                await self._exit_reason()

    async def _exit_reason(self) -> str:
        """Return how the process ended, in words. Waits at most `_EXIT_S`.

        (Up to Python 3.11.9 `wait()` also waits for pipes that somebody else may hold open.)
        """
        try:
            status = await asyncio.wait_for(self.process.wait(), _EXIT_S)
        except TimeoutError:
            return "it closed its answers"
        return f"signal {-status}" if status < 0 else f"exit status {status}"

    def kill(self) -> bool:
        """Kill the process, unless it has ended; return whether that was needed."""
        if self.process.returncode is not None:
            return False
        with suppress(ProcessLookupError):
            self.process.kill()
        return True

    def _answer_pending(self, reason: str) -> None:
        """Fail all pending calls: nothing else will answer them."""
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
                waiting.set_result(RequestFailed(call=call, cause=cause))
        self.pending.clear()


class Planner:
    """Asks the planner's process. Belongs to one event loop; calls are served in order.

    After the child has died, the next call starts it again. It still knows the layouts it gave out.

    Args:
        plans_dir: where the child keeps layouts. Made if missing. Belongs to one daemon at a time.
        nice: how much to add to this process's niceness for the child. Planning may take a whole
            core for seconds, and the trainers' data loaders go first.
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
        """Process id of the running child; None if none runs."""
        child = self._child
        return None if child is None or child.is_gone else child.process.pid

    async def start(self) -> None:
        """Start the child. Raises OSError if that is impossible."""
        self._is_stopped = False
        await self._running()

    async def stop(self) -> None:
        """End the child. Pending calls end with a cause. Idempotent."""
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
        """Have the child import torch, so that the first save need not wait for it.

        Returns once it has, or cannot, which is logged.
        """
        answer = await self._ask(Warm(call=next(self._calls)))
        if isinstance(answer, RequestFailed):
            log.warning("planner.cold", extra={"fields": {"cause": answer.cause.message}})

    async def make_plan(
        self, job: str, attempt: int, reports: Sequence[RankReport]
    ) -> PlanReady | Cause:
        """Plan a job's structure.

        Args:
            job: its name; layouts are remembered by job, rank and layout.
            attempt: its number; each attempt is told once of a key whose replicas differ.
            reports: one for every rank of the job: an offer with its fingerprint, or the layout
                under which the rank has staged. A layout that the child does not know (any more)
                fails the plan with `plan-failed`.
        """
        call = next(self._calls)
        request = PlanWanted(call=call, job=job, attempt=attempt, reports=tuple(reports))
        return _expect(await self._ask(request), PlanReady)

    async def build_index(
        self,
        save: SaveRef,
        root: str,
        files: Sequence[WrittenFile],
        fragments: Sequence[str],
        until_s: float,
        *,
        umask: int = -1,
    ) -> IndexReady | Cause:
        """Write `.milepost` and then `.metadata` into the save's directory, durably.

        The child reads every fragment and opens every data file, which proves that the nodes share
        the root. A missing file is looked for again during `FILE_WAIT_S`, and is then
        `root-not-shared`. What storage refuses for a passing reason is tried again.

        Args:
            save: which one; its directory is below `.partial`.
            root: the directory of checkpoints.
            files: what each rank has written, and under which layout; one entry a rank.
            fragments: file names of the nodes' manifest fragments.
            until_s: when to stop trying, by the monotonic clock.
            umask: gives the modes of both files, as in `Join`.
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
                umask=umask,
            )
            answer = await self._ask(request)
            match answer:
                case FileUnseen(cause=cause):
                    give_up_s = unseen_until_s
                case RequestFailed(cause=cause, is_passing=True):
                    give_up_s = until_s
                    log.warning(
                        "storage.retried",
                        extra={"fields": {"code": cause.code, "cause": cause.message,
                                          "wait_s": pause_s}},
                    )  # fmt: skip
                case _:
                    return _expect(answer, IndexReady)
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
                    # Keep modules in the daemon's working directory from being imported.
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
            return RequestFailed(call=request.call, cause=cause)
        waiting: asyncio.Future[AnyAnswer] = asyncio.get_running_loop().create_future()
        child.pending[request.call] = waiting
        assert child.process.stdin is not None
        # No drain: a caller that is cancelled must not leave half a frame, and the few calls at a
        # time need no bound but the frame's. If the child has ended, the bytes are lost and its
        # reader answers.
        child.process.stdin.write(frame)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await waiting
        except TimeoutError:
            # A process that hangs in the kernel does not die of the kill; do not ask it again.
            child.is_gone = True
            child.kill()
            text = f"the planner's process did not answer within {ANSWER_S_MAX:g} s and was ended"
            return RequestFailed(call=request.call, cause=Cause("plan-failed", text))
        finally:
            child.pending.pop(request.call, None)


def _expect(answer: AnyAnswer, kind: type[_Kind]) -> _Kind | Cause:
    if isinstance(answer, kind):
        return answer
    if isinstance(answer, RequestFailed):
        return answer.cause
    return Cause("internal", f"the planner answered {type(answer).__name__}, not {kind.__name__}")
