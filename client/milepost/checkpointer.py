"""`Checkpointer`: the one object a trainer touches.

Owns the order of a save on the trainer: collect the items, get a layout if their structure is new,
take a free slot, copy, tell the daemon. Everything after that happens elsewhere. The daemon's
messages arrive on the connection's thread and end the handles. Neither a save nor a load calls a
collective or makes a process group.

Threads: public methods may be called from any thread; `save`, `prepare` and `load` take turns.
Handles are safe anywhere.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch

from milepost.advice import FirstSave, note_made
from milepost.concurrency.collector import collect_now, collector_paused
from milepost.concurrency.turns import Turn, in_turn
from milepost.concurrency.waiting import check_timeout
from milepost.errors import MilepostError, Rejected, UsageError
from milepost.handle import Save
from milepost.ledger import count_of
from milepost.link.connection import fetch_status
from milepost.link.preemption import PreemptionFlag
from milepost.link.rendezvous import Group, Introduction, Meeting, join_group
from milepost.link.run_dir import default_run_dir
from milepost.link.session import JOIN_S, Session
from milepost.options import (
    check_choice,
    check_options,
    check_repeated,
    check_step,
    directory_name,
    find_root,
    find_run_dir,
    job_name,
    make_staging,
)
from milepost.reading.choice import Loaded, load_chosen
from milepost.reading.restore import LoadOptions, LoadReport
from milepost.saving.access import RootAccess
from milepost.saving.attempts import JobAttempts
from milepost.saving.planning import Planning
from milepost.saving.preparation import Preparation
from milepost.saving.saves import Handover, Saves
from milepost.staging.selection import Optimizers
from milepost.staging.slots import Slots
from milepost.staging.stager import Stager
from milepost.staging.strategy import Filling
from milepost.state.content import Content, ContentReader
from milepost.state.planners import storage_meta_of
from milepost.storage.modes import own_umask
from milepost.storage.retention import Policy
from milepost.storage.root import Root
from milepost.wire.messages import (
    DaemonMessage,
    Join,
    Keep,
    NodeRef,
    Preempted,
    ReadsWanted,
    SaveRef,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.checkpoint.planner import SavePlanner


log = logging.getLogger("milepost")


class Checkpointer:
    """Saves a training run's state without stopping it, and loads it again.

    Args:
        root: directory of this run's checkpoints, on a file system that all nodes share; made if
            missing.
        process_group: the ranks that save together; None: the default group, or one process
            without torch.distributed.
        planner: a torch `SavePlanner`, as for `dcp.save`; its local half runs on every rank, its
            `create_global_plan` on rank 0.
        run_dir: run directory of a running daemon; None: `$MILEPOST_RUN_DIR`, else a daemon is
            started for the node.
        job: a name for the run; None: from the launcher's environment, else from the root.
        slots: how many saves may be under way at once, at least 2; each takes host memory for one
            image.
        on_busy: if no slot is free, "wait" for one, or "skip" the save on all ranks.
        on_failure: if a save fails, "warn" in the log, or "raise" at the next `save()` and at
            `close()`.
        overwrite: allow a step that this attempt saved, or resumed from, to be saved again.
        keep: which checkpoints stay: `KeepLast(n)`, `KeepEvery(steps)`, `Protect(steps)`, combined
            with `|`; None: all.
        staging: "blocking": `save()` returns when the copy is complete. "overlap": `save()` returns
            at once; the optimizer's parameters and state are copied during the next forward and
            backward, and the optimizer's next step waits for the copy. See docs/overlap.md.
        optimizer: with "overlap", the torch optimizer of the state that is saved, or several.
        deadline_s: how long one save may take, all stages together, from its first message to the
            daemon. Before that, a `save()` may wait for a slot for at most the same time.
        check_replicas: when ranks hold different values under one key, "warn" in the log, once for
            each key; "raise": fail the save; "off": do not compare. See docs/errors.md.

    Raises:
        UsageError: an argument is wrong, or ranks disagree.
        Unavailable: no daemon answers, or a rank is missing.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        process_group: dist.ProcessGroup | None = None,
        planner: SavePlanner | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        job: str | None = None,
        slots: int = 2,
        on_busy: Literal["wait", "skip"] = "wait",
        on_failure: Literal["warn", "raise"] = "warn",
        overwrite: bool = False,
        keep: Policy | None = None,
        staging: Literal["blocking", "overlap"] = "blocking",
        optimizer: Optimizers | None = None,
        deadline_s: float = 600.0,
        check_replicas: Literal["warn", "raise", "off"] = "warn",
    ) -> None:
        check_options(
            on_busy,
            on_failure,
            staging,
            slots,
            deadline_s,
            keep,
            planner=planner,
            overwrite=overwrite,
            check_replicas=check_replicas,
        )
        self._staging = make_staging(staging, optimizer, planner)
        self.root = find_root(root)
        self._may_wait = on_busy == "wait"
        self._overwrite = overwrite
        self._keep = Keep() if keep is None else keep.rules()
        self._deadline_s = float(deadline_s)
        self._group: Group = join_group(process_group)
        self.rank, self.world = self._group.rank, self._group.world
        self._reader = ContentReader(planner, self._group, self._deadline_s, check_replicas)

        given = run_dir if run_dir is not None else os.environ.get("MILEPOST_RUN_DIR") or None
        self._run_dir = find_run_dir(default_run_dir(os.environ) if given is None else given)
        self._session = Session(
            self._run_dir,
            is_embedded=given is None,
            on_message=self._heard,
            on_gone=lambda cause: self._saves.gone(cause),
        )
        self._saves = Saves(self._session, self.rank, is_raising=on_failure == "raise")
        self._planning = Planning(
            self._session,
            self._saves,
            self._reader,
            deadline_s=self._deadline_s,
            may_wait=self._may_wait,
            who=self,
            is_first=self.rank == 0,
        )
        self._access = RootAccess(self.root, is_first=self.rank == 0, overwrite=overwrite)

        self._preemption = PreemptionFlag(self._join, self._session.send)
        self._pid = os.getpid()
        self._turn = Turn()
        """Held by the thread that is in `save`, `prepare` or `load`. Only this thread changes the
        fields below, `job` and `attempt`; other threads at most read a field. The fields above
        never change."""
        self._preparation: Preparation | None = None
        """The preparation that is under way."""
        self._first_save = FirstSave(is_telling=self.rank == 0)
        self._loads = 0
        self._is_closed = False
        """Changed by any thread, under the lock of `_saves`."""
        name = job_name(job, self.root)
        self._attempts = JobAttempts(name, self._group, self._access, self._deadline_s)
        try:
            self.node: NodeRef = self._session.open().node
            self._meeting: Meeting = self._attempts.meet(
                Introduction(self.node, str(self.root), name, str(torch.__version__), own_umask())
            )
        except BaseException:
            self._session.close()
            raise
        self._slots_count = slots
        self._begin_attempt()
        self._staging.arm()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except MilepostError as failure:
            if error is None:
                raise
            log.warning("close() failed too, after another error: %s", failure)

    def __repr__(self) -> str:
        return f"<Checkpointer rank {self.rank} of {self.world}, job {self.job}, root {self.root}>"

    def _begin_attempt(self) -> None:
        """Go on as the present attempt of the job. No save is under way."""
        self.job, self.attempt = self._attempts.job, self._attempts.number
        slots = Slots(
            Stager(self.job, self.attempt, self.rank, slots=self._slots_count),
            self._saves.changed,
            count=self._slots_count,
            timeout_s=self._deadline_s,
            who=self,
        )
        self._saves.begin(self.job, self.attempt, slots)
        if self.attempt:
            note_made(self)

    def _claim_late(self) -> None:
        """Begin an attempt if there is none yet. Raises Rejected if that is still impossible."""
        if not self.attempt:
            self._attempts.claim_late()
            self._begin_attempt()

    # --- the daemon

    def _join(self) -> None:
        """Make sure that this rank has joined its job at a running daemon. Raises Unavailable or
        Rejected.
        """
        self._session.ensure(
            Join(
                job=self.job,
                attempt=self.attempt,
                root=str(self.root),
                rank=self.rank,
                node_of_rank=self._meeting.node_of_rank,
                cohort=self._meeting.cohort,
                keep=self._keep,
                deadline_s=self._deadline_s,
                umask=self._meeting.umask,
            )
        )

    def _heard(self, message: DaemonMessage) -> None:
        """Take a message; on the connection's thread."""
        match message:
            case ReadsWanted():
                self._preemption.hold()
            case Preempted():
                self._preemption.decide(message.at_read)
            case _:
                self._saves.heard(message)

    # --- saving

    @in_turn
    def prepare(
        self,
        state: Mapping[str, Any],
        wait: bool = True,
        per_rank: Mapping[str, Any] | None = None,
    ) -> None:
        """Pay now for what the first save would pay: plan, reserve and pin memory, touch its pages.

        All ranks call it with the state that they are going to save.

        Args:
            state: as for `save`; the call keeps no reference to it.
            wait: if False, the call only reads the state and returns; a thread does the rest, and
                a `save()` meanwhile waits for it. Since training goes on, replicas are not compared
                between ranks.
            per_rank: as for `save`.

        Call it after the optimizer's first step: before that, the optimizer has no state. torch's
        `get_state_dict` gives an optimizer its state by a step of its own. This changes training,
        and the log warns of it.

        Raises:
            UsageError: the state cannot be saved; names the keys.
            Rejected, Unavailable, SaveFailed: planning failed. With `wait=False` a later failure is
                only logged, and the first save tries again.
        """
        self._check_open()
        self._settle()
        self._claim_late()
        preparation = Preparation(
            self._saves,
            self._planning,
            self._staging,
            lambda: self._access.claim(self.job),
            is_still=wait,
        )
        try:
            preparation.read(lambda ref: self._read(ref, state, per_rank))
            self._preparation = preparation
            if not wait:
                preparation.start()
                return
            preparation.plan()
        except BaseException as error:
            preparation.settle(error)
            raise
        preparation.settle()
        collect_now()

    def _finish_preparing(self) -> None:
        """Wait for a preparation in the background."""
        if self._preparation is not None:
            # Forget it only once it is over: docs/design/0010-interrupts.md.
            self._preparation.join()
            self._first_save.was_prepared |= self._preparation.is_complete
        self._preparation = None

    def _settle(self) -> None:
        """Wait until the work of all earlier calls of this rank has ended."""
        self._finish_preparing()
        self._staging.settle()
        self._saves.give_up_left()

    def guard(self) -> None:
        """Wait until the parameters and optimizer state of the last `save()` may change.

        Call it before code that changes them outside `torch.optim.Optimizer.step()`; the step
        itself waits without a call. For tensors on a GPU the current stream waits, not the host.
        Returns at once with `staging="blocking"`, and if no copy is under way. For any thread.
        """
        self._staging.guard()

    @in_turn
    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        per_rank: Mapping[str, Any] | None = None,
        checkpoint_id: str | None = None,
    ) -> Save:
        """Save the state; return when it is copied and may change. All ranks call it alike.

        With `staging="overlap"`, parameters and optimizer state must not change before the copy is
        complete; see `guard`. If an earlier save is still being copied, the call waits for it.

        Args:
            step: the trainer's step, 0 or more.
            state: what `dcp.save` takes: nested dicts, lists, tensors, DTensors, modules,
                optimizers and other Stateful objects, picklable objects. Tensors are read until the
                save is staged.
            per_rank: state that differs by rank (random generators, data loaders). Each rank gets
                its own back in `LoadReport.per_rank`.
            checkpoint_id: the directory's name below the root; None: `step_<step>`.

        Raises:
            UsageError: what was passed cannot be saved; nothing was written. With
                `on_failure="raise"` also SaveFailed, for an earlier save.
        """
        started_s = time.monotonic()
        self._check_open()
        self._settle()
        self._raise_failures()
        step = check_step(step)
        name = directory_name(step, checkpoint_id)
        check_repeated(name, self._saves.taken_by(name), overwrite=self._overwrite)
        try:
            self._claim_late()
        except Rejected as error:
            return self._saves.refuse(step, name, error)
        ref, save = self._saves.open(step, name)
        try:
            with collector_paused():
                self._fill(ref, save, state, per_rank)
        except MilepostError as error:
            self._saves.give_up(ref, error)
            if isinstance(error, UsageError):
                raise
        except BaseException as error:
            self._saves.give_up(ref, error)
            raise
        save.stall_s = time.monotonic() - started_s
        return save

    def _fill(
        self,
        ref: SaveRef,
        save: Save,
        state: Mapping[str, Any],
        per_rank: Mapping[str, Any] | None,
    ) -> None:
        """Get a slot and copy the state into it, or begin to copy. No slot: the save has ended.

        The lists made from the state are gone on return, so that the collector does not walk them.
        """
        content = self._read(ref, state, per_rank)
        filling = self._staging.choose(content.items)
        self._access.check(ref, self.attempt)
        if self._saves.take_turn(ref, may_wait=self._may_wait):
            self._stage(ref, save, content, filling)

    def _read(
        self, ref: SaveRef, state: Mapping[str, Any], per_rank: Mapping[str, Any] | None
    ) -> Content:
        """List what a state holds; see `ContentReader.read`."""
        meta = storage_meta_of(str(self.root / ref.name), ref.save_id)
        return self._reader.read(ref.save_id, state, per_rank, self._join, meta)

    def _stage(self, ref: SaveRef, save: Save, content: Content, filling: Filling) -> None:
        """Copy the state into a slot, or begin to."""
        started_s = time.monotonic()
        plan = self._saves.plan_of(content.structure)
        with self._saves.slots.at_work(lambda: self._saves.is_over(ref)) as stager:
            placed = self._planning.put_in_force(ref, save, content)
            if placed is None:
                return
            slot, planned_s = self._saves.slots.take(), time.monotonic()
            listener = Handover(self._saves, ref, save)
            number = count_of(ref.save_id)
            # A plan that was made just now has compared everything.
            due = () if plan is None else plan.rota.due_in(number)
            digests = self._reader.digests(placed, due, number)
            is_complete = filling.fill(stager, slot, ref, placed.objects, listener, digests)
        if plan is None:
            copied_s = time.monotonic() - planned_s if is_complete else None
            self._first_save.paid(planned_s - started_s, copied_s)
        self._first_save.pass_by()

    # --- what is there

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, ascending."""
        return sorted({entry.step for entry in Root(self.root).checkpoints() if entry.step >= 0})

    def latest(self) -> int | None:
        """Return the step of the newest committed checkpoint, by attempt and step; None if none."""
        for entry in Root(self.root).checkpoints():
            if entry.step >= 0:
                return entry.step
        return None

    @in_turn
    def load(
        self,
        state: dict[str, Any] | None,
        step: int | None = None,
        partial: bool = False,
        source: Literal["auto", "storage"] = "auto",
        verify: bool = True,
        fallback: bool = False,
        cast: bool = False,
        allow_pickle: bool = False,
    ) -> LoadReport:
        """Load a checkpoint into the state, in place. All ranks call it; rank 0 chooses the step.

        The call first waits for saves of this object that are under way. The number of ranks may
        differ from the number that saved the checkpoint. If one rank cannot load, all ranks raise
        before any rank reads a tensor; see docs/loading.md.

        Args:
            state: a template, as for `dcp.load`. An empty dict or list in it, None, and the state
                of an optimizer that has not stepped are filled with what the checkpoint holds
                there. None: everything, nested as it was saved, in `LoadReport.state`.
            step: the checkpoint's step; None: the latest.
            partial: leave keys that the checkpoint does not hold as they are.
            source: "storage", or "auto", which means the same for now.
            verify: compare everything that is read with its checksums.
            fallback: if the checkpoint is damaged, load the newest older one that is whole.
            cast: convert tensors of other dtypes, as `Tensor.to` does; not if that changes
                integers.
            allow_pickle: load objects of any class, which runs whatever code the checkpoint names.

        Raises:
            LoadFailed: "not-found": there is no such checkpoint; "load-failed": keys are missing,
                or it does not fit; "shape-mismatch", "dtype-mismatch", "unsafe-object".
            CorruptCheckpoint: the checkpoint is damaged; names files and keys, and the keys of the
                state that were overwritten before the damage was found.
        """
        self._check_open()
        check_choice("source", source, ("auto", "storage"))
        step = None if step is None else check_step(step)
        self._settle()
        self._loads += 1
        self._access.note_load()
        self.wait()
        loaded = load_chosen(
            Root(self.root),
            state,
            LoadOptions(partial, verify, cast, allow_pickle),
            step=step,
            fallback=fallback,
            group=self._group,
            topic=f"load/{self._loads}",
            timeout_s=self._deadline_s,
        )
        self._resume(loaded)
        return loaded.report

    def _resume(self, loaded: Loaded) -> None:
        """Go on from a checkpoint. Later steps that this attempt has saved are abandoned."""
        is_beyond = self._saves.last_step > loaded.report.step
        if self._attempts.branch(f"load/{self._loads}/attempt", is_needed=is_beyond):
            # Arenas carry the number of their attempt; those of earlier attempts are removed.
            self._saves.slots.close(unlink=True)
            self._begin_attempt()
        self._saves.resume(loaded.report.step, loaded.name)

    @property
    def preempted(self) -> bool:
        """Whether to save and leave: true on all ranks once any of them got SIGTERM.

        Read it once a step, on every rank, from the main thread. It turns true at the same read on
        all ranks, so that all of them save the same step. The first read installs a SIGTERM
        handler: from then on the signal no longer ends the process.
        """
        return self._preemption.read()

    def status(self) -> dict[str, Any]:
        """Return the node's status, as `milepost status --json` prints it. Raises Unavailable."""
        return fetch_status(self._run_dir, JOIN_S)

    # --- the end

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once no save of this object is under way, however they ended.

        Raises TimeoutError, which names a save that still runs.
        """
        check_timeout(timeout_s)
        self._saves.await_ends(timeout_s)

    def close(self) -> None:
        """Wait for the saves under way, say goodbye to the daemon, and free the shared memory.

        Waits at most the save's own deadline. Idempotent. With `on_failure="raise"` raises
        SaveFailed for a save that failed.
        """
        if os.getpid() != self._pid:
            return  # In a forked child, everything belongs to the parent.
        with self._saves.changed:
            is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        self._preemption.close()
        self._access.close()
        if (preparation := self._preparation) is not None:
            preparation.join()
        self._staging.close()
        if self._turn.is_free:
            self._saves.give_up_left()
        is_quiet = True
        try:
            self.wait(self._deadline_s + JOIN_S)
        except TimeoutError as error:
            is_quiet = False
            log.warning("closed during a save; the daemon will finish it: %s", error)
        if is_quiet:
            self._session.leave()
        self._session.close()
        self._saves.slots.close(unlink=is_quiet)
        self._raise_failures()

    @property
    def is_closed(self) -> bool:
        """Whether `close()` was called."""
        return self._is_closed

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "usage",
                f"this Checkpointer belongs to process {self._pid}, and process {os.getpid()} is "
                "a fork of it",
                "call it in the process that made it",
            )
        if self._is_closed:
            raise UsageError("closed", f"{self!r} is closed", "make a new one")

    def _raise_failures(self) -> None:
        for save in self._saves.take_failures():
            # The caller knows of a failure that `wait()` has raised.
            if not save.is_told:
                raise save.failure()
