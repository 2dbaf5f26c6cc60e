"""The savers of this process: one for each process group, and one for saves without a group.

Knows which saver belongs to which group, and ends each with its group or with the process. Knows
nothing of states or paths.

Threads: any. A forked child has none of its parent's savers.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch.distributed as dist

from milepost.dcp.saver import GroupSaver
from milepost.link.rendezvous import Group, join_group
from milepost.link.run_dir import default_run_dir
from milepost.options import find_run_dir

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("milepost")


class _Owner(NamedTuple):
    """Whom a saver belongs to: a group and a daemon."""

    group: int
    """Its `id`; 0: of no group."""
    run_dir: str
    """As the environment names it; empty: the default one."""


class _Kept(NamedTuple):
    saver: GroupSaver
    group: Callable[[], Any]
    """Returns the group; None: it is gone."""


class Savers:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[_Owner, _Kept] = {}
        """Guarded by the lock."""

    def of(self, process_group: dist.ProcessGroup | None, *, no_dist: bool) -> GroupSaver:
        """Return the saver of a group, of the default group, or of no group."""
        group = _group_of(process_group, no_dist=no_dist)
        run_dir = os.environ.get("MILEPOST_RUN_DIR", "")
        owner = _Owner(id(group) if group is not None else 0, run_dir)
        with self._lock:
            ended = [self._kept.pop(each) for each in [*self._kept] if self._has_ended(each)]
            kept = self._kept.get(owner)
            if kept is None:
                kept = self._kept[owner] = _make(group, run_dir)
        for each in ended:
            _close(each.saver)
        return kept.saver

    def drop(self, saver: GroupSaver) -> None:
        """Close a saver that cannot be used any more; `of` makes another one."""
        with self._lock:
            for owner in [each for each, kept in self._kept.items() if kept.saver is saver]:
                del self._kept[owner]
        _close(saver)

    def close(self) -> None:
        """Close all savers, once their saves have ended."""
        with self._lock:
            kept, self._kept = self._kept, {}
        for each in kept.values():
            _close(each.saver)

    def _has_ended(self, owner: _Owner) -> bool:
        """Whether the group was destroyed. The lock is held."""
        if not owner.group:
            return False
        group = self._kept[owner].group()
        return group is None or group not in dist.distributed_c10d._world.pg_map


def _group_of(
    process_group: dist.ProcessGroup | None, *, no_dist: bool
) -> dist.ProcessGroup | None:
    if no_dist or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.group.WORLD if process_group is None else process_group


def _make(group: dist.ProcessGroup | None, run_dir: str) -> _Kept:
    place = Group(0, 1, None) if group is None else join_group(group)
    saver = GroupSaver(
        place,
        find_run_dir(run_dir or default_run_dir(os.environ)),
        is_embedded=not run_dir,
    )
    return _Kept(saver, (lambda: None) if group is None else weakref.ref(group))


def _close(saver: GroupSaver) -> None:
    try:
        saver.close()
    except Exception as error:
        log.warning("while closing %r: %s", saver, error)


SAVERS: Final = Savers()


def _forget_in_child() -> None:
    """Leave the parent's savers to the parent: their sockets and threads are not the child's.

    Keeps references to them, so that nothing that is shared with the parent is closed here.
    """
    _inherited.append(dict(SAVERS._kept))
    SAVERS.__init__()  # type: ignore[misc]


_inherited: list[object] = []

atexit.register(SAVERS.close)
os.register_at_fork(after_in_child=_forget_in_child)
