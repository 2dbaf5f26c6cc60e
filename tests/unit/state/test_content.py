"""What of a content is compared after its plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from milepost.link.rendezvous import Group
from milepost.state.content import Content, ContentReader
from milepost.wire.replicas import unpack_digests


def reader(check_replicas: str = "warn", world: int = 2) -> ContentReader:
    return ContentReader(None, Group(0, world, None), 9.0, check_replicas)


def content(**state: Any) -> Content:
    return reader().read("1-1", state, None, lambda: None)


def test_what_is_due_is_read_at_once_and_told_later() -> None:
    tensor = torch.ones(3)
    made = content(t=tensor, other=torch.ones(4), o={"seed": 1})
    items = {key: item for item, key in enumerate(made.items.keys)}
    due = sorted([items["t"], items["o.seed"]])

    tell = reader().digests(made, due, 7)
    known = tell()
    asked_late = reader().digests(made, due, 7)
    tensor.zero_()

    assert due == [item for item, _ in unpack_digests(known)]
    assert known == asked_late()
    assert known != reader().digests(made, due, 7)()


def test_an_object_that_is_no_plain_data_is_left_out() -> None:
    made = content(t=torch.ones(3), size=(torch.Size([3]), 1))
    assert [0] == [item for item, _ in unpack_digests(reader().digests(made, (0, 1), 1)())]


@pytest.mark.parametrize(("check", "world"), [("off", 2), ("warn", 1), ("raise", 1)])
def test_nothing_is_read_where_nothing_is_compared(check: str, world: int) -> None:
    alone = reader(check, world)
    made = content(t=torch.ones(3))
    offer, _ = alone.offer(made)
    assert (-1,) == offer.digests
    assert "off" == offer.check_replicas
    assert b"" == alone.digests(made, (0,), 1)()


def test_nothing_is_compared_while_ranks_may_change_their_state() -> None:
    offer, _ = reader("raise").offer(content(t=torch.ones(3)), is_still=False)
    assert (-1,) == offer.digests
    assert "raise" == offer.check_replicas
