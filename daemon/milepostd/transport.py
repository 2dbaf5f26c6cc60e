"""The daemon's ZeroMQ sockets: messages in and out. What they mean is decided elsewhere.

```
trainer DEALER --- ipc://<run-dir>/milepostd.sock ---> ROUTER  sessions
peer    DEALER --- tcp://<peer address>, CURVE -----> ROUTER  what other nodes say
here    DEALER --- tcp://<their address>, CURVE ----> one per peer: what this node says
```

All sockets belong to the event loop's thread. LINGER is finite, so that last messages get out and
nothing hangs on an unreachable peer. High-water marks and message sizes are always set. Only nodes
that a job of this node has named are heard, known by their CURVE keys. Sources: ZMTP, ZAP (RFC 27),
CurveZMQ (RFC 26).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio
import zmq.auth
import zmq.auth.asyncio

from milepost.errors import ProtocolError, UsageError
from milepost.link.run_dir import SOCKET_PATH_BYTES_MAX, socket_path
from milepost.wire.messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL_VERSION,
    Cause,
    ClientMessage,
    DaemonMessage,
    NodeRef,
    PeerEnvelope,
    PeerMessage,
    Refused,
    decode_client,
    decode_peer,
    encode,
)
from milepostd.identity import Identity

log = logging.getLogger(__name__)

EARLY_MESSAGES_MAX: Final = 256
EARLY_BYTES_MAX: Final = 64 << 20
"""How much is kept of what nodes say that no local trainer has named yet: enough for the offers of
one large node, or for the first messages of many."""

REACH_S: Final = 4.0
"""If a peer's address does not resolve and answer a connection within this time, that is logged."""

LINGER_MS: Final = 500
"""How long a closed socket may still try to deliver."""

QUEUE_MESSAGES_MAX: Final = 1_000
"""High-water mark of each socket: far above what saves in flight need, low enough to bound
memory."""


class _Admission:
    """Which nodes may talk to this one, by their CURVE keys.

    Every key passes the handshake, and each message is judged by its key. To refuse the handshake
    would end a peer's connection for good, and a peer may well speak before the local trainer has
    named it. Messages that come too early are kept, within bounds, until their key is known.
    """

    def __init__(self) -> None:
        self._node_of_key: dict[str, str] = {}
        self._early: deque[tuple[str, PeerEnvelope, int]] = deque()
        self._early_bytes = 0

    def admit(self, node: NodeRef) -> list[PeerEnvelope]:
        """Let a node in; return the messages it has sent already."""
        self._node_of_key[node.public_key] = node.node_id
        mine = [envelope for key, envelope, _ in self._early if key == node.public_key]
        kept = [entry for entry in self._early if entry[0] != node.public_key]
        self._early = deque(kept)
        self._early_bytes = sum(size for _, _, size in kept)
        return [envelope for envelope in mine if envelope.node_id == node.node_id]

    def judge(self, key: str, envelope: PeerEnvelope, size: int) -> bool:
        """Return whether to take a message now. It is kept if its key is not known yet."""
        known = self._node_of_key.get(key)
        if known is not None:
            return known == envelope.node_id
        self._early.append((key, envelope, size))
        self._early_bytes += size
        while len(self._early) > EARLY_MESSAGES_MAX or self._early_bytes > EARLY_BYTES_MAX:
            self._early_bytes -= self._early.popleft()[2]
        return False


class Transport:
    """Sockets of one daemon. All methods run on the event loop."""

    def __init__(self, run_dir: Path, identity: Identity, incarnation: str) -> None:
        self.identity = identity
        self.incarnation = incarnation
        self.address = ""
        """Address that other nodes are told to connect to; set by `open`."""
        self._socket_path = socket_path(run_dir)
        self._context = zmq.asyncio.Context()
        self._admission = _Admission()
        self._authenticator: zmq.auth.asyncio.AsyncioAuthenticator | None = None
        self._sessions: zmq.asyncio.Socket | None = None
        self._inbox: zmq.asyncio.Socket | None = None
        self._peers: dict[str, tuple[NodeRef, zmq.asyncio.Socket]] = {}
        self._reaching: set[asyncio.Task[None]] = set()

    # --- opening and closing

    def open(self, peer: str, advertise: str) -> None:
        """Bind both sockets, and replace a socket file that an earlier daemon left. The caller must
        hold the run directory's lock.

        Raises UsageError if an address cannot be bound or the socket's path is too long.
        """
        try:
            self._open(peer, advertise)
        except BaseException:
            self.close()
            raise

    def _open(self, peer: str, advertise: str) -> None:
        path = str(self._socket_path)
        if len(path.encode()) > SOCKET_PATH_BYTES_MAX:
            raise UsageError(
                "usage",
                f"socket path {path} has {len(path.encode())} bytes, over the system's limit of "
                f"{SOCKET_PATH_BYTES_MAX}",
                "choose a shorter --run-dir",
            )
        self._socket_path.unlink(missing_ok=True)
        sessions = self._make_socket(zmq.ROUTER)
        sessions.setsockopt(zmq.ROUTER_MANDATORY, 1)
        previous = os.umask(0o077)
        try:
            sessions.bind(f"ipc://{path}")
        finally:
            os.umask(previous)
        self._sessions = sessions

        self._authenticator = zmq.auth.asyncio.AsyncioAuthenticator(self._context)
        self._authenticator.start()
        # The handshake proves that a peer holds its key; `_Admission` knows whose key it is.
        self._authenticator.configure_curve(domain="*", location=zmq.auth.CURVE_ALLOW_ANY)
        inbox = self._make_socket(zmq.ROUTER)
        inbox.curve_server = True
        inbox.curve_secretkey = self.identity.secret_key.encode()
        inbox.curve_publickey = self.identity.public_key.encode()
        self._inbox = inbox
        bound = self._bind_peer(inbox, peer)
        self.address = advertise or bound
        if self.address.endswith(":0"):
            self.address = self.address[: -len("0")] + bound.rpartition(":")[2]

    def _bind_peer(self, inbox: zmq.asyncio.Socket, peer: str) -> str:
        """Bind the peer socket and return its address. With port 0 try the port of the last start
        first.
        """
        if peer.endswith(":0") and self.identity.port:
            with contextlib.suppress(zmq.ZMQError):
                inbox.bind(f"{peer[:-2]}:{self.identity.port}")
                return inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        try:
            # With port 0 the system picks a free port and binds it in one step.
            inbox.bind(peer)
        except zmq.ZMQError as error:
            raise UsageError(
                "usage",
                f"cannot listen for peers at {peer}: {error.strerror}",
                "choose another --peer",
            ) from error
        return inbox.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def port(self) -> int:
        """The port the peer socket is bound to."""
        return int(self.address.rpartition(":")[2])

    def _make_socket(self, kind: int) -> zmq.asyncio.Socket:
        made = self._context.socket(kind)
        made.setsockopt(zmq.LINGER, LINGER_MS)
        made.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES_MAX)
        made.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES_MAX)
        made.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        return made

    def close(self) -> None:
        """Close all sockets. Queued messages have LINGER_MS to get out."""
        for task in self._reaching:
            task.cancel()
        for _, peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._sessions is not None:
            self._sessions.close()
        if self._inbox is not None:
            self._inbox.close()
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        self._socket_path.unlink(missing_ok=True)

    # --- trainers

    async def serve_sessions(self, take: Callable[[bytes, ClientMessage], Awaitable[None]]) -> None:
        """Give each message of a trainer to `take`, with the connection's routing id. Runs until
        cancelled.
        """
        assert self._sessions is not None
        while True:
            frames = await self._sessions.recv_multipart()
            if len(frames) != 2:
                continue
            try:
                message = decode_client(frames[1])
            except ProtocolError as error:
                cause = Cause(error.code, error.message, "client and daemon differ in version?")
                log.warning("session.malformed", extra={"fields": {"cause": error.message}})
                self.reply(frames[0], Refused(cause=cause))
                continue
            await take(frames[0], message)

    def reply(self, route: bytes, message: DaemonMessage) -> None:
        """Queue a message to a trainer. It is no error if the trainer is gone."""
        assert self._sessions is not None
        # EHOSTUNREACH: the trainer went away. EAGAIN: it has not read its messages for long.
        _post(self._sessions, [route, encode(message)])

    # --- peers

    def meet(self, nodes: tuple[NodeRef, ...]) -> list[PeerEnvelope]:
        """Let these nodes talk to this one; return the messages they have sent already."""
        return [envelope for node in nodes for envelope in self._admission.admit(node)]

    async def serve_peers(self, take: Callable[[PeerEnvelope], Awaitable[None]]) -> None:
        """Give each message of another node to `take`. Runs until cancelled."""
        assert self._inbox is not None
        while True:
            frames = await self._inbox.recv_multipart(copy=False)
            try:
                envelope = decode_peer(frames[-1].bytes)
            except ProtocolError as error:
                log.warning("peer.malformed", extra={"fields": {"cause": error.message}})
                continue
            if envelope.protocol != PROTOCOL_VERSION:
                log.warning(
                    "peer.version",
                    extra={"fields": {"peer": envelope.node_id, "protocol": envelope.protocol}},
                )
                continue
            key = frames[-1].get("User-Id")
            if self._admission.judge(str(key), envelope, len(frames[-1])):
                await take(envelope)

    def send(self, node: NodeRef, message: PeerMessage) -> None:
        """Queue a message to a node. It may be lost; the core repeats what matters."""
        known = self._peers.get(node.node_id)
        if known is not None and known[0] != node:
            known[1].close()
            known = None
        if known is None:
            dealer = self._make_socket(zmq.DEALER)
            dealer.curve_serverkey = node.public_key.encode()
            dealer.curve_publickey = self.identity.public_key.encode()
            dealer.curve_secretkey = self.identity.secret_key.encode()
            dealer.setsockopt(zmq.RECONNECT_IVL, 50)
            dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            dealer.connect(node.address)
            known = (node, dealer)
            self._peers[node.node_id] = known
            reaching = asyncio.get_running_loop().create_task(_tell_if_unreached(node))
            self._reaching.add(reaching)
            reaching.add_done_callback(self._reaching.discard)
        envelope = PeerEnvelope(PROTOCOL_VERSION, self.identity.node_id, self.incarnation, message)
        _post(known[1], [encode(envelope)])


async def _tell_if_unreached(node: NodeRef) -> None:
    """Log why a peer's address cannot be reached: ZeroMQ itself tries for ever, in silence.

    This opens a connection of its own and closes it at once. ZeroMQ goes on trying, so for a peer
    that only starts late the line is all that happens.
    """
    host, _, port = node.address.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except TimeoutError:
        cause = f"no answer within {REACH_S:g} s"
    except (OSError, ValueError) as error:
        cause = str(error)
    else:
        return
    fields = {"peer": node.node_id, "address": node.address, "cause": cause}
    log.warning("peer.unreached", extra={"fields": fields})


def _post(target: zmq.asyncio.Socket, frames: list[bytes]) -> None:
    """Queue frames, or drop them if the peer is gone or its queue is full."""
    # With NOBLOCK pyzmq sends at once and returns a finished future. Its exception is read here, or
    # the loop would report it as never retrieved.
    sent = asyncio.ensure_future(target.send_multipart(frames, zmq.NOBLOCK))
    if sent.done() and not sent.cancelled() and sent.exception() is not None:
        log.debug("message.unsent", extra={"fields": {"cause": str(sent.exception())}})
