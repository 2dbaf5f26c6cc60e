"""Layouts outlive the process that made them, within bounds."""

from __future__ import annotations

import os
from pathlib import Path

from tests.unit.planner.planner_requests import offer_of

from milepost.wire.offers import encode_offer
from milepostd.planner.layouts import JOB_DIRS_KEPT, LAYOUTS_KEPT, LayoutStore


def put(layouts: LayoutStore, items: list[int], job: str = "job", rank: int = 3) -> str:
    offer = offer_of(*[f"k{number}" for number in range(9)])
    return layouts.put(job, rank, "print", offer, encode_offer(offer), items).layout_id


def test_a_layout_is_still_known_after_the_process_is_gone(tmp_path: Path) -> None:
    layout = put(LayoutStore(tmp_path), [1, 4])

    found = LayoutStore(tmp_path).get("job", 3, layout)

    assert found is not None
    assert found.assigned == [1, 4]
    assert found.offer == offer_of(*[f"k{number}" for number in range(9)])


def test_layouts_of_other_ranks_jobs_and_names_are_unknown(tmp_path: Path) -> None:
    layouts = LayoutStore(tmp_path)
    layout = put(layouts, [1])

    assert layouts.get("job", 4, layout) is None
    assert layouts.get("other", 3, layout) is None
    assert layouts.get("job", 3, "0" * 24) is None
    assert layouts.get("job", 3, f"../{layout[:21]}") is None


def test_a_damaged_or_exchanged_file_is_an_unknown_layout(tmp_path: Path) -> None:
    layouts = LayoutStore(tmp_path)
    torn, swapped = put(layouts, [1]), put(layouts, [2])
    (directory,) = tmp_path.iterdir()
    whole = (directory / f"3-{torn}").read_bytes()
    (directory / f"3-{swapped}").write_bytes(whole)
    (directory / f"3-{torn}").write_bytes(whole[:-1])

    again = LayoutStore(tmp_path)

    assert again.get("job", 3, torn) is None
    assert again.get("job", 3, swapped) is None


def test_a_directory_that_cannot_be_written_costs_only_the_files(tmp_path: Path) -> None:
    layouts = LayoutStore(tmp_path / "plans")
    (tmp_path / "plans").rmdir()
    (tmp_path / "plans").write_bytes(b"in the way")

    layout = put(layouts, [1])

    assert layouts.get("job", 3, layout) is not None


def test_only_the_newest_layouts_of_a_rank_are_kept_and_use_keeps_one_new(tmp_path: Path) -> None:
    layouts = LayoutStore(tmp_path)
    directory = layouts.job_dir("job")
    made = []
    at_ns, second = 10**18, 10**9
    for number in range(LAYOUTS_KEPT + 2):
        made.append(put(layouts, [item for item in range(5) if number + 1 >> item & 1]))
        os.utime(directory / f"3-{made[-1]}", ns=(at_ns, at_ns + number * second))
        if number == LAYOUTS_KEPT:
            assert layouts.get("job", 3, made[1]) is not None
    layouts.prune("job")

    kept = [layout for layout in made if LayoutStore(tmp_path).get("job", 3, layout) is not None]

    assert kept == [made[1], *made[3:]]
    assert len(list(directory.iterdir())) == LAYOUTS_KEPT


def test_only_the_newest_jobs_are_kept(tmp_path: Path) -> None:
    layouts = LayoutStore(tmp_path)
    for number in range(JOB_DIRS_KEPT + 3):
        put(layouts, [0], job=f"job-{number}")
    layouts.prune("job-0")

    assert len(list(tmp_path.iterdir())) == JOB_DIRS_KEPT
