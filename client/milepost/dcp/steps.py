"""The steps of a load or a save, which all ranks of a group take together or not at all.

Does what torch's `_DistWrapper` does, with its errors, over the group's store: torch's collectives
of objects need numpy, and cost a round of tensors each. What goes from rank to rank is pickled as
there: all of it comes from the trainers of one process group. Knows nothing of checkpoints.

Source: torch/distributed/checkpoint/utils.py (2.13).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from milepost.link.rendezvous import gather, tell_all

if TYPE_CHECKING:
    from traceback import StackSummary

    from torch.distributed import Store

    from milepost.link.rendezvous import Group

_Result = TypeVar("_Result")

AFTER_S: Final = 30.0
"""How much longer the other ranks wait: rank 0 may wait the whole time for a late rank before it
answers."""


class _Word(NamedTuple):
    """What a rank says about a step: that it could not take it, or its result."""

    failure: tuple[BaseException, StackSummary] | None = None
    found: Any = None
    is_shared: bool = False
    """Whether the result is included."""


class _Answer(NamedTuple):
    """What rank 0 says: who failed, and whether there is a part for each rank."""

    failures: dict[int, tuple[BaseException, StackSummary]]
    has_parts: bool = False


class Steps:
    """Takes one rank through the steps; all ranks take the same ones, in the same order.

    Args:
        group: this rank's place among the others; its store has not been used before.
        timeout_s: how long a rank is waited for, at each step.
        has_ended: tells whether a rank will not come any more; None: nobody knows.
        act: what they are steps of, by its name in `rendezvous.ACTS`.

    A step raises on every rank what has failed on any of them, as CheckpointException with failures
    by rank; and Unavailable("rank-missing") where a rank does not come.
    """

    def __init__(
        self,
        group: Group,
        timeout_s: float,
        has_ended: Callable[[int], bool] | None = None,
        act: str = "load",
    ) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._has_ended = has_ended
        self._act = act
        self._answered = ""
        """Rank 0: the key of its last answer. All ranks have read it when they come again."""

    def agree(self, step: str, act: Callable[[], _Result]) -> _Result:
        """Take a step; return its result once all ranks have taken it."""
        return self._take(step, act, None)

    def exchange(
        self,
        step: str,
        act: Callable[[], _Result],
        reduce: Callable[[list[_Result]], Sequence[_Result]],
    ) -> _Result:
        """Take a step. Rank 0 makes an answer from all results; return this rank's part of it."""
        return self._take(step, act, reduce)

    def _take(
        self,
        step: str,
        act: Callable[[], _Result],
        reduce: Callable[[list[_Result]], Sequence[_Result]] | None,
    ) -> _Result:
        topic = f"{self._act}/{step}"
        try:
            found = act()
        except (Exception, CheckpointException) as error:
            try:
                self._hear(step, topic, _Word(_wrap_exception(error)), None)
            except CheckpointException as told:
                raise told from error
            raise AssertionError("a failure was told and nobody raised") from error
        except BaseException as error:
            # An interrupt: this rank leaves at once, and the others must not wait for it.
            self._leave(step, topic, error)
            raise
        if reduce is None:
            self._hear(step, topic, _Word(), None)
            return found
        part = self._hear(step, topic, _Word(None, found, True), reduce)
        return found if part is None else cast("_Result", part[0])

    def _hear(
        self,
        step: str,
        topic: str,
        word: _Word,
        reduce: Callable[[list[Any]], Sequence[Any]] | None,
    ) -> tuple[Any] | None:
        """Send this rank's word; return this rank's part of the answer, if it has parts. Raises
        CheckpointException with the failures of all ranks.
        """
        group = self._group
        parts: list[bytes] = []

        def answer() -> bytes:
            heard = gather(group, topic, said, self._timeout_s, self._has_ended)
            words = [_unpacked(each) for each in heard]
            self._delete(self._answered)
            failures = {rank: each.failure for rank, each in enumerate(words) if each.failure}
            if not failures and reduce is not None:
                try:
                    made = reduce(_found_by_all(words))
                    parts.extend(pickle.dumps(part) for part in made)
                except BaseException as error:
                    failures[0] = _wrap_exception(error)
            for rank, part in enumerate(parts if not failures and group.store else ()):
                group.store.set(f"{topic}/part/{rank}", part)  # type: ignore[union-attr]
            return _packed(_Answer(failures, bool(parts) and not failures))

        said = _packed(word) if group.store is not None else b""
        if group.store is None:
            return self._alone(step, word, reduce)
        if group.rank:
            gather(group, topic, said, self._timeout_s)
        told = tell_all(group, topic, answer, self._timeout_s + AFTER_S, self._has_ended)
        self._delete(f"{topic}/{group.rank}")
        self._answered = "" if group.rank else f"{topic}/answer"
        heard: _Answer = pickle.loads(told)
        if heard.failures:
            raise CheckpointException(step, heard.failures)
        if not heard.has_parts:
            return None
        place = f"{topic}/part/{group.rank}"
        part = pickle.loads(group.store.get(place))
        self._delete(place)
        return (part,)

    @staticmethod
    def _alone(
        step: str, word: _Word, reduce: Callable[[list[Any]], Sequence[Any]] | None
    ) -> tuple[Any] | None:
        if word.failure is not None:
            raise CheckpointException(step, {0: word.failure})
        if reduce is None:
            return None
        try:
            return (reduce([word.found])[0],)
        except Exception as error:
            raise CheckpointException(step, {0: _wrap_exception(error)}) from error

    def _leave(self, step: str, topic: str, error: BaseException) -> None:
        """Tell the other ranks that this one leaves; wait for no answer."""
        group = self._group
        if group.store is None:
            return
        if group.rank:
            gather(group, topic, _packed(_Word(_wrap_exception(error))), self._timeout_s)
        else:
            failures = _Answer({0: _wrap_exception(error)})
            tell_all(group, topic, lambda: _packed(failures), self._timeout_s)

    def _delete(self, key: str) -> None:
        """Delete what has been read from the store, which keeps it for as long as the run lasts."""
        # A store that cannot delete keeps a few bytes of each load.
        with suppress(RuntimeError):
            if key:
                cast("Store", self._group.store).delete_key(key)


def why_not_among(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> str:
    """Return why a process group is left to stock torch; "": its ranks can meet."""
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return ""
    group = dist.group.WORLD if process_group is None else process_group
    if group is None or dist.get_rank(group) < 0:
        return "this process is not in the group"
    if dist.get_backend(group) == "fake":
        return "the process group is a fake one"
    try:
        group.get_group_store()
    except (AttributeError, RuntimeError):
        return "the process group has no store"
    return ""


def _found_by_all(words: Sequence[_Word]) -> list[Any]:
    apart = [rank for rank, each in enumerate(words) if not each.is_shared]
    if apart:
        raise RuntimeError(
            f"the planner of rank 0 makes a global plan, and those of ranks {apart} do not"
        )
    return [each.found for each in words]


def _packed(value: _Word | _Answer) -> bytes:
    failures = [*value.failures.values()] if isinstance(value, _Answer) else [value.failure]
    try:
        data = pickle.dumps(value)
        if any(failures):
            pickle.loads(data)
    except Exception as error:
        # An exception may hold anything, or may not be reproducible from its arguments. So send its
        # text.
        if isinstance(value, _Answer):
            return pickle.dumps(
                _Answer({rank: _plain(each) for rank, each in value.failures.items()})
            )
        return pickle.dumps(_Word(_plain(value.failure or _wrap_exception(error))))
    return data


def _plain(failure: tuple[BaseException, StackSummary]) -> tuple[BaseException, StackSummary]:
    error, where = failure
    return RuntimeError(f"{type(error).__name__}: {error}"), where


def _unpacked(data: bytes) -> _Word:
    try:
        word: Any = pickle.loads(data)
    except Exception as error:
        # A class that only the other rank can import.
        return _Word(
            _wrap_exception(RuntimeError(f"a rank said what nobody understands: {error!r}"))
        )
    assert isinstance(word, _Word)
    return word
