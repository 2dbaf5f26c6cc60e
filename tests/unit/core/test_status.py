"""The status: what is saved, what runs, what is stuck, and a sentence saying what for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.unit.core.core_world import NO_SPACE, World, save_ref

from milepostd.core.commands import BuildIndex, GiveUp, MakePlan, Publish, WriteFragment, WriteImage
from milepostd.core.events import BytesWritten
from milepostd.core.role import RESOLVE_GRACE_S
from milepostd.core.status import STATUS_VERSION, status_of

SAVE = save_ref(1)


def status(world: World, node: str = "A") -> dict[str, Any]:
    return status_of(world.nodes[node], world.now_ns)


def waiting(world: World, node: str = "A") -> dict[str, tuple[str, str]]:
    """Role -> phase and sentence, of the one save in flight."""
    return {row["role"]: (row["phase"], row["waits_for"]) for row in status(world, node)["saves"]}


def test_the_picture_is_plain_json() -> None:
    world = World((1, 1))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    picture = status(world)
    assert picture == json.loads(json.dumps(picture))
    assert STATUS_VERSION == picture["version"] == 1
    assert {"version", "accepting", "jobs", "saves", "peers", "sessions"} == set(picture)


def test_a_job_shows_its_ranks_and_its_newest_checkpoint() -> None:
    world = World((2, 1))
    world.stage(SAVE)
    world.run()
    (job,) = status(world)["jobs"]
    assert {
        "job": "job",
        "root": "/data/run",
        "attempt": 1,
        "world": 3,
        "ranks_here": [0, 1],
        "nodes": ["A", "B"],
        "coordinator": True,
        "last_failed": None,
        "last_skipped": None,
        "committed_total": 1,
        "failed_total": 0,
        "skipped_total": 0,
        "unknown_total": 0,
    }.items() <= job.items()
    committed = job["last_committed"]
    assert (10, "step_10", "/data/run/step_10", 3 * 4096) == (
        committed["step"], committed["name"], committed["path"], committed["bytes"]
    )  # fmt: skip
    assert committed["at_ms"] > 0
    assert False is status(world, "B")["jobs"][0]["coordinator"]


def test_a_job_shows_why_its_newest_save_failed_and_counts_each_end() -> None:
    world = World((1,))
    world.unable(SAVE, 0, NO_SPACE)
    world.run()
    world.skip(save_ref(2), 0)
    world.run()
    (job,) = status(world)["jobs"]
    assert (20, "1-2", "busy", 0) == tuple(
        job["last_skipped"][field] for field in ("step", "save_id", "code", "rank")
    )
    assert "1-1" == job["last_failed"]["save_id"]
    assert (0, 1, 1) == tuple(job[f"{end}_total"] for end in ("committed", "failed", "skipped"))


def test_an_older_save_that_is_committed_late_is_not_the_newest() -> None:
    world = World((1,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.holding.clear()
    world.stage(save_ref(2))
    world.run(1)
    world.release()
    world.run()
    (job,) = status(world)["jobs"]
    assert (2, 20) == (job["committed_total"], job["last_committed"]["step"])


def test_sessions_and_peers_are_listed() -> None:
    world = World((1, 2))
    world.stage(SAVE)
    world.run()
    world.now_ns += 5_000_000_000
    picture = status(world, "B")
    assert [
        {"job": "job", "rank": 1, "pid": 1001, "attempt": 1},
        {"job": "job", "rank": 2, "pid": 1002, "attempt": 1},
    ] == picture["sessions"]
    (peer,) = picture["peers"]
    assert ("A", "tcp://A:1") == (peer["node_id"], peer["address"])
    assert 5 <= peer["last_heard_s"] < 6


def test_a_node_that_drains_accepts_nothing() -> None:
    world = World((1,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    assert True is status(world)["accepting"]
    world.stop("A")
    world.run(1)
    assert False is status(world)["accepting"]


@pytest.mark.parametrize(
    ("kind", "node", "participant", "coordinator"),
    [
        (
            MakePlan,
            "A",
            ("planning", "waiting for the plan of coordinator A for 1 of 1 rank: 0"),
            ("planning", "planning: dropping replicas, balancing bytes, checking coverage"),
        ),
        (
            WriteImage,
            "B",
            ("prepared", "durable here; waiting for coordinator A"),
            ("collecting", "waiting for 1 of 2 nodes: B to be durable"),
        ),
        (
            WriteFragment,
            "A",
            ("sealing", "writing the manifest fragment"),
            ("collecting", "waiting for 1 of 2 nodes: A to be durable"),
        ),
        (
            BuildIndex,
            "A",
            ("prepared", "durable here; waiting for coordinator A"),
            ("indexing", "building the index and the manifest"),
        ),
        (
            Publish,
            "A",
            ("prepared", "durable here; waiting for coordinator A"),
            ("publishing", "publishing"),
        ),
    ],
)
def test_each_save_says_what_it_waits_for(
    kind: type, node: str, participant: tuple[str, str], coordinator: tuple[str, str]
) -> None:
    world = World((1, 1))
    world.hold(kind, node)
    world.offer(SAVE)
    world.run(1)
    assert {"participant": participant, "coordinator": coordinator} == waiting(world)
    rows = status(world)["saves"]
    assert {("job", "1-1", 10, "step_10", 1.0)} == {
        (row["job"], row["save_id"], row["step"], row["name"], round(row["age_s"], 1))
        for row in rows
    }


def test_a_save_that_not_all_ranks_have_called_names_the_others() -> None:
    world = World((3, 1))
    world.stage(SAVE, 1)
    world.run(1)
    assert {"participant": ("gathering", "waiting for 2 of 3 ranks: 0, 2 to call save")} == waiting(
        world
    )
    world.stage(SAVE, 0, 2)
    world.run(0.5)
    assert (
        "waiting for 1 of 2 nodes: B, where not every rank has called save: 1 of 4 ranks: 3"
    ) == waiting(world)["coordinator"][1]


def test_a_save_that_waits_for_a_rank_to_stage_names_it() -> None:
    world = World((2,))
    world.stages_when_planned = False
    world.offer(SAVE)
    world.run(1)
    assert "waiting for 2 of 2 ranks: 0, 1 to stage" == waiting(world)["participant"][1]


def test_bytes_written_are_shown_and_never_exceed_the_total() -> None:
    world = World((2,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    for count, sentence in (
        (4096, "writing 4096 of 8192 bytes"),
        (9999, "writing 8192 of 8192 bytes"),
    ):
        world.post("A", BytesWritten(save=SAVE, count=count))
        world.run(0)
        assert ("writing", sentence) == waiting(world)["participant"]
    (row,) = (row for row in status(world)["saves"] if row["role"] == "participant")
    assert (8192, 8192) == (row["bytes_total"], row["bytes_written"])


def test_failing_and_asking_the_directory_are_said_in_words() -> None:
    world = World((1, 1))
    world.hold(GiveUp)
    world.unable(SAVE, 1, NO_SPACE)
    world.run(1)
    assert {
        "participant": ("failing", "failed here; waiting for coordinator A to end it")
    } == waiting(world, "B")
    assert {"coordinator": ("aborting", "moving the save's directory out of the way")} == waiting(
        world
    )
    other = World((1, 1))
    other.hold(Publish)
    other.hold(GiveUp)
    other.stage(SAVE)
    other.run(61 + RESOLVE_GRACE_S)
    assert {
        "participant": ("resolving", "the coordinator is silent; asking the shared directory")
    } == waiting(other, "B")


def test_a_save_that_has_ended_is_shown_while_a_writer_still_reads_its_image() -> None:
    world = World((1,))
    world.hold(WriteImage)
    world.stage(SAVE)
    world.run(1)
    world.abort(SAVE, 0)
    world.run(1)
    sentence = "ended as failed; a writer still reads the image of 1 of 1 rank: 0"
    assert {"participant": ("releasing", sentence)} == waiting(world)
    world.release()
    world.run()
    assert [] == status(world)["saves"]
