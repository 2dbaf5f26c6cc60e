"""Log lines: their form, their fields, and that repeats are folded."""

from __future__ import annotations

import ast
import io
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from milepostd.ops.logs import FIELDS, FOLD_S, LEVELS, Folding, emit, setup

if TYPE_CHECKING:
    from collections.abc import Iterator

DAEMON = Path(__file__).parents[3] / "daemon" / "milepostd"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("asyncio", "uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def logged(log_format: str, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    setup(log_format, level, stream)
    return stream


def test_a_json_line_is_the_event_and_its_fields_without_the_empty_ones() -> None:
    stream = logged("json")
    emit("info", "save.committed", step=10, job="a job", elapsed_s=1.5, rank=None)
    line = json.loads(stream.getvalue())
    at = line.pop("at")
    assert (24, "Z") == (len(at), at[-1])
    assert line == {
        "level": "info",
        "event": "save.committed",
        "step": 10,
        "job": "a job",
        "elapsed_s": 1.5,
    }


def test_a_readable_line_can_be_split_again() -> None:
    stream = logged("text")
    emit(
        "warning", "save.failed", step=10, cause="no space\nleft", code="no-space", elapsed_s=1 / 3
    )
    _, rest = stream.getvalue().split(" ", 1)
    assert rest == (
        'warning save.failed step=10 cause="no space\\nleft" code=no-space elapsed_s=0.333\n'
    )


def test_what_is_less_severe_than_asked_is_not_written() -> None:
    stream = logged("json", "warning")
    emit("info", "save.opened")
    emit("error", "save.failed")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["save.failed"]


def test_a_library_s_line_and_its_traceback_stay_one_json_line() -> None:
    stream = logged("json")
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("zmq").exception("it went %s", "wrong")
    (line,) = stream.getvalue().splitlines()
    found = json.loads(line)
    assert ("log.written", "it went wrong", "zmq") == (found["event"], found["text"], found["name"])
    assert found["traceback"].endswith("ValueError: broken")


def test_a_second_setup_replaces_the_first() -> None:
    first, second = logged("json"), logged("json")
    emit("info", "daemon.started")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_auto_is_json_where_nobody_watches() -> None:
    stream = logged("auto")
    emit("info", "daemon.started")
    assert json.loads(stream.getvalue())["event"] == "daemon.started"


def record(event: str, at_s: float, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("milepostd", logging.INFO, "", 0, event, (), None)
    made.created = at_s
    made.fields = fields
    return made


def test_repeats_are_folded_and_counted() -> None:
    folding = Folding()
    assert folding.filter(record("peer.silent", 0.0, peer="n2", wait_s=1.0))
    assert not folding.filter(record("peer.silent", 1.0, peer="n2", wait_s=2.0))
    assert not folding.filter(record("peer.silent", 2.0, peer="n2", wait_s=3.0))
    again = record("peer.silent", FOLD_S + 1, peer="n2", wait_s=4.0)
    assert folding.filter(again)
    assert again.repeats == 2  # type: ignore[attr-defined]
    assert folding.filter(record("peer.silent", FOLD_S + 2, peer="n3", wait_s=4.0))


def _log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(DAEMON.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in ("emit", "Log"):
                yield str(path.relative_to(DAEMON)), node


def test_every_line_of_the_daemon_has_a_dotted_event_a_level_and_known_fields() -> None:
    seen = 0
    for path, call in _log_calls():
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        names = set(given)
        if isinstance(call.func, ast.Name) and call.func.id == "Log":
            fields = given.get("fields")
            names = (
                {str(key.value) for key in fields.keys if isinstance(key, ast.Constant)}
                if isinstance(fields, ast.Dict)
                else set()
            )
            level, event = given["level"], given["event"]
        else:
            if len(call.args) < 2:
                continue
            level, event = call.args[:2]
        where = f"{path}:{call.lineno}"
        assert names <= FIELDS, f"{where}: {sorted(names - FIELDS)} are not in FIELDS"
        if isinstance(level, ast.Constant):
            assert level.value in LEVELS, where
        if isinstance(event, ast.Constant):
            assert str(event.value).count(".") == 1, where
        seen += 1
    assert seen > 0
