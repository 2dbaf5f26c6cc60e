"""Every message that crosses a process boundary, in the order in which a save sends them.

This file owns the protocol: message types, their encoding (msgpack arrays of a type name and a
map), the version, and the limits. It knows nothing of sockets. Rules of evolution: a new field has
a default, a field never changes its type or meaning, unknown fields are ignored, an unknown type is
an error that names it. The daemon unpickles nothing: `offer` and the like are opaque bytes, which
only the planner's child decodes, as msgpack.

Data runs: trainer -> its node's daemon (`Hello` .. `Leave`), daemon -> trainer (`Welcome` ..
`Concluded`), daemon <-> daemon (`Gathered` .. `Outcome`), daemon <-> its planner child (see
`milepostd.planner.frames`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, TypeAlias

import msgpack
import msgspec

from milepost.errors import ProtocolError

PROTOCOL_VERSION: Final = 2

MESSAGE_BYTES_MAX: Final = 256 << 20
"""Largest message accepted from a socket: an offer of 1,000,000 shards is about 100 MB; anything
larger is an attack or a bug."""

HEARTBEAT_S: Final = 1.0
"""How often a session sends a heartbeat."""

SILENCE_S: Final = 15.0
"""How long the daemon may be silent before a client calls it lost: many heartbeats, since a node
under load swaps and stalls."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Base of all messages; the class name is the type on the wire."""


class NodeRef(msgspec.Struct, frozen=True):
    """How one node is reached: its id, the address its daemon tells others, and its CURVE public
    key (Z85).
    """

    node_id: str
    address: str
    public_key: str


class Cause(msgspec.Struct, frozen=True):
    """Why something failed, for people: code, sentence, hint, and where it happened (`node`, and
    `rank`; -1: no rank).
    """

    code: str
    message: str
    hint: str = ""
    node: str = ""
    rank: int = -1


class Keep(msgspec.Struct, frozen=True):
    """Retention policy as data. A checkpoint stays if any rule keeps it; no rule at all keeps
    everything.

    last: the newest N; every: steps divisible by one of these; protect: these steps.
    """

    last: int = 0
    every: tuple[int, ...] = ()
    protect: tuple[int, ...] = ()


class SaveRef(msgspec.Struct, frozen=True):
    """Names one save everywhere: job, save_id (`<attempt>-<count>`), the trainer's step, the
    checkpoint's directory name.
    """

    job: str
    save_id: str
    step: int
    name: str
    overwrite: bool = False
    is_plan_only: bool = False
    """Nothing is saved: the ranks only want layouts before their first save."""
    place: str = ""
    """Absolute path of the directory that becomes the checkpoint; empty: the checkpoint is `name`
    below the job's root."""


class Ending(StrEnum):
    """How a save ends. A new value needs a new `PROTOCOL_VERSION`: older sides cannot read it."""

    COMMITTED = "committed"
    """It is a checkpoint."""
    FAILED = "failed"
    """It never becomes a checkpoint; the cause says why."""
    SKIPPED = "skipped"
    """It never becomes a checkpoint: a rank had no free slot, and `on_busy` says to skip."""
    UNKNOWN = "outcome-unknown"
    """Storage did not tell whether it is a checkpoint."""


# --- trainer to daemon
# ------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a session. The daemon answers `Welcome` or `Refused`."""

    protocol: int
    version: str
    torch_version: str
    pid: int
    pid_created_s: float
    """`psutil.Process(pid).create_time()`, so that a reused pid is not mistaken for the trainer."""


class Join(Message, frozen=True):
    """One rank takes its place in a job. The daemon answers `Joined` or `Refused`.

    `cohort` lists each node once; `node_of_rank[r]` is rank r's index in it. The coordinator is the
    node of rank 0.
    """

    job: str
    attempt: int
    root: str
    rank: int
    node_of_rank: tuple[int, ...]
    cohort: tuple[NodeRef, ...]
    keep: Keep = Keep()
    deadline_s: float = 600.0
    """Limit for all stages of a save together: from its first report on a node to its outcome."""
    umask: int = -1
    """Of the process of rank 0: gives the modes of the files and directories of the job's saves;
    -1: not known, and each daemon's own does."""


class Offered(Message, frozen=True):
    """The rank's structure is new, so the rank says all that it could write. The daemon answers
    `LayoutReady`, or concludes the save.
    """

    save: SaveRef
    fingerprint: str
    offer: bytes
    """A `milepost.wire.offers.Offer`, msgpack."""


class Staged(Message, frozen=True):
    """The image is complete, and the trainer may change its weights. The daemon writes the image,
    and concludes the save later.
    """

    save: SaveRef
    layout_id: str
    arena: str
    """Path of the arena's file."""
    slot: int
    image_bytes: int


class Skipped(Message, frozen=True):
    """This rank does not take part (no free slot); the save ends as skipped on all ranks."""

    save: SaveRef
    reason: str


class Unable(Message, frozen=True):
    """This rank cannot complete the save (its state was refused, or shared memory is too small); it
    fails on all ranks.
    """

    save: SaveRef
    cause: Cause


class AbortWanted(Message, frozen=True):
    """The user asked for the save to end."""

    save: SaveRef


class Ping(Message, frozen=True):
    """The client is alive. Answered by `Pong`."""


class Leave(Message, frozen=True):
    """The rank is done. Saves that it has staged are still finished. Answered by `Left`."""


class PreemptionNoticed(Message, frozen=True):
    """This rank was told to go (SIGTERM). Repeated until `Preempted` comes."""


class ReadsTold(Message, frozen=True):
    """Answer to `ReadsWanted`: how often this rank has read `preempted`. Its next read waits."""

    reads: int


class StatusWanted(Message, frozen=True):
    """Asks for the status; needs no `Hello`. Answered by `StatusIs`."""


# --- daemon to trainer
# ------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The daemon is ready for `Join`; `node` is what the ranks tell one another."""

    protocol: int
    version: str
    pid: int
    incarnation: str
    node: NodeRef


class Refused(Message, frozen=True):
    """The session cannot go on: versions differ, a root is not allowed, a message was malformed."""

    cause: Cause


class Joined(Message, frozen=True):
    """The rank has its place."""

    job: str
    attempt: int
    rank: int


class LayoutReady(Message, frozen=True):
    """What this rank has to write. The rank stages it in this order, then sends `Staged`."""

    save_id: str
    layout_id: str
    assigned: bytes
    """Bit i (little-endian within each byte) is set if the rank has to stage item i of its
    offer."""
    warnings: tuple[Cause, ...] = ()
    rota: bytes = b""
    """When its replicas are compared, by `milepost.wire.replicas.pack_rota`."""


class Progress(Message, frozen=True):
    """The save's phase on this node has changed. For people; nothing depends on it."""

    save_id: str
    phase: str


class Concluded(Message, frozen=True):
    """How the save ended for this rank; its slot is free again."""

    save_id: str
    outcome: Ending
    path: str = ""
    checkpoint_bytes: int = 0
    elapsed_s: float = 0.0
    cause: Cause | None = None
    layout_valid: bool = True
    """False: the plan no longer holds; the rank has to offer again at the next save."""
    slot_free: bool = True
    """False: the daemon still reads the image, since the save failed while it was being written;
    `SlotFreed` follows."""
    warnings: tuple[Cause, ...] = ()


class SlotFreed(Message, frozen=True):
    """The daemon no longer reads the image of a save that has ended."""

    save_id: str


class ReadsWanted(Message, frozen=True):
    """A rank was told to go. Asks how often this rank has read `preempted`; its next read waits."""


class Preempted(Message, frozen=True):
    """All ranks answer true from this read of `preempted` on, and false before."""

    at_read: int


class Pong(Message, frozen=True):
    """Answer to `Ping`."""


class Left(Message, frozen=True):
    """Answer to `Leave`: no save of this rank is pending."""


class StatusIs(Message, frozen=True):
    """The node's status, as the JSON that `GET /status` serves."""

    status_json: str


# --- daemon to daemon
# -------------------------------------------------------------------------------------------------


class RankReport(msgspec.Struct, frozen=True):
    """What one rank said about a save: that it has staged under a layout, or an offer that needs a
    layout.
    """

    rank: int
    layout_id: str = ""
    """The layout under which it has staged; empty if it offers."""
    fingerprint: str = ""
    offer: bytes = b""


class RankLayout(msgspec.Struct, frozen=True):
    """What one rank was assigned, and when its replicas are compared; see `LayoutReady`."""

    rank: int
    layout_id: str
    assigned: bytes
    rota: bytes = b""


class Gathered(Message, frozen=True):
    """Node to coordinator: all local ranks have reported. Repeated until an answer comes."""

    save: SaveRef
    reports: tuple[RankReport, ...]


class Planned(Message, frozen=True):
    """Coordinator to node: layouts for the ranks that offered."""

    save: SaveRef
    layouts: tuple[RankLayout, ...]
    warnings: tuple[Cause, ...] = ()


class WrittenFile(msgspec.Struct, frozen=True):
    """One durable data file of a save."""

    rank: int
    layout_id: str
    file: str
    """Name below the save's directory; empty if the rank had nothing to write."""
    file_bytes: int


class Prepared(Message, frozen=True):
    """Node to coordinator: all its files and its manifest fragment are durable. Repeated until an
    `Outcome` comes.
    """

    save: SaveRef
    files: tuple[WrittenFile, ...]
    fragment: str
    """File name of the node's manifest fragment, below the save's directory."""


class Fail(Message, frozen=True):
    """Node to coordinator: the save cannot succeed (or is skipped) because of this node."""

    save: SaveRef
    cause: Cause
    skip: bool = False


class Outcome(Message, frozen=True):
    """Coordinator to node: how the save ended. Repeated in answer to a late `Gathered` or
    `Prepared`.
    """

    save: SaveRef
    outcome: Ending
    path: str = ""
    checkpoint_bytes: int = 0
    at_ms: int = 0
    """Wall clock of the coordinator when it was published, milliseconds since 1970."""
    cause: Cause | None = None
    layout_valid: bool = True
    warnings: tuple[Cause, ...] = ()


class WordWanted(Message, frozen=True):
    """Asks for a message about a save that is waiting. Repeated while it waits.

    Coordinator to node: the save waits for this node, which fails it if a local rank is gone. Node
    to coordinator: the save has begun here and waits for local ranks, so ask the other nodes.
    """

    save: SaveRef


class RankReads(msgspec.Struct, frozen=True):
    """How often one rank has read `preempted`."""

    rank: int
    reads: int


class PreemptionSaid(Message, frozen=True):
    """Node to coordinator: a local rank was told to go (then without `reads`), or how often the
    local ranks have read. Repeated until `PreemptionDecided` comes.
    """

    job: str
    attempt: int
    reads: tuple[RankReads, ...] = ()


class PreemptionAsked(Message, frozen=True):
    """Coordinator to node: ask the local ranks for their reads. Repeated until all nodes have
    answered.
    """

    job: str
    attempt: int


class PreemptionDecided(Message, frozen=True):
    """Coordinator to node: all ranks answer true from this read on."""

    job: str
    attempt: int
    at_read: int


RankMessage: TypeAlias = Offered | Staged | Skipped | Unable | AbortWanted
"""What a joined rank says about a save."""

SignalMessage: TypeAlias = PreemptionNoticed | ReadsTold
"""What a joined rank says about signals."""

ClientMessage: TypeAlias = Hello | Join | RankMessage | Ping | Leave | SignalMessage | StatusWanted
"""Trainer to daemon."""

DaemonMessage: TypeAlias = (
    Welcome
    | Refused
    | Joined
    | LayoutReady
    | Progress
    | Concluded
    | SlotFreed
    | ReadsWanted
    | Preempted
    | Pong
    | Left
    | StatusIs
)
"""Daemon to trainer."""

ParticipantMessage: TypeAlias = Gathered | Prepared | Fail | WordWanted
"""What a participant tells the coordinator of a save."""

CoordinatorMessage: TypeAlias = Planned | Outcome
"""What the coordinator tells a participant of a save, besides `WordWanted`."""

SaveMessage: TypeAlias = ParticipantMessage | CoordinatorMessage
PreemptionMessage: TypeAlias = PreemptionSaid | PreemptionAsked | PreemptionDecided
PeerMessage: TypeAlias = SaveMessage | PreemptionMessage
"""Daemon to daemon."""


class PeerEnvelope(msgspec.Struct, frozen=True):
    """What travels between daemons: a message, the daemon that sent it, and its incarnation."""

    protocol: int
    node_id: str
    incarnation: str
    message: PeerMessage


def encode(message: Message | PeerEnvelope) -> bytes:
    """Return the message as one msgpack frame."""
    packed: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))
    if len(packed) > MESSAGE_BYTES_MAX:
        raise ProtocolError(
            "protocol", f"a message of {len(packed)} bytes is over the limit of {MESSAGE_BYTES_MAX}"
        )
    return packed


def _decode(frame: bytes, kind: Any) -> Any:
    if len(frame) > MESSAGE_BYTES_MAX:
        raise ProtocolError(
            "protocol", f"a message of {len(frame)} bytes is over the limit of {MESSAGE_BYTES_MAX}"
        )
    try:
        raw = msgpack.unpackb(frame, strict_map_key=True, use_list=False)
        return msgspec.convert(raw, kind, builtin_types=(bytes,))
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError("protocol", f"malformed message: {error}") from error


def decode_client(frame: bytes) -> ClientMessage:
    """Decode what a client sent. Raises ProtocolError, naming the field, if it is not one of its
    messages.
    """
    message: ClientMessage = _decode(frame, ClientMessage)
    return message


def decode_daemon(frame: bytes) -> DaemonMessage:
    """Decode what a daemon sent to a client. Raises ProtocolError as above."""
    message: DaemonMessage = _decode(frame, DaemonMessage)
    return message


def decode_peer(frame: bytes) -> PeerEnvelope:
    """Decode what another daemon sent. Raises ProtocolError as above."""
    envelope: PeerEnvelope = _decode(frame, PeerEnvelope)
    return envelope
