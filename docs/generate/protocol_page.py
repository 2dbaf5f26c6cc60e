"""Makes `docs/protocol.md` from the classes and docstrings of `milepost.wire.messages`.

`python -m docs.generate.protocol_page > docs/protocol.md`. Owns the page's form only: every word
about a message stands beside its class. Python does not keep the docstrings of fields, so the
source is read.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from typing import Any, get_args

from milepost.wire import messages as protocol

_INTRODUCTION = """\
# Protocol

Generated from `client/milepost/wire/messages.py` by `python -m docs.generate.protocol_page`.

Protocol version {version}. A message is one ZeroMQ frame: msgpack of a map with the message's
fields and `type`, its name. Between daemons the frame is a map of `protocol`, `node_id`,
`incarnation` and `message`. A new field has a default, a field never changes its type or meaning, a
reader ignores fields it does not know, and an unknown type is an error that names it. Frames over
{bytes_max} bytes are refused. A session says `Ping` every {heartbeat:g} s; a daemon that is silent
for {silence:g} s is lost.

What travels between the daemon and its planner child is in `daemon/milepostd/planner/frames.py`.
"""

_SECTIONS = (
    ("From a trainer to its daemon", protocol.ClientMessage),
    ("From a daemon to a trainer", protocol.DaemonMessage),
    ("Between daemons", protocol.PeerMessage),
)


def page() -> str:
    """Return the whole page."""
    classes = {
        node.name: node
        for node in ast.parse(inspect.getsource(protocol)).body
        if isinstance(node, ast.ClassDef)
    }
    parts = [
        _INTRODUCTION.format(
            version=protocol.PROTOCOL_VERSION,
            bytes_max=f"{protocol.MESSAGE_BYTES_MAX:,}",
            heartbeat=protocol.HEARTBEAT_S,
            silence=protocol.SILENCE_S,
        )
    ]
    named = {"Message", "PeerEnvelope"}
    for title, union in _SECTIONS:
        parts.append(f"## {title}\n")
        for message in get_args(union):
            parts.append(_section(message, classes[message.__name__]))
            named.add(message.__name__)
    parts.append("## Parts of messages\n")
    parts += [
        _section(getattr(protocol, name), node)
        for name, node in classes.items()
        if name not in named
    ]
    return "\n".join(parts)


def _section(kind: type[Any], node: ast.ClassDef) -> str:
    text = f"### {kind.__name__}\n\n{_joined(ast.get_docstring(node) or '')}\n"
    rows, values = [], []
    for statement, following in itertools.pairwise([*node.body, ast.Pass()]):
        said = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            said = _joined(str(following.value.value))
        if isinstance(statement, ast.Assign):
            values.append(f"| `{ast.literal_eval(statement.value)}` | {said} |")
        if not isinstance(statement, ast.AnnAssign):
            continue
        assert isinstance(statement.target, ast.Name)
        default = "" if statement.value is None else f"`{ast.unparse(statement.value)}`"
        annotation = ast.unparse(statement.annotation).replace("|", "\\|")
        rows.append(f"| `{statement.target.id}` | `{annotation}` | {default} | {said} |")
    if rows:
        text += "\n| field | type | default | meaning |\n|---|---|---|---|\n"
        text += "\n".join(rows) + "\n"
    if values:
        text += "\n| value | meaning |\n|---|---|\n" + "\n".join(values) + "\n"
    return text


def _joined(text: str) -> str:
    """Return a docstring as one paragraph."""
    return " ".join(text.split())


if __name__ == "__main__":
    sys.stdout.write(page())
