"""Sockets between nodes: CURVE on loopback, and which nodes are heard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq

from milepost.wire.messages import Cause as FailCause
from milepost.wire.messages import Fail, NodeRef, PeerEnvelope, SaveRef
from milepostd.identity import Identity, load_identity, save_identity
from milepostd.transport import Transport


def _word(text: str) -> Fail:
    save = SaveRef(job="j", save_id="1-1", step=1, name="step_1")
    return Fail(save=save, cause=FailCause("aborted", text))


class Peer:
    """A transport, and the messages that it has received."""

    def __init__(self, folder: Path, name: str) -> None:
        public, secret = zmq.curve_keypair()
        identity = Identity(node_id=name, public_key=public.decode(), secret_key=secret.decode())
        folder.mkdir()
        self.transport = Transport(folder, identity, f"{name}-life")
        self.transport.open("tcp://127.0.0.1:0", "")
        self.node = NodeRef(name, self.transport.address, public.decode())
        self.heard: list[PeerEnvelope] = []
        self.came = asyncio.Event()
        self.has_kept = asyncio.Event()
        """That something has come which is not taken yet, or never."""
        admission = self.transport._admission
        self._plain_judge = admission.judge
        admission.judge = self._judge  # type: ignore[method-assign]

    async def _take(self, envelope: PeerEnvelope) -> None:
        self.heard.append(envelope)
        self.came.set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.transport.serve_peers(self._take))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self.transport.close()

    def _judge(self, key: str, envelope: PeerEnvelope, size: int) -> bool:
        is_taken = self._plain_judge(key, envelope, size)
        if not is_taken:
            self.has_kept.set()
        return is_taken

    async def until(self, count: int) -> list[str]:
        async with asyncio.timeout(10):
            while len(self.heard) < count:
                self.came.clear()
                await self.came.wait()
        return [each.message.cause.message for each in self.heard if isinstance(each.message, Fail)]


def test_a_node_that_speaks_before_it_is_known_is_heard_once_it_is_known(folder: Path) -> None:
    async def main() -> None:
        a, b = Peer(folder / "a", "a"), Peer(folder / "b", "b")
        async with a.serving(), b.serving():
            b.transport.send(a.node, _word("early"))
            await asyncio.wait_for(a.has_kept.wait(), 10)
            assert [] == a.heard
            early = a.transport.meet((b.node,))
            assert ["early"] == [e.message.cause.message for e in early]  # type: ignore[union-attr]
            b.transport.send(a.node, _word("later"))
            assert ["later"] == await a.until(1)

    asyncio.run(main())


def test_a_stranger_is_never_taken_for_a_node_that_is_known(folder: Path) -> None:
    async def main() -> None:
        a, b, stranger = (Peer(folder / name, name) for name in ("a", "b", "x"))
        # It claims to be b, but has not b's key.
        stranger.transport.identity = Identity(
            node_id="b",
            public_key=stranger.node.public_key,
            secret_key=stranger.transport.identity.secret_key,
        )
        async with a.serving(), b.serving(), stranger.serving():
            a.transport.meet((b.node,))
            stranger.transport.send(a.node, _word("false"))
            await asyncio.wait_for(a.has_kept.wait(), 10)
            b.transport.send(a.node, _word("true"))
            assert ["true"] == await a.until(1)
            assert [] == a.transport.meet((b.node,))

    asyncio.run(main())


def test_a_restarted_node_keeps_name_keys_and_port(folder: Path) -> None:
    async def port_of(identity: Identity) -> int:
        transport = Transport(folder, identity, "life")
        transport.open("tcp://127.0.0.1:0", "")
        try:
            return transport.port
        finally:
            transport.close()

    first = load_identity(folder)
    port = asyncio.run(port_of(first))
    save_identity(folder, msgspec.structs.replace(first, port=port))
    again = load_identity(folder)
    assert (first.node_id, first.public_key) == (again.node_id, again.public_key)
    assert port == asyncio.run(port_of(again))
    assert 0o600 == (folder / "identity").stat().st_mode & 0o777


def test_a_socket_path_that_is_too_long_is_refused_with_the_numbers(tmp_path: Path) -> None:
    from milepost import UsageError

    long = tmp_path / ("x" * 100)
    long.mkdir()

    async def main() -> None:
        identity = Identity(node_id="n", public_key="", secret_key="")
        with pytest.raises(UsageError, match="107"):
            Transport(long, identity, "life").open("tcp://127.0.0.1:0", "")

    asyncio.run(main())
