"""What a newcomer gets wrong is refused by name, or told in the log with what to do."""

from __future__ import annotations

import errno
import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Group
from tests.unit.storage.published import publish
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from milepost import advice
from milepost.errors import Unavailable, UsageError
from milepost.link import rendezvous
from milepost.link.embedded import ensure_daemon
from milepost.link.rendezvous import Group as Ranks
from milepost.link.rendezvous import gather, tell_all
from milepost.memory.arena import find_arenas
from milepost.options import check_options, directory_name, find_root, find_run_dir, job_name
from milepost.state.content import ContentReader
from milepost.storage.claims import Ownership, find_other
from milepost.storage.root import Root
from milepost.tools.status import counted, fetch, render
from milepostd.cli import check_directories
from milepostd.ops.config import Settings

GOOD: dict[str, Any] = {
    "on_busy": "wait", "on_failure": "warn", "staging": "blocking", "slots": 2, "deadline_s": 9.0,
    "keep": None,
}  # fmt: skip

NO_TEXT = ["a\nb", "a\0b", "\ud800", b"x", 3, (), object()]


@pytest.mark.parametrize("planner", [3, "x", (), object()])
def test_a_planner_that_is_none_is_refused(planner: object) -> None:
    with pytest.raises(UsageError, match="not a SavePlanner"):
        check_options(**GOOD, planner=planner)


@pytest.mark.parametrize("overwrite", [3, None, "yes"])
def test_overwrite_is_true_or_false(overwrite: object) -> None:
    with pytest.raises(UsageError, match="not True or False"):
        check_options(**GOOD, overwrite=overwrite)


@pytest.mark.parametrize("check", [None, True, "", "fail"])
def test_how_replicas_are_checked_is_one_of_three_words(check: object) -> None:
    with pytest.raises(
        UsageError, match=r"check_replicas is .*, not one of 'warn', 'raise', 'off'"
    ):
        check_options(**GOOD, check_replicas=check)
    check_options(**GOOD, check_replicas="raise")


@pytest.mark.parametrize("job", ["", "  ", *NO_TEXT])
def test_a_job_that_would_break_a_line_of_the_log_is_refused(job: Any) -> None:
    with pytest.raises(UsageError, match=r"job is .*printable characters"):
        job_name(job, Path("/r"))


def test_a_launchers_job_name_loses_what_would_break_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MILEPOST_JOB", "run\n7 ")
    assert "run7" == job_name(None, Path("/r"))


@pytest.mark.parametrize("path", ["", *NO_TEXT])
def test_roots_and_run_directories_that_are_no_paths_are_refused(path: Any) -> None:
    with pytest.raises(UsageError, match="root is"):
        find_root(path)
    with pytest.raises(UsageError, match="run_dir is"):
        find_run_dir(path)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="which is a file"):
        find_root(tmp_path / "file")


def test_a_checkpoint_id_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="checkpoint_id is 3"):
        directory_name(1, 3)
    assert ("step_1", "best") == (directory_name(1, None), directory_name(1, "best"))


@pytest.mark.parametrize("place", ["/proc/milepost", "file/run"])
def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    run_dir = tmp_path / place
    with pytest.raises(Unavailable, match=str(run_dir)) as caught:
        ensure_daemon(run_dir)
    assert "XDG_RUNTIME_DIR" in caught.value.hint


@pytest.mark.parametrize("place", ["/proc/milepost", "file/run"])
def test_a_daemon_names_a_run_directory_that_cannot_be_made(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    settings = Settings(run_dir=tmp_path / place, roots=(tmp_path,))
    with pytest.raises(UsageError, match=f"run directory {tmp_path / place}: "):
        check_directories(settings)


def test_a_daemon_warns_of_a_missing_root_and_refuses_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    check_directories(Settings(run_dir=tmp_path / "run", roots=(tmp_path, tmp_path / "none")))
    (record,) = caplog.records
    assert ("root.missing", str(tmp_path / "none")) == (
        record.getMessage(), vars(record)["fields"]["root"]
    )  # fmt: skip
    with pytest.raises(UsageError, match="is a file"):
        check_directories(Settings(run_dir=tmp_path / "run", roots=(tmp_path / "file",)))


def test_no_arenas_are_found_where_there_is_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(tmp_path / "none"))
    assert [] == find_arenas("job")


def test_ranks_that_have_not_come_are_named_while_they_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "LATE_S", 0.01)
    store = dist.HashStore()
    store.set("load/1/2", "here")
    with caplog.at_level(logging.WARNING, "milepost"), pytest.raises(Unavailable):
        gather(Ranks(0, 4, store), "load/1", b"me", 0.2)
    told = caplog.messages[0]
    assert "load()" in told
    assert "2 of 4 ranks" in told
    assert ": 1, 3;" in told


def test_a_late_rank_is_still_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr(rendezvous, "LATE_S", 0.01)
    monkeypatch.setattr(rendezvous, "_warn_of_missing", lambda *_: told.set())
    store = dist.HashStore()

    def come() -> None:
        told.wait(30)
        store.set("meet/1", "late")

    other = threading.Thread(target=come)
    other.start()
    assert [b"me", b"late"] == gather(Ranks(0, 2, store), "meet", b"me", 30)
    other.join()


def test_a_rank_tells_that_it_waits_for_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "LATE_S", 0.01)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    with caplog.at_level(logging.WARNING, "milepost"), pytest.raises(Unavailable):
        tell_all(Ranks(1, 2, store), "load/1", bytes, 0.1)
    assert "load() for 1 of 2 ranks" in caplog.messages[0]


class Saver:
    def __init__(self, root: str, attempt: int) -> None:
        self.root, self.rank, self.attempt, self.is_closed = Path(root), 0, attempt, False


def test_a_second_checkpointer_of_a_root_names_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, other = Saver("/newcomers/a", 3), Saver("/newcomers/b", 1)
    second, third = Saver("/newcomers/a", 4), Saver("/newcomers/a", 5)
    advice.note_made(first)
    advice.note_made(other)
    assert [] == caplog.messages
    advice.note_made(second)
    assert "attempt 3" in caplog.text
    caplog.clear()
    first.is_closed = True
    advice.note_made(second)
    assert [] == caplog.messages, "one that goes on as another attempt supersedes nobody"
    first.is_closed = second.is_closed = True
    advice.note_made(third)
    assert [] == caplog.messages


def test_a_first_save_tells_what_it_paid_and_how_to_avoid_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "milepost"):
        advice.tell_unprepared(0.05, 0.1, was_prepared=False)
        advice.tell_unprepared(2.0, 3.5, was_prepared=False)
        advice.tell_unprepared(2.0, None, was_prepared=True)
    assert ["INFO", "WARNING", "WARNING"] == [record.levelname for record in caplog.records]
    assert "behind training" in caplog.messages[2]
    assert "was not prepared" in caplog.messages[1]
    assert "another structure" in caplog.messages[2]
    assert "2.0 s" in caplog.messages[1]
    assert "3.5 s" in caplog.messages[1]
    assert "ck.prepare(state)" in caplog.messages[1]


def test_only_the_first_save_tells_what_it_paid_and_only_if_it_had_to_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = advice.FirstSave(is_telling=True)
    with caplog.at_level(logging.INFO, "milepost"):
        first.paid(2.0, 3.5)
        first.paid(2.0, 3.5)
        prepared = advice.FirstSave(is_telling=True)
        prepared.pass_by()
        prepared.paid(2.0, 3.5)
        advice.FirstSave(is_telling=False).paid(2.0, 3.5)
    assert 1 == len(caplog.messages)


def test_a_root_tells_which_living_job_has_it(tmp_path: Path) -> None:
    root = Root(tmp_path)
    root.prepare()
    assert "" == find_other(root, "mine")
    owner = Ownership.take(root, "theirs")
    try:
        assert "" == find_other(root, "theirs")
        told = find_other(root, "mine")
        assert "job theirs" in told
        assert f"pid {os.getpid()}" in told
    finally:
        owner.close()


def test_counts_agree_with_their_nouns() -> None:
    assert ["0 files", "1 file", "2 files"] == [counted(number, "file") for number in range(3)]


def test_a_url_may_be_host_and_port() -> None:
    with pytest.raises(Unavailable, match=r"no daemon answers at http://127\.0\.0\.1:1/status"):
        fetch(Path("/unused"), "127.0.0.1:1", "", 5)
    for wrong in ("ftp://x:1", "host:port", "a b:1", "http://"):
        with pytest.raises(UsageError, match="expected host:port"):
            fetch(Path("/unused"), wrong, "", 5)


def test_a_skip_is_not_shown_as_a_failure() -> None:
    skipped = {"step": 9, "message": "all 2 slots in use", "code": "busy", "hint": ""}
    status = {
        "node": {"node_id": "n", "version": "1", "pid": 1, "uptime_s": 1.0, "peer_address": "p"},
        "accepting": True, "sessions": [0], "saves": [], "peers": [],
        "jobs": [{
            "job": "j", "attempt": 1, "ranks_here": [0], "world": 1, "last_committed": None,
            "last_failed": None, "last_skipped": skipped, "committed_total": 0, "failed_total": 0,
            "skipped_total": 1, "root": "/r",
        }],
    }  # fmt: skip
    picture = render(status)
    assert isinstance(picture, Group)
    shown = [str(part) for part in picture.renderables]
    assert "last skip of j: step 9, all 2 slots in use" in shown
    assert not any("last failure" in text for text in shown)
    assert any(", 1 trainer," in text for text in shown)


def test_an_attempt_that_begins_behind_what_is_there_is_warned_once_that_nothing_was_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = Root(tmp_path / "root")
    root.prepare()
    advice.tell_branch(root, 1, 1)
    publish(root, "1-6", 60)
    advice.tell_branch(root, 61, 2)
    advice.tell_branch(root, 10, 1)
    assert caplog.records == []
    advice.tell_branch(root, 10, 2)
    (record,) = caplog.records
    text = record.getMessage()
    assert f"{root.path} holds step 60 of an earlier attempt" in text
    assert "now saves step 10" in text
    assert "ck.load(state)" in text


def test_a_root_that_may_not_be_looked_at_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(UsageError, match=f"root is {tmp_path}/run, .*: permission denied"):
        find_root(tmp_path / "run")


def test_where_no_daemon_runs_its_status_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no daemon runs with .*: there is no such directory"):
        fetch(tmp_path / "nowhere", "", "", 3600)
    (tmp_path / "lock").touch()
    with pytest.raises(Unavailable, match=rf"no daemon runs with run directory {tmp_path} \["):
        fetch(tmp_path, "", "", 3600)


class Wrapped:
    """As README's App: torch's `get_state_dict` steps an optimizer that has no state yet."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def test_a_state_that_steps_its_optimizer_when_it_is_read_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for app, is_told in ((Wrapped(), True), (Wrapped(), False)):
        reader = ContentReader(None, Ranks(0, 1, None), 9.0)
        if not is_told:
            app.model(torch.ones(2)).sum().backward()
            app.optimizer.step()
        caplog.clear()
        for _ in range(2):
            reader.read("1-1", {"app": app}, None, lambda: None)
        found = [record.getMessage() for record in caplog.records]
        assert is_told == any("reading the state has stepped AdamW" in text for text in found)
        assert len(found) <= 1
