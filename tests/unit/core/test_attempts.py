"""A daemon that is killed again and again finishes what each attempt had staged, and forgets it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.core.core_world import World, save_ref

from milepost.wire.messages import Join, NodeRef
from milepostd.core.commands import SweepArenas, WriteImage
from milepostd.journal import Journal

SAVE = save_ref(1)
KEY = (SAVE.job, SAVE.save_id)


def attempts(world: World) -> list[tuple[str, int]]:
    """What the nodes' journals hold."""
    return sorted((node, attempt) for node, _, attempt in world.journal)


def sweeps(world: World) -> list[int]:
    return [
        command.below_attempt for _, command in world.commands if isinstance(command, SweepArenas)
    ]


def crash_again(world: World, attempt: int) -> None:
    """A further attempt begins, and all of it is killed, trainers first or daemons first."""
    for rank in range(world.world):
        world.join(rank, attempt=attempt)
    world.run(1)
    world.killed |= set(range(world.world))
    if attempt % 2:
        for rank in range(world.world):
            world.lose(rank)
        world.run(1)
    for node in world.nodes:
        world.restart(node)
    world.run(1)


@pytest.mark.parametrize("crashes", [1, 3])
@pytest.mark.parametrize("ranks_per_node", [(1,), (1, 1), (2, 1)])
def test_what_an_attempt_had_staged_is_finished_whatever_began_and_died_since(
    ranks_per_node: tuple[int, ...], crashes: int
) -> None:
    world = World(ranks_per_node)
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    for attempt in range(2, 2 + crashes):
        crash_again(world, attempt)
        assert {(node, 1) for node in world.nodes} <= {*attempts(world)}
    # Never while its images are still to be written.
    before = [number for number in sweeps(world) if number > 1]
    assert [] == before
    world.release()
    world.run()
    assert "committed" == world.disk[KEY]
    assert {"committed"} == world.verdicts(SAVE)
    assert [] == attempts(world), "nothing is pending, and nobody is there"
    assert [number for number in sweeps(world) if number > 1], "what it left in memory goes"


def test_an_attempt_with_nothing_left_to_do_is_forgotten_as_soon_as_the_next_begins() -> None:
    world = World((2,))
    world.stage(SAVE)
    world.run()
    assert [("A", 1)] == attempts(world)
    for rank in range(2):
        world.join(rank, attempt=2)
    world.run()
    assert [("A", 2)] == attempts(world)
    assert 2 in sweeps(world)


def join_of(job: str, attempt: int) -> Join:
    node = NodeRef("n", "tcp://n:1", "key")
    return Join(job=job, attempt=attempt, root="/root", rank=0, node_of_rank=(0,), cohort=(node,))


def test_the_journal_tells_a_jobs_attempts_in_their_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for job, attempt in (("b", 10), ("a", 2), ("b", 9), ("a", 1)):
        journal.keep(join_of(job, attempt))
    (tmp_path / "journal" / "torn.join").write_bytes(b"\x01")
    told = [(join.job, join.attempt) for join in Journal(tmp_path).recall()]
    assert [("a", 1), ("a", 2), ("b", 9), ("b", 10)] == told
    journal.forget("b", 9)
    journal.forget("b", 9)
    assert ("b", 9) not in [(join.job, join.attempt) for join in journal.recall()]
    assert 3 == len(journal.recall())
