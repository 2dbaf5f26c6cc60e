"""Which saves are ours, where they go, and what is left to torch."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import milepost.dcp as dcp
from milepost.dcp.saver import _step_of
from milepost.dcp.writer import Writer, target_of, why_not_ours, why_not_staged


class OwnWriter(FileSystemWriter):
    """A user's."""


class OwnStager(BlockingAsyncStager):
    """A user's."""


class Zipped:
    """Stands for a stream extension."""


def why(writer: Any = None, path: Any = "/x", use_collectives: bool = True) -> str:
    return why_not_ours(writer, path, use_collectives=use_collectives)


def test_the_signatures_are_torchs() -> None:
    for ours, theirs in ((dcp.save, stock.save), (dcp.async_save, stock.async_save)):
        ours_said, theirs_said = inspect.signature(ours), inspect.signature(theirs)
        assert [*theirs_said.parameters] == [*ours_said.parameters]
        for name, parameter in theirs_said.parameters.items():
            found = ours_said.parameters[name]
            assert (parameter.kind, parameter.default) == (found.kind, found.default)
    assert inspect.signature(FileSystemWriter) == inspect.signature(Writer)


@pytest.mark.parametrize("path", ["/x/y", "relative", Path("/x"), "/x/ ä"])
def test_paths_are_ours(path: Any) -> None:
    assert "" == why(None, path)
    assert "" == why(FileSystemWriter(path), None)
    assert "" == why(Writer("elsewhere", single_file_per_rank=False, thread_count=4), path)


@pytest.mark.parametrize(
    ("reason", "given"),
    [
        ("use_collectives=False", {"use_collectives": False}),
        ("a OwnWriter", {"writer": OwnWriter("/x")}),
        ("extensions", {"writer": FileSystemWriter("/x", _extensions=[Zipped()])}),  # type: ignore[list-item]
        ("SAFETENSORS", {"writer": FileSystemWriter(
            "/x", serialization_format=SerializationFormat.SAFETENSORS)}),
        ("is a URL", {"path": "s3://bucket/x"}),
        ("can be told", {"path": "/x/" + "y/" * 1600}),
        ("can be told", {"path": "/x/\n"}),
        ("can be told", {"path": "/x/\udcff"}),
    ],
)  # fmt: skip
def test_what_a_daemon_cannot_write_is_left_to_torch(reason: str, given: dict[str, Any]) -> None:
    assert reason in why(**given)


def test_a_stager_of_ones_own_is_left_to_torch() -> None:
    options = StagingOptions(False, False, False, False)
    assert ["", "", ""] == [
        why_not_staged(stager) for stager in (None, DefaultStager(options), BlockingAsyncStager())
    ]
    assert "a OwnStager" in why_not_staged(OwnStager())


def test_a_writers_path_and_settings_tell_where_a_save_goes(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "a", overwrite=False)
    for target, name in (
        (target_of(writer, None), "a"),
        (target_of(writer, str(tmp_path / "b")), "b"),
    ):
        assert (tmp_path / name, False) == (target.path, target.overwrite)
    target = target_of(None, tmp_path)
    assert (tmp_path, True, str(tmp_path)) == (target.path, target.overwrite, target.place)
    assert target.storage_meta is not None
    assert tmp_path == target.storage_meta.checkpoint_id


@pytest.mark.parametrize("path", ["", None])
def test_no_path_is_refused_in_torchs_words(path: Any) -> None:
    with pytest.raises(RuntimeError, match="`checkpoint_id` must be specified"):
        target_of(None, path)


@pytest.mark.parametrize("call", [dcp.save, dcp.async_save])
def test_the_warning_that_there_is_no_group_names_the_callers_line(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("no daemon here")

    monkeypatch.setattr("milepost.dcp.saving._begin", refuse)
    with (
        pytest.warns(UserWarning, match="torch.distributed is disabled") as warned,
        pytest.raises(RuntimeError, match="no daemon here"),
    ):
        call({}, checkpoint_id=tmp_path).result(0)
    assert [__file__] == [each.filename for each in warned]


@pytest.mark.parametrize(
    ("step", "place"),
    [(7, "/x/step_7"), (12, "/x/12"), (300, "/x/ckpt-00300"), (-1, "/x/last"), (-1, "/7/last")],
)
def test_the_number_that_ends_a_path_is_taken_for_the_step(step: int, place: str) -> None:
    assert step == _step_of(place)
