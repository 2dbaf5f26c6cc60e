"""Where everything lies in an image: the table is what torch's own containers say."""

from __future__ import annotations

import torch

from milepost.dcp_format import container
from milepost.format.layout import PAGE_BYTES, unpack_table
from milepost.staging.layouts import make_layout
from milepost.state.collecting import collect
from milepost.state.flattening import flatten
from milepost.wire.offers import Kind


def test_rows_of_a_layout_say_where_torch_put_the_payload_and_its_crc() -> None:
    items = collect(*flatten({"a": torch.ones(5), "o": 1, "b": torch.ones(300_000)}))
    layout = make_layout(items, [0, 1, 2], "layout")
    first, second = unpack_table(layout.table)
    template = container.template((5,), torch.float32)
    assert (0, 0, template.total_bytes, template.payload_at, 20) == first[:5]
    assert (template.crc_at, template.central_crc_at) == first[5:]
    assert second.item == 2
    assert second.blob_at % PAGE_BYTES == 0
    assert layout.objects == (1,)
    assert items.kinds[1] == Kind.OBJECT
