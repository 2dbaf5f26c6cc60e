"""Names below a root: what is refused, and that no accepted name leaves the root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.storage.saves import commit

from milepost.errors import UsageError
from milepost.storage.names import check_name
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "/a", "latest", "a\0b", "a\nb", "x" * 201, "\udc80"]
)
def test_a_name_that_is_not_one_plain_component_is_refused(root: Root, name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)
    with pytest.raises(UsageError):
        root.open_save(SaveRef("run-7", "1-1", 1, name))
    with pytest.raises(UsageError):
        root.remove_checkpoint(name)
    with pytest.raises(UsageError):
        root.move_latest(name)


@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("", "it is empty", "step_<step>"),
        (".hidden", "begins with a dot, as what milepost keeps below a root does", "without the"),
        ("a/b", "a checkpoint lies directly below its root", "one path component"),
        ("latest", "'latest' is the link to the newest checkpoint", "give another name"),
        ("x" * 201, "it is 201 bytes long, and a file's name may have 255", "at most 200 bytes"),
        ("é" * 101, "it is 202 bytes long", "at most 200 bytes"),
        ("a\nb", "cannot be printed", "control characters"),
    ],
)
def test_the_error_says_why_a_name_is_refused_and_what_to_do(
    name: str, reason: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_name(name)
    assert reason in caught.value.message
    assert hint in caught.value.hint
    assert len(caught.value.message) < 250


@pytest.mark.parametrize("save_id", ["", "../1", "1.1", "aborted", "1-1/x", "-1"])
def test_a_malformed_save_id_is_refused(root: Root, save_id: str) -> None:
    with pytest.raises(UsageError):
        root.open_save(SaveRef("run-7", save_id, 1, "step_1"))


@pytest.mark.parametrize("name", ["step_1", "best model", "a.b-1_c", "épreuve", "x" * 200])
def test_other_names_are_taken_and_become_directories(root: Root, name: str) -> None:
    save = SaveRef("run-7", "1-1", 1, name)
    assert root.path / name == commit(root, save)
    assert [name] == [each.name for each in root.checkpoints()]


@given(st.text(max_size=12))
def test_no_accepted_name_leaves_the_root(name: str) -> None:
    try:
        check_name(name)
    except UsageError:
        return
    assert Path("/root") == (Path("/root") / name).parent
    assert "/root/" + name == os.path.normpath("/root/" + name)
