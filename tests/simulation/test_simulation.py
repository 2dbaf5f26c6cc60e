"""What `make test` runs of the simulation: small worlds under many seeds, a large one, each seed
the same under any hash seed, every order of one small save; and that the oracles see what they
should.

Method: seeds 0 to SEEDS are run with everything drawn, faults included. A seed that once found a
fault is kept below with what it found; `docs/testing.md` says how to rerun one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import MilepostError
from milepost.format.manifest import Manifest as RealManifest
from milepost.format.manifest import encode_manifest
from milepost.ledger import Decision, ForgetWords, Ledger, _Taken
from milepost.storage.claims import EXPIRY_S, being_read, reading
from milepost.storage.root import Root
from milepost.wire.messages import Concluded, Keep, PreemptionDecided, SaveRef
from milepostd.core.coordination import Coordination
from milepostd.core.participation import Participation
from milepostd.core.phases import COORDINATOR, PARTICIPANT, Phase, Trigger
from milepostd.core.preemption import Preemption
from milepostd.core.role import Role
from milepostd.executors.latest import _retain
from tests.simulation import __main__ as command
from tests.simulation import branches, disk, faults, preemption, readers
from tests.simulation.disk import (
    MANIFEST,
    METADATA,
    Calls,
    Disk,
    File,
    Folder,
    Image,
    Manifest,
    finish,
)
from tests.simulation.disk import Root as Twin
from tests.simulation.explore import Faults, Walk, begin_staged
from tests.simulation.machine import Daemon
from tests.simulation.oracle import LivenessViolation, SafetyViolation
from tests.simulation.run import Options, Result, Run, draw_options
from tests.simulation.session import Session

SEEDS = 75

FOUND = {
    3: "a directory half deleted under `.partial` was given its final name back by `prepare`",
    99: "a restarted node said `failed` of a save that its earlier life had helped to publish",
    175: "a save that was given up was finished by the next life of its only node, unheard by any",
    105: "the same, with a coordinator that had forgotten the save",
    111: "a coordinator that had forgotten a save called it aborted, since it was retained away",
    144: "a save that was held up replaced that of a newer attempt, which was told to be committed",
    158: "a daemon that was restarted after `load()` gave a rank its place in the attempt before",
    456: "retention removed what had been saved anew under the name of what it was to remove",
    592: "a save failed since retention removed what it was to replace at that moment",
    202: "a coordinator that was killed after its decision told the others to go a step later",
    831: "`Fail` of an earlier attempt was answered with `failed`, without a look at the directory",
}
"""Seeds that found a fault when they were first run, and what. What is drawn has changed since, so
each has a scenario of its own in `tests/unit/`.
"""

RARE = (380, 483)
"""Seeds that take rows of the tables that no other seed takes: the shared directory shows neither
outcome for a while."""

Row = tuple[type[Role], Phase, Trigger]


def rerun(seed: int, nodes: int = 0) -> Result:
    options = draw_options(seed, nodes)
    try:
        return Run(options).go()
    except Exception as error:
        error.add_note(command.rerun(options))
        raise


@pytest.fixture(scope="module")
def swarm() -> tuple[list[Result], set[Row]]:
    """All small runs, and the transitions they took."""
    taken: set[Row] = set()
    move = Role.move

    def recording(role: Role, trigger: Trigger) -> bool:
        before = role.phase
        has_moved = move(role, trigger)
        if has_moved:
            taken.add((type(role), before, trigger))
        return has_moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Role, "move", recording)
        results = [rerun(seed) for seed in [*range(SEEDS), *FOUND, *RARE]]
    return results, taken


@pytest.mark.slow
def test_whatever_goes_wrong_nothing_is_lost_and_the_next_save_is_committed(
    swarm: tuple[list[Result], set[Row]],
) -> None:
    results, _ = swarm
    assert all(result.commits >= 2 for result in results)


@pytest.mark.slow
def test_every_kind_of_fault_has_struck(swarm: tuple[list[Result], set[Row]]) -> None:
    kinds = {*faults.KINDS, faults.AMBUSH, preemption.KIND, *readers.KINDS}
    assert kinds == {kind for result in swarm[0] for kind in result.fired}


@pytest.mark.slow
def test_every_row_of_both_tables_is_taken_in_simulation(
    swarm: tuple[list[Result], set[Row]],
) -> None:
    for role, table in ((Participation, PARTICIPANT), (Coordination, COORDINATOR)):
        assert set() == {row for row in table if (role, *row) not in swarm[1]}


@pytest.mark.slow
def test_what_should_be_seen_is_seen(swarm: tuple[list[Result], set[Row]]) -> None:
    seen = {mark for result in swarm[0] for mark in result.marks}
    assert set() == {
        "job.recalled", "save.committed", "save.failed", "save.skipped", "plan.made",
        "message.dropped", "session.lost", "daemon.draining", "retained", "handle:committed",
        "handle:failed", "handle:skipped", "handle:outcome-unknown", "code:no-space",
        "code:io-error", "code:rank-missing", "code:node-missing", "code:structure-changed",
        "code:aborted", "code:timeout", "job.preempted", "preempted", "read", "branch",
    } - seen  # fmt: skip


def test_two_hundred_and_fifty_six_nodes() -> None:
    assert rerun(1, 256).commits >= 2


@pytest.mark.parametrize("seed", [1, 7, 12])
def test_a_seed_does_the_same_under_any_hash_seed(seed: int) -> None:
    ends = []
    for hash_seed in ("0", "4711"):
        ran = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", str(seed)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == ran.returncode, ran.stdout + ran.stderr
        ends.append(ran.stdout.splitlines()[-2:])
    assert ends[0][0].startswith("commits ")
    assert ends[0][1].startswith("trace hash ")
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_all_orders_of_a_save_of_three_nodes_with_a_crash_and_a_lost_message() -> None:
    walk = Walk(begin_staged, Faults(losses=1, crashes=1))
    walk.explore()
    assert {
        ("committed", frozenset(["committed"])),
        ("aborted", frozenset(["failed"])),
    } == walk.ends.keys()
    assert len(walk.seen) > 10_000


def test_all_orders_of_a_save_of_three_nodes_without_a_fault_end_in_a_checkpoint() -> None:
    walk = Walk(begin_staged, Faults(losses=0, crashes=0))
    walk.explore()
    assert [("committed", frozenset(["committed"]))] == list(walk.ends)


# --- the oracles see what they should


def run_all(first: int, nodes: int) -> None:
    """Run a hundred seeds, starting shortly before the first that is known to find the fault."""
    for seed in range(first, first + 100):
        Run(draw_options(seed, nodes)).go()


def no_sync(root: Twin, folder: Any) -> Iterator[str]:
    yield "fsync"


def remove_newest(checkpoints: list[Any], keep: Keep) -> list[str]:
    return [name for name, _, _ in checkpoints[:1]] if keep.last else []


def no_reader(root: Twin) -> Calls[frozenset[str]]:
    yield "listdir"
    return frozenset()


def decide_early(preemption: Preemption, at_read: int) -> PreemptionDecided:
    job = preemption.job
    return PreemptionDecided(job=job.job, attempt=job.attempt, at_read=at_read - 1)


def keep_what_lies_beyond(ledger: Ledger[Any], step: int, name: str) -> None:
    ledger._taken[name] = _Taken(step, "the checkpoint this attempt resumed from")


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "sentence", "first"),
    [
        (Twin, "_sync", no_sync, "is not synced", 0),
        ("tests.simulation.disk", "doomed", remove_newest, "retention by", 0),
        (Participation, "is_recalled", property(lambda role: False, lambda role, value: None),
         "has two outcomes", 370),
        (Twin, "_is_published", lambda root, save: False, "latest is None", 0),
        (Preemption, "_decision", decide_early, "preempted is True on rank", 0),
        (Twin, "being_read", no_reader, "retention removes", 0),
        (disk, "EXPIRY_S", 1e9, "retention by .* has left", 0),
        (branches, "_begin_branch", lambda trainer, number: None, "latest is .* abandoned", 0),
        (Twin, "_is_newer", lambda root, old_id, save: False, "takes its place", 160),
        (Ledger, "resume", keep_what_lies_beyond, "is refused step_", 0),
        (Session, "_has_place", lambda session, place: session.joined is not None,
         "ends by Cause.*protocol", 0),
    ],
)  # fmt: skip
def test_a_fault_that_is_put_in_is_found(
    owner: Any,
    name: str,
    wrong: Any,
    sentence: str,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", wrong)
    else:
        monkeypatch.setattr(owner, name, wrong, raising=False)
    with pytest.raises(SafetyViolation, match=sentence):
        run_all(first, 3)


def test_a_daemon_that_loses_its_timers_is_found_by_its_handles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Daemon, "_timer_over", lambda daemon, timer, at_ns: None)
    with pytest.raises(LivenessViolation):
        run_all(60, 2)


@pytest.mark.slow
def test_a_slot_that_nobody_mentions_to_a_restarted_daemon_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    concluded = Ledger._concluded

    def forget(ledger: Ledger[Any], message: Concluded) -> Sequence[Decision[Any]]:
        return [ForgetWords(message.save_id), *concluded(ledger, message)]

    monkeypatch.setattr(Ledger, "_concluded", forget)
    with pytest.raises(LivenessViolation, match=r"never gets the slot of .* back"):
        run_all(300, 0)


def test_a_removal_that_does_not_check_whose_checkpoint_it_removes_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def retire(root: Twin, name: str, save_id: str) -> Calls[bool]:
        yield from root._remove(root.disk.root, name)
        return True

    monkeypatch.setattr(Twin, "_retire", retire)
    with pytest.raises(SafetyViolation, match=r"was committed as .* which is not there"):
        run_all(0, 1)


def test_lost_answers_of_ranks_are_found_by_the_time_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Preemption, "reads_told", lambda preemption, rank, reads: [])
    with pytest.raises(LivenessViolation, match="nothing is wrong, and decided without a rank"):
        run_all(0, 2)


def _raise(error: Exception) -> Callable[[Run], Result]:
    def go(run: Run) -> Result:
        raise error

    return go


@pytest.mark.parametrize(
    ("error", "code"),
    [(RuntimeError("broken"), 1), (SafetyViolation("torn"), 3), (LivenessViolation("late"), 4)],
)
def test_the_exit_code_tells_crash_safety_and_liveness_apart(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Run, "go", _raise(error))
    assert code == command.once(7, 3)
    lines = capsys.readouterr().out.splitlines()
    assert "rerun: make sim SEED=7 NODES=3" == lines[0] == lines[-1]
    assert "  seed: 7" == lines[1]


def test_the_same_seed_draws_the_same_options() -> None:
    drawn: list[Options] = [draw_options(7, 4096), draw_options(7, 4096)]
    assert drawn[0] == drawn[1]


# --- the disk is the storage module's twin

SAVES = [
    SaveRef(job="job", save_id=f"{attempt}-{count}", step=step, name=f"step_{step}", overwrite=True)
    for attempt, count, step in ((1, 1, 10), (1, 2, 20), (2, 1, 10))
]
ACTS = [
    "open", "write", "index", "publish", "publish", "latest", "give_up", "forestall", "discard",
    "remove", "prepare", "all", "all", "all", "lease", "lease", "expire", "release", "read",
    "retain", "note", "note",
]  # fmt: skip


class Both:
    """The real root and its twin, given the same to do."""

    def __init__(self, path: Path) -> None:
        import random

        self.real = Root(path)
        self.real.prepare()
        self.disk = Disk()
        self.twin = Twin(self.disk, "node", random.Random(1), str(path))
        self.readers: list[tuple[AbstractContextManager[None], str]] = []
        """Readers, at the real root and at its twin."""
        self.notes = 0
        """How many entries people have put into directories of checkpoints."""

    def close(self) -> None:
        while self.readers:
            self.readers.pop()[0].__exit__(None, None, None)

    def do(self, act: str, save: SaveRef) -> tuple[str, str]:
        if act == "all":
            for each in ("open", "write", "index", "publish"):
                answers = self.do(each, save)
                assert answers[0] == answers[1], (each, answers)
            act = "latest"
        elif act == "lease":
            reader = reading(self.real, save.name)
            reader.__enter__()
            self.readers.append((reader, finish(self.twin.take_lease(save.name))))
        elif act == "release" and self.readers:
            known, lease = self.readers.pop()
            known.__exit__(None, None, None)
            finish(self.twin.drop_lease(lease))
        return self._said(lambda: self._real(act, save)), self._said(lambda: self._twin(act, save))

    @staticmethod
    def _said(work: Callable[[], object]) -> str:
        try:
            answer = work()
        except MilepostError as error:
            return f"{type(error).__name__} {error.code}"
        return answer if isinstance(answer, str) else "done"

    def _real(self, act: str, save: SaveRef) -> object:
        real, folder = self.real, self.real.save_dir(save)
        match act:
            case "open":
                real.open_save(save)
            case "write":
                real.open_save(save)
                if not (folder / "__0_0.distcp").exists():
                    real.write_image(folder / "__0_0.distcp", memoryview(bytes(4096)))
            case "index":
                manifest = RealManifest(
                    job="job", save_id=save.save_id, step=save.step, files=("__0_0.distcp",)
                )
                real.write_file(folder / MANIFEST, encode_manifest(manifest))
                real.write_file(folder / METADATA, b"index")
            case "publish":
                real.publish(save)
            case "latest":
                if self._is_there(save):
                    real.advance_latest(save)
            case "give_up":
                return real.give_up(save)
            case "forestall":
                return real.forestall(save)
            case "discard":
                real.discard(save)
            case "remove":
                return str(real.remove_checkpoint(save.name, save.save_id))
            case "prepare":
                real.prepare()
            case "expire":
                for path in real.run_path.glob(f"reading-{save.name}-*"):
                    os.utime(path, (0, 0))
            case "read":
                return " ".join(sorted(being_read(real)))
            case "retain":
                return " ".join(_retain(real, Keep(last=1)))
            case "note":
                folder = real.path / save.name
                if folder.is_dir():
                    self.notes += 1
                    (folder / f"note-{self.notes}").touch()
        return None

    def _twin(self, act: str, save: SaveRef) -> object:
        twin = self.twin
        match act:
            case "open":
                finish(twin.open_save(save))
            case "write":
                folder = finish(twin.open_save(save))
                if "__0_0.distcp" not in folder.entries:
                    image = Image("job", save.save_id, save.step, save.name, 0, "s0")
                    finish(twin.write_image(save, 0, lambda: image))
            case "index":
                manifest = Manifest("job", save.save_id, save.step, ((0, "__0_0.distcp"),), ("s0",))
                for name in (MANIFEST, METADATA):
                    self._reported(twin.write_into(save, name, manifest))
            case "publish":
                finish(twin.publish(save))
            case "latest":
                if self._is_there(save):
                    finish(twin.advance_latest(save))
            case "give_up":
                return finish(twin.give_up(save))
            case "forestall":
                return finish(twin.forestall(save))
            case "discard":
                finish(twin.discard(save))
            case "remove":
                return str(finish(twin.remove_checkpoint(save.name, save.save_id)))
            case "prepare":
                finish(twin.prepare())
            case "expire":
                for lease, file in self.disk.run.entries.items():
                    if lease.startswith(f"reading-{save.name}-") and isinstance(file, File):
                        file.touched_ns = -int((EXPIRY_S + 1) * 1e9)
            case "read":
                return " ".join(sorted(finish(twin.being_read())))
            case "retain":
                return " ".join(
                    name
                    for name, save_id in finish(twin.removable(Keep(last=1))).items()
                    if finish(twin.remove_checkpoint(name, save_id))
                )
            case "note":
                found = self.disk.root.entries.get(save.name)
                if isinstance(found, Folder):
                    self.disk.make_file("people", found, f"note-{self.notes}", "note")
        return None

    @staticmethod
    def _reported(calls: Any) -> None:
        from tests.simulation.disk import reported

        finish(reported("write", "", calls))

    def _is_there(self, save: SaveRef) -> bool:
        return any(each.save_id == save.save_id for each in self.real.checkpoints())

    def pictures(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is there: checkpoints by name, `.partial`, `latest`, and intents."""
        real, twin, disk = self.real, self.twin, self.disk
        link = disk.root.entries.get("latest")
        return {
            "checkpoints": [(each.name, each.step, each.save_id) for each in real.checkpoints()],
            "partial": [path.name for path in real.partials()],
            "notes": sorted(
                str(path.relative_to(real.path))
                for folder in (real.path, real.path / ".partial")
                for path in folder.glob("*/note-*")
                if not path.parent.is_symlink()
            ),
            "latest": os.readlink(real.path / "latest")
            if (real.path / "latest").is_symlink()
            else None,
            "intents": sorted(
                path.name for path in (real.path / ".milepost-run").glob("replace-*")
            ),
            "leases": sorted(
                path.name.rpartition("-")[0] for path in real.run_path.glob("reading-*")
            ),
        }, {
            "checkpoints": [
                (name, step, twin.heading(disk.root.entries[name])[0])
                for name, step, _ in twin.checkpoints()
            ],
            "partial": sorted(disk.partial.entries),
            "notes": sorted(
                f"{prefix}{name}/{entry}"
                for folder, prefix in ((disk.root, ""), (disk.partial, ".partial/"))
                for name, inode in folder.entries.items()
                for entry in twin.foreign_in(inode)
                if entry.startswith("note-")
            ),
            "latest": link.content if isinstance(link, File) else None,
            "intents": sorted(name for name in disk.run.entries if name.startswith("replace-")),
            "leases": sorted(
                name.rpartition("-")[0] for name in disk.run.entries if name.startswith("reading-")
            ),
        }


@settings(max_examples=60)
@given(acts=st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, len(SAVES) - 1)), max_size=20))
def test_the_simulated_disk_does_what_the_storage_module_does(
    acts: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    both = Both(tmp_path_factory.mktemp("root"))
    try:
        for act, index in acts:
            real, twin = both.do(act, SAVES[index])
            assert real == twin, act
            pictures = both.pictures()
            assert pictures[0] == pictures[1]
            assert both.notes == len(pictures[0]["notes"]), "what people put there is lost"
    finally:
        both.close()
