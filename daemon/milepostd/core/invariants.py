"""What must hold at a node after every event, whatever has happened before. Tests and simulation
check it.

Reads a node and changes nothing. A broken invariant is a fault of the core, never of a trainer, a
peer or a disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from milepost.wire.messages import Ending
from milepostd.core.coordination import Coordination
from milepostd.core.early import EARLY_MAX
from milepostd.core.job import Job, save_order
from milepostd.core.node import Node
from milepostd.core.participation import Participation
from milepostd.core.phases import COORDINATOR, PARTICIPANT, Phase
from milepostd.core.saves import ENDED_MAX, SAVES_MAX
from milepostd.core.sessions import JOBS_MAX

PARTICIPANT_PHASES = frozenset({phase for phase, _ in PARTICIPANT} | {*PARTICIPANT.values()})
COORDINATOR_PHASES = frozenset({phase for phase, _ in COORDINATOR} | {*COORDINATOR.values()})


def broken_invariants(node: Node) -> list[str]:
    """Return a sentence for each invariant that is broken."""
    return [
        *_sessions(node),
        *_bounds(node),
        *(
            f"participation {job}/{save_id}: {what}"
            for (job, save_id), role in node.saves.participations.items()
            for what in _participation(role, (job, save_id))
        ),
        *(
            f"coordination {job}/{save_id}: {what}"
            for (job, save_id), role in node.saves.coordinations.items()
            for what in _coordination(role, (job, save_id), node)
        ),
    ]


def _sessions(node: Node) -> Iterator[str]:
    seats: list[tuple[int, int]] = []
    for number, joined in node.roster.joined.items():
        seats.append((id(joined.job), joined.rank))
        seat = joined.job.seats.get(joined.rank)
        if number not in node.roster.open_sessions:
            yield f"session {number} has joined but is not open"
        if seat is None or seat.session != number or seat.is_lost:
            yield f"session {number} is rank {joined.rank}, whose seat says otherwise"
    if len(seats) != len(set(seats)):
        yield "two sessions are one rank"
    for name, job in node.roster.jobs.items():
        if name != job.job or not job.ranks_here or not job.seats.keys() <= set(job.ranks_here):
            yield f"job {name} seats ranks {sorted(job.seats)}, here are {job.ranks_here}"


def _bounds(node: Node) -> Iterator[str]:
    if len(node.roster.jobs) > JOBS_MAX:
        yield f"{len(node.roster.jobs)} jobs"
    for what, roles in (
        ("participant", node.saves.participations),
        ("coordinator", node.saves.coordinations),
    ):
        active = sum(not role.has_ended for role in roles.values())
        if active > SAVES_MAX:
            yield f"{active} saves in flight as {what}"
    if len(node.peers.early.kept) > EARLY_MAX:
        yield f"{len(node.peers.early.kept)} early messages"
    if node.housekeeping < 0:
        yield f"{node.housekeeping} housekeeping commands in flight"
    pending = sum(role.is_pending for role in node.saves.participations.values())
    if len(node.saves.ended) > ENDED_MAX + pending:
        yield f"{len(node.saves.ended)} ended saves are kept"
    kept = [
        *((True, key) for key, role in node.saves.participations.items() if role.has_ended),
        *((False, key) for key, role in node.saves.coordinations.items() if role.has_ended),
    ]
    if sorted(kept) != sorted(node.saves.ended):
        yield "the list of ended saves does not name each of them once"


def _role(job: Job, role: Participation | Coordination, key: tuple[str, str]) -> Iterator[str]:
    if key != (role.save.job, role.save.save_id) or key[0] != job.job:
        yield f"holds save {role.save.save_id} of job {role.save.job}"
    attempt = save_order(role.save)[0]
    # The coordinator of a newer attempt may end saves of an earlier one.
    if attempt > job.attempt or (isinstance(role, Participation) and attempt < job.attempt):
        yield f"belongs to attempt {job.attempt}"


def _participation(role: Participation, key: tuple[str, str]) -> Iterator[str]:
    yield from _role(role.job, role, key)
    here = set(role.job.ranks_here)
    phase = role.phase
    if phase not in PARTICIPANT_PHASES:
        yield f"is {phase}, which is the coordinator's"
    if not role.staged.keys() | role.reports.keys() | role.files.keys() <= here:
        yield "knows ranks of other nodes"
    if not role.writing | role.files.keys() <= role.staged.keys():
        yield "writes an image that nobody staged"
    if role.writing & role.files.keys():
        yield "writes a file that is durable"
    if phase is Phase.GATHERING and role.reports.keys() == here:
        yield "gathers, though all ranks have reported"
    if phase is Phase.PLANNING and (role.reports.keys() != here or role.staged.keys() == here):
        yield "waits for a plan, though ranks are silent or all have staged"
    is_failed = role.failure is not None
    is_resolving = phase in (Phase.RESOLVING, Phase.UNDECIDED)
    if phase in (Phase.WRITING, Phase.SEALING, Phase.PREPARED) or (is_resolving and not is_failed):
        if role.staged.keys() != here:
            yield f"is {phase} before all ranks have staged"
        if (phase is Phase.WRITING) == (role.files.keys() == here):
            yield f"is {phase} with files of ranks {sorted(role.files)}"
    if (phase is Phase.PREPARED or (is_resolving and not is_failed)) and (
        role.writing or not role.fragment
    ):
        yield f"is {phase}, but not all is durable"
    if phase is Phase.FAILING and role.failure is None:
        yield "fails without a cause"
    if role.has_ended != (role.verdict is not None) and not (
        role.has_ended and role.save.is_plan_only
    ):
        yield f"is {phase} with outcome {role.outcome}"
    if phase is Phase.RELEASING and not role.has_writers:
        yield "waits for a writer, and none is at work"
    if phase in (Phase.DISCARDING, Phase.CONCLUDED) and role.writing:
        yield f"is {phase}, and a writer still reads images of ranks {sorted(role.writing)}"
    if phase in (Phase.DISCARDING, Phase.CONCLUDED) and role.is_sealing:
        yield f"is {phase}, and its fragment is still being written"
    if phase in (Phase.SHOWING, Phase.DISCARDING) and (
        role.outcome not in (Ending.FAILED, Ending.SKIPPED)
    ):
        yield f"is {phase} with outcome {role.outcome}"
    if role.has_ended and any(report.offer for report in role.reports.values()):
        yield "has ended and still holds offers"
    verdict = role.verdict
    if verdict is not None and verdict.outcome is not Ending.COMMITTED and verdict.cause is None:
        yield f"ended as {verdict.outcome} without a cause"


def _coordination(role: Coordination, key: tuple[str, str], node: Node) -> Iterator[str]:
    yield from _role(role.job, role, key)
    phase, nodes = role.phase, role.job.nodes.keys()
    if phase not in COORDINATOR_PHASES:
        yield f"is {phase}, which is the participants'"
    if not role.gathered.keys() | role.prepared.keys() <= nodes:
        yield "knows nodes that are not in the cohort"
    if phase in (Phase.PLANNING, Phase.COLLECTING, Phase.INDEXING, Phase.PUBLISHING) and (
        role.gathered.keys() != nodes
    ):
        yield f"is {phase} before all nodes have gathered"
    if phase in (Phase.INDEXING, Phase.PUBLISHING) and role.prepared.keys() != nodes:
        yield f"is {phase} before all nodes are prepared"
    if phase is Phase.ABORTING and role.failure is None:
        yield "aborts without a cause"
    if role.has_ended != (
        role.verdict is not None or (role.save.is_plan_only and bool(role.planned))
    ):
        yield f"is {phase} with outcome {role.outcome}"
    if role.verdict is not None and (role.gathered or role.prepared or role.layout_of):
        yield "has ended and still holds what the nodes said"
    own = node.saves.participations.get(key)
    if (
        own is not None
        and role.outcome is not own.outcome
        and Ending.COMMITTED in (role.outcome, own.outcome)
        and None not in (role.outcome, own.outcome)
        and Ending.UNKNOWN not in (role.outcome, own.outcome)
    ):
        yield f"ended as {role.outcome}, its own participant as {own.outcome}"
