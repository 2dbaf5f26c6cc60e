"""`GroupSaver`: one rank's way to its daemon behind many calls of `save`, each to its own place.

Owns the order of a save: agree with the other ranks, list the state, get a layout if the structure
is new, copy, tell the daemon. It is like a `Checkpointer` without a root: it claims no root,
numbers no attempts and removes no checkpoints, and each call names a path.

Threads: any thread may call `save` and `close`; calls take turns.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from milepost.concurrency.collector import collector_paused
from milepost.concurrency.turns import Turn, in_turn
from milepost.dcp.steps import Steps
from milepost.dcp_format.index import read_metadata
from milepost.errors import MilepostError, Rejected, UsageError
from milepost.format.manifest import METADATA_NAME
from milepost.ledger import count_of
from milepost.link.presence import Presence
from milepost.link.rendezvous import Introduction, meet
from milepost.link.session import JOIN_S, Session
from milepost.saving.planning import Planning
from milepost.saving.saves import Handover, Saves
from milepost.staging.blocking import BlockingStaging
from milepost.staging.slots import Slots
from milepost.staging.stager import Stager
from milepost.state.content import ContentReader
from milepost.state.planners import PlannerFailed, is_default, wants_lowest_rank
from milepost.storage.modes import own_umask
from milepost.storage.place import Place
from milepost.wire.messages import Join

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlanner

    from milepost.dcp.writer import Target
    from milepost.handle import Save
    from milepost.link.rendezvous import Group, Meeting
    from milepost.wire.messages import DaemonMessage, NodeRef, SaveRef

log = logging.getLogger("milepost")

DEADLINE_S: Final = 1800.0
"""How long a save may take, and how long to wait for a rank: as long as torch's process groups
wait.
"""

ATTEMPT: Final = 1
"""Each saver is a job of its own, which never has another attempt."""

_STEP: Final = re.compile(r"(\d{1,18})$")


class SaverLost(Exception):
    """The daemon refused this saver on some rank, or the saver was closed. All ranks need new
    ones.
    """


class _Word(NamedTuple):
    """What one rank says before a save: where it saves, and whether its saver is of use."""

    place: str
    is_lost: bool


class SavedBytes(NamedTuple):
    """A committed checkpoint, with the content of its `.metadata`."""

    path: Path
    pickled: bytes

    def metadata(self) -> Metadata:
        """Return the index, with the path as torch's own has it. Raises CorruptCheckpoint."""
        found = read_metadata(self.path, data=self.pickled)
        if found.storage_meta is not None:
            found.storage_meta.checkpoint_id = self.path
        return found


class Pending:
    """A save that was staged, or has failed here.

    Args:
        handle: of the save.
        rank: this one.
        target: where it goes.
        error: why it could not be staged.
    """

    def __init__(
        self, handle: Save, rank: int, target: Target, error: Exception | None = None
    ) -> None:
        self._handle = handle
        self._rank = rank
        self._target = target
        self._error = error

    def wait(self) -> SavedBytes:
        """Return once it is committed. Raises CheckpointException."""
        try:
            if self._error is not None:
                raise self._error
            self._handle.wait()
            pickled = (Path(self._target.place) / METADATA_NAME).read_bytes()
            return SavedBytes(self._target.path, pickled)
        except PlannerFailed as error:
            failures = {rank: _wrap_exception(each) for rank, each in error.raised.items()}
            raise CheckpointException("plan", failures) from error
        except (MilepostError, OSError) as error:
            culprit = self._handle.failed_rank
            rank = self._rank if self._error is not None or culprit < 0 else culprit
            raise failed_here("write", rank, error) from error


class GroupSaver:
    """See the module's docstring. All ranks of the group make one, and call it alike.

    Args:
        group: this rank's place among those that save together.
        run_dir: of the node's daemon.
        is_embedded: whether a daemon is started there if none is running.
    """

    def __init__(self, group: Group, run_dir: Path, *, is_embedded: bool) -> None:
        self.rank = group.rank
        self._group = group
        self._presence = Presence(group, "dcp")
        self._steps = Steps(group, DEADLINE_S, self._presence.has_ended, act="dcp")
        self._steps_taken = 0
        self._session = Session(
            run_dir,
            is_embedded=is_embedded,
            on_message=self._heard,
            on_gone=lambda cause: self._saves.gone(cause),
        )
        self._saves = Saves(self._session, self.rank, is_raising=False)
        self._readers: dict[bool, ContentReader] = {}
        """Readers of states, by whether replicas go to the lowest rank."""
        self._staging = BlockingStaging()
        self._pid = os.getpid()
        self._turn = Turn()
        """Held by the thread that is in `save`. Only this thread changes the fields below."""
        self._node: NodeRef | None = None
        self._meeting: Meeting | None = None
        self._root = ""
        """The path that the daemons get as the job's root: the place of the first save."""
        self._slots_count = 0
        self._open_places: dict[str, Save] = {}
        """The last save to each place, unless it has ended."""
        self._is_lost = False

    def __repr__(self) -> str:
        return f"<milepost.dcp saver, rank {self.rank} of {self._group.world}>"

    # --- the daemon

    def _heard(self, message: DaemonMessage) -> None:
        self._saves.heard(message)

    def _say_hello(self) -> None:
        """Find out which node this is. Raises Unavailable or Rejected."""
        if self._node is None:
            self._node = self._session.open().node

    def _meet(self, place: str) -> None:
        """Find the other ranks' daemons, and name the job. Raises as `rendezvous.meet`."""
        assert self._node is not None
        me = Introduction(self._node, place, "", str(torch.__version__), own_umask())
        name = f"dcp-{uuid.uuid4().hex[:16]}"
        self._meeting = meet(self._group, me, lambda: (name, ATTEMPT), topic="dcp/meet")
        self._root = place
        self._use_slots(1)

    def _join(self) -> None:
        """Make sure this rank has its place at a living daemon. Raises Unavailable or Rejected."""
        assert self._meeting is not None
        try:
            self._session.ensure(
                Join(
                    job=self._meeting.job,
                    attempt=ATTEMPT,
                    root=self._root,
                    rank=self.rank,
                    node_of_rank=self._meeting.node_of_rank,
                    cohort=self._meeting.cohort,
                    deadline_s=DEADLINE_S,
                    umask=self._meeting.umask,
                )
            )
        except Rejected:
            self._is_lost = True
            raise

    # --- saving

    @in_turn
    def save(
        self,
        state: Mapping[Any, Any] | Exception,
        target: Target,
        planner: SavePlanner | None,
        *,
        slots: int,
    ) -> Pending:
        """Save a state; return when it is copied and may change. All ranks call it alike.

        Args:
            state: the state with its Stateful entries called; or the exception of one of them,
                which the other ranks are told.
            target: where it goes.
            planner: the user's, as for `dcp.save`.
            slots: for how many images to make room, at least.

        Raises:
            CheckpointException: on all ranks: one of them cannot go on.
            SaverLost: on all ranks: nothing was begun, and new savers are needed.
            UsageError: "nested-call".
        """
        self._agree(target, state if isinstance(state, Exception) else None)
        assert not isinstance(state, Exception)
        self._use_slots(slots)
        self._await_same(target.place)
        ref, handle = self._saves.open(
            _step_of(target.place),
            os.path.basename(target.place) or "/",
            place=target.place,
            overwrite=target.overwrite,
        )
        self._open_places[target.place] = handle
        try:
            with collector_paused():
                self._fill(ref, handle, state, target, planner)
        except Exception as error:
            self._saves.give_up(ref, error)
            return Pending(handle, self.rank, target, error)
        except BaseException as error:
            self._saves.give_up(ref, error)
            raise
        return Pending(handle, self.rank, target)

    def _agree(self, target: Target, failure: Exception | None) -> None:
        """Agree with the other ranks on a save. Raises as `save`."""
        if failure is None:
            failure = _raised(self._say_hello if self._meeting is None else self._join)
        self._take_step(target, failure, is_lost=self._is_lost)
        if self._meeting is not None:
            return
        try:
            self._meet(target.place)
        except MilepostError as error:
            self._is_lost = True
            raise failed_here("plan", self.rank, error) from error
        # A daemon may refuse its rank: then the others must not wait for it.
        self._take_step(target, _raised(self._join), is_lost=False)

    def _take_step(self, target: Target, failure: Exception | None, *, is_lost: bool) -> None:
        """Go on if all ranks can. Raises as `save`."""

        def look() -> _Word:
            if failure is not None and not is_lost:
                raise failure
            if not target.overwrite and Place(target.place).is_checkpoint():
                raise RuntimeError("Checkpoint already exists and self.overwrite=False.")
            return _Word(target.place, is_lost)

        self._steps_taken += 1
        try:
            word = self._steps.exchange(f"plan/{self._steps_taken}", look, _prepared)
        except MilepostError as error:
            self._is_lost = True
            raise failed_here("plan", self.rank, error) from error
        if word.is_lost:
            raise SaverLost

    def _fill(
        self,
        ref: SaveRef,
        handle: Save,
        state: Mapping[Any, Any],
        target: Target,
        planner: SavePlanner | None,
    ) -> None:
        """Take the state to a slot, unless the save has ended. Raises as `Checkpointer.save`."""
        reader = self._reader_of(planner)
        content = reader.read(ref.save_id, state, None, self._join, target.storage_meta)
        filling = self._staging.choose(content.items)
        if not self._saves.take_turn(ref, may_wait=True):
            return
        plan = self._saves.plan_of(content.structure)
        planning = Planning(
            self._session,
            self._saves,
            reader,
            deadline_s=DEADLINE_S,
            may_wait=True,
            who=self,
            is_first=self.rank == 0,
        )
        with self._saves.slots.at_work(lambda: self._saves.is_over(ref)) as stager:
            placed = planning.put_in_force(ref, handle, content)
            if placed is None:
                return
            number = count_of(ref.save_id)
            # A plan that was made just now has compared all replicas.
            due = () if plan is None else plan.rota.due_in(number)
            slot, listener = self._saves.slots.take(), Handover(self._saves, ref, handle)
            digests = reader.digests(placed, due, number)
            filling.fill(stager, slot, ref, placed.objects, listener, digests)

    def _reader_of(self, planner: SavePlanner | None) -> ContentReader:
        """Return what reads a state by this planner. A user's planner plans anew in each save."""
        if not is_default(planner):
            return ContentReader(planner, self._group, DEADLINE_S)
        to_lowest = wants_lowest_rank(planner)
        if to_lowest not in self._readers:
            self._readers[to_lowest] = ContentReader(planner, self._group, DEADLINE_S, "warn")
        return self._readers[to_lowest]

    def _await_same(self, place: str) -> None:
        """Wait until no earlier save to the same place is under way."""
        for each, handle in list(self._open_places.items()):
            if each == place:
                handle.await_end(None)
            if handle.done():
                del self._open_places[each]

    def _use_slots(self, count: int) -> None:
        """Make room for this many images, if there is less."""
        if count <= self._slots_count:
            return
        assert self._meeting is not None
        if self._slots_count:
            self._saves.await_ends(None)
            self._saves.slots.await_none()
            self._saves.slots.close(unlink=True)
        slots = Slots(
            Stager(self._meeting.job, ATTEMPT, self.rank, slots=count),
            self._saves.changed,
            count=count,
            timeout_s=DEADLINE_S,
            who=self,
        )
        self._saves.begin(self._meeting.job, ATTEMPT, slots)
        self._slots_count = count

    # --- the end

    def close(self) -> None:
        """Wait for the saves under way, say goodbye to the daemon, and free the shared memory.

        Idempotent.
        """
        if os.getpid() != self._pid:
            return  # What a forked child leaves is its parent's.
        self._is_lost = True
        is_quiet = True
        if self._meeting is not None:
            try:
                self._saves.await_ends(DEADLINE_S + JOIN_S)
            except TimeoutError as error:
                is_quiet = False
                log.warning("closing while a save runs, which the daemon finishes: %s", error)
            if is_quiet:
                self._session.leave()
        self._session.close()
        if self._slots_count:
            self._saves.slots.close(unlink=is_quiet)


def _raised(act: Callable[[], object]) -> Exception | None:
    """Return the exception that a call raises."""
    try:
        act()
    except Exception as error:
        return error
    return None


def _prepared(words: list[_Word]) -> list[_Word]:
    """Prepare the place, on rank 0; return what each rank is told. Raises what prevents it."""
    place = words[0].place
    for rank, word in enumerate(words):
        if word.place != place:
            text = f"rank {rank} saves to {word.place}, rank 0 to {place}"
            raise UsageError("save-mismatch", text, "give one path")
    is_lost = any(word.is_lost for word in words)
    if not is_lost:
        Place(place).prepare()
    return [_Word(place, is_lost)] * len(words)


def failed_here(step: str, rank: int, error: BaseException) -> CheckpointException:
    """Return what a call raises for one rank's failure."""
    return CheckpointException(step, {rank: _wrap_exception(error)})


def _step_of(place: str) -> int:
    """Return the number that ends a path, which people name by the step; -1 if there is none."""
    found = _STEP.search(place)
    return int(found[1]) if found else -1
