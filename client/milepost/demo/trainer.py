"""One rank of the demonstration's training run, as a training engineer would write it, plus code
that records what the rank's state was.

`python -m milepost.demo.trainer ROOT RECORDS ATTEMPT STEPS EVERY`, with the environment that
torchrun gives and `MILEPOST_RUN_DIR` of the node's daemon. Resumes from the newest checkpoint below
ROOT if there is one. The recording code writes digests of this rank's state to RECORDS, before each
save and after a resume. It reads the state by torch alone.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from milepost import Checkpointer, Save
from milepost.demo.judge import digest, leave
from milepost.demo.model import LanguageModel, TextSampler, read_text
from milepost.demo.records import (
    Called,
    Ended,
    Finished,
    Recorded,
    RecordedPart,
    RecordWriter,
    Stepped,
    file_of,
)

BATCH: Final = 4
"""Pieces of text a rank and step."""

LEARNING_RATE: Final = 2e-3
SEED: Final = 7


class Trainer:
    """The model, its optimizer, and the sampler that feeds it."""

    def __init__(self, rank: int, world: int) -> None:
        torch.manual_seed(SEED)
        self.model = LanguageModel()
        mesh = init_device_mesh("cpu", (world,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.sampler = TextSampler(read_text(), BATCH, SEED + rank)
        self.step = 0
        # From here on only dropout draws, and each rank must draw differently.
        torch.manual_seed(SEED + 1000 + rank)

    def train_step(self) -> float:
        """Do one step; return its loss."""
        loss = self.model(*self.sampler.draw())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        """Return the state that all ranks save together; it shares the live tensors."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": {"step": self.step}}

    def own_state(self) -> dict[str, torch.Tensor]:
        """Return what differs by rank."""
        return {"rng": torch.get_rng_state(), "sampler": self.sampler.generator.get_state()}

    def resume(self, ck: Checkpointer) -> None:
        """Load the newest checkpoint."""
        state = self.state()
        report = ck.load(state)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["progress"]["step"]
        self.sampler.generator.set_state(report.per_rank["sampler"])
        torch.set_rng_state(report.per_rank["rng"])


def part_of(value: Any) -> RecordedPart:
    """Return what this rank has of a value."""
    if not isinstance(value, DTensor):
        return RecordedPart(-1, digest(value))
    # `fully_shard` on a mesh of one dimension shards by rows. The judge relies on it.
    assert value.placements == (Shard(0),)
    local = value.to_local()
    return RecordedPart(local.shape[0], digest(local))


def record(trainer: Trainer, state: dict[str, Any], rank: int, is_resumed: bool) -> Recorded:
    """Return what this rank's state is. Calls no other rank."""
    # torch names the keys here, not milepost: milepost's keys are what the judge checks.
    parts = {key: part_of(value) for key, value in flatten_state_dict(state)[0].items()}
    own = {f"per_rank/{rank}/{key}": value for key, value in trainer.own_state().items()}
    parts |= {key: part_of(value) for key, value in own.items()}
    return Recorded(trainer.step, parts, is_resumed)


def train(root: Path, writer: RecordWriter, steps: int, every: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    trainer = Trainer(rank, world)
    with Checkpointer(root) as ck:
        if ck.latest() is not None:
            trainer.resume(ck)
            writer.write(record(trainer, trainer.state(), rank, is_resumed=True))
        ck.prepare(trainer.state(), per_rank=trainer.own_state())
        last = None
        while trainer.step < steps:
            began_s = time.monotonic()
            loss = trainer.train_step()
            writer.write(Stepped(trainer.step, loss, began_s, time.monotonic()))
            if trainer.step % every == 0 or trainer.step == steps:
                last = save_and_record(ck, trainer, writer, rank)
        if last is not None:
            last.wait()
    writer.write(Finished(time.monotonic()))


def save_and_record(ck: Checkpointer, trainer: Trainer, writer: RecordWriter, rank: int) -> Save:
    """Save without waiting for the commit; record what was saved, and later how it ended."""
    began_s = time.monotonic()
    state, own = trainer.state(), trainer.own_state()
    state_s = time.monotonic() - began_s
    writer.write(record(trainer, state, rank, is_resumed=False))
    # Recording takes some ranks longer than others; do not count that as milepost's time.
    dist.barrier()
    began_s = time.monotonic()
    made = ck.save(trainer.step, state, per_rank=own)
    stall_s = time.monotonic() - began_s
    writer.write(Called(made.step, made.save_id, began_s, stall_s, state_s))
    made.add_done_callback(
        lambda ended: writer.write(Ended(ended.step, ended.save_id, ended.phase, time.monotonic()))
    )
    return made


def main() -> None:
    root, records = map(Path, sys.argv[1:3])
    attempt, steps, every = map(int, sys.argv[3:6])
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    writer = RecordWriter(file_of(records, attempt, int(os.environ["RANK"])))
    train(root, writer, steps, every)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
