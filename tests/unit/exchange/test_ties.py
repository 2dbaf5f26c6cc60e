"""Tied weights are found by their bytes, and what merely looks alike is left alone."""

from __future__ import annotations

import pytest
import torch

from milepost.exchange.files import StateSource
from milepost.exchange.ties import tied_to

EMBEDDING = torch.arange(200.0).reshape(50, 4)


def ties(state: dict[str, torch.Tensor]) -> dict[str, str]:
    source = StateSource(state)
    return tied_to(source, list(source.tensors), lambda _: None, lambda _: None)


def test_an_output_layer_is_tied_to_the_embedding_that_comes_first() -> None:
    state = {"transformer.wte.weight": EMBEDDING, "lm_head.weight": EMBEDDING.clone()}
    assert {"lm_head.weight": "transformer.wte.weight"} == ties(state)


def test_several_names_are_tied_to_the_first() -> None:
    names = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    assert dict.fromkeys(names[1:], names[0]) == ties(dict.fromkeys(names, EMBEDDING))


@pytest.mark.parametrize(
    "names",
    [
        ("layers.0.linear.weight", "layers.1.linear.weight"),
        ("layers.0.linear1.weight", "layers.0.linear2.weight"),
        ("experts.0.weight", "experts.1.weight"),
        ("model.fc.weight", "average.fc.weight"),
    ],
)
def test_copies_of_a_layer_are_not_tied(names: tuple[str, str]) -> None:
    assert {} == ties(dict.fromkeys(names, EMBEDDING))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(50, 4), torch.ones(50, 4), torch.arange(200.0), torch.tensor(3)],
    ids=["zeros", "ones", "vector", "scalar"],
)  # fmt: skip
def test_what_is_initialised_alike_is_not_tied(tensor: torch.Tensor) -> None:
    assert {} == ties({"norm.weight": tensor, "other.weight": tensor.clone()})


def test_one_bit_makes_another_tensor() -> None:
    other = EMBEDDING.clone()
    other[-1, -1] = -1
    assert {} == ties({"wte.weight": EMBEDDING, "lm_head.weight": other})


def test_another_shape_or_dtype_is_another_tensor() -> None:
    state = {
        "a.weight": EMBEDDING,
        "b.weight": EMBEDDING.reshape(4, 50),
        "c.weight": EMBEDDING.view(torch.int32),
    }
    assert {} == ties(state)
