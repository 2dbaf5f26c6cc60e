"""`milepost.dcp.save` and `async_save` on two ranks: torch's semantics, judged by stock torch."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.cluster import Node, Rank, judge, run_ranks, until
from tests.integration.test_dcp_load import full, sharded_state, without_numpy
from tests.integration.test_refusals import Records

VALUES = {
    "path": 1.0, "positional": 2.0, "writer": 3.0, "stock": 4.0, "async": 5.0, "response": 6.0,
    "over": 8.0, "lowest": 10.0, "no-numpy": 11.0, "after": 12.0,
}  # fmt: skip
"""What of these names the ranks save, by the value that the state is made of."""


class Run(NamedTuple):
    root: Path
    ranks: list[dict[str, Any]]


class Unpicklable:
    """Says what happens when it is pickled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise self.error or AssertionError


class Broken:
    """A Stateful that has no state to give."""

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no state today")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def raised(call: Any) -> tuple[str, dict[int, str]]:
    """Return the type of what a call raises, and the failures by rank."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        call()
    except CheckpointException as error:
        told = {
            rank: f"{type(each).__name__}: {each}" for rank, (each, _) in error.failures.items()
        }
        return type(error).__name__, told
    except Exception as error:
        return type(error).__name__, {}
    return "", {}


def save_in_all_ways(rank: Rank) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as stock
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    import milepost.dcp

    dcp: Any = milepost.dcp

    warnings.simplefilter("ignore")
    root, found = rank.root, dict[str, Any]()
    states = {name: sharded_state(value) for name, value in VALUES.items()}

    metadata = dcp.save(states["path"], checkpoint_id=str(root / "path"))
    found["metadata"] = (sorted(metadata.state_dict_metadata), metadata.storage_meta)
    dcp.save(states["positional"], dcp.Writer(root / "positional"))
    writer = stock.FileSystemWriter(root / "elsewhere", thread_count=2, single_file_per_rank=False)
    dcp.save(states["writer"], checkpoint_id=root / "writer", storage_writer=writer)
    stock.save(states["stock"], storage_writer=dcp.Writer(root / "stock"))

    future = dcp.async_save(states["async"], checkpoint_id=root / "async")
    # Only what was there when the call was made is saved.
    states["async"]["plain"].fill_(-1.0)
    names: list[str] = []
    future.add_done_callback(lambda each: names.append(str(each.result().storage_meta)))
    found["async"] = type(future.result(60)).__name__
    until(lambda: bool(names), "the callback was called")
    stager = DefaultStager(StagingOptions(False, False, True, False))
    answer = dcp.async_save(
        states["response"], checkpoint_id=root / "response", async_stager=stager
    )
    stager.close()
    found["response"] = (
        type(answer).__name__,
        answer.staging_completion.result(60),
        type(answer.upload_completion.result(60)).__name__,
    )

    # One that is not waited for, and another one to the same path.
    first = dcp.async_save(sharded_state(7.0), checkpoint_id=root / "over")
    if rank.rank == 0:
        (root / "over" / "notes.txt").write_text("mine")
    dcp.save(states["over"], checkpoint_id=root / "over")
    first.result(60)
    before = states["over"]
    for name, call in {
        "save": lambda: dcp.save(before, storage_writer=dcp.Writer(root / "over", overwrite=False)),
        "async_save": lambda: dcp.async_save(
            before, storage_writer=stock.FileSystemWriter(root / "over", overwrite=False)
        ).result(60),
        "nothing": lambda: dcp.save(before),
        "nothing async": lambda: dcp.async_save(before).result(60),
        "two paths": lambda: dcp.save(before, checkpoint_id=root / f"two{rank.rank}"),
        "a file": lambda: dcp.save(before, checkpoint_id=root / "over" / "notes.txt"),
        "unpicklable": lambda: dcp.save(
            {"x": Unpicklable(ValueError("not me")) if rank.rank else 1}, checkpoint_id=root / "bad"
        ),
        "unpicklable async": lambda: dcp.async_save(
            {"x": Unpicklable(ValueError("not me")) if rank.rank else 1}, checkpoint_id=root / "bad"
        ).result(60),
        "stateful": lambda: dcp.save({"x": Broken() if rank.rank else 1}, checkpoint_id=root / "b"),
        "stateful async": lambda: dcp.async_save(
            {"x": Broken() if rank.rank else 1}, checkpoint_id=root / "b"
        ),
    }.items():
        found[f"raised by {name}"] = raised(call)
    lowest = stock.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    dcp.save(states["lowest"], checkpoint_id=root / "lowest", planner=lowest)

    groups = [dist.new_group([each]) for each in range(rank.world)]
    own = {"x": rank.rank + 0.5}
    dcp.save(own, checkpoint_id=root / f"own{rank.rank}", process_group=groups[rank.rank])
    both = dist.new_group(list(range(rank.world)))
    dcp.save({"x": 9.5}, checkpoint_id=root / "both", process_group=both)
    whole = full(states["path"])
    if rank.rank == 0:
        dcp.save(whole, checkpoint_id=root / "alone", no_dist=True)
    dist.barrier()

    without_numpy()
    dcp.save(states["no-numpy"], checkpoint_id=root / "no-numpy")
    future = dcp.async_save(states["after"], checkpoint_id=root / "after")
    found["last"] = type(future.result(60)).__name__
    dist.barrier()
    found["files"] = sorted(str(each.relative_to(root)) for each in root.rglob("*"))
    return found


@pytest.fixture(scope="module")
def run(pair: list[Node], module_folder: Path) -> Run:
    root = module_folder / "saved"
    root.mkdir()
    return Run(root, run_ranks(save_in_all_ways, root, pair))


def load_all(rank: int, world: int, root: str, names: list[str]) -> dict[str, Any]:
    """Load by stock torch, into states of other values."""
    import torch.distributed.checkpoint as stock

    found = {}
    for name in names:
        state = sharded_state(-3.0)
        stock.load(state, checkpoint_id=f"{root}/{name}")
        found[name] = full(state)
    return found


def expected(rank: int, world: int, values: dict[str, float]) -> dict[str, Any]:
    return {name: full(sharded_state(value)) for name, value in values.items()}


def test_stock_torch_loads_what_was_saved_in_every_way(run: Run) -> None:
    loaded = judge(load_all, 2, str(run.root), list(VALUES))
    assert judge(expected, 2, VALUES) == loaded


def load_plain(rank: int, world: int, root: str, names: list[str]) -> dict[str, float]:
    import torch.distributed.checkpoint as stock

    found = {}
    for name in names:
        state = {"x": 0.0}
        stock.load(state, checkpoint_id=f"{root}/{name}")
        found[name] = state["x"]
    return found


def test_groups_save_at_once_below_one_parent(run: Run) -> None:
    names = ["own0", "own1", "both"]
    assert [dict(zip(names, (0.5, 1.5, 9.5), strict=True))] == judge(
        load_plain, 1, str(run.root), names
    )


def test_one_rank_of_a_group_saves_alone(run: Run) -> None:
    assert {"alone/.metadata", "alone/__0_0.distcp"} <= set(run.ranks[0]["files"])
    assert "alone/__1_0.distcp" not in run.ranks[0]["files"]


def test_the_index_is_returned_on_every_rank(run: Run) -> None:
    keys = ["columns", "nested.n", "own0", "own1", "plain", "replicated", "rows"]
    for rank in run.ranks:
        assert keys == rank["metadata"][0]
        assert run.root / "path" == rank["metadata"][1].checkpoint_id
        assert ("Metadata", "Metadata") == (rank["async"], rank["last"])
        assert ("AsyncSaveResponse", None, "Metadata") == rank["response"]


def test_there_is_nothing_but_checkpoints(run: Run) -> None:
    files = run.ranks[0]["files"]
    # Of a save that failed the directory stays, as in torch.
    folders = {*VALUES, "own0", "own1", "both", "alone", "bad"}
    assert folders | {"over/notes.txt"} == {
        each for each in files if not each.endswith((".metadata", ".milepost", ".distcp"))
    }
    over = [each for each in files if each.startswith("over/")]
    assert 5 == len(over), over


def test_a_checkpoint_is_not_overwritten_unasked(run: Run) -> None:
    text = "RuntimeError: Checkpoint already exists and self.overwrite=False."
    for rank in run.ranks:
        for name in ("save", "async_save"):
            assert ("CheckpointException", {0: text, 1: text}) == rank[f"raised by {name}"]


def test_what_one_rank_refuses_is_raised_on_all_by_its_number(run: Run) -> None:
    for rank in run.ranks:
        for name in ("unpicklable", "unpicklable async"):
            kind, failures = rank[f"raised by {name}"]
            assert ("CheckpointException", [1]) == (kind, list(failures))
            assert "not me" in failures[1]
        kind, failures = rank["raised by two paths"]
        assert ("CheckpointException", [0]) == (kind, list(failures))
        assert "two0" in failures[0]
        assert "two1" in failures[0]
        kind, failures = rank["raised by a file"]
        assert ("CheckpointException", [0]) == (kind, list(failures))


def test_what_a_state_dict_raises_is_raised_as_it_is_on_its_rank(run: Run) -> None:
    for name in ("stateful", "stateful async"):
        assert ("ValueError", {}) == run.ranks[1][f"raised by {name}"]
    kind, failures = run.ranks[0]["raised by stateful"]
    assert ("CheckpointException", {1: "ValueError: no state today"}) == (kind, failures)


def test_a_save_without_a_path_is_refused_in_torchs_words(run: Run) -> None:
    for rank in run.ranks:
        assert "RuntimeError" == rank["raised by nothing"][0]
        assert "RuntimeError" == rank["raised by nothing async"][0]


def save_by_planners(rank: Rank) -> dict[str, Any]:
    """Save with planners and by torch's own code, two calls each, and note what is logged."""
    import torch.distributed.checkpoint as stock

    import milepost.dcp

    dcp: Any = milepost.dcp

    warnings.simplefilter("ignore")

    class Renaming(stock.DefaultSavePlanner):
        """Renames, as torch's documentation has it, and notes what it is told."""

        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False) -> None:  # type: ignore[no-untyped-def]
            told.append((storage_meta, is_coordinator))
            super().set_up_planner(
                {f"new_{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator
            )

    class Old(stock.DefaultSavePlanner):
        """As planners were before torch 2.3."""

        def set_up_planner(  # type: ignore[override]
            self, state_dict: Any, is_coordinator: bool
        ) -> None:
            super().set_up_planner(state_dict, None, is_coordinator)

    class Failing(stock.DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            if rank.rank == 1:
                raise KeyError("no plan")
            return super().create_local_plan()

    class Own(stock.FileSystemWriter):
        """A writer that is not torch's."""

    told: list[Any] = []
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("milepost")
    logger.setLevel(logging.INFO)
    logger.addHandler(Listener())
    state = {"x": 1.5}
    dcp.save(state, checkpoint_id=rank.root / "renamed", planner=Renaming())
    dcp.save(state, checkpoint_id=rank.root / "plain")
    dcp.async_save(state, checkpoint_id=rank.root / "old", planner=Old()).result(60)
    failing = raised(lambda: dcp.save(state, checkpoint_id=rank.root / "no", planner=Failing()))
    dcp.save(state, checkpoint_id=rank.root / "after")
    ours = len([line for line in lines if "leaves this one" in line])
    dcp.save(state, checkpoint_id=rank.root / "apart", use_collectives=False)
    dcp.save(state, storage_writer=Own(rank.root / "own"))
    dcp.async_save(state, storage_writer=Own(rank.root / "own async")).result(60)
    return {"told": told, "ours": ours, "lines": [each for each in lines if "leaves" in each],
            "failing": failing}  # fmt: skip


def test_planners_are_per_call_and_what_is_not_ours_is_left_to_torch(
    pair: list[Node], root: Path
) -> None:
    root.mkdir()
    ranks = run_ranks(save_by_planners, root, pair)
    for at, rank in enumerate(ranks):
        ((meta, is_first),) = rank["told"]
        assert (root / "renamed", at == 0) == (meta.checkpoint_id, is_first)
        assert 0 == rank["ours"]
        assert 3 == len(rank["lines"])
        assert "use_collectives=False" in rank["lines"][0]
        assert ("CheckpointException", [1]) == (rank["failing"][0], list(rank["failing"][1]))
        assert "KeyError: 'no plan'" == rank["failing"][1][1]
    names = ["plain", "old", "after", "own", "own async"]
    assert [dict.fromkeys(names, 1.5)] == judge(load_plain, 1, str(root), names)
    assert ["new_x"] == judge(keys_of, 1, str(root / "renamed"))[0]
    assert {"__0.metadata", "__1.metadata"} <= {each.name for each in (root / "apart").iterdir()}


def keys_of(rank: int, world: int, path: str) -> list[str]:
    import torch.distributed.checkpoint as stock

    return sorted(stock.FileSystemReader(path).read_metadata().state_dict_metadata)


class Deadly:
    """A Stateful that ends its process."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def die_while_saving(rank: Rank) -> Any:
    import milepost.dcp

    dcp: Any = milepost.dcp

    dcp.save({"x": 1.5}, checkpoint_id=rank.root / "c")
    state = {"x": Unpicklable() if rank.rank else 2.5, "y": 0}
    return raised(lambda: dcp.save(state, checkpoint_id=rank.root / "c"))


def die_before_saving(rank: Rank) -> Any:
    import milepost.dcp

    dcp: Any = milepost.dcp

    return raised(
        lambda: dcp.save({"x": Deadly() if rank.rank else 2.5}, checkpoint_id=rank.root / "c")
    )


def test_a_rank_that_dies_before_a_first_save_is_not_waited_for(
    pair: list[Node], root: Path
) -> None:
    root.mkdir()
    (kind, failures), _ = run_ranks(die_before_saving, root, pair, expect_death=[1])
    assert "CheckpointException" == kind
    assert "rank 1 ended while others waited for it" in str(failures)


def test_the_old_checkpoint_stays_when_a_rank_dies_while_it_is_overwritten(
    pair: list[Node], root: Path
) -> None:
    root.mkdir()
    (kind, failures), _ = run_ranks(die_while_saving, root, pair, expect_death=[1])
    assert ("CheckpointException", [1]) == (kind, list(failures))
    assert "rank-missing" in failures[1]
    assert [{"c": 1.5}] == judge(load_plain, 1, str(root), ["c"])


def save_while_the_daemon_dies(rank: Rank) -> list[str]:
    import torch

    import milepost.dcp

    dcp: Any = milepost.dcp
    from milepost.link.connection import fetch_status
    from milepost.link.run_dir import default_run_dir

    warnings.simplefilter("ignore")
    big = {"x": 0.5, "w": torch.arange(float(1 << 24))}
    dcp.save({"x": 0.0}, checkpoint_id=rank.root / "first")
    future = dcp.async_save(big, checkpoint_id=rank.root / "second")
    pid = fetch_status(default_run_dir(os.environ), 30)["node"]["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    future.result(80)
    dcp.save({**big, "x": 1.0}, checkpoint_id=rank.root / "third")
    return sorted(each.name for each in rank.root.iterdir())


def test_an_asynchronous_save_is_finished_by_the_daemon_that_follows_one_that_was_killed(
    folder: Path,
) -> None:
    root = folder / "r"
    root.mkdir()
    environment = {"XDG_RUNTIME_DIR": str(folder), "MILEPOST_RUN_DIR": ""}
    (names,) = run_ranks(save_while_the_daemon_dies, root, [None], environment=environment)
    assert ["first", "second", "third"] == names
    assert [{"second": 0.5, "third": 1.0}] == judge(load_plain, 1, str(root), ["second", "third"])


def save_what_drifts(rank: Rank) -> list[str]:
    import torch

    import milepost.dcp

    dcp: Any = milepost.dcp
    records = Records()
    logging.getLogger("milepost").addHandler(records)

    state = {f"t{i}": torch.zeros(1024) for i in range(200)}
    for number in range(4):
        dcp.save(state, checkpoint_id=rank.root / f"equal {number}")
    state["t150"][3] = rank.rank
    # As many saves as compare all: 200 tensors, a quarter of a MiB of them in each.
    for number in range(7):
        dcp.save(state, checkpoint_id=rank.root / f"drifted {number}")
    return [text for text in records.said if "replicas-differ" in text]


def test_replicas_that_drift_apart_between_saves_are_told_once(
    pair: list[Node], root: Path
) -> None:
    root.mkdir()
    told, nothing = run_ranks(save_what_drifts, root, pair)
    assert ["key 't150' differs by rank"] == [text.partition(",")[0] for text in told]
    assert [] == nothing


def save_by_odd_paths(rank: Rank) -> str:
    import milepost.dcp

    dcp: Any = milepost.dcp

    deep, elsewhere = rank.root / "real" / "deep", rank.root / "elsewhere"
    deep.mkdir(parents=True)
    elsewhere.mkdir()
    (rank.root / "link").symlink_to(deep)
    os.chdir(rank.root)
    dcp.save({"x": 1.5}, checkpoint_id="link/../z")
    future = dcp.async_save({"x": 2.5}, checkpoint_id="relative")
    os.chdir(elsewhere)
    return str(future.result(60).storage_meta.checkpoint_id)


def test_a_path_means_what_it_meant_to_the_system_when_the_save_was_called(
    pair: list[Node], root: Path
) -> None:
    root.mkdir()
    assert ["relative"] == run_ranks(save_by_odd_paths, root, pair[:1])
    expected = {"real/z": 1.5, "relative": 2.5}
    assert [expected] == judge(load_plain, 1, str(root), list(expected))


def leave_unfinished(rank: Rank) -> None:
    import torch

    import milepost.dcp

    dcp: Any = milepost.dcp

    dcp.async_save({"x": 4.5, "w": torch.ones(1 << 22)}, checkpoint_id=rank.root / "c")


def test_what_was_not_waited_for_is_finished_when_the_program_ends(
    pair: list[Node], root: Path
) -> None:
    root.mkdir()
    run_ranks(leave_unfinished, root, pair[:1])
    assert [{"c": 4.5}] == judge(load_plain, 1, str(root), ["c"])


def fork_and_save(rank: Rank) -> int:
    import milepost.dcp

    dcp: Any = milepost.dcp

    warnings.simplefilter("ignore")
    dcp.save({"x": 1.0}, checkpoint_id=rank.root / "parent")
    child = os.fork()
    if child == 0:
        try:
            dcp.save({"x": 2.0}, checkpoint_id=rank.root / "child")
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    dcp.save({"x": 3.0}, checkpoint_id=rank.root / "parent")
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_saves_by_itself_and_the_parent_goes_on(
    pair: list[Node], root: Path
) -> None:
    root.mkdir()
    assert [0] == run_ranks(fork_and_save, root, pair[:1])
    found = judge(load_plain, 1, str(root), ["parent", "child"])
    assert [{"parent": 3.0, "child": 2.0}] == found
