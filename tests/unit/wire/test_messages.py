"""The wire: every message arrives as it was sent, and what is no message is refused by name.

`tests/golden/wire-v2` holds one frame a message, as version 2 writes it, and `wire-v1` those of
version 1, which are still read. `MILEPOST_GOLDEN=write` makes missing ones, for a message that is
new; an existing one is never written again.
"""

from __future__ import annotations

import contextlib
import enum
import os
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import ProtocolError
from milepost.wire import messages as protocol
from milepost.wire.messages import (
    AbortWanted,
    Cause,
    ClientMessage,
    Concluded,
    DaemonMessage,
    Ending,
    Fail,
    Gathered,
    Hello,
    Join,
    Joined,
    Keep,
    LayoutReady,
    Leave,
    Left,
    Message,
    NodeRef,
    Offered,
    Outcome,
    PeerEnvelope,
    PeerMessage,
    Ping,
    Planned,
    Pong,
    Preempted,
    PreemptionAsked,
    PreemptionDecided,
    PreemptionNoticed,
    PreemptionSaid,
    Prepared,
    Progress,
    RankLayout,
    RankReads,
    RankReport,
    ReadsTold,
    ReadsWanted,
    Refused,
    SaveRef,
    Skipped,
    SlotFreed,
    Staged,
    StatusIs,
    StatusWanted,
    Unable,
    Welcome,
    WordWanted,
    WrittenFile,
    decode_client,
    decode_daemon,
    decode_peer,
    encode,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "wire-v2"
GOLDEN_1 = GOLDEN.with_name("wire-v1")

SAVE = SaveRef("run@1f", "3-7", 700, "step_700", True, place="/data/best")
CAUSE = Cause("no-space", "cannot write 4096 bytes to /r/x", "free some space", "node-1", 3)
NODES = (
    NodeRef("node-0", "tcp://10.0.0.1:9471", "k" * 40),
    NodeRef("node-1", "tcp://10.0.0.2:9471", "l" * 40),
)

CLIENT: list[Message] = [
    Hello(
        protocol=1,
        version="0.1.0",
        torch_version="2.13.0+cpu",
        pid=4242,
        pid_created_s=1.7e9 + 0.25,
    ),
    Join(
        job="run@1f",
        attempt=3,
        root="/data/run",
        rank=1,
        node_of_rank=(0, 1, 1),
        cohort=NODES,
        keep=Keep(last=2, every=(100, 250), protect=(7,)),
        deadline_s=120.5,
        umask=0o027,
    ),
    Offered(save=SAVE, fingerprint="0" * 32, offer=b"\x00\xff\xc1"),
    Staged(save=SAVE, layout_id="l" * 32, arena="/dev/shm/a", slot=1, image_bytes=1 << 41),
    Skipped(save=SAVE, reason="no slot is free"),
    Unable(save=SAVE, cause=CAUSE),
    AbortWanted(save=SAVE),
    Ping(),
    Leave(),
    PreemptionNoticed(),
    ReadsTold(reads=7),
    StatusWanted(),
]
DAEMON: list[Message] = [
    Welcome(protocol=1, version="0.1.0", pid=77, incarnation="0123456789ab", node=NODES[0]),
    Refused(cause=CAUSE),
    Joined(job="run@1f", attempt=3, rank=1),
    LayoutReady(
        save_id="3-7", layout_id="l" * 32, assigned=b"\x05\x80", warnings=(CAUSE,), rota=b"\1\0\2\0"
    ),
    Progress(save_id="3-7", phase="writing"),
    Concluded(
        save_id="3-7",
        outcome=Ending.FAILED,
        path="/data/run/step_700",
        checkpoint_bytes=1 << 42,
        elapsed_s=1.5,
        cause=CAUSE,
        layout_valid=False,
        slot_free=False,
        warnings=(CAUSE,),
    ),
    SlotFreed(save_id="3-7"),
    ReadsWanted(),
    Preempted(at_read=8),
    Pong(),
    Left(),
    StatusIs(status_json='{"version": 1, "jobs": []}'),
]
PEER: list[Message] = [
    Gathered(
        save=SAVE,
        reports=(RankReport(0, "l" * 32), RankReport(1, "", "0" * 32, b"\x00\xff")),
    ),
    Prepared(
        save=SAVE,
        files=(WrittenFile(0, "l" * 32, "__0_0.distcp", 8192), WrittenFile(1, "m" * 32, "", 0)),
        fragment="fragment.node-1",
    ),
    Fail(save=SAVE, cause=CAUSE, skip=True),
    WordWanted(save=SAVE),
    Planned(save=SAVE, layouts=(RankLayout(1, "m" * 32, b"\x01", b"\1\0\1\0"),), warnings=(CAUSE,)),
    Outcome(
        save=SAVE,
        outcome=Ending.COMMITTED,
        path="/data/run/step_700",
        checkpoint_bytes=1 << 42,
        at_ms=1_700_000_000_123,
        cause=CAUSE,
        layout_valid=False,
        warnings=(CAUSE,),
    ),
    PreemptionSaid(job="run@1", attempt=3, reads=(RankReads(0, 41), RankReads(1, 40))),
    PreemptionAsked(job="run@1", attempt=3),
    PreemptionDecided(job="run@1", attempt=3, at_read=42),
]


def enveloped(message: Any) -> PeerEnvelope:
    return PeerEnvelope(protocol=1, node_id="node-1", incarnation="0123456789ab", message=message)


FRAMES: list[tuple[Message | PeerEnvelope, Callable[[bytes], Any]]] = [
    *((message, decode_client) for message in CLIENT),
    *((message, decode_daemon) for message in DAEMON),
    *((enveloped(message), decode_peer) for message in PEER),
]


def name_of(frame: Any) -> str:
    if callable(frame):
        return ""
    return type(frame.message if isinstance(frame, PeerEnvelope) else frame).__name__


def strategy_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return st.lists(strategy_of(arguments[0]), max_size=3).map(tuple)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(strategy_of, arguments))
    if kind is type(None):
        return st.none()
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(
            kind, **{field: strategy_of(hints[field]) for field in kind.__struct_fields__}
        )
    scalars: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63 - 1),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        bytes: st.binary(max_size=20),
        bool: st.booleans(),
        float: st.floats(allow_nan=False),
    }
    return scalars[kind]


@given(message=strategy_of(ClientMessage))
def test_what_a_client_says_arrives_as_it_was_sent(message: ClientMessage) -> None:
    assert message == decode_client(encode(message))


@given(message=strategy_of(DaemonMessage))
def test_what_a_daemon_says_arrives_as_it_was_sent(message: DaemonMessage) -> None:
    assert message == decode_daemon(encode(message))


@given(message=strategy_of(PeerMessage))
def test_what_a_peer_says_arrives_as_it_was_sent(message: PeerMessage) -> None:
    assert enveloped(message) == decode_peer(encode(enveloped(message)))


def test_the_examples_cover_every_message() -> None:
    for union, examples in ((ClientMessage, CLIENT), (DaemonMessage, DAEMON), (PeerMessage, PEER)):
        assert list(typing.get_args(union)) == [type(message) for message in examples]
    declared = {
        kind
        for kind in vars(protocol).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    }
    assert declared == {type(message) for message in (*CLIENT, *DAEMON, *PEER)}


@pytest.mark.parametrize("message", [*CLIENT, *DAEMON, *PEER], ids=name_of)
def test_the_examples_leave_no_field_at_its_default(message: Message) -> None:
    for field in msgspec.structs.fields(type(message)):
        assert field.required or getattr(message, field.name) != field.default, field.name


@pytest.mark.parametrize(("frame", "decode"), FRAMES, ids=name_of)
def test_version_2_frames_are_written_and_read_as_ever(
    frame: Message | PeerEnvelope, decode: Callable[[bytes], Any]
) -> None:
    path = GOLDEN / f"{name_of(frame)}.msgpack"
    if os.environ.get("MILEPOST_GOLDEN") == "write" and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(frame))
    golden = path.read_bytes()
    assert frame == decode(golden)
    assert msgpack.unpackb(golden) == msgpack.unpackb(encode(frame))


@pytest.mark.parametrize(("frame", "decode"), FRAMES, ids=name_of)
def test_version_1_frames_mean_what_they_meant_and_have_no_later_field(
    frame: Message | PeerEnvelope, decode: Callable[[bytes], Any]
) -> None:
    golden = (GOLDEN_1 / f"{name_of(frame)}.msgpack").read_bytes()
    found = msgspec.to_builtins(frame)
    message = found.get("message", found)
    if "save" in message:
        message["save"]["place"] = ""
    for layout in message.get("layouts", ()):
        layout["rota"] = ""
    for later in LATER.get(message["type"], ()):
        del message[later]
    assert found == msgspec.to_builtins(decode(golden))


LATER = {
    "Join": ["umask"],
    "LayoutReady": ["rota"],
    "Concluded": ["warnings"],
    "Outcome": ["warnings"],
}
"""Fields that version 1 did not have, besides `place`."""


def test_no_golden_frame_is_left_unread() -> None:
    assert {f"{name_of(frame)}.msgpack" for frame, _ in FRAMES} == {
        path.name for path in GOLDEN.iterdir()
    }


@pytest.mark.parametrize(("frame", "decode"), FRAMES, ids=name_of)
def test_a_field_that_a_newer_version_added_is_ignored(
    frame: Message | PeerEnvelope, decode: Callable[[bytes], Any]
) -> None:
    def add(value: Any) -> Any:
        if isinstance(value, list):
            return [add(element) for element in value]
        if isinstance(value, dict):
            return {key: add(element) for key, element in value.items()} | {"colour": "blue"}
        return value

    assert frame == decode(msgpack.packb(add(msgpack.unpackb(encode(frame)))))


@pytest.mark.parametrize(("frame", "decode"), FRAMES, ids=name_of)
def test_a_field_that_is_missing_is_named(
    frame: Message | PeerEnvelope, decode: Callable[[bytes], Any]
) -> None:
    raw = msgpack.unpackb(encode(frame))
    for field in msgspec.structs.fields(type(frame)):
        if field.required:
            short = {key: value for key, value in raw.items() if key != field.encode_name}
            with pytest.raises(ProtocolError, match=f"`{field.encode_name}`"):
                decode(msgpack.packb(short))


def test_a_field_of_the_wrong_type_is_named_with_its_path() -> None:
    raw = msgpack.unpackb(encode(CLIENT[2]))
    raw["save"]["step"] = "seven hundred"
    with pytest.raises(ProtocolError, match=r"Expected `int`, got `str` - at `\$\.save\.step`"):
        decode_client(msgpack.packb(raw))


def test_an_unknown_way_to_end_is_refused_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"Invalid enum value 'lost' - at `\$\.outcome`"):
        decode_daemon(msgpack.packb({"type": "Concluded", "save_id": "1-1", "outcome": "lost"}))


@pytest.mark.parametrize("decode", [decode_client, decode_daemon])
def test_an_unknown_type_is_refused_by_name(decode: Callable[[bytes], Any]) -> None:
    with pytest.raises(ProtocolError, match="Invalid value 'Gossip'"):
        decode(msgpack.packb({"type": "Gossip"}))


def test_an_unknown_type_from_a_peer_is_refused_by_name() -> None:
    raw = msgpack.unpackb(encode(enveloped(PEER[0])))
    raw["message"]["type"] = "Gossip"
    with pytest.raises(ProtocolError, match="Invalid value 'Gossip'"):
        decode_peer(msgpack.packb(raw))


@pytest.mark.parametrize(
    ("decode", "foreign"),
    [(decode_client, DAEMON[0]), (decode_daemon, CLIENT[0]), (decode_client, PEER[0])],
)
def test_a_message_for_somebody_else_is_refused(
    decode: Callable[[bytes], Any], foreign: Message
) -> None:
    with pytest.raises(ProtocolError, match="Invalid value"):
        decode(encode(foreign))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        msgpack.packb(None),
        msgpack.packb([1, 2]),
        msgpack.packb({}),
        msgpack.packb({1: 2}),
        encode(CLIENT[1])[:-1],
        encode(CLIENT[1]) + b"\0",
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
@pytest.mark.parametrize("decode", [decode_client, decode_daemon, decode_peer])
def test_bytes_that_are_no_message_are_refused(
    decode: Callable[[bytes], Any], frame: bytes
) -> None:
    with pytest.raises(ProtocolError, match="malformed message") as caught:
        decode(frame)
    assert "protocol" == caught.value.code


@given(frame=st.binary(max_size=60))
def test_random_bytes_never_do_anything_else(frame: bytes) -> None:
    for decode in (decode_client, decode_daemon, decode_peer):
        with contextlib.suppress(ProtocolError):
            decode(frame)


def test_a_message_over_the_limit_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(CLIENT[2])
    monkeypatch.setattr(protocol, "MESSAGE_BYTES_MAX", len(frame))
    assert CLIENT[2] == decode_client(encode(CLIENT[2]))
    monkeypatch.setattr(protocol, "MESSAGE_BYTES_MAX", len(frame) - 1)
    over = f"a message of {len(frame)} bytes is over the limit of {len(frame) - 1}"
    with pytest.raises(ProtocolError, match=over):
        encode(CLIENT[2])
    with pytest.raises(ProtocolError, match=over):
        decode_client(frame)


def test_no_message_is_a_pickle_and_bytes_stay_bytes() -> None:
    assert CLIENT[2] == decode_client(encode(CLIENT[2]))
    raw = msgpack.unpackb(encode(CLIENT[2]))
    assert b"\x00\xff\xc1" == raw["offer"]
    with pytest.raises(ProtocolError, match=r"\$\.offer"):
        decode_client(msgpack.packb(raw | {"offer": "text"}))
