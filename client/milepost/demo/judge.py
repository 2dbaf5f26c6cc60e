"""The demonstration's judge: stock torch reads the checkpoints and compares every value.

Run as a file, never as a module of the package, so that nothing of milepost is imported; it checks
that at its end. What is in a checkpoint is taken from torch's own index, tensors are loaded as
DTensors sharded over the judging ranks, and what they hold is compared with what the trainers
recorded when they saved. The trainers use this file's `digest` for that.

`python -P judge.py ROOT EXPECTED VERDICT RENDEZVOUS RANK WORLD`: the checkpoints' directory; what
is expected (JSON: by checkpoint name, digests by key); where rank 0 writes what it found (JSON: by
checkpoint name, how many values were equal, and a sentence for each that was not); a file for the
process group. Exit 0 if it could judge, whatever it found.

Source: torch/distributed/checkpoint/metadata.py (2.13).
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros


def digest(value: Any) -> str:
    """Return a text that is the same for equal values only: of a tensor, on CPU and whole, dtype,
    shape and SHA-256 of its bytes; of anything else its `repr`.
    """
    if not isinstance(value, torch.Tensor):
        return repr(value)
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy(force=True)
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()}"


def whole(value: Any) -> Any:
    """Return a DTensor gathered from its ranks, all of which call this; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def load(path: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Return all that a checkpoint holds, by key: tensors sharded over the mesh, then objects."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    state: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            state[key] = None
        elif entry.size:
            state[key] = zeros(
                entry.size, dtype=entry.properties.dtype, device_mesh=mesh, placements=[Shard(0)]
            )
        else:
            state[key] = torch.zeros((), dtype=entry.properties.dtype)
    dcp.load(state, checkpoint_id=path)
    return state


def compare(expected: dict[str, str], found: dict[str, str]) -> dict[str, Any]:
    """Return how many values are equal, and a sentence for each that is not."""
    wrong = [f"{key} is missing" for key in expected if key not in found]
    wrong += [f"{key} was never saved" for key in found if key not in expected]
    both = [key for key in expected if key in found]
    wrong += [
        f"{key} is {found[key]}, saved was {expected[key]}"
        for key in both
        if found[key] != expected[key]
    ]
    return {"equal": sum(found[key] == expected[key] for key in both), "wrong": wrong}


def main() -> None:
    root, expected, verdict, rendezvous = map(Path, sys.argv[1:5])
    rank, world = map(int, sys.argv[5:7])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous.absolute()}", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name, digests in json.loads(expected.read_text()).items():
        state = load(root / name, mesh)
        found[name] = compare(digests, {key: digest(whole(value)) for key, value in state.items()})
    dist.destroy_process_group()
    ours = [name for name in sys.modules if name.split(".")[0] in ("milepost", "milepostd")]
    if ours:
        raise SystemExit(f"the judge has imported {', '.join(ours)}")
    if rank == 0:
        verdict.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
