"""Samples of a copy: compared bit for bit, whatever the type and the strides."""

from __future__ import annotations

import pytest
import torch

from milepost.staging.sampling import Sampler


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128, torch.float8_e5m2],
    ids=str,
)
def test_samples_compare_bits_whatever_the_type_and_the_strides(dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (6, 5, 4)).to(dtype)
    sources = [raw, raw.transpose(0, 2), raw[::2, 1:, :3], raw[0, 0, 0], raw[:0]]
    sources = [source for source in sources if source.numel()]
    image, payloads_at = b"", []
    for source in sources:
        payloads_at.append(len(image))
        data = source.contiguous().reshape(-1).view(torch.uint8)
        image += bytes(data.tolist()).ljust(-(-data.numel() // 64) * 64, b"\0")
    sizes = [tuple(each.shape) for each in sources]
    sampler = Sampler(sizes, [dtype] * len(sources), payloads_at)
    sampler.read(sources)
    held = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    assert sampler.differing(held) == []
    held[payloads_at[1]] ^= 1
    assert sampler.differing(held) == [1]
    sampler.read(sources)
    held[payloads_at[1]] ^= 1
    assert sampler.differing(held) == []


def test_conjugate_and_negative_views_are_compared_as_they_are_read() -> None:
    raw = torch.randn(6, 5, dtype=torch.complex64)
    sources = [raw, raw.conj(), raw.mH, raw.real, raw.conj().imag]
    image, payloads_at = b"", []
    for source in sources:
        payloads_at.append(len(image))
        data = source.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        image += bytes(data.tolist()).ljust(-(-data.numel() // 64) * 64, b"\0")
    sizes = [tuple(each.shape) for each in sources]
    sampler = Sampler(sizes, [each.dtype for each in sources], payloads_at)
    sampler.read(sources)
    held = torch.frombuffer(bytearray(image), dtype=torch.uint8)
    assert sampler.differing(held) == []
    for index in (1, 2, 4):
        held[payloads_at[index]] ^= 1
    assert sampler.differing(held) == [1, 2, 4]


def test_equal_nans_are_no_difference() -> None:
    source = torch.full((7,), float("nan"))
    sampler = Sampler([(7,)], [torch.float32], [0])
    sampler.read([source])
    assert sampler.differing(source.view(torch.uint8)) == []
