"""Of which ranks it is known that they have ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from torch.distributed import HashStore

from milepost.link import presence
from milepost.link.presence import Presence
from milepost.link.rendezvous import Group


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends when it is told to."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as started:
        yield started


def pair(child: subprocess.Popen[bytes], here: str = "", started: str = "") -> Presence:
    """Return the presence of rank 0, where rank 1 has said that it is the child."""
    store = HashStore()
    own = Presence(Group(0, 2, store), "load/1")
    told = here or presence._namespace(), child.pid, started or presence._started(child.pid)
    store.set("load/1/process/1", msgpack.packb(told))
    return own


def test_a_rank_has_ended_once_its_process_has_whether_or_not_somebody_has_asked(
    child: subprocess.Popen[bytes],
) -> None:
    own = pair(child)
    assert not own.has_ended(0)
    assert not own.has_ended(1)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert own.has_ended(1)
    child.wait()
    assert own.has_ended(1)


def test_another_process_of_the_same_number_is_not_the_rank(
    child: subprocess.Popen[bytes],
) -> None:
    assert pair(child, started="1").has_ended(1)


def test_of_processes_of_other_hosts_and_users_nothing_is_known(
    child: subprocess.Popen[bytes],
) -> None:
    assert not pair(child, here="another kernel", started="1").has_ended(1)


def test_of_a_rank_that_has_said_nothing_and_of_one_alone_nothing_is_known() -> None:
    assert not Presence(Group(0, 2, HashStore()), "load/1").has_ended(1)
    assert not Presence(Group(0, 1, None), "load/1").has_ended(0)


def test_a_rank_that_waits_for_nobody_any_more_leaves_nothing_in_the_store() -> None:
    store = HashStore()
    own = Presence(Group(0, 2, store), "load/1")
    own.close()
    assert 0 == store.num_keys()
    Presence(Group(0, 1, None), "load/1").close()


def test_without_proc_nothing_is_known(
    child: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = pair(child)
    (tmp_path / str(child.pid) / "stat").mkdir(parents=True)
    monkeypatch.setattr(presence, "_PROC", tmp_path)
    assert not own.has_ended(1)
    assert not Presence(Group(0, 2, HashStore()), "load/2").has_ended(0)
