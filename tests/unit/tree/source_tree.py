"""The source tree, parsed: what the tests of its structure and of its style look at."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TREE = Path(__file__).parents[3]
CLIENT = TREE / "client" / "milepost"
DAEMON = TREE / "daemon" / "milepostd"
CORE = DAEMON / "core"
SOURCES = sorted([*CLIENT.rglob("*.py"), *DAEMON.rglob("*.py")])


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def named(path: Path) -> str:
    return str(path.relative_to(TREE))


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every imported module with the names taken from it, wherever in the file."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{named(path)}:{node.lineno} imports relatively"
            yield node.module or "", tuple(alias.name for alias in node.names)
