"""What may be copied late, the guard, the order on a device's queues, and copies found torn."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from milepost.errors import MilepostError, UsageError
from milepost.memory.arena import Slot
from milepost.staging import copying, division
from milepost.staging.behind import BehindFilling, BehindStaging
from milepost.staging.copying import copy_with_one_thread
from milepost.staging.division import EARLY_MAX
from milepost.staging.pinning import NoPinner
from milepost.staging.sampling import Sampler
from milepost.staging.stager import StagedImage, Stager
from milepost.staging.streams import HostStreams, Streams, default_streams
from milepost.state.collecting import collect
from milepost.state.fingerprint import fingerprint
from milepost.state.flattening import flatten
from milepost.state.items import Items
from milepost.wire.messages import SaveRef

END_S = 20.0
"""How long a copy of these sizes may take on a busy machine."""


class Bench:
    """One stager and one BehindStaging, and what came of the last copy."""

    def __init__(
        self, optimizer: Any, streams: Callable[[torch.device], Streams] = default_streams
    ) -> None:
        self.staging = BehindStaging(optimizer, streams)
        self.staging.arm()
        self.stager = Stager("job", 1, 0, pinner=NoPinner())
        self.errors: list[MilepostError | None] = []
        self.waited_s: list[float] = []
        self.slot: Slot | None = None
        self.said_on: list[threading.Thread] = []
        self.keys: list[str] = []

    # --- as the staging's listener

    def staged(self, image: StagedImage) -> None:
        self.errors.append(None)

    def failed(self, error: MilepostError) -> None:
        self.errors.append(error)

    def waited(self, waited_s: float) -> None:
        self.waited_s.append(waited_s)

    def say(self) -> bytes:
        self.said_on.append(threading.current_thread())
        return b"said"

    # --- as a Checkpointer

    def save(self, state: dict[str, Any], *, device_keys: str = "") -> dict[str, list[str]]:
        """Start a save; return how each key is copied. Keys that begin with `device_keys`, if that
        is given, are taken as being on a device.
        """
        self.staging.settle()
        flat, paths = flatten(state)
        items = collect(flat, paths)
        if device_keys:
            items.devices = [
                "cuda" if key.startswith(device_keys) else device
                for key, device in zip(items.keys, items.devices, strict=True)
            ]
        return self._start(items)

    def prepare(self, state: dict[str, Any]) -> None:
        items = collect(*flatten(state))
        self.stager.lay_out(items, range(len(items)), fingerprint(items))
        self.staging.choose(items).prepare(self.stager)

    def _start(self, items: Items) -> dict[str, list[str]]:
        self.stager.lay_out(items, range(len(items)), fingerprint(items))
        filling = self.staging.choose(items)
        layout = self.stager.layout
        assert layout is not None
        self.keys = [items.keys[item] for item in layout.tensors.items]
        self.slot = self.stager.free_slots()[0]
        ref = SaveRef(job="job", save_id="1-1", step=1, name="step_1")
        assert isinstance(filling, BehindFilling)
        chosen = layout.tensors.items
        split = self.staging.division.split(filling._selection, items, chosen)
        assert not filling.fill(self.stager, self.slot, ref, None, self, self.say)
        return {
            kind: [self.keys[position] for position in positions]
            for kind, positions in split._asdict().items()
        }

    def image(self) -> dict[str, torch.Tensor]:
        """What the last save's image holds, by key, once its copy has ended."""
        self.staging.settle()
        assert self.slot is not None
        return {
            key: torch.tensor([]) if target is None else target.clone()
            for key, target in zip(self.keys, self.stager.targets(self.slot), strict=True)
        }

    def release(self) -> None:
        assert self.slot is not None
        self.slot.release()

    def close(self) -> None:
        self.staging.close()
        self.stager.close()


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBench]:
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(tmp_path))
    made: list[Bench] = []

    def make(*arguments: Any) -> Bench:
        made.append(Bench(*arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()


class GatedStreams(HostStreams):
    """Host memory, with a gate before every piece of the copy's work."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.is_at_gate = threading.Event()
        self.after: Callable[[], None] = lambda: None
        """Called after each piece."""

    def give(self, work: Callable[[], None]) -> None:
        self.is_at_gate.set()
        assert self.gate.wait(END_S)
        work()
        self.after()


@pytest.fixture
def gated() -> Iterator[GatedStreams]:
    streams = GatedStreams()
    yield streams
    streams.gate.set()


def _model(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((8, 4), float(number))) for number in range(count)]


def _step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _state(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    named = {f"p{number}": each for number, each in enumerate(parameters)}
    return {"model": named, "optimizer": optimizer.state_dict()["state"], "count": 3}


def _begun(
    bench: MakeBench, streams: Streams
) -> tuple[list[nn.Parameter], torch.optim.Optimizer, Bench]:
    """Begin a save whose copy goes by these streams."""
    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made = bench(optimizer, lambda _: streams)
    made.save(_state(parameters, optimizer))
    return parameters, optimizer, made


# --- which memory -------------------------------------------------------------------------------


def test_parameters_and_optimizer_state_are_copied_late_and_all_else_at_once(
    bench: MakeBench,
) -> None:
    parameters = _model(2)
    optimizer = torch.optim.AdamW(parameters)
    _step(optimizer, parameters)
    made = bench(optimizer)
    found = made.save(
        {**_state(parameters, optimizer), "buffer": torch.ones(3), "e": torch.ones(0)}
    )
    assert found["now"] == ["buffer", "e"]
    assert found["cloned"] == []
    assert {"model.p0", "model.p1", "optimizer.0.step", "optimizer.1.exp_avg_sq"} <= set(
        found["guarded"]
    )
    image = made.image()
    assert made.errors == [None]
    assert torch.equal(parameters[1], image["model.p1"])
    assert torch.equal(optimizer.state[parameters[0]]["exp_avg"], image["optimizer.0.exp_avg"])
    assert torch.equal(torch.ones(3), image["buffer"])


def test_what_a_copied_image_says_of_replicas_is_asked_for_on_the_copys_thread(
    bench: MakeBench,
) -> None:
    model = nn.Linear(3, 3)
    run = bench(torch.optim.SGD(model.parameters()))
    run.save(model.state_dict())
    run.image()
    assert run.slot is not None
    assert b"said" == run.slot.record().digests
    (thread,) = run.said_on
    assert thread is not threading.current_thread()


def test_a_learning_rate_that_is_a_tensor_is_copied_at_once(bench: MakeBench) -> None:
    parameters = _model(1)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(parameters, lr=rate, foreach=False)
    found = bench(optimizer).save({"p": parameters[0].detach(), "rate": rate})
    assert found == {"now": ["rate"], "guarded": ["p"], "cloned": []}


def test_state_nested_in_lists_is_found(bench: MakeBench) -> None:
    parameters = _model(1)
    optimizer = torch.optim.LBFGS(parameters, max_iter=3, line_search_fn=None)

    def closure() -> float:
        optimizer.zero_grad()
        loss = ((parameters[0] + torch.arange(4)) ** 4).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = bench(optimizer).save(_state(parameters, optimizer))
    assert any(key.startswith("optimizer.0.old_dirs.") for key in found["guarded"])
    assert found["now"] == []


def test_views_of_a_flat_parameter_are_guarded_and_what_reaches_beyond_it_is_not(
    bench: MakeBench,
) -> None:
    memory = torch.arange(20.0)
    flat = nn.Parameter(memory[:10])
    optimizer = torch.optim.SGD([flat], lr=1)
    state = {"head": memory[:4], "tail": memory[4:10], "beyond": memory[8:12], "all": memory}
    found = bench(optimizer).save(state)
    assert found == {"now": ["beyond", "all"], "guarded": ["head", "tail"], "cloned": []}


def test_what_prepare_made_serves_every_save(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made = bench(optimizer)
    made.prepare(_state(parameters, optimizer))

    def unexpected(*arguments: Any) -> Any:
        raise AssertionError("a save makes again what prepare() has made")

    monkeypatch.setattr(division, "Sampler", unexpected)
    monkeypatch.setattr(Sampler, "_make_rows", unexpected)
    for step in range(3):
        _step(optimizer, parameters)
        made.save(_state(parameters, optimizer))
        held = made.image()
        assert all(torch.equal(held[f"model.p{at}"], each) for at, each in enumerate(parameters))
        assert made.errors == [None] * (step + 1)
        made.release()


# --- the guard ----------------------------------------------------------------------------------


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1, momentum=0.5)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "sgd foreach": lambda parameters: torch.optim.SGD(parameters, lr=1, foreach=True),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=1, momentum=0.5, fused=True),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1, fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_waits_for_the_copy(bench: MakeBench, gated: GatedStreams, kind: str) -> None:
    parameters = _model()
    optimizer = OPTIMIZERS[kind](parameters)
    # Runs before the guard, for it is registered before it.
    opener = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: gated.gate.set())
    try:
        _step(optimizer, parameters)
        gated.gate.clear()
        made = bench(optimizer, lambda _: gated)
        before = {f"model.p{n}": each.detach().clone() for n, each in enumerate(parameters)}
        pieces: list[int] = []
        gated.after = lambda: pieces.append(1)
        seen: list[int] = []
        # Runs after the guard: instance hooks follow global ones.
        optimizer.register_step_pre_hook(lambda *_: seen.append(len(pieces)))
        made.save(_state(parameters, optimizer))
        _step(optimizer, parameters)
    finally:
        opener.remove()
    image = made.image()
    assert made.errors == [None]
    assert all(torch.equal(before[key], image[key]) for key in before)
    assert seen[0] >= 2  # the copies and the late samples
    assert not torch.equal(before["model.p1"], parameters[1])


def test_accumulation_steps_without_an_optimizer_step_do_not_wait(
    bench: MakeBench, gated: GatedStreams
) -> None:
    parameters = _model()
    optimizer = _sgd(parameters)
    made = bench(optimizer, lambda _: gated)
    made.save(_state(parameters, optimizer))
    for _ in range(3):
        torch.stack([(each**2).sum() for each in parameters]).sum().backward()  # type: ignore[no-untyped-call]
    assert made.errors == []
    gated.gate.set()
    optimizer.step()
    assert torch.equal(torch.full((8, 4), 2.0), made.image()["model.p2"])


def test_a_closure_runs_after_the_guard(bench: MakeBench, gated: GatedStreams) -> None:
    parameters = _model(1)
    optimizer = torch.optim.LBFGS(parameters, max_iter=2)
    # It must come first.
    opener = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: gated.gate.set())
    made = bench(optimizer, lambda _: gated)
    pieces: list[int] = []
    gated.after = lambda: pieces.append(1)
    seen: list[int] = []

    def closure() -> torch.Tensor:
        seen.append(len(pieces))
        optimizer.zero_grad()
        loss = ((parameters[0] - 3) ** 2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    try:
        made.save({"p": parameters[0].detach()})
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    finally:
        opener.remove()
    assert seen[0] >= 2  # the copy and the late samples
    assert torch.equal(torch.zeros(8, 4), made.image()["p"])
    assert made.errors == [None]


def test_another_optimizer_waits_if_it_steps_what_is_copied_and_only_then(
    bench: MakeBench, gated: GatedStreams
) -> None:
    parameters, others = _model(2), _model(1)
    ours = _sgd(parameters)
    made = bench(ours, lambda _: gated)
    made.save(_state(parameters, ours))
    stranger = torch.optim.SGD(others, lr=1)
    _step(stranger, others)  # returns although the gate is shut
    assert made.errors == []
    held: list[int] = []
    copy = made.staging._copy
    assert copy is not None
    copy.hold = lambda: held.append(1)  # type: ignore[method-assign]
    _step(torch.optim.SGD([parameters[1]], lr=0), [parameters[1]])
    assert held == [1]
    gated.gate.set()
    made.staging.settle()
    assert made.errors == [None]


def test_guard_waits_and_tells_how_long(bench: MakeBench, gated: GatedStreams) -> None:
    parameters = _model()
    optimizer = _sgd(parameters)
    made = bench(optimizer, lambda _: gated)
    made.staging.guard()  # nothing to wait for
    made.save(_state(parameters, optimizer))
    opener = threading.Timer(0.02, gated.gate.set)
    opener.start()
    made.staging.guard()
    assert gated.gate.is_set()
    with torch.no_grad():
        parameters[1].add_(10)
    opener.join()
    assert torch.equal(torch.full((8, 4), 1.0), made.image()["model.p1"])
    assert made.errors == [None]
    assert len(made.waited_s) == 1
    assert made.waited_s[0] > 0


def test_the_hook_is_there_once_for_all_and_goes_with_the_last() -> None:
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = len(hooks)
    first, second = (BehindStaging(_sgd(_model(1))) for _ in range(2))
    first.arm()
    second.arm()
    assert len(hooks) == before + 1
    first.close()
    assert len(hooks) == before + 1
    second.close()
    assert len(hooks) == before


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_step_waits_for_the_copy(bench: MakeBench, gated: GatedStreams) -> None:
    parameters = _model()
    optimizer = torch.optim.AdamW(parameters, lr=1, foreach=True)
    compiled = torch.compile(optimizer.step, backend="eager")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    compiled()  # before the hook is there
    opener = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: gated.gate.set())
    try:
        made = bench(optimizer, lambda _: gated)
        for _ in range(2):
            gated.gate.clear()
            before = parameters[1].detach().clone()
            made.save(_state(parameters, optimizer))
            compiled()
            assert torch.equal(before, made.image()["model.p1"])
            assert not torch.equal(before, parameters[1])
            made.release()
    finally:
        opener.remove()
    assert made.errors == [None, None]


# --- torn copies --------------------------------------------------------------------------------


def test_a_change_of_everything_before_the_copy_began_is_found(
    bench: MakeBench, gated: GatedStreams
) -> None:
    parameters, _, made = _begun(bench, gated)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1)
    gated.gate.set()
    made.staging.settle()
    (error,) = made.errors
    assert error is not None
    assert error.code == "torn-snapshot"
    assert "3 of 3 overlapped tensors" in error.message
    assert "'model.p0' (version counter 0 at save(), 1 after the copy) first" in error.message


def test_a_change_of_one_tensor_after_its_copy_is_found_and_the_next_save_is_sound(
    bench: MakeBench, gated: GatedStreams
) -> None:
    parameters = _model(2 * EARLY_MAX)
    optimizer = torch.optim.SGD(parameters, lr=1)
    made = bench(optimizer, lambda _: gated)

    def change() -> None:
        gated.after = lambda: None
        with torch.no_grad():
            parameters[3].view(-1)[-1] = 77  # only its last element

    gated.after = change
    gated.gate.set()
    made.save(_state(parameters, optimizer))
    made.staging.settle()
    (error,) = made.errors
    assert error is not None
    assert "1 of 256 overlapped tensors changed while they were copied, 'model.p3'" in str(error)
    made.release()
    made.save(_state(parameters, optimizer))
    assert made.image()["model.p3"].view(-1)[-1] == 77
    assert made.errors[1:] == [None]


def test_a_storage_replaced_before_its_copy_is_found(bench: MakeBench, gated: GatedStreams) -> None:
    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made, may_begin = bench(optimizer, lambda _: gated), threading.Event()
    made.staging._executor.submit(may_begin.wait)
    made.save(_state(parameters, optimizer))
    parameters[2].data = parameters[2].data.clone().add_(1)
    may_begin.set()
    gated.gate.set()
    made.staging.settle()
    assert [error and error.code for error in made.errors] == ["torn-snapshot"]


def test_a_storage_replaced_later_is_copied_as_it_was(
    bench: MakeBench, gated: GatedStreams
) -> None:
    parameters, _, made = _begun(bench, gated)
    assert gated.is_at_gate.wait(END_S)
    parameters[2].data = parameters[2].data.clone().add_(1)
    gated.gate.set()
    assert torch.equal(torch.full((8, 4), 2.0), made.image()["model.p2"])
    assert made.errors == [None]


def test_a_storage_that_is_freed_before_its_copy_is_found(bench: MakeBench) -> None:
    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made, may_begin = bench(optimizer), threading.Event()
    made.staging._executor.submit(may_begin.wait)
    made.save(_state(parameters, optimizer))
    parameters[1].untyped_storage().resize_(0)
    may_begin.set()
    made.staging.settle()
    assert [error and error.code for error in made.errors] == ["torn-snapshot"]


def test_a_failure_of_the_copy_ends_the_save_and_lets_the_guard_go(bench: MakeBench) -> None:
    class Broken(HostStreams):
        def give(self, work: Callable[[], None]) -> None:
            raise RuntimeError("no")

    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made = bench(optimizer, lambda _: Broken())
    made.save(_state(parameters, optimizer))
    made.staging.guard()
    made.staging.settle()
    (error,) = made.errors
    assert error is not None
    assert error.code == "internal"
    assert "RuntimeError('no')" in error.message


def test_an_image_that_cannot_be_sealed_fails_its_save_and_gives_the_slot_back(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> StagedImage:
        raise RuntimeError("no")

    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made = bench(optimizer)
    monkeypatch.setattr(Stager, "seal", refuse)
    made.save(_state(parameters, optimizer))
    made.staging.settle()
    (error,) = made.errors
    assert error is not None
    assert "internal" == error.code
    assert "could not be sealed: RuntimeError('no')" in error.message
    assert 2 == len(made.stager.free_slots())


def test_a_step_waits_although_another_thread_waits_for_the_copy_too(
    bench: MakeBench, gated: GatedStreams
) -> None:
    parameters, optimizer, made = _begun(bench, gated)
    settling = threading.Thread(target=made.staging.settle)
    settling.start()
    stepping = threading.Thread(target=_step, args=(optimizer, parameters))
    stepping.start()
    stepping.join(0.3)
    assert stepping.is_alive(), "the step has overtaken the copy"
    gated.gate.set()
    for thread in (stepping, settling):
        thread.join(END_S)
    assert made.errors == [None]
    assert torch.equal(torch.zeros(8, 4), made.image()["model.p0"])


@pytest.mark.parametrize("is_shut", [False, True])
def test_without_a_thread_the_copy_is_made_at_once(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, is_shut: bool
) -> None:
    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads = torch.get_num_threads()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        made = bench(optimizer)
        if is_shut:
            made.staging._executor.shutdown()
        made.save(_state(parameters, optimizer))
        assert made.errors == [None]
    assert threads == torch.get_num_threads()
    _step(optimizer, parameters)
    assert torch.equal(torch.zeros(8, 4), made.image()["model.p0"])
    made.release()
    # By a thread again; the executor's also comes by the copy that was made.
    made.save(_state(parameters, optimizer))
    assert torch.equal(parameters[0], made.image()["model.p0"])
    assert made.errors == [None, None]


def test_an_interrupt_of_a_copy_without_a_thread_goes_through(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(HostStreams):
        def give(self, work: Callable[[], None]) -> None:
            raise KeyboardInterrupt

    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made = bench(optimizer, lambda _: Interrupted())
    made.staging._executor.shutdown()
    with pytest.raises(KeyboardInterrupt):
        made.save(_state(parameters, optimizer))
    assert ["internal"] == [error and error.code for error in made.errors]
    _step(optimizer, parameters)


def test_whoever_is_told_of_the_end_may_close(bench: MakeBench) -> None:
    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made, told = bench(optimizer), threading.Event()

    class Errors(list[Any]):
        def append(self, error: Any) -> None:
            made.staging.settle()
            made.staging.close()
            told.set()

    made.errors = Errors()
    made.save(_state(parameters, optimizer))
    assert told.wait(END_S)


def test_nothing_of_the_state_is_kept_once_it_is_copied(bench: MakeBench) -> None:
    parameters = _model()
    optimizer = torch.optim.AdamW(parameters)
    _step(optimizer, parameters)
    made = bench(optimizer)
    made.save(_state(parameters, optimizer))
    made.image()
    moments = [weakref.ref(entry["exp_avg"]) for entry in optimizer.state.values()]
    for entry in optimizer.state.values():
        entry["exp_avg"] = entry["exp_avg"].clone()
    # The thread lets go of the copy itself a moment after it has ended.
    until_s = time.monotonic() + END_S
    while any(each() is not None for each in moments) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert [None] * 3 == [each() for each in moments]


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_interrupt_while_a_copy_begins_keeps_nobody_for_ever(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    made = bench(optimizer)
    submit = ThreadPoolExecutor.submit

    def interrupted(pool: ThreadPoolExecutor, task: Callable[[], None]) -> None:
        if is_begun:
            submit(pool, task)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ThreadPoolExecutor, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.save(_state(parameters, optimizer))
    made.staging.guard()
    _step(optimizer, parameters)
    made.staging.settle()
    assert made.slot is not None
    made.slot.release()
    made.save(_state(parameters, optimizer))
    assert torch.equal(parameters[0], made.image()["model.p0"])


def test_a_forked_child_is_not_held_by_its_parents_copy(
    bench: MakeBench, gated: GatedStreams
) -> None:
    _, _, made = _begun(bench, gated)
    child = os.fork()
    if not child:
        made.staging.guard()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    assert 7 == os.waitstatus_to_exitcode(status)
    gated.gate.set()


def test_what_lies_between_the_elements_of_a_parameter_is_copied_at_once(bench: MakeBench) -> None:
    base = torch.zeros(4, 6)
    parameter, between = nn.Parameter(base[:, :4]), base[:-1, 4:]
    optimizer = torch.optim.SGD([parameter], lr=1)
    made = bench(optimizer)
    found = made.save({"p": parameter, "between": between, "whole": torch.ones(2)})
    assert [] == found["guarded"]
    assert {"p", "between", "whole"} == set(found["now"])


def test_the_copying_thread_uses_no_other_and_leaves_the_trainers_alone() -> None:
    mine = torch.get_num_threads()
    seen = []

    def look() -> None:
        copy_with_one_thread()
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [1]
    assert mine == torch.get_num_threads()


def test_many_tensors_and_bytes_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 100)
    monkeypatch.setattr(copying, "CHUNK_TENSORS", 3)
    sizes = [1, 1, 1, 1, 25, 30, 1]
    tensors = [torch.zeros(size) for size in sizes]
    chunks = [out_of for _, out_of in copying._chunks(tensors, tensors)]
    assert [tensors[:3], tensors[3:5], tensors[5:6], tensors[6:]] == chunks


# --- queues of a device -------------------------------------------------------------------------


class Event:
    """A place in a queue; passed when the queue has come by."""

    def __init__(self) -> None:
        self.passed = threading.Event()


Entry = tuple[str, Any]


class FakeDevice(Streams):
    """A device that does nothing until it is told to, and then as badly as its streams allow.

    Tensors of host memory stand for its memory. The compute stream is what the trainer fills.
    """

    gathers = True

    def __init__(self) -> None:
        self.compute: deque[Entry] = deque()
        self.side: deque[Entry] = deque()
        self.kept: list[int] = []
        self._lock = threading.Lock()
        self.is_given = threading.Event()
        """The copy has joined: all its work is queued."""

    def launch(self, work: Callable[[], Any]) -> None:
        self.compute.append(("work", work))

    def fork(self) -> None:
        event = Event()
        self.compute.append(("record", event))
        self.side.append(("wait", event))

    def here(self, work: Callable[[], None]) -> None:
        self.launch(work)

    def give(self, work: Callable[[], None]) -> None:
        self.side.append(("work", work))

    def keep(self, tensors: Any) -> None:
        self.kept += [tensor.data_ptr() for tensor in tensors]

    def mark(self) -> Event:
        event = Event()
        self.side.append(("record", event))
        return event

    def hold(self, mark: Event) -> None:
        self.compute.append(("wait", mark))

    def join(self, mark: Event) -> None:
        self.is_given.set()
        assert mark.passed.wait(END_S)

    def run(self, *, compute_first: bool) -> None:
        """Empty both queues, one as far as it gets before the other has its turn."""
        queues = [self.compute, self.side] if compute_first else [self.side, self.compute]
        while any(queues):
            moved = [self._advance(queue) for queue in queues]
            assert any(moved), "the queues wait for each other"

    def _advance(self, queue: deque[Entry]) -> bool:
        has_moved = False
        while queue:
            kind, what = queue[0]
            if kind == "wait" and not what.passed.is_set():
                break
            queue.popleft()
            has_moved = True
            if kind == "work":
                what()
            elif kind == "record":
                what.passed.set()
        return has_moved


def _add(tensor: torch.Tensor) -> Callable[[], None]:
    def add() -> None:
        with torch.no_grad():
            tensor.add_(1)

    return add


@pytest.mark.parametrize("count", [3, 9], ids=["single", "gathered"])
@pytest.mark.parametrize("compute_first", [True, False])
def test_on_a_device_the_streams_wait_and_the_host_does_not(
    bench: MakeBench, compute_first: bool, count: int
) -> None:
    parameters, buffer = _model(count), torch.zeros(4)
    optimizer = torch.optim.SGD(parameters, lr=1)
    device = FakeDevice()
    made = bench(optimizer, lambda _: device)
    for parameter in parameters:
        device.launch(_add(parameter))  # the step before, which the device has not come to yet
    device.launch(_add(buffer))
    state = {"d": {**_state(parameters, optimizer)["model"], "b": buffer}, "host": torch.ones(2)}
    found = made.save(state, device_keys="d.")
    guarded = [f"d.p{number}" for number in range(count)]
    assert found == {"now": ["host"], "guarded": guarded, "cloned": ["d.b"]}
    device.launch(_add(buffer))  # the next forward
    optimizer.step()  # no gradients: only the hook acts
    for parameter in parameters:
        device.launch(_add(parameter))
    assert device.is_given.wait(END_S)
    assert made.errors == []  # nothing ran yet, and nothing is called complete
    assert parameters[2].data_ptr() in device.kept
    device.run(compute_first=compute_first)
    image = made.image()
    assert made.errors == [None]
    for number, parameter in enumerate(parameters):
        assert torch.equal(torch.full((8, 4), number + 1.0), image[f"d.p{number}"])
        assert torch.equal(torch.full((8, 4), number + 2.0), parameter)
    assert torch.equal(torch.ones(4), image["d.b"])
    assert torch.equal(torch.full((4,), 2.0), buffer)


def test_on_a_device_small_tensors_go_in_one_transfer(bench: MakeBench) -> None:
    parameters = _model(500)
    optimizer = torch.optim.SGD(parameters, lr=1)
    device = FakeDevice()
    made = bench(optimizer, lambda _: device)
    for generation in range(2):
        made.save(_state(parameters, optimizer), device_keys="model.")
        assert device.is_given.wait(END_S)
        # The gathering, the transfer, the samples and the fetching of both kinds of them.
        assert 5 == [kind for kind, _ in device.side].count("work")
        device.run(compute_first=True)
        for number, parameter in enumerate(parameters):
            held = made.image()[f"model.p{number}"] if number in (0, 250, 499) else None
            assert held is None or torch.equal(parameter, held)
            _add(parameter)()
        made.release()
        device.is_given.clear()
        assert made.errors == [None] * (generation + 1)


def test_on_a_device_a_step_that_nobody_announced_is_found(bench: MakeBench) -> None:
    parameters = _model()
    optimizer = torch.optim.SGD(parameters, lr=1)
    device = FakeDevice()
    made = bench(optimizer, lambda _: device)
    made.save(_state(parameters, optimizer), device_keys="model.")
    device.launch(_add(parameters[1]))
    assert device.is_given.wait(END_S)
    device.run(compute_first=True)
    made.staging.settle()
    assert [error and error.code for error in made.errors] == ["torn-snapshot"]


def test_host_tensors_are_copied_at_once_beside_a_device(bench: MakeBench) -> None:
    parameters = _model(1)
    optimizer = torch.optim.AdamW(parameters)
    _step(optimizer, parameters)
    device = FakeDevice()
    made = bench(optimizer, lambda _: device)
    found = made.save(_state(parameters, optimizer), device_keys="model.")
    assert found["guarded"] == ["model.p0"]
    assert "optimizer.0.step" in found["now"]
    assert device.is_given.wait(END_S)
    device.run(compute_first=True)
    made.staging.settle()
    assert made.errors == [None]


def test_clones_take_no_more_device_memory_than_is_allowed(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "CLONE_BYTES_MAX", 100)
    parameters = _model(1)
    optimizer = torch.optim.SGD(parameters, lr=1)
    staging = bench(optimizer, lambda _: FakeDevice()).staging
    flat, paths = flatten({"p": parameters[0], "a": torch.zeros(16), "b": torch.zeros(16)})
    items = collect(flat, paths)
    items.devices = ["cuda"] * 3
    filling = staging.choose(items)
    assert isinstance(filling, BehindFilling)
    split = staging.division.split(filling._selection, items, range(3))
    assert split == ([2], [0], [1])


def test_a_device_whose_queues_are_not_known_is_refused() -> None:
    with pytest.raises(UsageError, match="a parameter is on meta"):
        default_streams(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fused", [False, True])
def test_on_cuda_every_image_holds_one_generation(bench: MakeBench, fused: bool) -> None:
    parameters = [nn.Parameter(torch.zeros(1 << 22, device="cuda")) for _ in range(8)]
    optimizer = torch.optim.SGD(parameters, lr=-1, fused=fused)
    buffer = torch.zeros(1 << 20, device="cuda")
    made = bench(optimizer)
    for generation in range(10):
        made.save({**_state(parameters, optimizer), "b": buffer})
        buffer.add_(1)
        _step(optimizer, parameters)
        image = made.image()
        assert made.errors[-1] is None
        values = {float(end) for each in image.values() for end in torch.aminmax(each)}
        assert {float(generation)} == values
        made.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_an_unannounced_step_is_found(bench: MakeBench) -> None:
    parameters = [nn.Parameter(torch.zeros(1 << 24, device="cuda")) for _ in range(8)]
    optimizer = torch.optim.SGD(parameters, lr=1)
    made = bench(optimizer)
    made.save(_state(parameters, optimizer))
    with torch.no_grad():
        torch._foreach_add_(list[torch.Tensor](parameters), 1)
    made.staging.settle()
    assert [error and error.code for error in made.errors] == ["torn-snapshot"]
