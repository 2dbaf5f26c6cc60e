"""A mesh of four ranks, without any other process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A 2 x 2 mesh seen from rank 1, without any other process."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2, 2))
    finally:
        dist.destroy_process_group()
