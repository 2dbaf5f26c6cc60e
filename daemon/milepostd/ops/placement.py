"""Which cores the daemon may use, its niceness and its I/O class.

Owns the choice of cores (`choose_cores`, pure), and applies all three to the threads of this
process and of its planner. On Linux all three belong to single threads, and a thread that is
started inherits them: call `settle` while there is only one. What the system refuses is logged once
and the daemon goes on: too loud a daemon is better than none. Knows no sessions.

Sources: sched(7), setpriority(2), ioprio_set(2), sched_setaffinity(2), cpuset(7).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil

from milepost.errors import UsageError
from milepostd.ops.logs import emit

CORES_MIN: Final = 2
"""The daemon confines itself to free cores only if there are this many or more. Its planner may use
a whole core for seconds, and heartbeats and writers must go on meanwhile. More writer threads need
no more cores, since they mostly wait for the device."""

CORE_DIGITS_MAX: Final = 9
CORE_NUMBER_MAX: Final = 8191
"""No kernel supports more cores. An affinity mask may name cores that the machine does not have."""

IO_CLASSES: Final = {
    "best-effort": (psutil.IOPRIO_CLASS_BE, 7),
    "idle": (psutil.IOPRIO_CLASS_IDLE, 0),
}
"""Class and level of each value of `io_class` that is not `none`; 7 is the lowest level."""


# --- the choice


class Choice(NamedTuple):
    """The chosen cores, and the reason in a sentence."""

    cores: frozenset[int]
    reason: str


def parse_cores(text: str) -> frozenset[int]:
    """Read a list such as `8-11,14`. Raises UsageError for anything else."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = (first, last) if dash else (first, first)
        if not all(
            # `int` raises for thousands of digits.
            number.isascii() and number.isdigit() and len(number) <= CORE_DIGITS_MAX
            for number in numbers
        ):
            raise UsageError("usage", f"expected auto, all or a list like 8-11,14, got {text!r}")
        low, high = int(numbers[0]), int(numbers[1])
        if low > high or high > CORE_NUMBER_MAX:
            raise UsageError(
                "usage", f"{part.strip()} is no range of cores from 0 to {CORE_NUMBER_MAX}"
            )
        cores.update(range(low, high + 1))
    return frozenset(cores)


def show_cores(cores: Collection[int]) -> str:
    """Write cores as a list such as `8-11,14`, ascending."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in runs)


def choose_cores(
    allowed: frozenset[int],
    trainers: Sequence[frozenset[int] | None],
    siblings: Callable[[int], frozenset[int]],
) -> Choice:
    """Choose cores away from those that the trainers are pinned to, where enough are left.

    Args:
        allowed: the cores that the daemon may use at all.
        trainers: for each trainer of this node, the cores it may use; None if they are not known.
        siblings: returns the hardware threads that share a physical core with this one, itself
            among them. They slow each other down.

    Returns all of `allowed` unless at least `CORES_MIN` of them are free of all trainers.
    """
    if not trainers:
        return Choice(allowed, "no trainer is connected")
    seen = [cores for cores in trainers if cores is not None]
    if len(seen) < len(trainers):
        hidden = len(trainers) - len(seen)
        return Choice(allowed, f"the cores of {hidden} of {len(trainers)} trainers are not known")
    taken = frozenset().union(*seen) & allowed
    if not taken:
        return Choice(allowed, "no trainer may run on these cores")
    free = allowed - taken
    if len(free) < CORES_MIN:
        return Choice(
            allowed,
            f"trainers leave {len(free)} of {len(allowed)} cores free, fewer than {CORES_MIN}",
        )
    apart = free.difference(*(siblings(core) for core in taken))
    if len(apart) >= CORES_MIN and apart != free:
        return Choice(apart, f"apart from the trainers' cores {show_cores(taken)} and siblings")
    return Choice(free, f"apart from the trainers' cores {show_cores(taken)}")


# --- the effect

_GONE: Final[frozenset[int]] = frozenset()
"""The cores of a process that has ended."""


class Host:
    """The system calls of this module; tests put a fake in its place.

    Each raises OSError or psutil.Error for what the system refuses.
    """

    def __init__(self) -> None:
        self._siblings: dict[int, frozenset[int]] = {}

    def affinity(self, pid: int) -> frozenset[int]:
        """Return the cores that a thread may use. A process id stands for its first thread, 0 for
        this thread.
        """
        return frozenset(os.sched_getaffinity(pid))

    def set_affinity(self, pid: int, cores: Iterable[int]) -> None:
        """Confine a thread to cores; the kernel drops those that the cpuset does not allow."""
        os.sched_setaffinity(pid, cores)

    def threads(self, pid: int) -> list[int]:
        """Return the ids of a process's threads."""
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]

    def siblings(self, core: int) -> frozenset[int]:
        """Return the hardware threads of a core; only itself if the system does not tell."""
        found = self._siblings.get(core)
        if found is None:
            found = frozenset((core,))
            path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
            with suppress(OSError, UsageError):
                found = parse_cores(path.read_text().strip())
            self._siblings[core] = found
        return found

    def niceness(self) -> int:
        """Return the niceness of this thread."""
        return os.getpriority(os.PRIO_PROCESS, 0)

    def be_nice(self, nice: int) -> None:
        """Make this thread nicer."""
        os.nice(nice)

    def be_nice_as_session(self) -> None:
        """Make this process's session as nice as this thread, if the session is its own.

        Where the kernel groups tasks by session (`CONFIG_SCHED_AUTOGROUP`), niceness counts only
        within a session. A daemon that a trainer started has a session of its own. In somebody
        else's session its niceness counts already, and that session may hold the trainer.
        """
        if os.getsid(0) == os.getpid():
            with suppress(FileNotFoundError):
                Path("/proc/self/autogroup").write_text(str(self.niceness()))

    def io_class(self) -> int:
        """Return the I/O class of the process's first thread, as the kernel's number."""
        return int(psutil.Process().ionice().ioclass)

    def set_io_class(self, io_class: int, level: int) -> None:
        """Set the I/O class of the process's first thread."""
        psutil.Process().ionice(io_class, level or None)


class DaemonPlacement:
    """Where on its node the daemon runs, and how loudly. Use it on the process's first thread.

    Args:
        nice: added to the niceness that was inherited.
        io_class: a key of `IO_CLASSES`, or `none`: as it was inherited.
        cpus: `auto`, `all` or a list of cores.
        is_embedded: a trainer has started this process, on the trainer's own cores.
        host: the system; a test may put a fake in its place.
    """

    def __init__(
        self, *, nice: int, io_class: str, cpus: str, is_embedded: bool, host: Host | None = None
    ) -> None:
        self._nice = nice
        self._io_class = io_class
        self._cpus = cpus
        self._is_embedded = is_embedded
        self._host = host or Host()
        self._refused: set[str] = set()
        self._allowed: frozenset[int] = frozenset()
        """The cores that the daemon may use at all, as at its start."""
        self.choice = Choice(frozenset(), "")
        """The cores in use now, and the reason."""

    def settle(self) -> None:
        """Set niceness, I/O class and cores, for this thread and all that it starts from now on.

        Call it after the log is set up, and before the process has a second thread.
        """
        host = self._host
        if self._nice:
            self._try("nice", lambda: host.be_nice(self._nice))
            self._try("nice", host.be_nice_as_session)
        if self._io_class != "none":
            io_class, level = IO_CLASSES[self._io_class]
            self._try("io_class", lambda: host.set_io_class(io_class, level))
        if self._is_embedded or self._cpus != "auto":
            # The inherited mask says where the rank that started us trains, not where we may run.
            self._try("cpus", lambda: host.set_affinity(0, range(CORE_NUMBER_MAX + 1)))
        self._allowed = self._cores_of(0) or frozenset()
        if self._cpus == "auto":
            self.choice = choose_cores(self._allowed, [], host.siblings)
        elif self._cpus == "all":
            self.choice = Choice(self._allowed, "cpus is all")
        else:
            wanted = parse_cores(self._cpus)
            is_done = self._try("cpus", lambda: host.set_affinity(0, wanted))
            why = f"cpus is {self._cpus}" + ("" if is_done else ", which was refused")
            self.choice = Choice(self._cores_of(0) or frozenset(), why)

    def follow(self, trainers: Iterable[int | None], planner: int | None) -> None:
        """Move away from the cores of these trainers, if `cpus` is `auto`.

        Cheap enough to call each second: one system call a trainer, unless something has changed.

        Args:
            trainers: process ids; None for one that cannot be seen from here.
            planner: process id of the planner's child, which is moved too.
        """
        if self._cpus != "auto":
            return
        known = [self._cores_of(pid) for pid in trainers]
        choice = choose_cores(
            self._allowed, [cores for cores in known if cores != _GONE], self._host.siblings
        )
        moves = choice.cores != self.choice.cores
        if moves and not self._try("cpus", lambda: self._confine(os.getpid(), choice.cores)):
            return
        self.choice = choice
        if moves:
            self.tell()
        # Check each time: the planner may have been started just before the daemon moved.
        if planner is not None and self._cores_of(planner) not in (None, _GONE, choice.cores):
            self._try("cpus", lambda: self._confine(planner, choice.cores))

    def picture(self) -> dict[str, Any]:
        """Return what is in force, which may not be what was asked for, for the status."""
        names = {int(number): name for name, (number, _) in IO_CLASSES.items()}
        io_class = "none"
        with suppress(OSError, psutil.Error):
            io_class = names.get(self._host.io_class(), "none")
        return {
            "nice": self._host.niceness(),
            "io_class": io_class,
            "cpus": show_cores(self._cores_of(0) or self.choice.cores),
            "cpus_reason": self.choice.reason,
        }

    def tell(self) -> None:
        """Log where the daemon runs."""
        emit("info", "daemon.placed", cpus=show_cores(self.choice.cores),
             reason=self.choice.reason)  # fmt: skip

    def _cores_of(self, pid: int | None) -> frozenset[int] | None:
        if pid is None:
            return None
        try:
            return self._host.affinity(pid)
        except ProcessLookupError:
            return _GONE
        except OSError:
            return None

    def _confine(self, pid: int, cores: frozenset[int]) -> None:
        """Confine all threads of a process; the first thread first, since it starts the others."""
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            self._host.set_affinity(pid, cores)
            for thread in self._host.threads(pid):
                with suppress(ProcessLookupError):
                    self._host.set_affinity(thread, cores)

    def _try(self, setting: str, act: Callable[[], None]) -> bool:
        """Do it. Return False if the system refuses, which is logged once for each setting."""
        try:
            act()
        except (OSError, psutil.Error) as error:
            if setting not in self._refused:
                self._refused.add(setting)
                reason = getattr(error, "strerror", None) or type(error).__name__
                emit("warning", "place.refused", setting=setting, reason=reason,
                     hint=f"it goes on without; docs/config.md has {setting}")  # fmt: skip
            return False
        return True
