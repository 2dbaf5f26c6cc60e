"""The only loop of the daemon: feeds events to the core, carries out its commands, turns
completions into events.

Whole contract: each slow command ends in exactly one event, success or failure, and nothing an
executor does is raised into the loop. Payload never passes through here; writers map the arenas by
name. Threads: the event loop owns the core and all sockets; image writers and other file work run
in two bounded pools and talk back through the loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import psutil

from milepost.errors import UsageError
from milepost.format.manifest import FragmentFile
from milepost.memory.arena import find_arenas
from milepost.storage.homes import home_of
from milepost.wire.messages import (
    PROTOCOL_VERSION,
    AbortWanted,
    Cause,
    ClientMessage,
    Concluded,
    Hello,
    Join,
    Leave,
    Left,
    NodeRef,
    Offered,
    PeerEnvelope,
    Ping,
    Pong,
    PreemptionNoticed,
    ReadsTold,
    Refused,
    Skipped,
    Staged,
    StatusIs,
    StatusWanted,
    Unable,
    Welcome,
    WrittenFile,
)
from milepostd.core.commands import (
    AbandonWrite,
    AnyCommand,
    BuildIndex,
    ClearTimer,
    Discard,
    ForgetJournal,
    GiveUp,
    Halt,
    KeepJournal,
    Log,
    MakePlan,
    MeetPeers,
    Publish,
    RemoveArenas,
    Reply,
    Retain,
    Send,
    SetTimer,
    StartPlanner,
    SweepArenas,
    WarmPlanner,
    WriteFragment,
    WriteImage,
)
from milepostd.core.events import (
    AnyEvent,
    BytesWritten,
    FileDurable,
    FileFailed,
    FragmentDurable,
    FragmentFailed,
    IndexBuilt,
    IndexFailed,
    JobRecalled,
    PeerSaid,
    PlanFailed,
    PlanMade,
    RankJoined,
    RankLeft,
    RankSaid,
    RankSignalled,
    SessionLost,
    SessionOpened,
    Started,
    StopRequested,
    TimerFired,
)
from milepostd.core.node import Node, NodeSettings
from milepostd.core.phases import Phase
from milepostd.core.status import status_of
from milepostd.executors.failures import cause_of, retried
from milepostd.executors.latest import Latest
from milepostd.executors.threads import Threads
from milepostd.executors.throttle import MB, BandwidthLimit, Pace
from milepostd.executors.verdicts import Verdicts
from milepostd.executors.writer import OpenArenas, write_fragment, write_rank
from milepostd.journal import Journal, find_staged
from milepostd.ops import systemd
from milepostd.ops.config import Settings
from milepostd.ops.faults import FaultPoints, parse_faults
from milepostd.ops.http import bind_as_set, make_app, serve, url_of
from milepostd.ops.logs import emit
from milepostd.ops.metrics import Counters, make_exposition
from milepostd.ops.placement import Place
from milepostd.planner.process import Planner
from milepostd.transport import Transport, load_identity, save_identity

_log = logging.getLogger(__name__)
T = TypeVar("T")

FILE_THREADS: Final = 4
"""Threads for fragments, renames and deletions, apart from the image writers, so that one hung
write cannot keep a save of another root from being published."""

SWEEP_S: Final = 10.0
"""How long the end waits for shared memory to be freed."""

PROGRESS_S: Final = 0.1
"""How often the core hears how far a write is. Each block would wake the loop ten times as often,
for a tenth of the processor time of a save.
"""

LIVENESS_S: Final = 1.0
"""How often trainers without a pidfd are looked at."""

SILENT_TRAINER_S: Final = 300.0
"""A trainer whose process this node cannot see (another PID namespace) is lost after this silence;
long, because a trainer that compiles holds its interpreter for minutes."""


def run(settings: Settings, place: Place) -> int:
    """Run the daemon until it is told to stop; return the exit code.

    The run directory is made, the log set up and the place taken already.

    Raises UsageError if another daemon holds the run directory or an address cannot be bound.
    """
    run_dir = settings.run_dir
    if run_dir.stat().st_uid != os.getuid():
        raise UsageError("usage", f"run directory {run_dir} belongs to another user")
    run_dir.chmod(0o700)
    with _exclusive(run_dir) as release:
        place.tell()
        return asyncio.run(Runtime(settings, place, release).main())


@contextlib.contextmanager
def _exclusive(run_dir: Path) -> Iterator[Callable[[], None]]:
    """Hold the run directory's lock: one daemon a node. The kernel frees it with the process.

    Yields what frees it earlier.
    """
    path = run_dir / "lock"
    with path.open("a+") as lock:
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


class Session(msgspec.Struct):
    """One trainer's connection."""

    number: int
    route: bytes
    hello: Hello
    heard_at_s: float
    pidfd: int = -1
    """Readable once the process has ended; -1 where the process cannot be seen."""
    is_visible: bool = False


def installed_version(package: str) -> str:
    """Return a package's version without importing it; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class Runtime:
    """One daemon's loop and its executors."""

    def __init__(self, settings: Settings, place: Place, release: Callable[[], None]) -> None:
        self.settings = settings
        self.place = place
        self.release = release
        """Gives the run directory free for the next daemon."""
        self.incarnation = os.urandom(6).hex()
        self.identity = load_identity(settings.run_dir)
        self.transport = Transport(settings.run_dir, self.identity, self.incarnation)
        self.counters = Counters()
        self.faults = FaultPoints(parse_faults(settings.faults) if settings.faults else ())
        self.planner = Planner(settings.run_dir / "plans", nice=0)
        self.journal = Journal(settings.run_dir)
        self.started_at_s = time.monotonic()
        self.http_url = ""
        self.events: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self.sessions: dict[bytes, Session] = {}
        self.by_number: dict[int, Session] = {}
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.arenas = OpenArenas()
        self.fragments: dict[tuple[str, str], dict[int, FragmentFile]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.sweeps: set[asyncio.Task[None]] = set()
        """Those of `tasks` that free shared memory."""
        self.halted: asyncio.Future[str] | None = None
        self.last_turn_s = time.monotonic()
        self.last_session = 0
        self.service = systemd.ServiceManager(os.environ)
        self.writers = Threads("milepostd-writer", settings.writer_threads)
        self.files = Threads("milepostd-files", FILE_THREADS)
        self.latest = Latest(self._in_files, self._spawn)
        self.limit = BandwidthLimit(settings.write_mbps * MB) if settings.write_mbps else None
        self.paces: dict[tuple[str, str, int], Pace] = {}
        """Of the images that are being written, by save and rank."""
        self.roots = tuple(os.path.realpath(root) for root in settings.roots)
        self.torch_version = installed_version("torch")
        self.version = installed_version("milepost")

    # --- life

    async def main(self) -> int:
        """Serve until halted."""
        loop = asyncio.get_running_loop()
        self.halted = loop.create_future()
        self.transport.open(self.settings.peer, self.settings.advertise)
        save_identity(
            self.settings.run_dir, msgspec.structs.replace(self.identity, port=self.transport.port)
        )
        self.node_ref = NodeRef(
            self.identity.node_id, self.transport.address, self.identity.public_key
        )
        self.node = Node(
            NodeSettings(
                node=self.node_ref,
                roots=self.roots,
                is_embedded=self.settings.embedded,
                linger_s=self.settings.linger_s,
            )
        )
        self.verdicts = Verdicts(self.node_ref.node_id, self.faults, self._in_files, self.latest)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        listener = bind_as_set(self.settings)
        if listener is not None:
            self.http_url = url_of(listener)
            self._spawn(self._serve_http(listener))
        self._spawn(self.transport.serve_sessions(self._trainer_said))
        self._spawn(self.transport.serve_peers(self._peer_said))
        self._spawn(self._turn())
        self._spawn(self._watch())
        emit("info", "daemon.started", node=self.node_ref.node_id, pid=os.getpid(),
             address=self.node_ref.address, run_dir=str(self.settings.run_dir))  # fmt: skip
        self.service.ready("accepting saves")
        self._post(Started())
        self._recall()
        try:
            reason = await self.halted
        finally:
            await self._close()
        emit("info", "daemon.ended", node=self.node_ref.node_id, reason=reason)
        return 0

    async def _close(self) -> None:
        if self.sweeps:
            # What was to be freed is freed; it is only unlinking, which takes a moment a GiB.
            await asyncio.wait(self.sweeps, timeout=SWEEP_S)
        paces = [*self.paces.values()]
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        # Only now: what a stopped write says must not fail a save that the next life can finish.
        for pace in paces:
            pace.stop()
        for session in self.sessions.values():
            self._forget_pidfd(session)
        # The socket goes first: a trainer that comes now must not wait for an answer of ours.
        self.transport.close()
        self.release()
        await self.planner.stop()
        self.arenas.close()

    def _spawn(
        self, work: Coroutine[Any, Any, None], also: set[asyncio.Task[None]] | None = None
    ) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        if also is not None:
            also.add(task)
            task.add_done_callback(also.discard)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        # Executors turn every failure into an event, so this is a fault of ours: better a restart
        # by the supervisor than a loop that has lost one of its hands.
        _log.critical("daemon.broken", exc_info=task.exception(), extra={"fields": {}})
        if self.halted is not None and not self.halted.done():
            self.halted.set_exception(task.exception() or RuntimeError("a task broke"))

    def _asked_to_stop(self) -> None:
        self.service.stopping("draining")
        self._post(StopRequested())
        asyncio.get_running_loop().call_later(self.settings.drain_s, self._post, StopRequested())

    def _post(self, event: AnyEvent) -> None:
        self.events.put_nowait(event)

    async def _turn(self) -> None:
        """Take events one by one; the only place where the core is touched."""
        while True:
            event = await self.events.get()
            self.last_turn_s = time.monotonic()
            for command in self.node.handle(event, time.monotonic_ns()):
                self._carry_out(command)
            self.counters.event_took(time.monotonic() - self.last_turn_s)

    async def _watch(self) -> None:
        """Look after trainers that cannot be watched by pidfd, measure the loop, feed the
        watchdog.
        """
        fed_at_s = 0.0
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(min(LIVENESS_S, self.service.watchdog_s or LIVENESS_S))
            now_s = time.monotonic()
            self.counters.loop_lagged(max(0.0, now_s - before_s - LIVENESS_S))
            if (
                self.service.watchdog_s is not None
                and now_s - fed_at_s >= self.service.watchdog_s / 2
            ):
                self.service.alive()
                fed_at_s = now_s
            for session in [*self.sessions.values()]:
                if session.pidfd < 0 and not self._is_alive(session, now_s):
                    self._session_ended(session, "its process is gone")
            # Trainers may pin themselves at any time.
            self._keep_away()

    def _keep_away(self) -> None:
        """Leave the trainers' cores to them, as they are now."""
        trainers = [
            session.hello.pid if session.is_visible else None for session in self.sessions.values()
        ]
        self.place.follow(trainers, self.planner.pid)

    async def _serve_http(self, listener: socket.socket) -> None:
        app = make_app(
            status=self.status,
            healthy=self.is_healthy,
            metrics=make_exposition(self.status, self.counters),
            token=self.settings.http_token,
        )
        await serve(app, listener)

    # --- what others ask

    def status(self) -> dict[str, Any]:
        """The node's picture of itself, as `milepost status` and HTTP show it."""
        picture = status_of(self.node, time.monotonic_ns())
        for save in picture["saves"]:
            point = self.faults.holding(save["job"], save["save_id"])
            if point is not None:
                save["waits_for"] = f"held at fault point {point}; {save['waits_for']}"
            if self.limit is not None and save["phase"] == Phase.WRITING:
                save["waits_for"] += f", at most {self.settings.write_mbps:g} MB/s (write_mbps)"
        now_s = time.monotonic()
        heard = {
            session.hello.pid: now_s - session.heard_at_s for session in self.sessions.values()
        }
        for row in picture["sessions"]:
            row["last_heard_s"] = round(heard.get(row["pid"], 0.0), 3)
        picture["node"] = {
            "node_id": self.node_ref.node_id,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "version": self.version,
            "torch_version": self.torch_version,
            "uptime_s": round(now_s - self.started_at_s, 3),
            "peer_address": self.node_ref.address,
            "embedded": self.settings.embedded,
            "run_dir": str(self.settings.run_dir),
            "http": self.http_url,
        }
        picture["writer"] = {
            "threads": self.settings.writer_threads,
            "write_mbps": self.settings.write_mbps,
            **self.place.picture(),
        }
        return picture

    def is_healthy(self) -> bool:
        """Whether the loop turns: no event has waited for long."""
        return self.events.empty() or time.monotonic() - self.last_turn_s < 10.0

    async def _trainer_said(self, route: bytes, message: ClientMessage) -> None:
        self.counters.message(type(message).__name__, "in")
        session = self.sessions.get(route)
        if session is not None:
            session.heard_at_s = time.monotonic()
        match message:
            case StatusWanted():
                self.transport.reply(route, StatusIs(status_json=json.dumps(self.status())))
            case Hello():
                self._hello(route, message)
            case _ if session is None:
                cause = Cause(
                    "daemon-lost", "this daemon does not know the session", "say hello again"
                )
                self.transport.reply(route, Refused(cause=cause))
            case Ping():
                self.transport.reply(route, Pong())
            case Join():
                self._post(
                    RankJoined(session=session.number, pid=session.hello.pid, message=message)
                )
            case Leave():
                self._post(RankLeft(session=session.number, message=message))
            case PreemptionNoticed() | ReadsTold():
                self._post(RankSignalled(session=session.number, message=message))
            case Offered() | Staged() | Skipped() | Unable() | AbortWanted():
                self._post(RankSaid(session=session.number, message=message))

    def _hello(self, route: bytes, hello: Hello) -> None:
        cause = None
        if hello.protocol != PROTOCOL_VERSION:
            cause = Cause(
                "version-mismatch",
                f"the client speaks protocol {hello.protocol} (milepost {hello.version}), the "
                f"daemon {PROTOCOL_VERSION} (milepost {self.version})",
                "install one version on both sides and restart the daemon",
            )
        elif _series(hello.torch_version) != _series(self.torch_version):
            cause = Cause(
                "version-mismatch",
                f"the trainer runs torch {hello.torch_version}, the daemon's planner torch "
                f"{self.torch_version}",
                "start milepostd from the trainer's environment",
            )
        if cause is not None:
            self.transport.reply(route, Refused(cause=cause))
            return
        old = self.sessions.get(route)
        if old is None:
            self.last_session += 1
            session = Session(
                number=self.last_session, route=route, hello=hello, heard_at_s=time.monotonic()
            )
            self.sessions[route] = session
            self.by_number[session.number] = session
            self._watch_process(session)
            self._keep_away()
            self._post(SessionOpened(session=session.number))
        self.transport.reply(
            route,
            Welcome(
                protocol=PROTOCOL_VERSION,
                version=self.version,
                pid=os.getpid(),
                incarnation=self.incarnation,
                node=self.node_ref,
            ),
        )

    def _watch_process(self, session: Session) -> None:
        """Hear at once when the trainer ends, where its process can be seen and is the one it
        says.
        """
        session.is_visible = _is_process(session.hello)
        if not session.is_visible:
            return
        try:
            session.pidfd = os.pidfd_open(session.hello.pid)
        except OSError:
            return
        asyncio.get_running_loop().add_reader(
            session.pidfd, self._session_ended, session, "its process has ended"
        )

    def _is_alive(self, session: Session, now_s: float) -> bool:
        if session.is_visible:
            return _is_process(session.hello)
        return now_s - session.heard_at_s < SILENT_TRAINER_S

    def _forget_pidfd(self, session: Session) -> None:
        if session.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(session.pidfd)
            os.close(session.pidfd)
            session.pidfd = -1

    def _session_ended(self, session: Session, reason: str) -> None:
        self._forget_pidfd(session)
        self.sessions.pop(session.route, None)
        self.by_number.pop(session.number, None)
        self._keep_away()
        self._spawn(self._tell_lost(session.number, reason))

    async def _tell_lost(self, number: int, reason: str) -> None:
        """Tell the core, with the trainer's arenas and what it had staged and may not have said."""
        place = self.node.roster.joined.get(number)
        staged: list[tuple[int, Staged]] = []
        arenas: tuple[tuple[int, str], ...] = ()
        if place is not None:
            whose = (place.job.job, place.job.attempt, [place.rank])
            try:
                arenas = await self._in_files(partial(_arenas_of, *whose))
                staged = await self._in_files(partial(find_staged, *whose))
            except OSError as error:
                emit("warning", "arena.unreadable", cause=str(error))
        words = tuple(word for _, word in staged)
        paths = tuple(path for _, path in arenas)
        self._post(SessionLost(session=number, reason=reason, staged=words, arenas=paths))

    async def _peer_said(self, envelope: PeerEnvelope) -> None:
        self.counters.message(type(envelope.message).__name__, "in")
        self._post(PeerSaid(node_id=envelope.node_id, message=envelope.message))

    # --- commands

    def _carry_out(self, command: AnyCommand) -> None:
        match command:
            case Reply():
                self._reply(command)
            case Send():
                self.counters.message(type(command.message).__name__, "out")
                self.transport.send(command.node, command.message)
            case MeetPeers():
                for envelope in self.transport.meet(command.nodes):
                    self._post(PeerSaid(node_id=envelope.node_id, message=envelope.message))
            case SetTimer():
                self._set_timer(command.timer, command.at_ns)
            case ClearTimer():
                self._clear_timer(command.timer)
            case Log():
                self._log_line(command)
            case Halt():
                if self.halted is not None and not self.halted.done():
                    self.halted.set_result(command.reason)
            case StartPlanner():
                self._spawn(self._warm_planner(self.planner.start))
            case WarmPlanner():
                self._spawn(self._warm_planner(self.planner.warm))
            case KeepJournal():
                self._keep_journal(command)
            case ForgetJournal():
                self.journal.forget(command.job, command.attempt)
            case SweepArenas():
                self._spawn(self._sweep_arenas(command), self.sweeps)
            case RemoveArenas():
                self._spawn(self._remove_arenas(command), self.sweeps)
            case AbandonWrite():
                self._abandon_write((command.save.job, command.save.save_id, command.rank))
            case WriteImage():
                self._spawn(self._complete(self._write_image, command))
            case WriteFragment():
                self._spawn(self._complete(self._write_fragment, command))
            case MakePlan():
                self._spawn(self._complete(self._make_plan, command))
            case BuildIndex():
                self._spawn(self._complete(self._build_index, command))
            case Publish():
                self._spawn(self._complete(self.verdicts.publish, command))
            case GiveUp():
                self._spawn(self._complete(self.verdicts.give_up, command))
            case Discard():
                self._spawn(self._complete(self._discard, command))
            case Retain():
                self._spawn(self._complete(self.verdicts.retain, command))

    async def _complete(self, execute: Callable[[T], Awaitable[AnyEvent]], command: T) -> None:
        """Carry out a slow command: exactly one event comes back."""
        self._post(await execute(command))

    def _abandon_write(self, write: tuple[str, str, int]) -> None:
        """Have it end at its next block, and let others write if it never gets there."""
        if write in self.paces:
            self.paces[write].stop()
        self.writers.abandon(write)

    def _reply(self, command: Reply) -> None:
        session = self.by_number.get(command.session)
        if session is None:
            return
        self.counters.message(type(command.message).__name__, "out")
        if isinstance(command.message, Concluded):
            self._count_outcome(command.message)
        self.transport.reply(session.route, command.message)
        if isinstance(command.message, Left):
            self._session_ended(session, "it said goodbye")

    def _count_outcome(self, message: Concluded) -> None:
        if message.cause is not None:
            self.counters.error(message.cause.code)

    def _set_timer(self, timer: str, at_ns: int) -> None:
        self._clear_timer(timer)
        delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
        loop = asyncio.get_running_loop()
        self.timers[timer] = loop.call_later(delay_s, self._timer_fired, timer)

    def _timer_fired(self, timer: str) -> None:
        self.timers.pop(timer, None)
        self._post(TimerFired(timer=timer))

    def _clear_timer(self, timer: str) -> None:
        handle = self.timers.pop(timer, None)
        if handle is not None:
            handle.cancel()

    def _log_line(self, command: Log) -> None:
        fields: dict[str, Any] = dict(command.fields)
        if command.save is not None:
            fields |= {
                "job": command.save.job,
                "save": command.save.save_id,
                "step": command.save.step,
            }
        if command.cause is not None:
            fields |= {"code": command.cause.code, "cause": command.cause.message}
            fields |= {"rank": command.cause.rank} if command.cause.rank >= 0 else {}
        outcome = fields.get("outcome")
        if isinstance(outcome, str):
            self.counters.save_ended(outcome)
            if outcome == "committed":
                self.counters.commit_took(float(fields.get("elapsed_s", 0.0)))
        emit(command.level, command.event, node=self.node_ref.node_id, **fields)

    async def _in_files(self, work: Callable[[], T]) -> T:
        return await self.files.run(work)

    # --- executors of slow commands

    async def _write_image(self, command: WriteImage) -> AnyEvent:
        save, rank = command.save, command.rank
        write_of = (save.job, save.save_id, rank)
        loop = asyncio.get_running_loop()
        started_s = time.monotonic()
        pace = self.paces[write_of] = Pace(
            self.limit, until_s=command.until_ns / 1e9, on_wait=self.counters.throttled
        )

        untold, told_s = 0, started_s

        def on_bytes(count: int) -> None:
            nonlocal untold, told_s
            self.faults.at_blocking("mid-write", save)
            self.counters.bytes_written(count)
            untold += count
            if (now_s := time.monotonic()) - told_s >= PROGRESS_S:
                loop.call_soon_threadsafe(self._post, BytesWritten(save=save, count=untold))
                untold, told_s = 0, now_s

        try:
            await self.faults.at("after-staged", save)
            write = partial(
                write_rank,
                home_of(command.root, save),
                save,
                command.arena,
                command.slot,
                command.layout_id,
                on_bytes,
                self.arenas,
                pace,
            )
            file = await retried(partial(self.writers.run, write, write_of), command.until_ns)
            await self.faults.at("after-write", save)
        except Exception as error:  # every failure becomes the command's one event
            return FileFailed(
                save=save, rank=rank, cause=cause_of(error, node=self.node_ref.node_id, rank=rank)
            )
        finally:
            self.paces.pop(write_of, None)
            if untold:
                self._post(BytesWritten(save=save, count=untold))
        self.counters.write_took(time.monotonic() - started_s)
        self.fragments.setdefault((save.job, save.save_id), {})[rank] = file
        return FileDurable(
            save=save, file=WrittenFile(rank, file.layout_id, file.file, file.file_bytes)
        )

    async def _write_fragment(self, command: WriteFragment) -> AnyEvent:
        save = command.save
        try:
            await self.faults.at("before-durable", save)
            files = self.fragments.pop((save.job, save.save_id))
            ordered = tuple(files[rank] for rank in sorted(files))
            write = partial(
                write_fragment,
                home_of(command.root, save),
                save,
                self.node_ref.node_id,
                ordered,
            )
            name = await retried(partial(self.files.run, write), command.until_ns)
        except Exception as error:  # every failure becomes the command's one event
            return FragmentFailed(save=save, cause=cause_of(error, node=self.node_ref.node_id))
        return FragmentDurable(save=save, fragment=name)

    async def _make_plan(self, command: MakePlan) -> AnyEvent:
        save = command.save
        started_s = time.monotonic()
        try:
            await self.faults.at("before-plan", save)
            made = await self.planner.make_plan(save.job, command.reports)
            if save.is_plan_only:
                # Who prepares wants to have paid when it returns, and the index needs torch.
                await self.planner.warm()
        except Exception as error:  # every failure becomes the command's one event
            return PlanFailed(save=save, cause=cause_of(error, node=self.node_ref.node_id))
        self.counters.planning_took(time.monotonic() - started_s)
        if isinstance(made, Cause):
            return PlanFailed(save=save, cause=made)
        return PlanMade(save=save, layouts=made.layouts, warnings=made.warnings)

    async def _build_index(self, command: BuildIndex) -> AnyEvent:
        save = command.save
        try:
            await self.faults.at("before-metadata", save)
            built = await self.planner.build_index(
                save, command.root, command.files, command.fragments, command.until_ns / 1e9
            )
            await self.faults.at("after-metadata", save)
        except Exception as error:  # every failure becomes the command's one event
            return IndexFailed(save=save, cause=cause_of(error, node=self.node_ref.node_id))
        if isinstance(built, Cause):
            return IndexFailed(save=save, cause=built)
        return IndexBuilt(save=save, checkpoint_bytes=built.checkpoint_bytes)

    async def _discard(self, command: Discard) -> AnyEvent:
        self.fragments.pop((command.save.job, command.save.save_id), None)
        return await self.verdicts.discard(command)

    async def _warm_planner(self, warm: Callable[[], Awaitable[None]]) -> None:
        try:
            await warm()
        except OSError as error:  # the first plan tries again, and tells
            emit("warning", "planner.cold", cause=str(error))

    def _keep_journal(self, command: KeepJournal) -> None:
        """On the loop, since nothing of the job may be written before; a file of a few KiB."""
        try:
            self.journal.keep(command.message)
        except OSError as error:
            # Saves work without it; a daemon that is killed then cannot finish for dead trainers.
            emit("warning", "journal.unkept", job=command.message.job, cause=str(error))

    async def _sweep_arenas(self, command: SweepArenas) -> None:
        def old() -> tuple[str, ...]:
            return tuple(
                str(file.path)
                for file in find_arenas(command.job)
                if file.attempt < command.below_attempt and file.rank in command.ranks
            )

        await self._remove_arenas(RemoveArenas(paths=await self._in_files(old)))

    def _recall(self) -> None:
        """Tell the core what an earlier life of this daemon has left."""
        for join in self.journal.recall():
            ranks = [
                rank
                for rank, index in enumerate(join.node_of_rank)
                if join.cohort[index].node_id == self.identity.node_id
            ]
            arenas = _arenas_of(join.job, join.attempt, ranks)
            staged = tuple(find_staged(join.job, join.attempt, ranks))
            self._post(JobRecalled(message=join, staged=staged, arenas=arenas))

    async def _remove_arenas(self, command: RemoveArenas) -> None:
        for path in command.paths:
            self.arenas.forget(path)
            try:
                await self._in_files(partial(Path(path).unlink, missing_ok=True))
            except OSError as error:
                emit("warning", "arena.unremoved", file=path, cause=str(error))


def _arenas_of(job: str, attempt: int, ranks: Sequence[int]) -> tuple[tuple[int, str], ...]:
    """Return rank and path of each arena that these ranks of an attempt have left or hold."""
    return tuple(
        (file.rank, str(file.path))
        for file in find_arenas(job)
        if file.attempt == attempt and file.rank in ranks
    )


def _series(text: str) -> str:
    """Return major.minor of a version."""
    return ".".join(text.split("+")[0].split(".")[:2])


def _is_process(hello: Hello) -> bool:
    """Whether the process that said hello is there, and is still the same one."""
    try:
        process = psutil.Process(hello.pid)
        return (
            abs(process.create_time() - hello.pid_created_s) < 1.0
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.Error:
        return False
