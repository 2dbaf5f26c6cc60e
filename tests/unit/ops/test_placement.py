"""Where the daemon runs: away from trainers where there is room, and never because of a refusal."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection, Iterable

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import UsageError
from milepostd.ops.placement import (
    CORES_MIN,
    Choice,
    DaemonPlacement,
    Host,
    choose_cores,
    parse_cores,
    show_cores,
)

CORES = st.frozensets(st.integers(0, 15))


def alone(core: int) -> frozenset[int]:
    return frozenset((core,))


def paired(core: int) -> frozenset[int]:
    """Hyperthreads as most machines number them: 0 with 8, 1 with 9."""
    return frozenset((core % 8, core % 8 + 8))


def cores(text: str) -> frozenset[int]:
    return parse_cores(text)


# --- the decision


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", {3}), ("8-11,14", {8, 9, 10, 11, 14}), ("0, 2-3", {0, 2, 3}), ("5-5,5", {5})],
)
def test_lists_of_cores_are_read(text: str, expected: set[int]) -> None:
    assert expected == parse_cores(text)


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "3-2", "1;2", "0-99999", "١", "1,,2", "0x1", "9" * 5000]
)
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_cores(text)


@given(st.frozensets(st.integers(0, 300), min_size=1))
def test_a_list_of_cores_reads_as_it_was_written(numbers: frozenset[int]) -> None:
    assert numbers == parse_cores(show_cores(numbers))


def test_a_list_of_cores_is_written_as_short_as_it_goes() -> None:
    assert "8-11,14" == show_cores({14, 8, 9, 10, 11})
    assert "" == show_cores([])


@pytest.mark.parametrize(
    ("allowed", "trainers", "expected", "why"),
    [
        ("0-15", [], "0-15", "no trainer is connected"),
        ("0-15", ["0-3", "4-7"], "8-15", "apart from the trainers' cores 0-7"),
        ("0-15", ["0", "0", "1"], "2-15", "apart from the trainers' cores 0-1"),
        ("0-15", ["0-13"], "14-15", "apart from the trainers' cores 0-13"),
        ("0-15", ["0-14"], "0-15", "trainers leave 1 of 16 cores free, fewer than 2"),
        ("0-15", ["0-15"], "0-15", "trainers leave 0 of 16 cores free, fewer than 2"),
        ("0-15", ["0-1", None], "0-15", "the cores of 1 of 2 trainers are not known"),
        ("8-15", ["0-7"], "8-15", "no trainer may run on these cores"),
        ("4-11", ["0-7"], "8-11", "apart from the trainers' cores 4-7"),
        ("0-1", ["0"], "0-1", "trainers leave 1 of 2 cores free, fewer than 2"),
    ],
)
def test_the_daemon_goes_where_no_trainer_runs_if_there_is_room(
    allowed: str, trainers: list[str | None], expected: str, why: str
) -> None:
    known = [None if text is None else cores(text) for text in trainers]
    assert Choice(cores(expected), why) == choose_cores(cores(allowed), known, alone)


@pytest.mark.parametrize(
    ("trainers", "expected", "why"),
    [
        ("0-3", "4-7,12-15", "apart from the trainers' cores 0-3 and siblings"),
        ("0-6", "7,15", "apart from the trainers' cores 0-6 and siblings"),
        ("0-6,8", "7,15", "apart from the trainers' cores 0-6,8 and siblings"),
        ("0-7", "8-15", "apart from the trainers' cores 0-7"),
        ("0-3,8-11", "4-7,12-15", "apart from the trainers' cores 0-3,8-11"),
    ],
)
def test_siblings_of_the_trainers_cores_are_left_alone_too_if_there_is_room(
    trainers: str, expected: str, why: str
) -> None:
    assert Choice(cores(expected), why) == choose_cores(cores("0-15"), [cores(trainers)], paired)


@given(CORES.filter(bool), st.lists(CORES | st.none(), max_size=5), st.booleans())
def test_a_choice_is_allowed_and_either_all_or_roomy_and_free_of_every_trainer(
    allowed: frozenset[int], trainers: list[frozenset[int] | None], has_pairs: bool
) -> None:
    choice = choose_cores(allowed, trainers, paired if has_pairs else alone)
    assert choice.cores <= allowed
    if choice.cores != allowed:
        assert len(choice.cores) >= CORES_MIN
        assert None not in trainers
        assert not any(choice.cores & each for each in trainers if each)
    known = frozenset[int]().union(*(each for each in trainers if each))
    if trainers and None not in trainers and len(allowed - known) >= CORES_MIN:
        assert not choice.cores & known


# --- the effect


class FakeHost(Host):
    """A machine of sixteen cores: two threads in this process, three in the planner's."""

    OWN = os.getpid()
    # Far above what a kernel gives: this process may have any number below.
    PLANNER = 10_004_000
    TRAINER = 10_005_000

    def __init__(self, inherited: str = "0-15", cpuset: str = "0-15", refuse: int = 0) -> None:
        super().__init__()
        self.cpuset = cores(cpuset)
        self.refuse = refuse
        self.masks = {self.OWN: cores(inherited), self.OWN + 1: cores(inherited)}
        self.masks |= dict.fromkeys((10_004_000, 10_004_001, 10_004_002), cores(inherited))
        self.nice = 0
        self.has_niced_session = False
        self.io = (0, 0)
        self.looks = 0

    def _ask(self) -> None:
        if self.refuse:
            raise OSError(self.refuse, os.strerror(self.refuse))

    def affinity(self, pid: int) -> frozenset[int]:
        self.looks += 1
        if (pid or self.OWN) not in self.masks:
            raise ProcessLookupError(errno.ESRCH, "no such process")
        return self.masks[pid or self.OWN]

    def set_affinity(self, pid: int, wanted: Iterable[int]) -> None:
        self._ask()
        effective = self.cpuset.intersection(wanted)
        if not effective:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if (pid or self.OWN) not in self.masks:
            raise ProcessLookupError(errno.ESRCH, "no such process")
        self.masks[pid or self.OWN] = effective

    def threads(self, pid: int) -> list[int]:
        # The last one ends before it is reached.
        return [each for each in self.masks if pid <= each < pid + 1000] + [pid + 999]

    def siblings(self, core: int) -> frozenset[int]:
        return alone(core)

    def niceness(self) -> int:
        return self.nice

    def be_nice(self, nice: int) -> None:
        self._ask()
        self.nice += nice

    def be_nice_as_session(self) -> None:
        self._ask()
        self.has_niced_session = True

    def io_class(self) -> int:
        return self.io[0]

    def set_io_class(self, io_class: int, level: int) -> None:
        self._ask()
        self.io = (io_class, level)

    def own(self) -> set[frozenset[int]]:
        return {self.masks[self.OWN], self.masks[self.OWN + 1]}

    def planner(self) -> set[frozenset[int]]:
        return {self.masks[each] for each in (10_004_000, 10_004_001, 10_004_002)}


def settled(
    host: Host,
    *,
    cpus: str = "auto",
    nice: int = 10,
    io_class: str = "best-effort",
    is_embedded: bool = False,
) -> DaemonPlacement:
    place = DaemonPlacement(
        nice=nice, io_class=io_class, cpus=cpus, is_embedded=is_embedded, host=host
    )
    place.settle()
    return place


def test_niceness_and_io_class_are_taken_as_set() -> None:
    host = FakeHost()
    picture = settled(host).picture()
    assert (10, True, (2, 7)) == (host.nice, host.has_niced_session, host.io)
    assert {"nice": 10, "io_class": "best-effort", "cpus": "0-15"}.items() <= picture.items()
    assert "no trainer is connected" == picture["cpus_reason"]


def test_what_is_not_wanted_is_left_as_it_was() -> None:
    host = FakeHost(inherited="3")
    picture = settled(host, nice=0, io_class="none").picture()
    assert (0, False, (0, 0)) == (host.nice, host.has_niced_session, host.io)
    assert ("none", "3") == (picture["io_class"], picture["cpus"])


def test_an_embedded_daemon_leaves_the_core_of_the_rank_that_started_it() -> None:
    host = FakeHost(inherited="3", cpuset="0-7")
    assert cores("0-7") == settled(host, is_embedded=True).choice.cores
    assert cores("0-7") == host.affinity(0)


@pytest.mark.parametrize(
    ("cpus", "expected"), [("auto", "4-7"), ("all", "0-11"), ("2-3", "2-3"), ("10-20", "10-11")]
)
def test_a_supervised_daemon_leaves_the_cores_it_was_started_on_only_if_told_to(
    cpus: str, expected: str
) -> None:
    host = FakeHost(inherited="4-7", cpuset="0-11")
    place = settled(host, cpus=cpus)
    assert expected == show_cores(host.affinity(0)) == place.picture()["cpus"]


def test_a_list_of_which_nothing_is_allowed_is_told_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = FakeHost(cpuset="0-3", inherited="0-3")
    place = settled(host, cpus="12-13")
    assert Choice(cores("0-3"), "cpus is 12-13, which was refused") == place.choice
    assert ["cpus"] == [record.fields["setting"] for record in caplog.records]  # type: ignore[attr-defined]


def test_where_everything_is_refused_the_daemon_runs_all_the_same_and_tells_each_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = FakeHost(refuse=errno.EPERM)
    place = settled(host, is_embedded=True)
    host.masks[host.TRAINER] = cores("0-3")
    for _ in range(3):
        place.follow([host.TRAINER], host.PLANNER)
    told = [record.fields["setting"] for record in caplog.records]  # type: ignore[attr-defined]
    assert ["nice", "io_class", "cpus"] == told
    assert {"nice": 0, "io_class": "none", "cpus": "0-15"}.items() <= place.picture().items()


def test_all_threads_and_the_planner_move_away_from_trainers_and_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    host = FakeHost()
    place = settled(host)
    host.masks |= {10_005_000: cores("0-3"), 10_006_000: cores("4-7")}
    place.follow([10_005_000], host.PLANNER)
    assert {cores("4-15")} == host.own() == host.planner()
    place.follow([10_005_000, 10_006_000], host.PLANNER)
    assert {cores("8-15")} == host.own() == host.planner()
    place.follow([10_005_000, 10_006_000], host.PLANNER)
    assert "apart from the trainers' cores 0-7" == place.picture()["cpus_reason"]
    place.follow([], host.PLANNER)
    assert {cores("0-15")} == host.own() == host.planner()
    moves = [record.fields["cpus"] for record in caplog.records]  # type: ignore[attr-defined]
    assert ["4-15", "8-15", "0-15"] == moves


def test_a_trainer_that_pins_itself_late_is_noticed() -> None:
    host = FakeHost()
    place = settled(host)
    host.masks[10_005_000] = cores("0-15")
    place.follow([10_005_000], None)
    assert {cores("0-15")} == host.own()
    host.masks[10_005_000] = cores("0-1")
    place.follow([10_005_000], None)
    assert {cores("2-15")} == host.own()


def test_a_planner_that_started_while_the_daemon_moved_goes_after_it() -> None:
    host = FakeHost()
    place = settled(host)
    host.masks[10_005_000] = cores("0-7")
    place.follow([10_005_000], None)
    assert {cores("0-15")} == host.planner()
    place.follow([10_005_000], host.PLANNER)
    assert {cores("8-15")} == host.planner()


def test_a_trainer_that_cannot_be_seen_keeps_the_daemon_where_it_is_and_a_dead_one_does_not() -> (
    None
):
    host = FakeHost()
    place = settled(host)
    host.masks[10_005_000] = cores("0-7")
    place.follow([10_005_000, None], host.PLANNER)
    assert {cores("0-15")} == host.own()
    place.follow([10_005_000, 10_007_777], 10_008_888)
    assert {cores("8-15")} == host.own()


def test_a_planner_that_ends_while_it_is_moved_is_no_refusal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost()
    place = settled(host)
    host.masks[10_005_000] = cores("0-7")
    real = host.threads

    def threads(pid: int) -> list[int]:
        if pid == host.PLANNER:
            raise FileNotFoundError(errno.ENOENT, "no such directory")
        return real(pid)

    monkeypatch.setattr(host, "threads", threads)
    place.follow([10_005_000], host.PLANNER)
    assert {cores("8-15")} == host.own()
    assert [] == caplog.records


@pytest.mark.parametrize("cpus", ["all", "0-3"])
def test_with_cores_given_trainers_are_not_looked_at(cpus: str) -> None:
    host = FakeHost()
    place = settled(host, cpus=cpus)
    chosen, host.looks = host.own(), 0
    host.masks[10_005_000] = cores("0-7")
    place.follow([10_005_000], host.PLANNER)
    assert (chosen, 0) == (host.own(), host.looks)


def test_the_real_system_confines_a_thread_to_what_there_is() -> None:
    """In a thread of its own, which takes its mask along when it ends."""
    host, seen = Host(), list[Collection[int]]()

    def look() -> None:
        before = host.affinity(0)
        host.set_affinity(0, [min(before)])
        seen.append(host.affinity(0))
        host.set_affinity(0, range(8192))
        seen.append(host.affinity(0))
        seen.append(host.siblings(min(before)))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    here = os.sched_getaffinity(0)
    assert {min(here)} == seen[0]
    assert here <= set(seen[1])
    assert min(here) in seen[2]
    assert frozenset((5000,)) == host.siblings(5000), "a core that is not there"
    assert os.getpid() in host.threads(os.getpid())
    assert psutil.Process().nice() == host.niceness()
