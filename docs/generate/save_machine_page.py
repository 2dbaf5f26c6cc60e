"""Makes `docs/save-machine.md` from the transition tables of `milepostd.core.phases`.

`python -m docs.generate.save_machine_page > docs/save-machine.md`. Owns the page's form only:
phases, triggers and what a phase means stand in `phases`. Python does not keep the docstrings of
fields, so the source is read.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Mapping

from milepostd.core import phases
from milepostd.core.phases import COORDINATOR, ENDED, PARTICIPANT, Phase, Trigger

_INTRODUCTION = """\
# The save machine

Generated from `daemon/milepostd/core/phases.py` by `python -m docs.generate.save_machine_page`.

A save has two roles. Every node of the cohort is a *participant*; the node of rank 0 is also the
*coordinator*. Each role moves only along its own table; a trigger that a phase does not list
changes nothing. The reasons are in [0003](design/0003-commit-point.md).
"""

_TITLES = (
    ("The participant", PARTICIPANT),
    ("The coordinator", COORDINATOR),
)


def page() -> str:
    """Return the whole page."""
    meanings = _meanings()
    parts = [_INTRODUCTION]
    for title, table in _TITLES:
        parts.append(f"## {title}\n\n{_diagram(table)}\n\n{_legend(table, meanings)}")
    return "\n".join(parts)


def _diagram(table: Mapping[tuple[Phase, Trigger], Phase]) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {Phase.GATHERING}"]
    lines += [f"    {phase} --> {after}: {trigger}" for (phase, trigger), after in table.items()]
    return "\n".join([*lines, f"    {Phase.CONCLUDED} --> [*]", "```"])


def _legend(table: Mapping[tuple[Phase, Trigger], Phase], meanings: Mapping[str, str]) -> str:
    used = {phase for phase, _ in table} | {*table.values()}
    rows = [
        f"| {phase} | {'yes' if phase in ENDED else ''} | {meanings[phase.name]} |"
        for phase in Phase
        if phase in used
    ]
    return "\n".join(["| phase | outcome known | means |", "|---|---|---|", *rows, ""])


def _meanings() -> dict[str, str]:
    """Return what stands below each phase in the source."""
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(phases)).body
        if isinstance(node, ast.ClassDef) and node.name == "Phase"
    )
    found = {}
    for statement, following in itertools.pairwise(body):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            assert isinstance(statement.targets[0], ast.Name)
            assert isinstance(following.value, ast.Constant)
            found[statement.targets[0].id] = " ".join(str(following.value.value).split())
    return found


if __name__ == "__main__":
    sys.stdout.write(page())
