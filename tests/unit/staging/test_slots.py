"""Slots are waited for while saves hold them, and an interrupt costs one save, not all after it."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.errors import Rejected, SaveFailed
from milepost.format.layout import unpack_table
from milepost.memory.arena import Arena
from milepost.staging import slots
from milepost.staging.pinning import NoPinner
from milepost.staging.slots import Slots
from milepost.staging.stager import StagedImage, Stager
from milepost.state.collecting import collect
from milepost.state.fingerprint import fingerprint
from milepost.state.flattening import flatten
from milepost.wire.messages import SaveRef

END_S = 20.0


def never() -> bool:
    return False


class Bench:
    """Slots over a real stager, as a Checkpointer uses them."""

    def __init__(self, timeout_s: float = END_S) -> None:
        self.changed = threading.Condition()
        self.slots = Slots(
            Stager("job", 1, 3, pinner=NoPinner()), self.changed,
            count=2, timeout_s=timeout_s, who="rank 3",
        )  # fmt: skip
        self.count = 0

    def save(self, size: int = 8, *, may_wait: bool = True) -> StagedImage:
        """Stage a tensor of its own value, and let the daemon hold the slot."""
        self.count += 1
        items = collect(*flatten({"w": torch.full((size,), float(self.count))}))
        ref = SaveRef(job="job", save_id=f"1-{self.count}", step=self.count, name="s")
        assert self.slots.await_one(never, "saves")
        with self.slots.at_work(never) as stager:
            self.slots.lay_out(
                items, [0], fingerprint(items), None, is_over=never, may_wait=may_wait
            )
            staged = stager.stage(self.slots.take(), ref, items)
        self.slots.hold(ref.save_id, staged.slot)
        return staged

    def written(self, staged: StagedImage) -> None:
        self.slots.free(staged.record.save_id)


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILEPOST_SHM_DIR", str(tmp_path))
    return tmp_path


def value_of(staged: StagedImage) -> float:
    reader = Arena.open(staged.arena)
    try:
        slot = reader.slots[staged.slot.index]
        assert slot.record() == staged.record
        (row,) = unpack_table(reader.table)
        payload = bytes(slot.image[row.payload_at : row.payload_at + row.payload_bytes])
        (value,) = set(struct.unpack(f"<{len(payload) // 4}f", payload))
        return float(value)
    finally:
        reader.close()


def test_a_slot_is_waited_for_until_the_daemon_gives_one_back(shm: Path) -> None:
    bench = Bench()
    one, two = bench.save(), bench.save()
    assert bench.slots.held == ("1-1", "1-2")
    threading.Timer(0.05, bench.written, (one,)).start()
    three = bench.save()
    assert bench.slots.held == ("1-2", "1-3")
    for staged in (two, three):
        bench.written(staged)
    bench.slots.close(unlink=True)
    assert [] == list(shm.iterdir())


def test_no_slot_in_time_is_busy_and_a_save_that_is_over_waits_no_longer(shm: Path) -> None:
    bench = Bench(timeout_s=0.05)
    staged = [bench.save(), bench.save()]
    with pytest.raises(Rejected) as caught:
        bench.save()
    assert "busy" == caught.value.code
    assert not bench.slots.await_one(lambda: True, "saves")
    for each in staged:
        bench.written(each)
    bench.slots.close(unlink=True)


def after(real: Callable[..., Any]) -> Callable[..., Any]:
    """Do it, and be interrupted."""

    def interrupted(*arguments: Any, **named: Any) -> Any:
        real(*arguments, **named)
        raise KeyboardInterrupt

    return interrupted


def before(real: Callable[..., Any]) -> Callable[..., Any]:
    """Be interrupted, and do nothing."""

    def interrupted(*arguments: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    return interrupted


@pytest.mark.parametrize("when", [before, after])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Stager, "_make_arena"), (Stager, "_put_in_force"), (Stager, "_drop_retired"),
        (Stager, "begin"), (Stager, "copy"), (Stager, "seal"), (Arena, "close"), (Arena, "free"),
    ],
)  # fmt: skip
def test_after_an_interrupt_anywhere_the_next_saves_are_whole_and_nothing_is_left(
    shm: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, when: Any
) -> None:
    bench = Bench()
    bench.written(bench.save())
    held = bench.save()
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, when(getattr(owner, name)))
        try:
            bench.save(16)
        except KeyboardInterrupt:
            is_interrupted = True
        else:
            # Nothing was to be closed: the daemon reads from the old arena.
            is_interrupted = False
    assert is_interrupted or owner is Arena
    assert 2.0 == value_of(held), "what the daemon reads was left alone"
    threading.Timer(0.05, bench.written, (held,)).start()
    for size in (16, 16, 8):
        staged = bench.save(size)
        assert float(bench.count) == value_of(staged)
        bench.written(staged)
    for save_id in bench.slots.held:
        bench.slots.free(save_id)
    bench.slots.close(unlink=True)
    assert [] == list(shm.iterdir())


def test_a_failure_of_the_stagers_own_does_not_make_it_start_over(shm: Path) -> None:
    bench = Bench()
    bench.written(bench.save())
    (arena,) = bench.slots.stager.arenas
    with pytest.raises(SaveFailed), bench.slots.at_work(never):
        raise SaveFailed("structure-changed", "not these items")
    bench.written(bench.save())
    assert (arena,) == bench.slots.stager.arenas
    bench.slots.lose()
    bench.written(bench.save())
    assert arena not in bench.slots.stager.arenas
    bench.slots.close(unlink=True)
    assert [] == list(shm.iterdir())


def test_an_interrupt_before_the_end_leaves_no_file(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    monkeypatch.setattr(Stager, "_make_arena", after(Stager._make_arena))
    with pytest.raises(KeyboardInterrupt):
        bench.save()
    assert 1 == len(list(shm.iterdir()))
    bench.slots.close(unlink=True)
    assert [] == list(shm.iterdir())


def test_memory_that_another_rank_is_about_to_give_up_is_waited_for_and_a_lack_is_told(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    make, tries = Stager._make_arena, []

    def scarce(*arguments: Any) -> Arena:
        tries.append(arguments)
        if len(tries) <= 3:
            raise Rejected("shm-too-small", "wants 2 bytes, 1 is free")
        return make(*arguments)

    monkeypatch.setattr(Stager, "_make_arena", scarce)
    assert 1.0 == value_of(bench.save())
    assert 4 == len(tries)

    def never(*arguments: Any) -> Arena:
        raise Rejected("shm-too-small", "wants 2 bytes, 1 is free")

    bench.slots.free("1-1")
    monkeypatch.setattr(slots, "ROOM_S", 0.05)
    monkeypatch.setattr(Stager, "_make_arena", never)
    with pytest.raises(Rejected, match="wants 2 bytes"):
        bench.save(16)
    bench.slots.close(unlink=True)
