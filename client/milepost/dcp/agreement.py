"""What the ranks of one group say to each other before they save: one answer for all of them.

Owns the rounds: each rank says where it saves and whether it can, and rank 0 answers. Uses the
group's store, never a collective, and deletes what it put there. Knows nothing of states or
daemons. What is said is pickled, as in torch's own collectives: it goes from trainer to trainer of
one process group, never to a daemon.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from milepost.link.rendezvous import gather, tell_all

if TYPE_CHECKING:
    from traceback import StackSummary

    from torch.distributed import Store

    from milepost.link.rendezvous import Group

Failures: TypeAlias = "dict[int, tuple[BaseException, StackSummary]]"
"""By rank, as `CheckpointException.failures`."""


class Word(NamedTuple):
    """What one rank says before a save.

    Attributes:
        place: where it saves.
        failure: why it cannot.
        is_lost: its saver is of no use any more: all of them need new ones.
    """

    place: str
    failure: BaseException | None = None
    is_lost: bool = False


class Answer(NamedTuple):
    """What rank 0 answers: `failures` is empty if all go on."""

    failures: Failures
    is_lost: bool


class Rounds:
    """The rounds of one saver. All ranks take part in each.

    Args:
        group: this rank's place among the others.
        timeout_s: how long they are waited for.
    """

    def __init__(self, group: Group, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._count = 0
        self._spent: list[str] = []
        """Rank 0: keys that all ranks have read once they come to the next round."""

    def hold(self, word: Word, judge: Callable[[Sequence[Word]], Failures]) -> Answer:
        """Say a word, and return the answer, which is the same on all ranks.

        Args:
            word: this rank's.
            judge: called on rank 0 with what all ranks say if none of them has a failure; returns
                the failures that this shows.

        Raises MilepostError if a rank does not come.
        """
        self._count += 1
        topic = f"dcp/{self._count}"

        def answer() -> bytes:
            words = [_unpacked(each) for each in gather(self._group, topic, said, self._timeout_s)]
            self._delete(self._spent)
            failures = {
                rank: _wrap_exception(each.failure)
                for rank, each in enumerate(words)
                if each.failure is not None
            }
            is_lost = any(each.is_lost for each in words)
            if not failures and not is_lost:
                failures = judge(words)
            return _packed(Answer(failures, is_lost))

        said = _packed(word)
        if self._group.rank:
            gather(self._group, topic, said, self._timeout_s)
        # Rank 0 may wait all of `timeout_s` for a late rank before it answers.
        told = tell_all(self._group, topic, answer, self._timeout_s + 30)
        self._delete([f"{topic}/{self._group.rank}"])
        self._spent = [f"{topic}/answer"]
        found: Answer = pickle.loads(told)
        return found

    def _delete(self, keys: Sequence[str]) -> None:
        """Delete keys from the store, which would keep them for as long as the run lasts."""
        store = cast("Store | None", self._group.store)
        if store is None:
            return
        for key in keys:
            # A store that cannot delete keeps a few bytes for each save.
            with suppress(RuntimeError):
                store.delete_key(key)


def failed_here(step: str, rank: int, error: BaseException) -> CheckpointException:
    """Return what a call raises for one rank's failure."""
    found = CheckpointException(step, {rank: _wrap_exception(error)})
    found.__cause__ = error
    return found


def _packed(value: Word | Answer) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception:
        # An exception may hold anything; its text always travels.
        assert isinstance(value, Word)
        return pickle.dumps(value._replace(failure=RuntimeError(repr(value.failure))))


def _unpacked(data: bytes) -> Word:
    try:
        word: Any = pickle.loads(data)
    except Exception as error:
        # One that pickles, but is not made again by its arguments.
        return Word("", RuntimeError(f"a rank failed with what cannot be unpickled: {error!r}"))
    assert isinstance(word, Word)
    return word
