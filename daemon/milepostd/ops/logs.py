"""Log lines: set-up, format and the names of their fields.

The message is an event's dotted name, noun first, in the past tense (`save.committed`). All else is
a field from `FIELDS`. Lines go to stderr, as JSON objects or as text for people. The rest of the
daemon uses the standard `logging` with `extra={"fields": {...}}`, or calls `emit`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

FIELDS: Final = frozenset(
    {
        "action", "address", "arena", "attempt", "bytes", "cause", "code", "count", "cpus",
        "elapsed_s", "embedded", "file", "hint", "http", "incarnation", "job", "lag_s", "message",
        "name", "node", "outcome", "path", "peer", "phase", "pid", "point", "rank", "reason",
        "removed", "repeats", "role", "root", "run_dir", "save", "session", "setting", "step",
        "text", "traceback", "type", "version", "wait_s", "world",
    }
)  # fmt: skip
"""All fields that a line may have besides `at`, `level` and `event`. docs/operations.md says what
they mean."""

LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

FOLD_S: Final = 30.0
"""A line that repeats the one before is not written for this long; then it is, with a count."""

_log = logging.getLogger("milepostd")


def setup(log_format: str, level: str, stream: TextIO | None = None) -> None:
    """Send all logging of the process to `stream` (stderr). A second call replaces the first.

    Args:
        log_format: `json`, `text`, or `auto`: text if the stream is a terminal.
        level: the least severe level that is written, a key of `LEVELS`.
        stream: where the lines go instead of stderr.
    """
    target = sys.stderr if stream is None else stream
    if log_format == "auto":
        log_format = "text" if target.isatty() else "json"
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonLines() if log_format == "json" else ReadableLines())
    handler.addFilter(Folding())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(LEVELS[level])
    # These log at INFO what they serve; our own events say that better.
    for name in ("asyncio", "uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(max(LEVELS[level], logging.WARNING))


def emit(level: str, event: str, **fields: Any) -> None:
    """Log one event. Fields whose value is None are left out."""
    _log.log(LEVELS[level], "%s", event, extra={"fields": fields})


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """Return a record's event and fields. What a library logs becomes the field `text` of the event
    `log.written`.
    """
    given: Mapping[str, Any] | None = getattr(record, "fields", None)
    event = "log.written" if given is None else record.getMessage()
    if given is None:
        given = {"text": record.getMessage(), "name": record.name}
    fields = {name: value for name, value in given.items() if value is not None}
    if record.exc_info:
        fields["traceback"] = logging.Formatter().formatException(record.exc_info)
    repeats = getattr(record, "repeats", 0)
    if repeats:
        fields["repeats"] = repeats
    return event, fields


class JsonLines(logging.Formatter):
    """Formats a line as a JSON object: `at` (UTC, RFC 3339), `level`, `event`, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _parts(record)
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"at": at.replace("+00:00", "Z"), "level": record.levelname.lower(), "event": event}
        return json.dumps(line | fields, default=str, ensure_ascii=False)


class ReadableLines(logging.Formatter):
    """Formats a line for people: local time, level, event, `name=value`. A traceback follows on its
    own lines.
    """

    def format(self, record: logging.LogRecord) -> str:
        event, fields = _parts(record)
        traceback = fields.pop("traceback", "")
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        shown = " ".join(f"{name}={_show(value)}" for name, value in fields.items())
        line = f"{at}.{int(record.msecs):03d} {record.levelname.lower():7} {event} {shown}".rstrip()
        return f"{line}\n{traceback}" if traceback else line


def _show(value: Any) -> str:
    """Quote a value where needed, so that the line stays one line and can be split at spaces."""
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if set(text) & set(' "\n\r\t') or not text else text


class Folding(logging.Filter):
    """Holds back lines that repeat the last one. The next line that is written has their number."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[object, ...] = ()
        self._since = 0.0
        self._count = 0

    def filter(self, record: logging.LogRecord) -> bool:
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        # Floats, such as elapsed seconds, differ between lines that say the same.
        same = {name: value for name, value in fields.items() if not isinstance(value, float)}
        key = (record.levelno, record.getMessage(), str(same))
        if key == self._last and record.created - self._since < FOLD_S:
            self._count += 1
            return False
        if key == self._last:
            record.repeats = self._count
        self._last, self._since, self._count = key, record.created, 0
        return True
