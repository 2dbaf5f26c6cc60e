"""The fingerprint of a structure: equal exactly if the same plan serves."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.unit.state.states import distribute, items_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from milepost.errors import UsageError
from milepost.state.fingerprint import Fingerprints, fingerprint

remembering = Fingerprints()


def fingerprint_of(state: dict[Any, Any], *extra: Any) -> str:
    items = items_of(state)
    found = fingerprint(items, extra)
    # Whatever it was asked before, and once more.
    assert [remembering.take(items, extra) for _ in range(2)] == [found, found]
    return found


def test_a_fingerprint_ignores_values_and_objects_but_no_part_of_the_structure() -> None:
    base = {"a": torch.zeros(2, 3), "o": 1}
    same = fingerprint_of({"a": torch.ones(3, 2).t(), "o": "another object"})
    assert fingerprint_of(base) == same
    others = [
        fingerprint_of({"b": torch.zeros(2, 3), "o": 1}),
        fingerprint_of({"a": torch.zeros(3, 2), "o": 1}),
        fingerprint_of({"a": torch.zeros(2, 3, dtype=torch.float64), "o": 1}),
        fingerprint_of({"o": 1, "a": torch.zeros(2, 3)}),
        fingerprint_of({"a": 1, "o": 1}),
        fingerprint_of({"a": torch.zeros(2, 3)}),
        fingerprint_of(base, 2),
        fingerprint_of({**base, "d": {}}),
        *(fingerprint_of({**base, key: 1}) for key in (7, "7", 7.0, True, None)),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_a_fingerprint_tells_placements_and_coordinates_with_equal_boxes_apart(
    mesh: DeviceMesh,
) -> None:
    whole = torch.zeros(1, 2)
    plans: list[list[Placement]] = [
        [Shard(0), Replicate()],
        [Replicate(), Replicate()],
    ]
    prints = [fingerprint_of({"w": distribute(whole, mesh, plan)}) for plan in plans]
    boxes = [items_of({"w": distribute(whole, mesh, plan)})[0].sizes for plan in plans]
    assert boxes[0] == boxes[1]
    assert prints[0] != prints[1]
    assert fingerprint_of({"w": whole}) not in prints


def test_an_interrupt_gives_no_structure_the_name_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = items_of({"a": torch.zeros(2)}), items_of({"b": torch.zeros(2)})
    prints = Fingerprints()
    prints.take(one, ())

    def interrupted(structure: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("milepost.state.fingerprint._hashed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prints.take(two, ())
    assert fingerprint(one) == prints.take(one, ())
    assert fingerprint(two) == prints.take(two, ())


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    script = (
        "import torch; from milepost.state.collecting import collect;"
        "from milepost.state.fingerprint import fingerprint;"
        "from milepost.state.flattening import flatten;"
        "print(fingerprint(collect(*flatten({'a': torch.zeros(2), 'b': {'c': 1}})), (4, 'x')))"
    )
    other = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert other == fingerprint_of({"a": torch.zeros(2), "b": {"c": 1}}, 4, "x")


def test_a_key_that_is_no_text_is_refused() -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        fingerprint_of({"\ud800": torch.zeros(1)})
