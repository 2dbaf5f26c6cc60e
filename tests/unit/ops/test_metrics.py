"""Metrics: that each is what its table row says, agrees with the status, and stays bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docs.generate import metrics_page
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.core.core_world import World, save_ref

from milepostd.core.commands import WriteImage
from milepostd.core.status import status_of
from milepostd.ops.metrics import (
    PHASES,
    SPECS,
    Counters,
    make_exposition,
)

REPOSITORY = Path(__file__).parents[3]


def save(phase: str, role: str = "participant", **more: Any) -> dict[str, Any]:
    return {"role": role, "phase": phase, "age_s": 1.0, "bytes_total": 0, "bytes_written": 0} | more


def status(**more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "node": {"version": "0.1.0", "uptime_s": 3.5},
        "jobs": [],
        "saves": [],
        "peers": [],
        "sessions": [],
        "accepting": True,
    } | more


def scrape(
    picture: dict[str, Any], counters: Counters | None = None
) -> dict[tuple[Any, ...], float]:
    """Return every sample by its name and labels, read by prometheus-client's own parser."""
    text = make_exposition(lambda: picture, counters or Counters())().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_of_the_table_is_served_and_no_other() -> None:
    committed = {"at_ms": 1_700_000_000_500, "bytes": 10, "elapsed_s": 2.0}
    counters = Counters()
    counters.error("no-space")
    counters.message("Ping", "in")
    text = make_exposition(
        lambda: status(jobs=[{"last_committed": committed}]), counters
    )().decode()
    kinds = {
        family.name: family.type
        for family in text_string_to_metric_families(text)
        if family.samples
    }
    expected = {spec.name.removesuffix("_total"): spec.kind for spec in SPECS}
    assert {name.removesuffix("_total"): kind for name, kind in kinds.items()} == expected


def test_names_follow_the_convention() -> None:
    for spec in SPECS:
        assert spec.name.startswith("milepostd_")
        stem = spec.name.removesuffix("_total").removesuffix("_max")
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        if spec.unit:
            assert stem.endswith(f"_{spec.unit}"), spec.name
        assert not set(spec.labels) & {"step", "save", "job", "path"}, spec.name


def test_gauges_say_what_the_status_says() -> None:
    found = scrape(
        status(
            accepting=False,
            saves=[
                save("writing", age_s=7.5, bytes_total=100, bytes_written=40),
                save("writing", bytes_total=10),
                save("collecting", "coordinator"),
            ],
            peers=[{"last_heard_s": 2.0}, {"last_heard_s": 30.0}],
            sessions=[{"last_heard_s": 0.5}],
            jobs=[
                {"last_committed": None},
                {"last_committed": {"at_ms": 2000, "bytes": 5, "elapsed_s": 0.5}},
                {"last_committed": {"at_ms": 1000, "bytes": 9, "elapsed_s": 0.7}},
            ],
        )
    )
    phases = {
        (role, phase): found[("milepostd_saves_in_flight", ("phase", phase), ("role", role))]
        for role in ("participant", "coordinator")
        for phase in PHASES
    }
    assert {place: count for place, count in phases.items() if count} == {
        ("participant", "writing"): 2,
        ("coordinator", "collecting"): 1,
    }
    assert found[("milepostd_save_age_seconds_max",)] == 7.5
    assert found[("milepostd_pending_bytes",)] == 70
    assert found[("milepostd_peer_silence_seconds_max",)] == 30
    assert found[("milepostd_accepting",)] == 0
    assert found[("milepostd_jobs",)] == 3
    assert found[("milepostd_last_committed_timestamp_seconds",)] == 2
    assert found[("milepostd_last_committed_bytes",)] == 5
    assert found[("milepostd_build_info", ("version", "0.1.0"))] == 1
    assert found[("milepostd_resident_memory_bytes",)] > 1 << 20


def test_a_save_that_has_ended_is_counted_while_a_writer_still_reads_its_image() -> None:
    world, ref = World((1,)), save_ref()
    world.hold(WriteImage)
    world.stage(ref)
    world.run(1)
    world.abort(ref, 0)
    world.run(1)
    found = scrape(status(saves=status_of(world.nodes["A"], world.now_ns)["saves"]))
    labels = (("phase", "releasing"), ("role", "participant"))
    assert 1 == found["milepostd_saves_in_flight", *labels]


def test_before_the_first_commit_its_time_is_absent_rather_than_1970() -> None:
    assert ("milepostd_last_committed_timestamp_seconds",) not in scrape(status())


def test_counters_count() -> None:
    counters = Counters()
    counters.save_ended("committed")
    counters.save_ended("committed")
    counters.bytes_written(100)
    counters.bytes_written(28)
    counters.error("no-space")
    counters.message("Staged", "in")
    found = scrape(status(), counters)
    assert found[("milepostd_saves_total", ("outcome", "committed"))] == 2
    assert found[("milepostd_saves_total", ("outcome", "failed"))] == 0
    assert found[("milepostd_written_bytes_total",)] == 128
    assert found[("milepostd_errors_total", ("code", "no-space"))] == 1
    assert found[("milepostd_messages_total", ("direction", "in"), ("type", "Staged"))] == 1


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ("write_took", "milepostd_write_seconds"),
        ("commit_took", "milepostd_commit_seconds"),
        ("planning_took", "milepostd_planning_seconds"),
        ("loop_lagged", "milepostd_loop_lag_seconds"),
        ("event_took", "milepostd_event_seconds"),
    ],
)
def test_histograms_sum_and_count_cumulatively(record: str, name: str) -> None:
    counters = Counters()
    for value in (0.05, 1.0, 100_000.0):
        getattr(counters, record)(value)
    found = scrape(status(), counters)
    assert found[(f"{name}_bucket", ("le", "0.1"))] == 1
    assert found[(f"{name}_bucket", ("le", "1.0"))] == 2
    assert found[(f"{name}_bucket", ("le", "2.5"))] == 2
    assert found[(f"{name}_bucket", ("le", "+Inf"))] == 3
    assert found[(f"{name}_count",)] == 3
    assert found[(f"{name}_sum",)] == pytest.approx(100_001.05)


def test_a_label_outside_its_closed_set_makes_no_new_series() -> None:
    counters = Counters()
    for number in range(100):
        counters.error(f"made-up-{number}")
        counters.message(f"Type{number}", "in")
    found = scrape(status(), counters)
    assert found[("milepostd_errors_total", ("code", ""))] == 100
    assert found[("milepostd_messages_total", ("direction", "in"), ("type", ""))] == 100


def test_the_page_is_what_the_table_says() -> None:
    page = (REPOSITORY / "docs/metrics.md").read_text()
    assert metrics_page.page() == page, "rewrite it: python -m docs.generate.metrics_page"
