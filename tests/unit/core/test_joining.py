"""Who may join and where a save may be published, by the words of the rank alone."""

from __future__ import annotations

import pytest

from milepost.wire.messages import SaveRef
from milepostd.core.joining import PLACE_CHARACTERS_MAX, is_allowed, why_not_there


def save_at(place: str) -> SaveRef:
    return SaveRef("j", "1-1", 0, "best", place=place)


@pytest.mark.parametrize(
    ("path", "is_so"),
    [
        ("/data/run", True),
        ("/data/run/deep/er", True),
        ("/data", False),
        ("/data/running", False),
        ("/data/run/../secret", False),
        ("data/run", False),
        ("", False),
    ],
)
def test_a_path_is_allowed_under_a_root_and_nowhere_else(path: str, is_so: bool) -> None:
    assert is_so == is_allowed(path, ("/data/run", "/other"))


def test_without_roots_any_absolute_path_is_allowed() -> None:
    assert is_allowed("/anywhere", ())
    assert not is_allowed("anywhere", ())


def test_a_save_below_its_job_s_root_needs_no_further_leave() -> None:
    assert None is why_not_there(save_at(""), "n0", ("/data",))


def test_a_place_under_a_root_is_taken_and_one_elsewhere_refused_by_name() -> None:
    assert None is why_not_there(save_at("/data/best"), "n0", ("/data",))
    cause = why_not_there(save_at("/etc/best"), "n0", ("/data", "/more"))
    assert cause is not None
    assert ("root-refused", "n0") == (cause.code, cause.node)
    assert "/etc/best lies under none of this daemon's roots: /data, /more" == cause.message


@pytest.mark.parametrize("place", ["/" + "x" * PLACE_CHARACTERS_MAX, "/data/\0"])
def test_a_place_that_no_file_system_has_is_refused(place: str) -> None:
    cause = why_not_there(save_at(place), "n0", ())
    assert cause is not None
    assert "usage" == cause.code
