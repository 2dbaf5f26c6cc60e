"""What must hold, judged from outside the nodes: by the content of the disk and by what people are
told.

If one of the sentences below is not true, the oracle raises `SafetyViolation` at that instant, with
what led to it. It changes nothing, and trusts no node: it judges a checkpoint by its files.

1. Nothing under a final name is incomplete, mixed or not durable.
2. A save that anybody was told is committed is there after any crash, unless it was replaced, or a
   retention rule removed it.
3. No save has two outcomes, over all ranks and nodes.
4. Each handle ends in bounded virtual time after the last death of a daemon.
5. Retention never removes the last good checkpoint, or one that a rule keeps.
6. `latest` never names something incomplete.
7. No slot is filled while a writer reads it.
8. The invariants of each node hold after each of its events.
9. Retention does not remove what somebody reads, and removes it some time later (`readers.py`).
10. `preempted` gives all ranks the same answer at the same read (`preemption.py`).
11. A slot comes back once its save has ended.
12. After a step back, `latest` follows the new branch, and the abandoned branch takes nothing from
    it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from milepost.errors import CODES
from milepost.wire.messages import Keep, SaveRef
from milepostd.core.commands import Log
from milepostd.core.events import AnyEvent
from milepostd.core.invariants import broken_invariants
from tests.simulation.disk import (
    LATEST,
    MANIFEST,
    METADATA,
    REPLACED,
    RETIRED,
    Disk,
    File,
    Folder,
    Image,
    Inode,
    Manifest,
    Replacement,
)
from tests.simulation.preemption import Preemptions
from tests.simulation.readers import Leases
from tests.simulation.world import SECOND_NS, World

if TYPE_CHECKING:
    from tests.simulation.machine import Daemon, Slot
    from tests.simulation.trainer import Handle, Trainer
    from tests.simulation.workload import Attempt

STORY_LINES: Final = 60
"""How many lines about what led to a violation are printed."""


RETAINED: Final = "retained away"

SLOT_LOOK_S: Final = 5.0
SLOT_LOOKS_MAX: Final = 6
"""How often the slot of an ended save may be looked at and found not free."""


class SafetyViolation(AssertionError):
    """Something happened that must never happen."""


class LivenessViolation(AssertionError):
    """Something that must happen did not happen in time."""


@dataclass
class Oracle:
    """See the module's docstring.

    Args:
        checks_every: after how many events to check the nodes' invariants.
    """

    world: World
    disk: Disk
    deadline_s: float
    checks_every: int = 1
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    """Save id -> outcome -> who was told this outcome first."""
    committed: dict[str, Handle | None] = field(default_factory=dict)
    names: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name and step of each published save, by save id."""
    gone: dict[str, str] = field(default_factory=dict)
    """Committed saves that may be gone, and why."""
    open: dict[int, tuple[Handle, Trainer]] = field(default_factory=dict)
    marks: dict[str, int] = field(default_factory=dict)
    """Log events, outcomes and codes seen, and how often."""
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LINES))
    begun: dict[str, int] = field(default_factory=dict)
    """When a rank first called each save."""
    abandoned: dict[str, int] = field(default_factory=dict)
    """Saves of later steps than the one to which their attempt went back, and when it did."""
    commits: int = 0
    checked: int = 0
    check_at: int = 1
    unheard: dict[str, dict[Daemon, None]] = field(default_factory=dict)
    """Saves that a node ended as failed or skipped, and the lives of daemons that did so."""

    def __post_init__(self) -> None:
        self.disk.on_named = self.named
        self.leases = Leases(self)
        self.preemptions = Preemptions(self)

    def fail(self, what: str) -> None:
        story = "\n  ".join(self.story)
        raise SafetyViolation(f"at {self.world.now_s:.6f} s: {what}\nwhat led to it:\n  {story}")

    def be_late(self, what: str) -> None:
        story = "\n  ".join(self.story)
        raise LivenessViolation(f"at {self.world.now_s:.3f} s: {what}\n  {story}")

    def tell(self, *words: object) -> None:
        self.story.append(f"{self.world.now_s:12.6f} " + " ".join(str(word) for word in words))

    def mark(self, name: str) -> None:
        self.marks[name] = self.marks.get(name, 0) + 1

    # --- nodes

    def handled(self, daemon: Daemon, event: AnyEvent, commands: tuple[Any, ...]) -> None:
        self.checked += 1
        if self.checked >= self.check_at:
            node = daemon.node_core
            # A check takes longer the more a node remembers, so make it less often then.
            roles = len(node.saves.participations) + len(node.saves.coordinations)
            self.check_at = self.checked + max(self.checks_every, roles // 8)
            broken = broken_invariants(node)
            if broken:
                self.fail(f"node {daemon.node} after {event}: {broken}")
        self.preemptions.handled(daemon, event, commands)
        if self.checks_every == 1:
            self.tell(daemon.node, _short(event), "->", *map(_short, commands))

    def logged(self, daemon: Daemon, line: Log) -> None:
        node = daemon.node
        self.mark(line.event)
        if line.cause is not None:
            self.mark(f"code:{line.cause.code}")
            if line.cause.code not in CODES:
                self.fail(f"node {node} logs the unknown code {line.cause.code}")
        if line.save is not None and line.event in ("save.committed", "save.failed",
                                                    "save.skipped"):  # fmt: skip
            outcome = str(line.fields["outcome"])
            self.outcome(line.save.save_id, outcome, f"node {node}", daemon)

    def outcome(self, save_id: str, outcome: str, who: str, life: Daemon | None = None) -> None:
        """Note that somebody was told how a save ended: a rank by its handle, or (with `life`) a
        node's log.
        """
        told = self.outcomes.setdefault(save_id, {})
        if outcome in ("failed", "skipped") and life is not None and save_id not in self.names:
            # A rank that hears this frees its slot, and the save can never be complete again. A
            # daemon that is killed before any rank has heard it knows nothing of it afterwards: it
            # finds the images, and may still finish.
            self.unheard.setdefault(save_id, {})[life] = None
            return
        if outcome in told:
            return
        self.mark(f"outcome:{outcome}")
        if save_id in self.gone and outcome in ("failed", "skipped"):
            # Told by a node that was away, of a checkpoint that a rule has removed since: it finds
            # no trace of it, and nothing is lost that was not given up on purpose.
            self.mark("verdict.late")
            return
        told[outcome] = who
        self.tell("verdict", save_id, outcome, who)
        if "committed" in told and told.keys() & {"failed", "skipped"}:
            self.fail(f"save {save_id} has two outcomes: {told}")
        if outcome == "committed":
            self.commits += 1
            if save_id not in self.names:
                self.fail(f"save {save_id} was told to be committed and was never published")
            self._check_there(save_id)
        elif outcome in ("failed", "skipped") and save_id in self.names:
            self.fail(f"save {save_id} is a checkpoint, and {who} was told {outcome}")

    # --- handles and slots

    def opened(self, handle: Handle, trainer: Trainer) -> None:
        self.open[id(handle)] = (handle, trainer)
        self.begun.setdefault(handle.save.save_id, self.world.now_ns)

    def ended(self, handle: Handle) -> None:
        self.open.pop(id(handle), None)
        self.mark(f"handle:{handle.phase}")
        if handle.cause is not None and handle.cause.code in ("protocol", "internal"):
            # Nobody here breaks the protocol.
            self.fail(f"save {handle.save.save_id} of rank {handle.rank} ends by {handle.cause}")
        self.outcome(handle.save.save_id, handle.phase, f"the handle of rank {handle.rank}")

    def died(self, trainer: Trainer) -> None:
        """Note that the process has ended: nobody waits for its handles any more."""
        self.tell(f"trainer {trainer.rank} of attempt {trainer.attempt.number} has ended")
        for key, (_, owner) in list(self.open.items()):
            if owner is trainer:
                del self.open[key]

    def filling(self, slot: Slot, trainer: Trainer) -> None:
        if slot.readers:
            self.fail(f"rank {trainer.rank} fills a slot that a writer reads")

    def freed(self, slot: Slot, trainer: Trainer, save_id: str) -> None:
        if slot.readers:
            self.fail(f"rank {trainer.rank} was given the slot of {save_id}, which a writer reads")

    @property
    def handle_s_max(self) -> float:
        """How long a handle may take while its trainer lives: waiting for the daemon, for a slot,
        for a layout, for the outcome, and for a lost daemon.
        """
        return 20 + self.deadline_s + (self.deadline_s + 30) + (self.deadline_s + 30 + 17) + 95

    def check_handles(self) -> None:
        lost_at_ns: dict[Attempt, int] = {}
        for handle, trainer in self.open.values():
            attempt = trainer.attempt
            if attempt not in lost_at_ns:
                lost_at_ns[attempt] = max(machine.lost_at_ns for machine in attempt.machines)
            # A daemon that is killed begins the deadline anew in its next life.
            since_ns = max(handle.opened_at_ns, lost_at_ns[attempt])
            age_s = (self.world.now_ns - since_ns) / SECOND_NS
            if age_s > self.handle_s_max:
                self.be_late(
                    f"the handle of rank {trainer.rank} for {handle.save.save_id} is "
                    f"{handle.phase} after {age_s:.0f} s, more than {self.handle_s_max:.0f} s"
                )

    def watch_slot(self, trainer: Trainer, save: SaveRef, quiet: int = 0) -> None:
        """Watch the slot of an ended save. It must come back once nobody reads it, the daemon runs,
        and the daemon has ended the save, too. A restarted daemon may have taken it up again.
        """
        slot, daemon = trainer.held.get(save.save_id), trainer.machine.daemon
        if slot is None:
            return
        is_well = trainer.session.joined is not None and not slot.readers
        if is_well and daemon is not None and not daemon.is_stopped:
            role = daemon.node_core.saves.participations.get((save.job, save.save_id))
            quiet = quiet + 1 if role is None or role.has_ended else 0
        else:
            quiet = 0
        if quiet == SLOT_LOOKS_MAX:
            self.be_late(f"rank {trainer.rank} never gets the slot of {save.save_id} back")
        self.world.after(SLOT_LOOK_S, trainer, self.watch_slot, trainer, save, quiet)

    # --- the directory

    def named(self, name: str, inode: Inode | None) -> None:
        """Note that a name in the root was given or taken."""
        if name.startswith("."):
            return
        if name == LATEST:
            self.check_latest()
            return
        self.tell("root:", name, "is gone" if inode is None else "is there")
        self.leases.named(name, inode)
        if not isinstance(inode, Folder):
            for save_id, (other, _) in self.names.items():
                if other == name and "committed" in self.outcomes.get(save_id, {}):
                    self._check_there(save_id)
            return
        manifest = self._check_complete(name, inode)
        self.names[manifest.save_id] = (name, manifest.step)
        told = self.outcomes.get(manifest.save_id, {})
        unheard = self.unheard.pop(manifest.save_id, {})
        if any(life.is_alive for life in unheard):
            self.fail(f"save {manifest.save_id} becomes {name}, and a node says that it failed")
        if unheard:
            self.mark("verdict.revised")
        if told.keys() & {"failed", "skipped"}:
            self.fail(f"save {manifest.save_id} becomes {name}, and was told to be {told}")
        for save_id, (other, _) in self.names.items():
            if other == name and save_id != manifest.save_id and save_id not in self.gone:
                is_older = order_of(manifest.save_id)[0] < order_of(save_id)[0]
                if is_older and "committed" in self.outcomes.get(save_id, {}):
                    self.fail(
                        f"save {save_id} was committed as {name}, and {manifest.save_id}, of an "
                        "abandoned future, takes its place"
                    )
                self.gone[save_id] = f"replaced by {manifest.save_id}"
        # Retention may remove what it has chosen, even if somebody gave it its name back meanwhile.
        if self.gone.get(manifest.save_id) != RETAINED:
            self.gone.pop(manifest.save_id, None)

    def _check_complete(self, name: str, folder: Folder) -> Manifest:
        """Judge a checkpoint by its files; all of them durable."""
        parts = [folder.entries.get(part) for part in (MANIFEST, METADATA)]
        manifest = parts[0].content if isinstance(parts[0], File) else None
        if not isinstance(manifest, Manifest) or not isinstance(parts[1], File):
            self.fail(f"{name} has no manifest, or no index")
            raise AssertionError
        if parts[1].content != manifest:
            self.fail(f"{name}: its index and its manifest are of two saves")
        ranks = [rank for rank, _ in manifest.files]
        if ranks != list(range(len(ranks))) or not ranks:
            self.fail(f"{name} holds ranks {ranks}")
        if len({layout.partition("/")[0] for layout in manifest.layouts}) != 1:
            self.fail(f"{name} mixes structures: {manifest.layouts}")
        for rank, file_name in manifest.files:
            file = folder.entries.get(file_name)
            image = file.content if isinstance(file, File) else None
            if not isinstance(image, Image) or image.is_torn:
                self.fail(f"{name}/{file_name} is {image}")
                raise AssertionError
            wanted = (manifest.job, manifest.save_id, manifest.step, name, rank)
            if image[:5] != wanted:
                self.fail(f"{name}/{file_name} holds {image}, not {wanted}")
        named = {MANIFEST, METADATA, *(file for _, file in manifest.files)}
        for part, inode in folder.entries.items():
            if part not in named:
                # Files that a late node puts beside the checkpoint do no harm.
                self.mark("stray file")
                continue
            if isinstance(inode, File) and not inode.is_synced:
                self.fail(f"{name}/{part} is not synced")
            if folder.durable.get(part) is not inode:
                self.fail(f"the name {name}/{part} is not synced")
        return manifest

    def check_latest(self) -> None:
        link = self.disk.root.entries.get(LATEST)
        if not isinstance(link, File):
            return
        name = str(link.content)
        folder = self.disk.root.entries.get(name)
        if isinstance(folder, Folder):
            self._check_complete(name, folder)
        elif not self._is_being_replaced(name):
            self.fail(f"latest names {name}, which is not there")

    def _is_being_replaced(self, name: str) -> bool:
        """Whether the old checkpoint lies aside with an intent that will bring a whole one back."""
        intent = self.disk.run.entries.get(f"replace-{name}")
        content = intent.content if isinstance(intent, File) else None
        if isinstance(content, Replacement) and content.aside in self.disk.partial.entries:
            return True
        return any(
            part.startswith(f"{name}.") and part.endswith(RETIRED)
            for part in self.disk.partial.entries
        )

    def _lies_aside(self, save_id: str, name: str) -> bool:
        """Whether a whole checkpoint lies aside, where it gets its name back now or at the next
        start.
        """
        for part, inode in self.disk.partial.entries.items():
            if part.startswith(f"{name}.") and part.endswith((REPLACED, RETIRED)):
                manifest = inode.entries.get(MANIFEST) if isinstance(inode, Folder) else None
                content = manifest.content if isinstance(manifest, File) else None
                if isinstance(content, Manifest) and content.save_id == save_id:
                    return True
        return False

    def _check_there(self, save_id: str) -> None:
        if save_id in self.gone:
            return
        name, _ = self.names[save_id]
        folder = self.disk.root.entries.get(name)
        if isinstance(folder, Folder):
            found = self._check_complete(name, folder)
            if found.save_id != save_id:
                self.fail(f"{name} holds {found.save_id}; {save_id} was committed under it")
        elif not self._lies_aside(save_id, name):
            self.fail(f"save {save_id} was committed as {name}, which is not there")

    def crashed(self, owner: str | None, lost: int) -> None:
        """After unsynced changes were lost: check that everything reported as committed is
        there.
        """
        self.tell(f"crash of {owner or 'the storage'}: {lost} things lost")
        for save_id, told in self.outcomes.items():
            if "committed" in told:
                self._check_there(save_id)
        for name, inode in list(self.disk.root.entries.items()):
            if isinstance(inode, Folder) and not name.startswith("."):
                self._check_complete(name, inode)
        self.check_latest()

    def shown(self) -> list[tuple[tuple[int, int, int], str]]:
        """Return order and name of each checkpoint, newest first."""
        there: list[tuple[tuple[int, int, int], str]] = []
        for name, inode in self.disk.root.entries.items():
            if isinstance(inode, Folder) and not name.startswith("."):
                manifest = self._check_complete(name, inode)
                attempt, count = order_of(manifest.save_id)
                there.append(((attempt, manifest.step, count), name))
        return sorted(there, reverse=True)

    @staticmethod
    def kept(keep: Keep, there: Sequence[tuple[tuple[int, int, int], str]]) -> set[str]:
        """Return the names that a rule keeps."""
        kept = {name for _, name in there[: max(1, keep.last)]}
        for order, name in there:
            step = order[1]
            if step in keep.protect or any(step % every == 0 for every in keep.every):
                kept.add(name)
        return kept

    def retaining(
        self,
        doomed: dict[str, str],
        keep: Keep,
        there: Sequence[tuple[tuple[int, int, int], str]],
    ) -> None:
        """Note that the coordinator is about to remove these checkpoints, out of those it saw."""
        if self.kept(keep, there) & doomed.keys():
            self.fail(f"retention by {keep} removes {doomed} of {there}")
        for save_id in doomed.values():
            self.mark("retained")
            self.gone.setdefault(save_id, RETAINED)

    def followed(self, save_id: str) -> None:
        """Check that `latest` names this save, or another that was not abandoned before this one
        began.
        """
        link = self.disk.root.entries.get(LATEST)
        name = str(link.content) if isinstance(link, File) else ""
        folder = self.disk.root.entries.get(name)
        if isinstance(folder, Folder):
            found = self._check_complete(name, folder).save_id
            was_abandoned_ns = self.abandoned.get(found)
            if was_abandoned_ns is not None and self.begun[save_id] >= was_abandoned_ns:
                self.fail(f"save {save_id} is a checkpoint, and latest is {found}, abandoned")

    def note_unmoved(self) -> None:
        self.mark("latest.unmoved")

    def check_end(self, line: Sequence[Handle], keep: Keep, *, is_following: bool) -> None:
        """After the last save, a clean start and no fault: check that every reported checkpoint is
        under its name.

        Args:
            line: the saves of the last attempt that were not abandoned, oldest first.
            is_following: a daemon has not moved `latest` yet, and retention waits for it.
        """
        for save_id, told in self.outcomes.items():
            if "committed" in told and save_id not in self.gone:
                name = self.names[save_id][0]
                if not isinstance(self.disk.root.entries.get(name), Folder):
                    self.fail(f"save {save_id} was committed as {name}, which is not there")
                self._check_there(save_id)
        link = self.disk.root.entries.get(LATEST)
        if not isinstance(link, File) or not isinstance(
            self.disk.root.entries.get(str(link.content)), Folder
        ):
            self.fail(f"latest is {link}")
        committed = [
            handle.save.name
            for handle in line
            if "committed" in self.outcomes.get(handle.save.save_id, {})
        ]
        if isinstance(link, File) and committed and link.content != committed[-1]:
            self.fail(f"latest is {link.content}, and the last save became {committed[-1]}")
        there = self.shown()
        if keep == Keep() or is_following:
            return
        if len(there) > len(self.kept(keep, there)):
            self.fail(f"retention by {keep} has left {there}")


def order_of(save_id: str) -> tuple[int, int]:
    """Attempt and count."""
    attempt, _, count = save_id.partition("-")
    return int(attempt), int(count)


def _short(value: Any) -> str:
    """Return an event or a command in short form, for the story of a violation."""
    inner = getattr(value, "message", None)
    what = type(value).__name__ + (f".{type(inner).__name__}" if inner is not None else "")
    save = getattr(value, "save", None) or getattr(inner, "save", None)
    ident = getattr(save, "save_id", "") or getattr(inner, "save_id", "")
    extra = [
        str(getattr(value, name))
        for name in ("rank", "timer", "outcome", "event", "session")
        if getattr(value, name, "") not in ("", None)
    ]
    cause = getattr(value, "cause", None) or getattr(inner, "cause", None)
    said = [cause.code] if cause is not None else []
    target = getattr(getattr(value, "node", None), "node_id", "")
    source = getattr(value, "node_id", "")
    outcome = getattr(inner, "outcome", "")
    return "/".join(part for part in [what, ident, *extra, *said, target, source, outcome] if part)
