"""What the planner's process answers to plans and indexes, without its process."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest
from tests.unit.planner.planner_requests import offer_of, offered, plan_wanted

from milepost.storage.refusals import storage_error
from milepost.wire.messages import RankReport, SaveRef
from milepost.wire.offers import encode_offer, layout_id, pack_assigned, unpack_assigned
from milepostd.planner import fragments
from milepostd.planner.composing import Composer
from milepostd.planner.frames import IndexWanted, PlanReady, RequestFailed
from milepostd.planner.layouts import LayoutStore


def test_a_plan_gives_each_offering_rank_its_layout_by_fingerprint(tmp_path: Path) -> None:
    composer = Composer(LayoutStore(tmp_path))

    made = composer.answer(plan_wanted(offered(1, "a", "b"), offered(0, "a", "b")))

    assert isinstance(made, PlanReady)
    assert [layout.rank for layout in made.layouts] == [0, 1]
    assert [unpack_assigned(layout.assigned, 2) for layout in made.layouts] == [[0], [1]]
    for layout in made.layouts:
        assert layout_id(f"print-{layout.rank}", layout.assigned) == layout.layout_id


def test_a_rank_that_has_staged_is_planned_around(tmp_path: Path) -> None:
    """Also by a process that was not there when the layout was made."""
    first = Composer(LayoutStore(tmp_path)).answer(plan_wanted(offered(0, "a"), offered(1, "a")))
    assert isinstance(first, PlanReady)
    assert first.layouts[0].assigned == b"\x01"

    second = Composer(LayoutStore(tmp_path)).answer(
        plan_wanted(RankReport(0, layout_id=first.layouts[0].layout_id), offered(1, "a", "b"))
    )

    assert isinstance(second, PlanReady)
    (layout,) = second.layouts
    assert (1, pack_assigned([1], 2)) == (layout.rank, layout.assigned)


def test_a_staged_layout_that_is_unknown_fails_the_plan_and_names_the_rank(tmp_path: Path) -> None:
    answer = Composer(LayoutStore(tmp_path)).answer(plan_wanted(RankReport(7, layout_id="0" * 24)))

    assert isinstance(answer, RequestFailed)
    assert (answer.cause.code, answer.cause.rank) == ("plan-failed", 7)


def test_what_cannot_be_planned_is_answered_with_its_cause(tmp_path: Path) -> None:
    composer = Composer(LayoutStore(tmp_path))
    other = msgspec.structs.replace(offer_of("a"), dtypes=("float64",))

    conflict = composer.answer(
        plan_wanted(offered(0, "a"), RankReport(1, fingerprint="p", offer=encode_offer(other)))
    )
    malformed = composer.answer(plan_wanted(RankReport(0, fingerprint="p", offer=b"\x01")))

    assert isinstance(conflict, RequestFailed)
    assert conflict.cause.code == "key-conflict"
    assert isinstance(malformed, RequestFailed)
    assert malformed.cause.code == "protocol"


def _differing(*keys: str, check_replicas: str = "warn") -> tuple[RankReport, ...]:
    """Two ranks that hold different values under some keys."""
    reports = []
    for rank in (0, 1):
        offer = msgspec.structs.replace(
            offer_of(*keys), digests=(rank,) * len(keys), check_replicas=check_replicas
        )
        reports.append(RankReport(rank, fingerprint=f"{keys}", offer=encode_offer(offer)))
    return tuple(reports)


def test_each_attempt_is_told_once_of_a_key_whose_replicas_differ(tmp_path: Path) -> None:
    composer = Composer(LayoutStore(tmp_path))

    def told(*keys: str, attempt: int, job: str = "job") -> list[str]:
        answer = composer.answer(plan_wanted(*_differing(*keys), attempt=attempt, job=job))
        assert isinstance(answer, PlanReady)
        return [warning.message.split("'")[1] for warning in answer.warnings]

    assert ["a"] == told("a", attempt=1)
    assert ["b"] == told("a", "b", attempt=1)
    assert [] == told("a", attempt=1)
    assert ["a"] == told("a", attempt=1, job="other")
    assert ["a", "b"] == told("a", "b", attempt=2)


def test_a_plan_whose_replicas_must_not_differ_fails(tmp_path: Path) -> None:
    composer = Composer(LayoutStore(tmp_path))
    for _ in range(2):
        answer = composer.answer(plan_wanted(*_differing("a", check_replicas="raise")))
        assert isinstance(answer, RequestFailed)
        assert "replicas-differ" == answer.cause.code


@pytest.mark.parametrize(("number", "is_passing"), [(errno.ESTALE, True), (errno.EIO, False)])
def test_the_process_says_whether_a_refusal_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_passing: bool
) -> None:
    def refuse(directory: Path, request: IndexWanted) -> None:
        raise storage_error("read", directory, OSError(number, "refused"))

    monkeypatch.setattr(fragments, "read_fragments", refuse)
    save = SaveRef(job="job", save_id="1-1", step=1, name="step_1")
    wanted = IndexWanted(call=1, root=str(tmp_path), save=save, files=(), fragments=())
    answer = Composer(LayoutStore(tmp_path)).answer(wanted)
    assert isinstance(answer, RequestFailed)
    assert is_passing == answer.is_passing
