"""One rank's SIGTERM: every rank answers true from the same read on, whatever gets lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from milepost.link.preemption import PreemptionFlag
from milepost.wire.messages import (
    Join,
    Message,
    NodeRef,
    PeerMessage,
    Preempted,
    PreemptionNoticed,
    ReadsTold,
    ReadsWanted,
)
from milepostd.core.commands import Reply, Send, SetTimer
from milepostd.core.events import (
    AnyEvent,
    PeerSaid,
    RankJoined,
    RankSignalled,
    SessionLost,
    SessionOpened,
    TimerFired,
)
from milepostd.core.node import Node, NodeSettings

SECOND_NS = 1_000_000_000
COHORT = (NodeRef("a", "tcp://a", "ka"), NodeRef("b", "tcp://b", "kb"))


class Pair:
    """Two nodes with two ranks each, and a wire that may lose words."""

    def __init__(self, reads: list[int], loses: Callable[[PeerMessage], bool]) -> None:
        self.reads = reads
        self.loses = loses
        self.now_ns = 0
        self.nodes = {ref.node_id: Node(NodeSettings(node=ref)) for ref in COHORT}
        self.timers: dict[tuple[str, str], int] = {}
        self.told: dict[int, list[int]] = {rank: [] for rank in range(4)}
        self.held: set[int] = set()
        self.deaf: set[int] = set()
        for rank in range(4):
            self.feed(rank, SessionOpened(session=rank))
            join = Join(
                job="j", attempt=1, root="/r", rank=rank, node_of_rank=(0, 0, 1, 1), cohort=COHORT
            )
            self.feed(rank, RankJoined(session=rank, pid=rank, message=join))

    def feed(self, rank: int, event: AnyEvent) -> None:
        queue: deque[tuple[str, AnyEvent]] = deque([("a" if rank < 2 else "b", event)])
        while queue:
            name, event = queue.popleft()
            for command in self.nodes[name].handle(event, self.now_ns):
                match command:
                    case Send():
                        if not self.loses(command.message):
                            said = PeerSaid(node_id=name, message=command.message)
                            queue.append((command.node.node_id, said))
                    case Reply():
                        answer = self.answer(command.session, command.message)
                        if answer is not None:
                            queue.append((name, answer))
                    case SetTimer():
                        self.timers[name, command.timer] = command.at_ns
                    case _:
                        pass

    def answer(self, rank: int, message: Message) -> AnyEvent | None:
        match message:
            case ReadsWanted() if rank not in self.deaf:
                self.held.add(rank)
                told = ReadsTold(reads=self.reads[rank])
                return RankSignalled(session=rank, message=told)
            case Preempted():
                self.told[rank].append(message.at_read)
        return None

    def signal(self, rank: int) -> None:
        self.feed(rank, RankSignalled(session=rank, message=PreemptionNoticed()))

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ns += SECOND_NS
            for (name, timer), at_ns in list(self.timers.items()):
                if at_ns <= self.now_ns:
                    del self.timers[name, timer]
                    self.feed(0 if name == "a" else 2, TimerFired(timer=timer))


def test_all_ranks_turn_true_at_the_read_after_the_greatest_count() -> None:
    pair = Pair([7, 8, 7, 6], lambda message: False)
    pair.signal(3)
    assert {rank: [9] for rank in range(4)} == pair.told
    assert {0, 1, 2, 3} == pair.held


@pytest.mark.parametrize("lost", range(8))
def test_any_one_lost_word_is_repeated(lost: int) -> None:
    count = iter(range(1000))
    pair = Pair([7, 8, 7, 6], lambda message: next(count) == lost)
    pair.signal(3)
    pair.pass_time(8)
    assert {rank: {9} for rank in range(4)} == {rank: set(at) for rank, at in pair.told.items()}


def test_a_rank_that_is_gone_does_not_keep_the_others_waiting() -> None:
    pair = Pair([7, 8, 7, 6], lambda message: False)
    pair.feed(1, SessionLost(session=1, reason="killed"))
    pair.signal(0)
    pair.pass_time(7)
    assert [8] == pair.told[0]
    assert [8] == pair.told[2]


def test_a_rank_that_never_tells_is_waited_for_a_bounded_time() -> None:
    pair = Pair([7, 8, 7, 6], lambda message: False)
    pair.deaf.add(2)
    pair.signal(0)
    pair.pass_time(2)
    assert [] == pair.told[0]
    pair.pass_time(5)
    assert all(set(pair.told[rank]) == {9} for rank in range(4))


class Watched(threading.Condition):
    """Tells when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.is_waiting = threading.Event()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self.is_waiting.set()
        return super().wait_for(predicate, timeout)


def test_a_rank_that_is_asked_again_says_the_same_while_it_is_held_and_when_it_is_to_go() -> None:
    said: list[object] = []
    flag = PreemptionFlag(lambda: None, said.append)
    changed = flag._changed = Watched()
    answers: list[bool] = []
    reader = threading.Thread(target=lambda: answers.append(flag.read()))
    try:
        assert not any(flag.read() for _ in range(3))
        flag.hold()
        reader.start()
        assert changed.is_waiting.wait(60)
        flag.hold()
        flag.decide(4)
        reader.join(60)
        flag.hold()
    finally:
        flag.close()
    assert [True] == answers
    assert [ReadsTold(reads=3)] * 3 == said


def test_a_rank_that_joins_later_hears_of_it_and_a_new_attempt_does_not() -> None:
    pair = Pair([1, 1, 1, 1], lambda message: False)
    pair.signal(0)
    for attempt, expected in ((1, [2, 2]), (2, [2, 2])):
        pair.feed(1, SessionOpened(session=9))
        pair.feed(1, SessionLost(session=1, reason="restarted"))
        pair.feed(1, SessionOpened(session=1))
        join = Join(
            job="j", attempt=attempt, root="/r", rank=1, node_of_rank=(0, 0, 1, 1), cohort=COHORT
        )
        pair.feed(1, RankJoined(session=1, pid=1, message=join))
        assert expected == pair.told[1]
