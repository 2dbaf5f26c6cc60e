"""Who uses a root: one job that saves, and readers whom retention leaves alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgpack
import pytest

from milepost import Rejected
from milepost.storage import claims
from milepost.storage.claims import EXPIRY_S, Ownership, being_read, reading
from milepost.storage.root import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path)
    made.prepare()
    return made


def _age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def _pretend(root: Root, **fields: object) -> Path:
    owner = {"job": "other", "host": "elsewhere", "pid": 1, "pid_created_s": 0.0} | fields
    path = root.run_path / "owner"
    path.write_bytes(msgpack.packb(owner))
    return path


def test_another_live_job_is_refused_with_its_name_host_and_pid(root: Root) -> None:
    _pretend(root)
    with pytest.raises(Rejected, match=r"job other \(pid 1 on elsewhere\)") as refusal:
        Ownership.take(root, "mine")
    assert "root-locked" == refusal.value.code


def test_a_job_whose_claim_has_expired_is_replaced(root: Root) -> None:
    _age(_pretend(root), EXPIRY_S + 1)
    Ownership.take(root, "mine").close()
    assert not (root.run_path / "owner").exists()


def test_a_dead_process_of_this_host_is_replaced_at_once(root: Root) -> None:
    _pretend(root, host=os.uname().nodename, pid=2**22 + 1)
    Ownership.take(root, "mine").close()


def test_a_restart_of_the_same_job_takes_over_and_the_old_one_leaves_it_alone(root: Root) -> None:
    old = Ownership.take(root, "mine")
    _pretend(root, job="mine", host="elsewhere")
    new = Ownership.take(root, "mine")
    _pretend(root, job="mine", host="somewhere else")
    old.close()
    new.close()
    assert (root.run_path / "owner").exists()


def test_a_damaged_claim_is_no_claim(root: Root) -> None:
    (root.run_path / "owner").write_bytes(b"\xc1")
    Ownership.take(root, "mine").close()


def test_a_checkpoint_is_leased_while_it_is_read(root: Root) -> None:
    with reading(root, "step_3"), reading(root, "step-with-dashes-1"):
        assert {"step_3", "step-with-dashes-1"} == being_read(root)
    assert frozenset() == being_read(root)


def test_the_lease_of_a_dead_reader_expires_and_is_cleared(root: Root) -> None:
    path = root.run_path / f"reading-step_3-{'0' * 16}"
    path.touch()
    _age(path, EXPIRY_S + 1)
    assert frozenset() == being_read(root)
    assert not path.exists()


def test_a_root_that_cannot_be_written_to_is_read_without_a_lease(tmp_path: Path) -> None:
    with reading(Root(tmp_path / "missing"), "step_3"):
        pass


def test_the_lease_of_a_reader_that_was_held_up_for_long_comes_back(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "BEAT_S", 0.01)
    with reading(root, "step_1"):
        (lease,) = root.run_path.glob("reading-*")
        lease.unlink()
        until_s = time.monotonic() + 20
        while not lease.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        assert {"step_1"} == being_read(root)
