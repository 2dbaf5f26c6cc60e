"""Towards a device: nothing is read over what is still being copied, and all is there at the end.

A stand-in for a device keeps what it is given for later, as a device may; what lands proves the
order. Host memory stands for the device's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from tests.unit.fetching.checkpoints import Chunk, fetch_into, whole, write_checkpoint
from tests.unit.fetching.test_fetch import bits, shrink, values

from milepost.fetching import copying, fetch, planning
from milepost.fetching.devices import Devices
from milepost.fetching.files import Buffer
from milepost.fetching.index import Destination
from milepost.staging.streams import Streams


class LateStreams:
    """Does what it is given when somebody waits for it, and no earlier."""

    gathers = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given: list[Callable[[], None]] = []
        self._done = 0
        self.forks = 0
        self.most_open = 0

    def fork(self) -> None:
        self.forks += 1

    def here(self, work: Callable[[], None]) -> None:
        work()

    def give(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._given.append(work)
            self.most_open = max(self.most_open, len(self._given) - self._done)

    def keep(self, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("nothing of a device's is read")

    def mark(self) -> int:
        with self._lock:
            return len(self._given)

    def hold(self, mark: int) -> None:
        raise AssertionError("the host waits")

    def join(self, mark: int) -> None:
        with self._lock:
            while self._done < mark:
                self._given[self._done]()
                self._done += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    """Host memory is a device from now on."""
    made = LateStreams()

    class HostIsDevice(Devices):
        def __init__(self, streams_of: Callable[[torch.device], Streams]) -> None:
            super().__init__(streams_of, Buffer)

        def open(self, devices: Iterable[torch.device]) -> None:
            self._streams = dict.fromkeys(devices, made)
            for each in self._streams.values():
                each.fork()

    shrink(monkeypatch)
    monkeypatch.setattr(fetch, "Devices", HostIsDevice)
    for module in (copying, planning):
        monkeypatch.setattr(module, "PLAIN", frozenset())
    return made


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("align", [1, 64])
def test_no_buffer_is_used_anew_before_the_device_is_done_with_it(
    threads: int, align: int, streams: LateStreams, tmp_path: Path
) -> None:
    tensors = {
        "large": values((300, 90), torch.float32, 1),
        "odd": values((501, 7), torch.int16, 2),
        "small": values((20,), torch.float64, 3),
        "bytes": values((40_000,), torch.uint8, 4),
    }
    chunks = [Chunk(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in tensors.items()]
    folder = write_checkpoint(tmp_path / "c", [chunks], align=align)
    memory = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
    strips = torch.zeros(90, 100).t()
    wanted = [*whole(memory), Destination("large", (150, 0), strips)]
    done = fetch_into(folder, wanted, threads=threads)
    assert [] == done.damages
    assert all(bits(tensors[key]) == bits(memory[key]) for key in tensors)
    assert bits(tensors["large"][150:250]) == bits(strips)
    assert 1 == streams.forks
    assert streams.most_open > 1, "the stand-in has kept something for later"


def test_after_an_error_nothing_is_under_way(
    streams: LateStreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = values((300, 90), torch.float32, 1)
    folder = write_checkpoint(tmp_path / "c", [[Chunk("t", (300, 90), (0, 0), data)]])

    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(copying, "narrowed", broken)
    monkeypatch.setattr("milepost.fetching.tasks.narrowed", broken)
    with pytest.raises(RuntimeError, match="out of order"):
        fetch_into(folder, whole({"t": torch.zeros(300, 90)}), threads=2)
    assert streams.mark() == streams._done


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_memory_is_filled(tmp_path: Path) -> None:
    tensors = {
        "large": values((3000, 1000), torch.float32, 1),
        "half": values((999, 7), torch.bfloat16, 2),
        "small": values((20,), torch.int64, 3),
    }
    chunks = [Chunk(key, tuple(t.shape), (0,) * t.dim(), t) for key, t in tensors.items()]
    folder = write_checkpoint(tmp_path / "c", [chunks], align=64)
    memory = {key: torch.zeros_like(t, device="cuda") for key, t in tensors.items()}
    strips = torch.zeros(1000, 100, device="cuda").t()
    done = fetch_into(folder, [*whole(memory), Destination("large", (1500, 0), strips)])
    assert [] == done.damages
    assert all(bits(tensors[key]) == bits(memory[key].cpu()) for key in tensors)
    assert bits(tensors["large"][1500:1600]) == bits(strips.cpu())
