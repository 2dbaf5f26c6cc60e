"""Stock torch reads everything that one rank commits bit for bit, as from its own checkpoint."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.integration import states
from tests.integration.cluster import Rank, judge, nodes, run_ranks
from tests.integration.stagings import STAGINGS, opened

WITHOUT_STOCK = frozenset({"many", "subclass"})
"""Compared with the live state only: stock torch takes seconds to save many tensors, and saves a
tensor of a subclass as such, which it then refuses to load.
"""


NESTED = ["keys", "alignment", "nothing", "only_objects", "many"]
"""States that hold plain dicts, lists, tensors and objects, and so need no template."""


class Run(NamedTuple):
    """The results of this module's one run."""

    root: Path
    expected: dict[str, dict[str, Any]]
    """What each state held when it was saved."""
    errors: dict[str, str]
    """Tracebacks of the saves that failed."""
    resumed: dict[str, Any]
    """Results of runs that went on, and of runs resumed from checkpoints."""
    quantized: tuple[Any, Any]
    """A quantised tensor as it was, and as stock torch reads it."""
    ours: dict[str, states.Reading]
    stock: dict[str, states.Reading]


def save_all(rank: Rank) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    expected, errors = {}, {}
    with opened(rank) as ck:
        for step, name in enumerate(states.SINGLE):
            try:
                state = states.make(name)
                expected[name] = states.expected(state)
                ck.save(step, state, checkpoint_id=name).wait(60)
                if name not in WITHOUT_STOCK:
                    dcp.save(state, checkpoint_id=rank.root.parent / "stock" / name, no_dist=True)
            except Exception:
                errors[name] = traceback.format_exc()
        quantized = torch.quantize_per_channel(
            torch.randn(4, 3), torch.rand(4) + 0.1, torch.arange(4), 0, torch.qint8
        )
        ck.save(100, {"q": quantized}, checkpoint_id="quantized").wait(60)
        resumed = _resume(ck)
    return {
        "expected": expected,
        "errors": errors,
        "resumed": resumed,
        "quantized": _parts(quantized),
    }


def _resume(ck: Any) -> dict[str, Any]:
    """Train for a step, and do the same from the checkpoint in a fresh model; return both
    results.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    told: dict[str, Any] = {}
    for kind in ("adamw", "sgd"):
        model, optimizer = states.trained(kind)
        states.one_step(model, optimizer)
        told[kind] = states.expected({"model": model, "optimizer": optimizer})
        model, optimizer = states.trained(kind, seed=99)
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        report = ck.load(state, step=list(states.SINGLE).index(kind))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        states.one_step(model, optimizer)
        told[f"{kind} resumed"] = states.expected({"model": model, "optimizer": optimizer})
        told[f"{kind} unexpected"] = report.unexpected
    # A fresh optimizer has no moments to load into: stock drops them without a word.
    state = {"sgd": torch.optim.SGD(states.Network().parameters(), momentum=0.9).state_dict()}
    report = ck.load(state, step=list(states.SINGLE).index("raw_optimizer"), partial=True)
    told["added"] = report.added
    told["bare sgd"] = states.describe(states.trained("sgd")[1].state_dict())
    told["bare sgd resumed"] = states.describe(state["sgd"])
    for name in NESTED:
        state = states.make(name)
        told[f"{name} nested"] = states.describe(state)
        report = ck.load(None, step=list(states.SINGLE).index(name))
        told[f"{name} without a template"] = states.describe(report.state)
    return told


def _parts(quantized: torch.Tensor) -> Any:
    scales, zeros = quantized.q_per_channel_scales(), quantized.q_per_channel_zero_points()
    return states.describe([quantized.int_repr(), scales, zeros, quantized.q_per_channel_axis()])


def read_quantized(_rank: int, _world: int, path: str) -> Any:
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {"q": None}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return _parts(state["q"])


@pytest.fixture(scope="module", params=STAGINGS)
def run(request: pytest.FixtureRequest, module_folder: Path) -> Run:
    staging = request.param
    root = module_folder / staging / "checkpoints"
    with nodes(module_folder / staging, 1, root) as (node,):
        (told,) = run_ranks(save_all, root, [node], staging=staging)
    saved = [name for name in states.SINGLE if name not in told["errors"]]
    paths = {name: str(root / name) for name in saved}
    (ours,) = judge(states.read_all, 1, paths)
    stock_paths = {
        name: str(root.parent / "stock" / name) for name in saved if name not in WITHOUT_STOCK
    }
    (stock,) = judge(states.read_all, 1, stock_paths)
    (quantized,) = judge(read_quantized, 1, str(root / "quantized"))
    return Run(
        root,
        told["expected"],
        told["errors"],
        told["resumed"],
        (told["quantized"], quantized),
        ours,
        stock,
    )


@pytest.mark.parametrize("name", states.SINGLE)
def test_stock_torch_reads_every_key_bit_for_bit(run: Run, name: str) -> None:
    assert name not in run.errors, run.errors[name]
    assert run.expected[name] == run.ours[name].values


@pytest.mark.parametrize("name", [name for name in states.SINGLE if name not in WITHOUT_STOCK])
def test_values_and_index_are_those_of_a_stock_checkpoint(run: Run, name: str) -> None:
    assert name not in run.errors, run.errors[name]
    assert run.stock[name].values == run.ours[name].values
    assert run.stock[name].meaning == run.ours[name].meaning


def test_a_quantised_tensor_comes_back_with_its_scales(run: Run) -> None:
    saved, read = run.quantized
    assert saved == read


def test_every_dtype_is_stored_or_known_to_be_refused() -> None:
    refused = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    refused |= {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    refused |= {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}  # stock refuses these too
    there = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {str(dtype).removeprefix("torch.") for dtype in there} == refused | set(states.DTYPES)


def test_a_view_does_not_drag_its_storage_along(run: Run) -> None:
    assert [4096] == [each.stat().st_size for each in (run.root / "window").glob("*.distcp")]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_run_resumed_from_a_checkpoint_takes_the_same_next_step(run: Run, kind: str) -> None:
    assert run.resumed[kind] == run.resumed[f"{kind} resumed"]
    assert () == run.resumed[f"{kind} unexpected"]


def test_moments_that_a_fresh_optimizer_has_no_place_for_yet_are_restored(run: Run) -> None:
    momentum = tuple(f"sgd.state.{at}.momentum_buffer" for at in range(5))
    assert momentum == run.resumed["added"]
    assert run.resumed["bare sgd"] == run.resumed["bare sgd resumed"]


@pytest.mark.parametrize("name", NESTED)
def test_without_a_template_a_state_comes_back_with_its_keys_and_nesting(
    run: Run, name: str
) -> None:
    assert run.resumed[f"{name} nested"] == run.resumed[f"{name} without a template"]


def test_no_class_of_ours_is_in_an_index(run: Run) -> None:
    for name in run.ours:
        assert b"milepost" not in (run.root / name / ".metadata").read_bytes()
