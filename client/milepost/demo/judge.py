"""The demonstration's judge: stock torch reads the checkpoints and compares every value.

Run as a file, never as a module of the package, so that nothing of milepost is imported; at its end
it checks that. torch's own index says what is in a checkpoint. Tensors are loaded as DTensors
sharded over the judging ranks and compared with what the trainers recorded when they saved. The
trainers import `digest` and `leave` from this file.

`python -P judge.py ROOT EXPECTED VERDICT RENDEZVOUS RANK WORLD`
  ROOT        the directory of checkpoints
  EXPECTED    JSON: by checkpoint name and key, rows and digest of each part
  VERDICT     written by rank 0; JSON: by checkpoint name, how many values are equal, and a sentence
              for each that is not
  RENDEZVOUS  a file for the process group
Exit 0 if it could judge, whatever it found.

Source: torch/distributed/checkpoint/metadata.py (2.13).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros


def digest(value: Any) -> str:
    """Return a text that is the same only for equal values: dtype, shape and SHA-256 of the bytes
    of a tensor, which must be on the CPU and no DTensor; the `repr` of anything else.
    """
    if not isinstance(value, torch.Tensor):
        return repr(value)
    value = value.detach().contiguous()
    # hashlib takes no tensor, and numpy may be missing: copy the bytes straight from memory.
    content = ctypes.string_at(value.data_ptr(), value.nbytes)
    return f"{value.dtype} {list(value.shape)} {hashlib.sha256(content).hexdigest()}"


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
    # torch needs numpy for ranks that read together; without it, each rank reads its own shards.
    dcp.load(state, checkpoint_id=path, no_dist=find_spec("numpy") is None)
    return state


def parts_of(value: Any, rows: list[int]) -> list[str]:
    """Return the digests of a value's parts.

    The parts have these numbers of rows, in order; rows beyond them are one more part. If `rows` is
    [-1] the whole value is one part. A DTensor is gathered, so all of its ranks must call this.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if rows == [-1] or not isinstance(value, torch.Tensor) or value.dim() == 0:
        return [digest(value)]
    ends = [min(sum(rows[: index + 1]), len(value)) for index in range(len(rows))]
    parts = [digest(part) for part in value.tensor_split(ends)]
    return parts if ends[-1] < len(value) else parts[:-1]


def compare_values(
    expected: dict[str, list[tuple[int, str]]], state: dict[str, Any]
) -> dict[str, Any]:
    """Return how many values are equal, and a sentence for each that is not."""
    equal = 0
    wrong = [f"{key} is missing" for key in expected if key not in state]
    for key, value in state.items():
        recorded = expected.get(key, [])
        found = parts_of(value, [rows for rows, _ in recorded] or [-1])
        saved = [text for _, text in recorded]
        if found == saved:
            equal += 1
        else:
            wrong.append(f"{key} is {found}, saved was {saved or 'nothing'}")
    return {"equal": equal, "wrong": wrong}


def leave() -> NoReturn:
    """End this process successfully, without finalising the interpreter.

    While the interpreter finalises, one of gloo's threads may still release a tensor, which needs
    the interpreter. The process is then aborted (`terminate called without an active exception`):
    rarely, and with all of its work done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    root, expected, verdict, rendezvous = map(Path, sys.argv[1:5])
    rank, world = map(int, sys.argv[5:7])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous.absolute()}", rank=rank, world_size=world
    )
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name, parts in json.loads(expected.read_text()).items():
        found[name] = compare_values(parts, load(root / name, mesh))
    dist.destroy_process_group()
    ours = [name for name in sys.modules if name.split(".")[0] in ("milepost", "milepostd")]
    if ours:
        raise SystemExit(f"the judge has imported {', '.join(ours)}")
    if rank == 0:
        verdict.write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
