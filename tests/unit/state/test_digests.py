"""Digests: equal exactly for values that are equal bit for bit."""

from __future__ import annotations

import array
import math
import os
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.state.states import items_of

from milepost.dcp_format.container import DTYPE_NAMES
from milepost.state import digests
from milepost.state.digests import (
    BLOCK_BYTES,
    BLOCKS,
    HOST_SCRATCH_BYTES,
    PLAIN_BYTES_MAX,
    VALUE_BYTES,
    WHOLE_BYTES_MAX,
    TensorDigests,
    plain_digest,
)

LARGE = 16 * WHOLE_BYTES_MAX
"""Bytes of a tensor of which only a part is read."""


def digest_of(tensor: torch.Tensor, moved: int = 0) -> int:
    return TensorDigests(items_of({"t": tensor}), [0], moved).get()[0]


def bits_of(seed: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randint(0, 2, (nbytes,), dtype=torch.uint8, generator=_seeded(seed))
    return made.view(dtype)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in another order in memory."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.dtype in (torch.complex128, torch.complex64):
        return tensor.t().contiguous().t()
    return tensor.view(bits[tensor.itemsize]).t().contiguous().t().view(tensor.dtype)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
@pytest.mark.parametrize("nbytes", [4096, LARGE], ids=["whole", "sampled"])
def test_equal_tensors_have_equal_digests_however_they_lie_in_memory(
    dtype: torch.dtype, nbytes: int
) -> None:
    tensor = bits_of(1, nbytes, dtype).view(16, -1)
    turned = transposed(tensor)

    for moved in (0, 7):
        same = {digest_of(each, moved) for each in (tensor, turned, tensor.clone())}
        assert 1 == len(same)
    assert digest_of(tensor) != digest_of(bits_of(2, nbytes, dtype).view(16, -1))


def test_a_small_tensor_is_read_whole() -> None:
    tensor = torch.zeros(WHOLE_BYTES_MAX // 4)
    known = digest_of(tensor)
    for at in range(0, tensor.numel(), 1021):
        other = tensor.clone()
        other[at] = 1
        assert known != digest_of(other), at


@pytest.mark.parametrize("turn", [lambda tensor: tensor, transposed], ids=["dense", "turned"])
@pytest.mark.parametrize("part", [0, 1, 17, 40, 63])
def test_a_large_tensor_that_differs_in_one_region_has_another_digest(
    part: int, turn: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = torch.zeros(64, LARGE // 4 // 64)
    other = tensor.clone()
    other[part] = 1

    assert digest_of(turn(tensor)) != digest_of(turn(other))


def test_the_first_and_the_last_element_of_a_large_tensor_are_always_read() -> None:
    tensor = torch.zeros(LARGE // 4)
    for moved in range(20):
        for at in (0, -1):
            other = tensor.clone()
            other[at] = 1
            assert digest_of(tensor, moved) != digest_of(other, moved)


def test_what_changed_in_one_block_only_is_met_in_the_end() -> None:
    tensor = torch.zeros(LARGE, dtype=torch.uint8)
    other = tensor.clone()
    other[100_000 : 100_000 + BLOCK_BYTES] = 1

    differ = [digest_of(tensor, moved) != digest_of(other, moved) for moved in range(200)]

    assert not differ[0]
    # A block in 65, and each of its places half of the time.
    assert 3 < sum(differ) < 60


def test_of_a_large_tensor_a_bounded_part_is_read() -> None:
    read = []

    class Counted:
        memory = torch.zeros(1 << 20, dtype=torch.uint8)

        def fetch(self, end: int) -> Callable[[], memoryview]:
            read.append(end)
            return lambda: memoryview(bytearray(end))

    items = items_of({"t": torch.zeros(64 << 20, dtype=torch.uint8)})
    TensorDigests(items, [0], 3, lambda device: Counted()).get()

    assert [(BLOCKS + 2) * BLOCK_BYTES] == read


def test_bits_count_and_not_numbers() -> None:
    nan = torch.tensor([math.nan])
    other_nan = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)

    assert digest_of(nan) == digest_of(nan.clone())
    assert digest_of(nan) != digest_of(other_nan)
    assert digest_of(torch.tensor([0.0])) != digest_of(torch.tensor([-0.0]))


def test_many_tensors_are_read_as_one_by_one() -> None:
    state = {f"t{i}": bits_of(i, 4096 + 8 * i, torch.int64) for i in range(200)}
    state |= {"empty": torch.empty(0), "big": bits_of(1, LARGE, torch.int64)}
    assert HOST_SCRATCH_BYTES < sum(tensor.nbytes for tensor in state.values()) - LARGE
    items = items_of(state)

    found = TensorDigests(items, range(len(items))).get()

    assert [digest_of(tensor) for tensor in state.values()] == [
        found[item] for item in range(len(items))
    ]


def test_what_a_device_has_is_fetched_after_it_was_read_and_before_it_is_written_again() -> None:
    said: list[str] = []

    class Device:
        """A device that does its work when somebody waits for it."""

        memory = torch.zeros(64 << 10, dtype=torch.uint8)

        def fetch(self, end: int) -> Callable[[], memoryview]:
            number = len(said)
            said.append(f"fetch {number}")
            kept = bytearray(self.memory[:end].tolist())

            def wait() -> memoryview:
                said.append(f"wait {number}")
                return memoryview(kept)

            return wait

    items = items_of({f"t{i}": bits_of(i, 32 << 10, torch.uint8) for i in range(3)})
    begun = TensorDigests(items, range(3), 0, lambda device: Device())
    assert ["fetch 0", "wait 0", "fetch 2"] == said

    for source in items.sources:
        source.zero_()  # Too late to matter.
    assert [digest_of(bits_of(i, 32 << 10, torch.uint8)) for i in range(3)] == [
        begun.get()[item] for item in range(3)
    ]


def test_a_device_without_memory_leaves_its_tensors_without_digests_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(device: torch.device) -> Any:
        raise torch.OutOfMemoryError("nothing is free")

    assert {} == TensorDigests(items_of({"t": torch.ones(3)}), [0], 0, refuse).get()
    assert ["replicas on cpu are not compared this time: nothing is free"] == caplog.messages


def test_tensors_of_several_dtypes_are_read_together() -> None:
    state = {str(dtype): bits_of(3, 4096, dtype) for dtype in DTYPE_NAMES}
    state |= {f"{key} turned": transposed(t.view(16, -1)) for key, t in state.items()}
    items = items_of(state)

    found = TensorDigests(items, range(len(items))).get()

    assert 1 == len(set(found.values()))
    assert len(state) == len(found)


# --- objects ------------------------------------------------------------------------------------

PLAIN: list[Any] = [
    None, True, False, 0, 1, -1, 2**80, 1.0, 0.0, -0.0, 1j, "", "a", "\ud800", b"", b"a",
    [], [1], [[1]], (), (1,), {}, {"a": 1}, {1: "a"}, set(), {1}, frozenset(), frozenset([1]),
    ["ab", "c"], ["a", "bc"], [["a"], "b"], [["a", "b"]], bytearray(b"a"), array.array("d", [1.0]),
    array.array("f", [1.0]), torch.ones(2), torch.ones(1, 2), torch.ones(2).int(), torch.zeros(2),
]  # fmt: skip


def test_plain_data_that_differ_have_different_digests() -> None:
    found = [plain_digest(value) for value in PLAIN]

    assert None not in found
    assert len(found) == len(set(found))


def test_neither_order_nor_identity_makes_a_difference() -> None:
    text = "".join(["re", "peated"])

    assert plain_digest({"a": 1, "b": {2, 3}}) == plain_digest({"b": {3, 2}, "a": 1})
    assert plain_digest([text, text]) == plain_digest(["repeated", "".join(["repeat", "ed"])])
    assert plain_digest(torch.ones(2, 3).t()) == plain_digest(torch.ones(3, 2))


def test_the_digest_of_a_set_of_texts_is_the_same_in_every_process() -> None:
    code = (
        "from milepost.state.digests import plain_digest;"
        "print(plain_digest({f'name {i}' for i in range(50)}))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert {f"{plain_digest({f'name {i}' for i in range(50)})}\n".encode()} == said


class _Own:
    def __reduce__(self) -> Any:
        raise AssertionError("nothing of an object may run")


@pytest.mark.parametrize(
    "value",
    [
        _Own(),
        [_Own()],
        OrderedDict(a=1),
        torch.float32,
        memoryview(struct.pack("P", 0)).cast("P"),
        "x" * PLAIN_BYTES_MAX,
        list(range(PLAIN_BYTES_MAX // VALUE_BYTES)),
        torch.zeros(PLAIN_BYTES_MAX),
        torch.zeros(2, device="meta"),
        2 ** (8 * PLAIN_BYTES_MAX),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_data_or_too_much_has_no_digest(value: Any) -> None:
    assert plain_digest(value) is None


def test_data_that_hold_themselves_have_no_digest() -> None:
    own: list[Any] = []
    own.append(own)
    assert plain_digest(own) is None


def test_data_nested_too_deeply_have_no_digest() -> None:
    deep: Any = 1
    for _ in range(digests._DEPTH_MAX + 1):
        deep = [deep]
    assert plain_digest(deep) is None
