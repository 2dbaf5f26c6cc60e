"""States that one rank saves in tests, and descriptions of states and checkpoints as plain data.

Ranks and judges both import this module, so it must not import milepost. Tests compare the results
of `describe`: they are equal exactly if dtype, shape and every bit of the elements are equal.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import pathlib
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict

State = dict[Any, Any]

# --- telling --------------------------------------------------------------------------------------


def describe(value: Any) -> Any:
    """Return plain data that is equal for two values exactly if they are equal bit for bit."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), _digest(payload(value)))
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, _digest(value.tobytes()))
    if isinstance(value, float):
        return ("float", struct.pack("<d", value))
    if isinstance(value, Mapping):
        inner = [(describe(key), describe(entry)) for key, entry in value.items()]
        return (type(value).__name__, inner)
    if isinstance(value, list | tuple | collections.deque):
        return (type(value).__name__, [describe(entry) for entry in value])
    if isinstance(value, set | frozenset):
        return (type(value).__name__, sorted(map(repr, value)))
    if dataclasses.is_dataclass(value) or isinstance(value, Counter):
        return (type(value).__name__, describe(vars(value)))
    if isinstance(value, bytes | bytearray | str):
        data = value.encode() if isinstance(value, str) else bytes(value)
        return (type(value).__name__, data)
    return (type(value).__name__, getattr(value, "__qualname__", repr(value)))


def payload(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements in order, as bytes."""
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    # A clone, since numpy() would leave the caller's own storage unable to be resized.
    return plain.contiguous().clone().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def expected(state: State) -> dict[str, Any]:
    """Return what each key of a state holds now, by torch's own flattening."""
    flat, _ = flatten_state_dict(_stateful_to_state_dict(state))
    return {key: describe(value) for key, value in flat.items()}


def metadata(path: str) -> Metadata:
    """Return a checkpoint's index as stock torch reads it."""
    return FileSystemReader(path).read_metadata()


def read(path: str) -> dict[str, Any]:
    """Load a whole checkpoint with stock torch in one process, and describe it."""
    state: State = {
        key: torch.empty(known.size, dtype=known.properties.dtype)
        if isinstance(known, TensorStorageMetadata)
        else None
        for key, known in metadata(path).state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return {key: describe(value) for key, value in state.items()}


def index(path: str) -> dict[str, Any]:
    """Return what a checkpoint's index says, in plain data, without file names and offsets."""
    found = metadata(path)
    keys: dict[str, Any] = {}
    for key, known in found.state_dict_metadata.items():
        if isinstance(known, TensorStorageMetadata):
            chunks = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in known.chunks)
            keys[key] = (repr(known.properties), tuple(known.size), chunks)
        else:
            keys[key] = type(known).__name__
    return {
        "keys": keys,
        "paths": found.planner_data,
        "stored": sorted((each.fqn, tuple(each.offset or ())) for each in found.storage_data),
        "version": found.version,
    }


class Reading(NamedTuple):
    """What the judge finds in a checkpoint."""

    values: dict[str, Any]
    meaning: dict[str, Any]
    """What its index says."""


def read_all(_rank: int, _world: int, paths: Mapping[str, str]) -> dict[str, Reading]:
    """For the judge: read whole checkpoints; keyed as `paths` is."""
    torch.manual_seed(0)
    return {name: Reading(read(path), index(path)) for name, path in paths.items()}


# --- what states are made of ----------------------------------------------------------------------

DTYPES = [
    "bool",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]
"""Every dtype of torch 2.13 that stock DCP both saves and loads as a plain tensor."""


class Tagged(torch.Tensor):
    """A subclass that changes nothing."""


class Mode(enum.Enum):
    TRAIN = "train"


@dataclasses.dataclass
class Setting:
    """An object of a class of the user's, with a tensor inside."""

    rate: float
    table: torch.Tensor
    names: list[str]


class Counter:
    """Stateful by torch's protocol."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.history = torch.arange(count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": self.history}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count, self.history = state["count"], state["history"]


class Network(nn.Module):
    """Two layers, a buffer that is saved, one that is not, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 6, bias=False)
        self.second.weight = nn.Parameter(self.second.weight.detach().clone())
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.norm(self.first(batch)).relu())
        return out

    def get_extra_state(self) -> Any:
        return {"calls": 3, "blob": b"\x00\xff"}

    def set_extra_state(self, state: Any) -> None:
        assert state["calls"] == 3


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 24).reshape(4, 6)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()


def trained(kind: str, seed: int = 7) -> tuple[Network, torch.optim.Optimizer]:
    """Return a model after two steps of AdamW or of SGD with momentum."""
    torch.manual_seed(seed)
    model = Network()
    optimizer: torch.optim.Optimizer
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        one_step(model, optimizer)
    return model, optimizer


# --- states ---------------------------------------------------------------------------------------


def _dtypes() -> State:
    made: State = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 256, (6, 16), dtype=torch.uint8)
        made[name] = raw.view(dtype)
        made[f"{name}_scalar"] = raw.view(dtype).reshape(-1)[5]
        made[f"{name}_empty"] = torch.empty((2, 0), dtype=dtype)
    return made


def _layouts() -> State:
    base = torch.randn(3, 4, 5)
    spectrum = torch.randn(3, 4, dtype=torch.complex64)
    floats = torch.randn(4, 4)
    image = torch.randn(2, 3, 4, 5)
    weight = nn.Parameter(torch.randn(3, 3))
    with torch.inference_mode():
        inference = torch.ones(3) * 2
    unaligned = torch.frombuffer(bytearray(range(33)), dtype=torch.float32, offset=1)
    return {
        "scalar": torch.tensor(3.5),
        "no_rows": torch.empty(0),
        "no_columns": torch.empty(3, 0, 2),
        "transposed": base.transpose(0, 2),
        "expanded": torch.arange(4.0).expand(3, 4),
        "expanded_scalar": torch.tensor(2.0).expand(2, 3),
        "every_third": torch.arange(100)[::3],
        "inner": base[1:, 1:3, ::2],
        "channels_last": image.to(memory_format=torch.channels_last),
        "channels_last_3d": image[None].to(memory_format=torch.channels_last_3d),
        "diagonal": base[0].diagonal(),
        "overlapping": torch.arange(10.0).as_strided((4, 3), (2, 1)),
        "conj": spectrum.conj(),
        "conj_transposed": spectrum.conj().T,
        "imag_of_conj": spectrum.conj().imag,
        "negative_view": torch._neg_view(base),
        "complex": spectrum,
        "real_of_complex": spectrum.real,
        "complex_as_real": torch.view_as_real(spectrum),
        "floats": floats,
        "bytes_of_floats": floats.view(torch.uint8),
        "shifted_bytes_of_floats": floats.view(torch.uint8).reshape(-1)[3:30],
        "tied": weight,
        "tied_again": weight,
        "tied_part": weight[1],
        "parameter": nn.Parameter(torch.randn(2)),
        "frozen": nn.Parameter(torch.randn(2), requires_grad=False),
        "not_a_leaf": weight * 2,
        "buffer": nn.Buffer(torch.randn(3)),
        "inference": inference,
        "unaligned": unaligned,
        "numpy": torch.from_numpy(np.arange(6).reshape(2, 3)),
        "shared": torch.randn(5).share_memory_(),  # type: ignore[no-untyped-call]
        "many_dims": torch.randn((1,) * 9 + (2,)),
        "nan_bits": torch.tensor(
            [0x7FC00001, 0x7F800001, -0x3FFFFF, -0x400000, 0x7FFFFFFF], dtype=torch.int32
        ).view(torch.float32),
        "half_nan_bits": torch.tensor([0x7C01, 0x7E55, -1], dtype=torch.int16).view(torch.float16),
        "edges": torch.tensor([-0.0, float("inf"), -float("inf"), 1e-45]),
    }


def _keys() -> State:
    keys: list[Any] = [
        "a b", " ", "a/b", "../up", "line\nfeed", "nul\0inside", "quote'\"", "naïve ключ 鍵 🗝", "",
        "k" * 4000, "dotted.key", ".", "..", 7, -1, 2**70, (1, 2), None, True, 2.5,
    ]  # fmt: skip
    flat: State = {key: torch.full((2,), float(at)) for at, key in enumerate(keys)}
    return {
        **flat,
        "nested": {"": {"": torch.ones(1), 3: torch.zeros(1), "x y": {"\n": "text"}}},
        "objects": {key: f"value of {key!r}" for key in keys},
    }


def _objects() -> State:
    shared = [1, 2, {"in": 3}]
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    records = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    return {
        "none": None,
        "true": True,
        "int": 3,
        "large_int": 2**100,
        "float": 0.1,
        "nan": float("nan"),
        "complex": 1 + 2j,
        "text": "ünïcode\0",
        "long_text": "0123456789" * 30_000,
        "bytes": b"\x00\xff",
        "bytearray": bytearray(b"abc"),
        "empty_dict": {},
        "empty_list": [],
        "empty_tuple": (),
        "empty_inside": {"a": {}, "b": [], "c": {"d": {}}},
        "numbers": list(range(50)),
        "lists": [[1], [2, [3]]],
        "list_of_tensors": [torch.arange(3), torch.tensor(1.5)],
        "mixed_list": [1, torch.ones(2), {"deep": torch.zeros(1), "why": None}, [torch.ones(1)]],
        "tuple_of_tensors": (torch.arange(3), {"a": torch.ones(1)}),
        "nested_tuple": {"a": ((1, (2, None)), "x")},
        "set": {1, 2},
        "frozenset": frozenset({"a"}),
        "range": range(3),
        "grid": grid,
        "fortran": np.asfortranarray(grid),
        "strided_array": grid[:, ::2],
        "records": records,
        "numpy_scalar": np.float64(1.25),
        "numpy_rng": np.random.RandomState(3).get_state(),
        "python_rng": random.Random(3).getstate(),
        "torch_rng": torch.Generator().manual_seed(3).get_state(),
        "setting": Setting(0.5, torch.arange(4), ["a"]),
        "not_top_level": {"counter": Counter(2)},
        "mode": Mode.TRAIN,
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "ordered": collections.OrderedDict(b=torch.ones(1), a=2),
        "default": collections.defaultdict(int, {"a": 1}),
        "deque": collections.deque([1, 2], maxlen=3),
        "when": datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
        "decimal": decimal.Decimal("1.10"),
        "path": pathlib.PurePosixPath("a/b"),
        "class": {"of": Network},
        "function": batch,
        "partial": functools.partial,
        "shared": shared,
        "shared_again": shared,
    }


def _stateful() -> State:
    model, optimizer = trained("adamw")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "counter": Counter(4),
        "nested": {"module": nn.Linear(2, 2).state_dict()},
    }


def _by_state_dict(kind: str) -> State:
    model, optimizer = get_state_dict(*trained(kind))
    return {"model": model, "optimizer": optimizer}


def _raw_optimizer() -> State:
    return {
        "adamw": trained("adamw")[1].state_dict(),
        "sgd": trained("sgd")[1].state_dict(),
        "fresh": torch.optim.AdamW(Network().parameters()).state_dict(),
    }


def _frozen() -> State:
    torch.manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("used", "frozen", "unused")})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad])
    model["used"](torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def _alignment() -> State:
    """Return lengths around every limit that a layout could have."""
    lengths = {0, 1, 63, 64, 65, 4095, 4096, 4097, 65_535, 65_536, 65_537, 131_073, 1_048_577}
    return {
        f"bytes_{length}": torch.randint(0, 256, (length,), dtype=torch.uint8)
        for length in sorted(lengths)
    } | {"object": "x" * 70_000, "last": torch.ones(3)}


def _window() -> State:
    return {"window": torch.arange(1_000_000, dtype=torch.float32)[500:510]}


def _subclass() -> State:
    return {"tagged": torch.randn(3, 2).as_subclass(Tagged).T}


def _many() -> State:
    return {
        f"layers.{at}.weight": torch.full((at % 7 + 1, 3), float(at), dtype=torch.float32)
        for at in range(11_000)
    }


SINGLE: dict[str, Callable[[], State]] = {
    "dtypes": _dtypes,
    "layouts": _layouts,
    "keys": _keys,
    "objects": _objects,
    "stateful": _stateful,
    "adamw": lambda: _by_state_dict("adamw"),
    "sgd": lambda: _by_state_dict("sgd"),
    "raw_optimizer": _raw_optimizer,
    "frozen": _frozen,
    "alignment": _alignment,
    "window": _window,
    "nothing": dict,
    "only_objects": lambda: {"a": 1, "b": {"c": "x"}},
    "only_empty": lambda: {"a": torch.empty(0), "b": torch.empty(2, 0)},
    "subclass": _subclass,
    "many": _many,
}
"""States of one rank by name. Each call makes a new one."""


def make(name: str) -> State:
    """Return a state of `SINGLE`, the same values at each call."""
    torch.manual_seed(len(name))
    return SINGLE[name]()
