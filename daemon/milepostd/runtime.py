"""The only loop of the daemon: feeds events to the core and carries out its commands.

Quick commands are carried out on the loop, slow ones by executors in tasks of their own, each of
which ends in exactly one event (`executors/table.py`). Payload never passes through here; writers
map the arenas by name. Threads: the event loop owns the core and all sockets. Images are written
and other file work is done in two bounded groups of threads, which talk back through the loop only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, TypeVar

import msgspec

from milepost.errors import UsageError
from milepost.wire.messages import (
    PROTOCOL_VERSION,
    ClientMessage,
    Concluded,
    NodeRef,
    PeerEnvelope,
    Staged,
    Welcome,
)
from milepostd.core.commands import (
    AbandonWrite,
    AnyCommand,
    ClearTimer,
    ForgetJournal,
    Halt,
    KeepJournal,
    Log,
    MeetPeers,
    RemoveArenas,
    Reply,
    Send,
    SetTimer,
    SlowCommand,
    StartPlanner,
    SweepArenas,
    WarmPlanner,
)
from milepostd.core.events import (
    AnyEvent,
    JobRecalled,
    PeerSaid,
    SessionLost,
    Started,
    StopRequested,
    TimerFired,
)
from milepostd.core.node import Node, NodeSettings
from milepostd.core.phases import Phase
from milepostd.core.status import status_of
from milepostd.executors.arenas import ArenaRemoval, OpenArenas, arenas_of, find_staged
from milepostd.executors.directories import SaveDirectories
from milepostd.executors.images import Images
from milepostd.executors.latest import Latest
from milepostd.executors.plans import Plans
from milepostd.executors.table import carry_out, make_executors
from milepostd.executors.threads import Threads
from milepostd.executors.throttle import MB, BandwidthLimit
from milepostd.identity import Identity, load_identity, only_daemon, save_identity
from milepostd.journal import Journal
from milepostd.ops import systemd
from milepostd.ops.config import Settings
from milepostd.ops.faults import FaultPoints, parse_faults
from milepostd.ops.http import make_app
from milepostd.ops.logs import emit
from milepostd.ops.metrics import Counters, make_exposition
from milepostd.ops.placement import DaemonPlacement
from milepostd.ops.server import bind_as_set, serve_http, url_of
from milepostd.planner.process import Planner
from milepostd.sessions import TrainerSessions
from milepostd.transport import Transport

_log = logging.getLogger(__name__)
T = TypeVar("T")

FILE_THREADS: Final = 4
"""Threads for fragments, renames and deletions. They are apart from the image writers, so that a
hung write cannot keep a save of another root from being published."""

SWEEP_S: Final = 10.0
"""How long the daemon's end waits for shared memory to be freed."""

LOOK_S: Final = 1.0
"""How often to look after trainers that no pidfd watches, the loop's lag and the watchdog."""

LOOP_STUCK_S: Final = 10.0
"""If an event waits longer for the core, the daemon calls itself unhealthy."""


def run_daemon(settings: Settings, placement: DaemonPlacement) -> int:
    """Run the daemon until it is told to stop; return the exit code.

    The run directory must be there, the log set up and the place taken.

    Raises UsageError if another daemon holds the run directory or an address cannot be bound.
    """
    run_dir = settings.run_dir
    if run_dir.stat().st_uid != os.getuid():
        raise UsageError("usage", f"run directory {run_dir} belongs to another user")
    run_dir.chmod(0o700)
    with only_daemon(run_dir) as release:
        placement.tell()
        return asyncio.run(_serve(settings, placement, release))


async def _serve(
    settings: Settings, placement: DaemonPlacement, release: Callable[[], None]
) -> int:
    incarnation = os.urandom(6).hex()
    identity = load_identity(settings.run_dir)
    transport = Transport(settings.run_dir, identity, incarnation)
    transport.open(settings.peer, settings.advertise)
    identity = msgspec.structs.replace(identity, port=transport.port)
    save_identity(settings.run_dir, identity)
    runtime = Runtime(settings, placement, identity, incarnation, transport)
    return await runtime.main(release)


def _installed_version(package: str) -> str:
    """Return a package's version without importing it; empty if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


class Runtime:
    """One daemon's loop. Made on the loop, with sockets that are open."""

    def __init__(
        self,
        settings: Settings,
        placement: DaemonPlacement,
        identity: Identity,
        incarnation: str,
        transport: Transport,
    ) -> None:
        self.settings = settings
        self.placement = placement
        self.incarnation = incarnation
        self.transport = transport
        self.started_at_s = time.monotonic()
        self.last_turn_s = self.started_at_s
        self.version = _installed_version("milepost")
        self.torch_version = _installed_version("torch")
        self.node_ref = NodeRef(identity.node_id, transport.address, identity.public_key)
        self.node = Node(
            NodeSettings(
                node=self.node_ref,
                roots=tuple(os.path.realpath(root) for root in settings.roots),
                is_embedded=settings.embedded,
                linger_s=settings.linger_s,
            )
        )
        self.events: asyncio.Queue[AnyEvent] = asyncio.Queue()
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.freeing: set[asyncio.Task[None]] = set()
        """Those of `tasks` that free shared memory."""
        self.halted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.http_url = ""
        self.counters = Counters()
        self.service = systemd.ServiceManager(os.environ)
        self.journal = Journal(settings.run_dir)
        self.sessions = TrainerSessions(
            Welcome(
                protocol=PROTOCOL_VERSION,
                version=self.version,
                pid=os.getpid(),
                incarnation=incarnation,
                node=self.node_ref,
            ),
            self.torch_version,
            reply=transport.reply,
            post=self._post,
            status=self.status,
            changed=self._keep_away,
            lost=self._session_lost,
        )
        self._set_up_executors()

    def _set_up_executors(self) -> None:
        settings, node_id = self.settings, self.node_ref.node_id
        self.faults = FaultPoints(parse_faults(settings.faults) if settings.faults else ())
        self.limit = BandwidthLimit(settings.write_mbps * MB) if settings.write_mbps else None
        self.planner = Planner(settings.run_dir / "plans", nice=0)
        self.files = Threads("milepostd-files", FILE_THREADS)
        self.arenas = OpenArenas()
        self.removal = ArenaRemoval(self.arenas, self.files.run)
        self.images = Images(
            node_id,
            arenas=self.arenas,
            writers=Threads("milepostd-writer", settings.writer_threads),
            files=self.files,
            faults=self.faults,
            counters=self.counters,
            limit=self.limit,
            post=self._post,
        )
        self.plans = Plans(self.planner, self.faults, self.counters)
        latest = Latest(self.files.run, self._spawn)
        directories = SaveDirectories(node_id, self.faults, self.files.run, latest)
        self.executors = make_executors(self.images, self.plans, directories)

    # --- life

    async def main(self, release: Callable[[], None]) -> int:
        """Serve until halted; return the exit code.

        Args:
            release: lets the next daemon have the run directory.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        listener = bind_as_set(self.settings)
        if listener is not None:
            self.http_url = url_of(listener)
            self._spawn(self._serve_http(listener))
        self._spawn(self.transport.serve_sessions(self._trainer_said))
        self._spawn(self.transport.serve_peers(self._peer_said))
        self._spawn(self._turn())
        self._spawn(self._look_around())
        emit("info", "daemon.started", node=self.node_ref.node_id, pid=os.getpid(),
             address=self.node_ref.address, run_dir=str(self.settings.run_dir))  # fmt: skip
        self.service.ready("accepting saves")
        self._post(Started())
        self._recall()
        try:
            reason = await self.halted
        finally:
            await self._close(release)
        emit("info", "daemon.ended", node=self.node_ref.node_id, reason=reason)
        return 0

    async def _close(self, release: Callable[[], None]) -> None:
        if self.freeing:
            # Wait: it is only unlinking, which takes a moment for each GiB.
            await asyncio.wait(self.freeing, timeout=SWEEP_S)
        paces = self.images.paces()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        # Stop the writes only now that nobody hears of it: a stopped write would fail its save,
        # and the next life of this daemon can finish that save.
        for pace in paces:
            pace.stop()
        self.sessions.close()
        # The socket goes before the lock: a trainer that comes now must not wait for an answer.
        self.transport.close()
        release()
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
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        # A fault of ours. Better a restart by the supervisor than a loop that has lost a task.
        _log.critical("daemon.broken", exc_info=error, extra={"fields": {}})
        if not self.halted.done():
            self.halted.set_exception(error)

    def _asked_to_stop(self) -> None:
        self.service.stopping("draining")
        self._post(StopRequested())
        asyncio.get_running_loop().call_later(self.settings.drain_s, self._post, StopRequested())

    async def _look_around(self) -> None:
        """Look after trainers, measure the loop and feed the watchdog, again and again."""
        watchdog_s = self.service.watchdog_s
        fed_at_s = 0.0
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(min(LOOK_S, watchdog_s or LOOK_S))
            now_s = time.monotonic()
            self.counters.loop_lagged(max(0.0, now_s - before_s - LOOK_S))
            if watchdog_s is not None and now_s - fed_at_s >= watchdog_s / 2:
                self.service.alive()
                fed_at_s = now_s
            self.sessions.look_after()
            # Trainers may pin themselves to cores at any time.
            self._keep_away()

    def _keep_away(self) -> None:
        """Leave the trainers' cores to them, as they are now."""
        self.placement.follow(self.sessions.pids(), self.planner.pid)

    async def _serve_http(self, listener: socket.socket) -> None:
        app = make_app(
            status=self.status,
            healthy=self.is_healthy,
            metrics=make_exposition(self.status, self.counters),
            token=self.settings.http_token,
        )
        await serve_http(app, listener)

    # --- what others ask

    def status(self) -> dict[str, Any]:
        """Return the node's status, as `milepost status` and HTTP show it."""
        picture = status_of(self.node, time.monotonic_ns())
        for save in picture["saves"]:
            point = self.faults.holding(save["job"], save["save_id"])
            if point is not None:
                save["waits_for"] = f"held at fault point {point}; {save['waits_for']}"
            if self.limit is not None and save["phase"] == Phase.WRITING:
                save["waits_for"] += f", at most {self.settings.write_mbps:g} MB/s (write_mbps)"
        silences_s = self.sessions.silences_s()
        for row in picture["sessions"]:
            row["last_heard_s"] = round(silences_s.get(row["pid"], 0.0), 3)
        picture["node"] = {
            "node_id": self.node_ref.node_id,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "version": self.version,
            "torch_version": self.torch_version,
            "uptime_s": round(time.monotonic() - self.started_at_s, 3),
            "peer_address": self.node_ref.address,
            "embedded": self.settings.embedded,
            "run_dir": str(self.settings.run_dir),
            "http": self.http_url,
        }
        picture["writer"] = {
            "threads": self.settings.writer_threads,
            "write_mbps": self.settings.write_mbps,
            **self.placement.picture(),
        }
        return picture

    def is_healthy(self) -> bool:
        """Whether the loop turns: no event has waited for long."""
        return self.events.empty() or time.monotonic() - self.last_turn_s < LOOP_STUCK_S

    # --- events

    def _post(self, event: AnyEvent) -> None:
        self.events.put_nowait(event)

    async def _turn(self) -> None:
        """Take events one by one. Nothing else changes the core."""
        while True:
            event = await self.events.get()
            self.last_turn_s = time.monotonic()
            for command in self.node.handle(event, time.monotonic_ns()):
                self._carry_out(command)
            self.counters.event_took(time.monotonic() - self.last_turn_s)

    async def _trainer_said(self, route: bytes, message: ClientMessage) -> None:
        self.counters.message(type(message).__name__, "in")
        self.sessions.take(route, message)

    async def _peer_said(self, envelope: PeerEnvelope) -> None:
        self.counters.message(type(envelope.message).__name__, "in")
        self._post(PeerSaid(node_id=envelope.node_id, message=envelope.message))

    def _session_lost(self, number: int, reason: str) -> None:
        self._spawn(self._tell_lost(number, reason))

    async def _tell_lost(self, number: int, reason: str) -> None:
        """Tell the core, with the trainer's arenas and what it may have staged without saying."""
        place = self.node.roster.joined.get(number)
        staged: list[tuple[int, Staged]] = []
        arenas: tuple[tuple[int, str], ...] = ()
        if place is not None:
            whose = (place.job.job, place.job.attempt, [place.rank])
            try:
                arenas = await self.files.run(partial(arenas_of, *whose))
                staged = await self.files.run(partial(find_staged, *whose))
            except OSError as error:
                emit("warning", "arena.unreadable", cause=str(error))
        words = tuple(word for _, word in staged)
        paths = tuple(path for _, path in arenas)
        self._post(SessionLost(session=number, reason=reason, staged=words, arenas=paths))

    def _recall(self) -> None:
        """Tell the core what an earlier life of this daemon has left unfinished."""
        for join in self.journal.recall():
            ranks = [
                rank
                for rank, index in enumerate(join.node_of_rank)
                if join.cohort[index].node_id == self.node_ref.node_id
            ]
            arenas = arenas_of(join.job, join.attempt, ranks)
            staged = tuple(find_staged(join.job, join.attempt, ranks))
            self._post(JobRecalled(message=join, staged=staged, arenas=arenas))

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
                if not self.halted.done():
                    self.halted.set_result(command.reason)
            case StartPlanner():
                self._spawn(self.plans.start())
            case WarmPlanner():
                self._spawn(self.plans.warm())
            case KeepJournal():
                self._keep_journal(command)
            case ForgetJournal():
                self.journal.forget(command.job, command.attempt)
            case SweepArenas():
                self._spawn(self.removal.sweep(command), self.freeing)
            case RemoveArenas():
                self._spawn(self.removal.remove(command), self.freeing)
            case AbandonWrite():
                self.images.abandon(command)
            case _:
                self._spawn(self._complete(command))

    async def _complete(self, command: SlowCommand) -> None:
        """Carry out a slow command; give the core its one event."""
        self._post(await carry_out(self.executors, command, self.node_ref.node_id))

    def _reply(self, command: Reply) -> None:
        if not self.sessions.reply(command.session, command.message):
            return
        self.counters.message(type(command.message).__name__, "out")
        if isinstance(command.message, Concluded) and command.message.cause is not None:
            self.counters.error(command.message.cause.code)

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

    def _keep_journal(self, command: KeepJournal) -> None:
        """Write it on the loop, since nothing of the job may be written before; a few KiB."""
        try:
            self.journal.keep(command.message)
        except OSError as error:
            # Saves work without it, but a daemon that is killed cannot finish for dead trainers.
            emit("warning", "journal.unkept", job=command.message.job, cause=str(error))

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
