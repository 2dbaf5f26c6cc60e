"""The judge sees every difference between what was saved and what stock torch reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from milepost.demo.judge import compare_values, digest


def _expected(parts: Sequence[torch.Tensor]) -> list[tuple[int, str]]:
    return [(len(part), digest(part)) for part in parts]


def test_the_judge_sees_one_flipped_bit_and_every_key_too_many_or_too_few() -> None:
    table = torch.randn(10, 3)
    expected = {"table": _expected(torch.chunk(table, 3)), "lr": [(-1, digest(0.1))]}
    same: dict[str, Any] = {"table": table.clone(), "lr": 0.1}
    assert compare_values(expected, same) == {"equal": 2, "wrong": []}
    for row in (0, 5, 9):
        other = table.clone()
        other.view(torch.int32)[row, 0] ^= 1
        found = compare_values(expected, {"table": other, "lr": 0.1})
        assert found["equal"] == 1
        assert found["wrong"][0].startswith("table is ")
    assert compare_values(expected, {"table": table})["wrong"] == ["lr is missing"]
    assert compare_values(expected, same | {"more": 1})["wrong"] == [
        "more is ['1'], saved was nothing"
    ]
    for other in (table[:9], torch.cat([table, table[:1]]), table.double(), table.reshape(3, 10)):
        assert compare_values(expected, same | {"table": other})["equal"] == 1
