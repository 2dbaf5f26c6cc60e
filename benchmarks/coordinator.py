"""The coordinator of many nodes: its core and its wire, with everybody else played by one process.

The node core is the daemon's own, and every message passes through the frames it has on the wire.
Files, index and rename are only said to have been done; the planner's process is another's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from milepost.wire.messages import (
    PROTOCOL_VERSION,
    Concluded,
    Gathered,
    Join,
    NodeRef,
    Offered,
    PeerEnvelope,
    PeerMessage,
    Prepared,
    RankLayout,
    RankReport,
    SaveRef,
    Staged,
    WrittenFile,
    decode_client,
    decode_peer,
    encode,
)
from milepostd.core.commands import (
    AnyCommand,
    BuildIndex,
    MakePlan,
    Publish,
    Reply,
    Send,
    WriteFragment,
    WriteImage,
)
from milepostd.core.events import (
    AnyEvent,
    FileDurable,
    FragmentDurable,
    IndexBuilt,
    PeerSaid,
    PlanMade,
    Published,
    RankJoined,
    RankSaid,
    SessionOpened,
    Started,
)
from milepostd.core.node import Node, NodeSettings

RANKS_A_NODE: Final = 8
INCARNATION: Final = "0" * 16
IMAGE_BYTES: Final = 1 << 20


class Coordinator:
    """The node of rank 0 in a job of so many ranks, all of which have joined.

    Attributes:
        peer_bytes: of all frames to and from other nodes so far.
        rank_bytes: of all frames to and from the local ranks.
    """

    def __init__(self, job: str, root: str, ranks: int) -> None:
        nodes = -(-ranks // RANKS_A_NODE)
        self._ranks = ranks
        self._cohort = tuple(
            NodeRef(f"node{node}", f"tcp://10.0.{node >> 8}.{node & 255}:9471", "k" * 40)
            for node in range(nodes)
        )
        self._node = Node(NodeSettings(node=self._cohort[0]))
        self._layouts: dict[int, RankLayout] = {}
        self._plan: MakePlan | None = None
        self._outcomes: dict[str, str] = {}
        self.peer_bytes = self.rank_bytes = 0
        self._feed(Started())
        node_of_rank = tuple(rank // RANKS_A_NODE for rank in range(ranks))
        for rank in self._locals():
            join = Join(
                job=job,
                attempt=1,
                root=root,
                rank=rank,
                node_of_rank=node_of_rank,
                cohort=self._cohort,
            )
            self._feed(SessionOpened(session=rank))
            self._feed(RankJoined(session=rank, pid=1000 + rank, message=join))

    def offer(self, save: SaveRef, reports: Sequence[RankReport]) -> Callable[[], MakePlan]:
        """Have all ranks offer. What is returned takes their frames in, and gives the plan that is
        wanted; before, they are made, which is work of the other nodes.
        """
        by_rank = [
            encode(Offered(save=save, fingerprint=each.fingerprint, offer=each.offer))
            for each in reports[:RANKS_A_NODE]
        ]
        by_node = [
            self._envelope(node, Gathered(save=save, reports=tuple(self._of(node, reports))))
            for node in range(1, len(self._cohort))
        ]

        def take() -> MakePlan:
            for rank, frame in enumerate(by_rank):
                self._hear_rank(rank, frame)
            for frame in by_node:
                self._hear_node(frame)
            assert self._plan is not None, "the core wants no plan"
            return self._plan

        return take

    def plan_made(self, save: SaveRef, layouts: tuple[RankLayout, ...]) -> None:
        """Tell the core its plan, and all ranks their layouts."""
        self._layouts = {layout.rank: layout for layout in layouts}
        self._feed(PlanMade(save=save, layouts=layouts, warnings=()))

    def commit(self, save: SaveRef, *, is_planned: bool) -> float:
        """Have all ranks stage and all nodes write; return the coordinator's seconds.

        is_planned: this save has had its plan; else the ranks stage under the layouts they have.
        """
        frames: list[bytes] = []
        for node in range(1, len(self._cohort)):
            ranks = range(node * RANKS_A_NODE, min((node + 1) * RANKS_A_NODE, self._ranks))
            if not is_planned:
                staged = [RankReport(rank, self._layouts[rank].layout_id) for rank in ranks]
                gathered = Gathered(save=save, reports=tuple(staged))
                frames.append(self._envelope(node, gathered))
            written = tuple(
                WrittenFile(rank, self._layouts[rank].layout_id, f"__{rank}_0.distcp", IMAGE_BYTES)
                for rank in ranks
            )
            prepared = Prepared(save=save, files=written, fragment=f"fragment.node{node}")
            frames.append(self._envelope(node, prepared))
        words = [
            encode(
                Staged(
                    save=save,
                    layout_id=self._layouts[rank].layout_id,
                    arena=f"/dev/shm/milepost-{save.job}-1-r{rank}-0",
                    slot=0,
                    image_bytes=IMAGE_BYTES,
                )
            )
            for rank in self._locals()
        ]
        began_s = time.perf_counter()
        for rank, word in enumerate(words):
            self._hear_rank(rank, word)
        for frame in frames:
            self._hear_node(frame)
        took_s = time.perf_counter() - began_s
        assert self._outcomes[save.save_id] == "committed", self._outcomes
        return took_s

    def _locals(self) -> range:
        return range(min(RANKS_A_NODE, self._ranks))

    @staticmethod
    def _of(node: int, reports: Sequence[RankReport]) -> Sequence[RankReport]:
        return reports[node * RANKS_A_NODE : (node + 1) * RANKS_A_NODE]

    def _envelope(self, node: int, message: PeerMessage) -> bytes:
        name = self._cohort[node].node_id
        return encode(PeerEnvelope(PROTOCOL_VERSION, name, INCARNATION, message))

    def _hear_rank(self, rank: int, frame: bytes) -> None:
        self.rank_bytes += len(frame)
        message = decode_client(frame)
        assert isinstance(message, Offered | Staged)
        self._feed(RankSaid(session=rank, message=message))

    def _hear_node(self, frame: bytes) -> None:
        self.peer_bytes += len(frame)
        envelope = decode_peer(frame)
        self._feed(PeerSaid(node_id=envelope.node_id, message=envelope.message))

    def _feed(self, event: AnyEvent) -> None:
        """Give the core an event, and whatever follows from it at once."""
        waiting = [event]
        while waiting:
            for command in self._node.handle(waiting.pop(0), time.monotonic_ns()):
                after = self._carry_out(command)
                if after is not None:
                    waiting.append(after)

    def _carry_out(self, command: AnyCommand) -> AnyEvent | None:
        match command:
            case Send():
                own = self._cohort[0].node_id
                envelope = PeerEnvelope(PROTOCOL_VERSION, own, INCARNATION, command.message)
                self.peer_bytes += len(encode(envelope))
            case Reply():
                message = command.message
                self.rank_bytes += len(encode(message))
                if isinstance(message, Concluded):
                    self._outcomes[message.save_id] = message.outcome
            case MakePlan():
                self._plan = command
            case WriteImage():
                file = WrittenFile(
                    command.rank, command.layout_id, f"__{command.rank}_0.distcp", IMAGE_BYTES
                )
                return FileDurable(save=command.save, file=file)
            case WriteFragment():
                return FragmentDurable(save=command.save, fragment="fragment.node0")
            case BuildIndex():
                return IndexBuilt(save=command.save, checkpoint_bytes=self._ranks * IMAGE_BYTES)
            case Publish():
                path = f"{command.root}/{command.save.name}"
                return Published(save=command.save, path=path, at_ms=0)
        return None
