"""The law of one completion: each slow command ends in exactly one event, whatever happens."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.unit.executors.tables import table_of
from tests.unit.storage.published import filled

from milepost.errors import StorageError
from milepost.storage.root import Root
from milepost.wire.messages import Cause, Keep, SaveRef
from milepostd.core import commands, events
from milepostd.core.commands import (
    BuildIndex,
    Discard,
    GiveUp,
    MakePlan,
    Publish,
    Retain,
    SlowCommand,
    WriteFragment,
    WriteImage,
)
from milepostd.core.events import AnyEvent, Published
from milepostd.executors.directories import SaveDirectories
from milepostd.executors.latest import Latest
from milepostd.executors.table import Executor, carry_out
from milepostd.executors.threads import Threads
from milepostd.ops.faults import FaultPoints

SAVE = SaveRef("job", "1-3", 30, "step_30")
ROOT = "/root"
COMMANDS: list[SlowCommand] = [
    WriteImage(save=SAVE, root=ROOT, rank=3, arena="", slot=0, layout_id="", until_ns=0),
    WriteFragment(save=SAVE, root=ROOT, files=(), until_ns=0),
    MakePlan(save=SAVE, reports=()),
    BuildIndex(save=SAVE, root=ROOT, files=(), fragments=(), until_ns=0),
    Publish(save=SAVE, root=ROOT, until_ns=0),
    GiveUp(save=SAVE, root=ROOT, is_coordinator=True),
    Discard(save=SAVE, root=ROOT),
    Retain(job="job", root=ROOT, keep=Keep(last=1)),
]
KINDS = [type(command) for command in COMMANDS]


@pytest.fixture
def table() -> dict[type, Executor[Any]]:
    files = Threads("files", 1)
    latest = Latest(files.run, lambda work: work.close())
    return table_of(SaveDirectories("node", FaultPoints(()), files.run, latest))


def end(table: dict[type, Executor[Any]], command: SlowCommand) -> AnyEvent:
    return asyncio.run(carry_out(table, command, "node"))


def broken(
    table: dict[type, Executor[Any]], kind: type, error: Exception
) -> dict[type, Executor[Any]]:
    """The table, with an executor that raises."""

    async def execute(command: SlowCommand) -> AnyEvent:
        raise error

    return table | {kind: table[kind]._replace(execute=execute)}


def completions(kind: type) -> set[type]:
    """What the command's docstring names: `Slow: FileDurable or FileFailed.`"""
    found = re.match(r"Slow: (\w+)(?: or (\w+))?\.", kind.__doc__ or "")
    assert found is not None, f"{kind.__name__} does not say how it ends"
    return {getattr(events, name) for name in found.groups() if name}


def test_the_table_has_a_row_for_each_slow_command_and_no_other(
    table: dict[type, Executor[Any]],
) -> None:
    assert set(get_args(SlowCommand)) == table.keys() == {*KINDS}
    said = {
        kind
        for kind in vars(commands).values()
        if isinstance(kind, type) and (kind.__doc__ or "").startswith("Slow: ")
    }
    assert said == table.keys()


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_broken_executor_ends_its_command_and_is_logged_once_with_its_trace(
    table: dict[type, Executor[Any]], command: SlowCommand, caplog: pytest.LogCaptureFixture
) -> None:
    event = end(broken(table, type(command), RuntimeError("boom")), command)
    assert type(event) in completions(type(command))
    cause = getattr(event, "cause", None)
    if cause is not None:
        expected = Cause("internal", "RuntimeError: boom", "report it", "node")
        rank = command.rank if isinstance(command, WriteImage) else -1
        assert (expected.code, expected.message, expected.node, rank) == (
            cause.code, cause.message, cause.node, cause.rank
        )  # fmt: skip
    (line,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "executor.broken" == line.getMessage()
    assert line.exc_info is not None
    assert "boom" in str(line.exc_info[1])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_refusal_of_storage_ends_the_command_with_its_own_code_and_no_trace(
    table: dict[type, Executor[Any]], command: SlowCommand, caplog: pytest.LogCaptureFixture
) -> None:
    error = StorageError("no-space", "pwrite /root/x: no space left on device")
    event = end(broken(table, type(command), error), command)
    assert type(event) in completions(type(command))
    assert getattr(event, "cause", Cause("no-space", "")).code == "no-space"
    assert [] == [each for each in caplog.records if each.exc_info]


def test_a_cause_that_an_executor_returns_is_its_failure(table: dict[type, Executor[Any]]) -> None:
    cause = Cause("plan-failed", "the planner does not know layout x", rank=5)

    async def refuse(command: MakePlan) -> Cause:
        return cause

    rows = table | {MakePlan: table[MakePlan]._replace(execute=refuse)}
    assert events.PlanFailed(save=SAVE, cause=cause) == end(rows, MakePlan(save=SAVE, reports=()))


def test_what_an_executor_returns_is_the_completion(
    table: dict[type, Executor[Any]], tmp_path: Path
) -> None:
    root = Root(tmp_path / "root")
    root.prepare()
    filled(root, SAVE)
    event = end(table, Publish(save=SAVE, root=str(root.path), until_ns=0))
    assert isinstance(event, Published)
    assert str(root.path / "step_30") == event.path
