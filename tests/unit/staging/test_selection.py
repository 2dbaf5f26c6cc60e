"""Which memory optimizers change, and which optimizers cannot be guarded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from milepost.errors import UsageError
from milepost.staging.selection import Selection, Selector, Spans
from milepost.state.collecting import collect
from milepost.state.flattening import flatten


def _model(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((8, 4), float(number))) for number in range(count)]


def _select(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Selection:
    return Selector(optimizer).select(collect(*flatten(state)))


def test_ranges_that_are_nested_are_all_seen() -> None:
    memory = torch.zeros(100)
    spans = Spans([memory[:100], memory[10:20], memory[50:51]])
    assert spans.held([memory[30:90], memory[99:], memory[50:51], memory[:0]]) == [
        True, True, True, False,
    ]  # fmt: skip
    assert Spans([memory[10:20]]).meet([memory[:11]])
    assert not Spans([memory[10:20]]).meet([memory[:10], memory[20:], memory[15:15]])


def test_strided_tensors_are_measured_from_their_first_to_their_last_element() -> None:
    memory = torch.zeros(10, 10)
    assert Spans([memory[:, 0]]).held([memory[0], memory[:, 0], memory[:9, 0], memory.t()]) == [
        True, True, True, False,
    ]  # fmt: skip


# --- one save after the other -------------------------------------------------------------------


def _keys(selector: Selector, state: dict[str, Any]) -> list[str]:
    """What a save of the state may copy late."""
    items = collect(*flatten(state))
    return [items.keys[item] for item in sorted(selector.select(items).items)]


def test_a_parameter_that_has_moved_away_from_the_state_is_noticed() -> None:
    parameters = _model(2)
    selector = Selector(torch.optim.SGD(parameters, lr=1))
    state = {"p0": parameters[0].detach(), "p1": parameters[1].detach()}
    assert _keys(selector, state) == _keys(selector, state) == ["p0", "p1"]
    parameters[1].data = parameters[1].data.clone()
    with pytest.raises(UsageError, match="parameter 1 of SGD"):
        _keys(selector, state)
    assert _keys(selector, {**state, "p1": parameters[1].detach()}) == ["p0", "p1"]


def test_an_interrupt_leaves_no_answer_to_another_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = _model(2)
    selector = Selector(torch.optim.SGD(parameters, lr=1))
    model = {"p0": parameters[0].detach(), "p1": parameters[1].detach()}
    assert _keys(selector, {**model, "b": torch.zeros(2)}) == ["p0", "p1"]
    state = {"b": torch.zeros(2), **model}

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Spans, "cover", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _keys(selector, state)
    assert _keys(selector, state) == ["p0", "p1"]


def test_memory_that_an_optimizer_no_longer_holds_is_noticed() -> None:
    memory = torch.zeros(10)
    parameter = nn.Parameter(memory)
    selector = Selector(torch.optim.SGD([parameter], lr=1))
    for _ in range(2):
        assert _keys(selector, {"w": parameter.detach(), "tail": memory[4:]}) == ["w", "tail"]
    parameter.data = memory[:4]  # where it was, and shorter
    for _ in range(2):
        assert _keys(selector, {"w": parameter.detach(), "tail": memory[4:]}) == ["w"]
    views = {"head": memory[:4], "tail": memory[4:]}
    for data in (memory, memory[:4]):  # seen in nothing of the state
        parameter.data = data
        held = ["head", "tail"] if data is memory else ["head"]
        assert _keys(selector, views) == held
    parameter.data = memory[::2]  # as far as before, and with gaps
    for _ in range(2):
        assert _keys(selector, {"w": parameter.detach()[:4], "odd": memory[1:2]}) == []


@pytest.mark.parametrize("is_strided", [False, True])
def test_state_that_is_replaced_or_comes_later_is_noticed(is_strided: bool) -> None:
    [parameter] = _model(1)
    optimizer = torch.optim.SGD([parameter], lr=1, momentum=0.9)
    selector = Selector(optimizer)
    model = {"w": parameter.detach()}
    assert _keys(selector, {**model, "optimizer": optimizer}) == ["w"]
    shape = (4, 8) if is_strided else (8, 4)
    momentum = torch.zeros(0)
    for _ in range(3):
        momentum = torch.zeros(shape)
        optimizer.state[parameter]["momentum_buffer"] = momentum.t() if is_strided else momentum
        buffer = {"buffer": momentum[1:]}
        for _ in range(2):
            assert _keys(selector, {**model, "optimizer": optimizer, **buffer}) == [
                "w", "optimizer.state.0.momentum_buffer", "buffer",
            ]  # fmt: skip
    buffer = {"buffer": momentum.clone()}
    assert _keys(selector, {**model, "optimizer": optimizer, **buffer})[-1] != "buffer"


# --- refused by name ----------------------------------------------------------------------------


class Foreign:
    def step(self) -> None: ...


class Wrapper(torch.optim.Optimizer):
    """As some trainers' libraries do it: an Optimizer that never calls its base."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda sgd: None, "needs optimizer="),
        (lambda sgd: [], "is empty"),
        (lambda sgd: Foreign(), "a Foreign, which is not a torch.optim.Optimizer"),
        (lambda sgd: [sgd, Foreign()], "a Foreign, which is not a torch.optim.Optimizer"),
        (lambda sgd: Wrapper(sgd), "the step of Wrapper does not run torch's hooks"),
    ],
)
def test_an_optimizer_that_does_not_announce_its_steps_is_refused(
    make: Callable[[torch.optim.Optimizer], Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        Selector(make(torch.optim.SGD(_model(1), lr=1)))
    assert caught.value.hint


def test_a_parameter_that_is_not_in_the_state_is_refused() -> None:
    parameters = _model(2)
    optimizer = torch.optim.SGD(parameters, lr=1)
    with pytest.raises(UsageError, match=r"parameter 1 of SGD, of shape \(8, 4\), is not in the"):
        _select(optimizer, {"p0": parameters[0].detach(), "p1": parameters[1].detach().clone()})


def test_a_step_inside_backward_is_refused() -> None:
    parameters = _model(2)
    parameters[1].register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(parameters, lr=1)
    with pytest.raises(UsageError, match="parameter 1 of SGD has a post-accumulate-grad hook"):
        _select(optimizer, {str(at): each for at, each in enumerate(parameters)})


def test_a_capturable_optimizer_is_refused() -> None:
    parameters = _model(1)
    optimizer = torch.optim.AdamW(parameters, capturable=True)
    with pytest.raises(UsageError, match="AdamW is capturable"):
        _select(optimizer, {str(at): each for at, each in enumerate(parameters)})
