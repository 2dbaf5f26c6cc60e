"""What is trained and saved: three states, filled with random values, and one kind of step.

`large` is 1.5 GiB in 64 tensors, `small` 80 MiB in 11,000, `ranks` 1 GiB on two ranks, three
quarters of it in shards and the rest in replicas. A step is forward and backward passes of a small
network, many operations of a millisecond or less as in real training, so that whoever takes the
interpreter's lock, a core or memory bandwidth is seen; then an optimizer changes a sixteenth of the
state, another one in each step. The network is not part of the state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.results import RankTask
from milepost.dcp_format import container

STEP_COPIES: Final = 2
"""A training step takes as long as so many copies of the state by one thread."""

SHAPES_SMALL: Final = ((48, 80), (1906,), (64,), (30, 60), (32, 60))
"""In turn: 1,906 elements each on average, weights and biases mixed."""

WIDTH: Final = 256
DEPTH: Final = 4
BATCH: Final = 32

GROUPS: Final = 16
"""The optimizer changes one part in so many of the state in a step."""

SEED: Final = 20260


@dataclass(frozen=True)
class _Form:
    """A tensor of the state, of this rank."""

    name: str
    shape: tuple[int, ...]
    is_shard: bool


def _forms(task: RankTask) -> Iterator[_Form]:
    def rows(full: int) -> int:
        return max(1, round(full * task.size))

    match task.workload:
        case "large":
            for index in range(64):
                yield _Form(f"layer{index}.weight", (rows(1536), 4096), False)
        case "small":
            for index, shape in enumerate(islice(cycle(SHAPES_SMALL), max(16, rows(11_000)))):
                yield _Form(f"block{index // 100}.part{index}.weight", shape, False)
        case "ranks":
            for index in range(32):
                yield _Form(f"layer{index}.weight", (rows(3072 // task.world), 2048), True)
            for index in range(16):
                yield _Form(f"layer{index}.shared", (rows(2048), 2048), False)
        case _:
            raise ValueError(f"no workload is called {task.workload!r}")


def _random(shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    return torch.empty(shape).uniform_(-1, 1, generator=generator).to(device)


def _sharded(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(local, mesh, [Shard(0)])


class Training:
    """One rank's training run.

    Attributes:
        optimizer: over every tensor of the state.
        tensors: the state's tensors on this rank, by name, as `state_dict` would give them.
        state_bytes: of all ranks together, replicas once.
        image_bytes: the same with torch's container around each tensor.
        share: local tensors that this rank writes if replicas are shared out evenly.
        batches: passes in a step; set it before the first step.
    """

    def __init__(self, task: RankTask, batches: int = 0) -> None:
        self._device = task.device
        self._world = task.world
        self.batches = batches
        forms = list(_forms(task))
        common = torch.Generator().manual_seed(SEED)
        own = torch.Generator().manual_seed(SEED + 1 + task.rank)
        mesh = init_device_mesh(task.device, (task.world,))
        parameters: dict[str, nn.Parameter] = {}
        gradients: dict[tuple[tuple[int, ...], bool], torch.Tensor] = {}
        self.share: list[torch.Tensor] = []
        self.state_bytes = self.image_bytes = replicas = 0
        for form in forms:
            local = _random(form.shape, own if form.is_shard else common, task.device)
            kind = (form.shape, form.is_shard)
            if kind not in gradients:
                gradient = _random(form.shape, common, task.device)
                gradients[kind] = _sharded(gradient, mesh) if form.is_shard else gradient
            if form.is_shard or replicas % task.world == task.rank:
                self.share.append(local)
            replicas += not form.is_shard
            copies = task.world if form.is_shard else 1
            self.state_bytes += local.nbytes * copies
            container_bytes = container.template(form.shape, local.dtype).total_bytes
            self.image_bytes += container_bytes * copies
            parameters[form.name] = nn.Parameter(_sharded(local, mesh) if form.is_shard else local)
        self.tensors = {name: parameter.detach() for name, parameter in parameters.items()}
        # Operations on lists cannot mix DTensors and others.
        kinds = [
            [parameters[form.name] for form in forms if form.is_shard == is_shard]
            for is_shard in (False, True)
        ]
        self.optimizer = torch.optim.SGD(
            [{"params": of_kind} for of_kind in kinds if of_kind], lr=1e-4, foreach=True
        )
        pairs = [
            (parameter, gradients[form.shape, form.is_shard])
            for parameter, form in zip(parameters.values(), forms, strict=True)
        ]
        self._groups = cycle([pairs[group::GROUPS] for group in range(GROUPS)])
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)]
        self._network = nn.Sequential(*layers).to(task.device)
        self._inputs = _random((BATCH, WIDTH), own, task.device)
        self._flag = torch.zeros(1, device=task.device)

    def state(self, step: int) -> dict[str, Any]:
        """Return what is saved at a step."""
        return {"model": self.tensors, "progress": {"step": step, "name": f"step {step}"}}

    def passes(self, count: int) -> None:
        """Do so many forward and backward passes."""
        for _ in range(count):
            self._network(self._inputs).square().mean().backward()

    def step(self, guard: AbstractContextManager[object], is_over: bool) -> tuple[float, bool]:
        """Do one training step.

        Args:
            guard: entered before the optimizer changes the state, left after.
            is_over: whether this rank has seen what it was waiting for.

        Returns how long the guard held it back, and whether `is_over` on all ranks.
        """
        self.passes(self.batches)
        group = next(self._groups)
        for parameter, gradient in group:
            parameter.grad = gradient
        guarded_s = time.perf_counter()
        with guard:
            guard_s = time.perf_counter() - guarded_s
            self.optimizer.step()
        for parameter, _ in group:
            parameter.grad = None
        self._network.zero_grad()
        if self._world > 1:
            # As gradients would be: every rank waits for the slowest.
            self._flag.fill_(is_over)
            dist.all_reduce(self._flag)
            is_over = self._flag.item() == self._world
        self.synchronize()
        return guard_s, is_over

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._device != "cpu":
            torch.accelerator.synchronize()

    def calibrate(self, target_s: float) -> None:
        """Choose `batches` so that the passes of a step take this long."""
        self.passes(8)
        self.synchronize()
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < max(0.3, target_s):
            self.passes(4)
            self.synchronize()
            count += 4
        self.batches = max(1, round(target_s * count / (time.perf_counter() - began_s)))
