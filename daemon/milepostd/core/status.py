"""The status of a node, which the command line, the page and `/status` show.

Reads a node and changes nothing. The status is plain data, ready for JSON; `docs/operations.md`
describes version 1.
"""

from __future__ import annotations

from typing import Any, Final

from milepost.wire.messages import Cause, Ending
from milepostd.core.coordination import Coordination
from milepostd.core.job import Job, LastFailed
from milepostd.core.node import Node
from milepostd.core.participation import Participation
from milepostd.core.timers import SECOND_NS

STATUS_VERSION: Final = 1


def status_of(node: Node, now_ns: int) -> dict[str, Any]:
    """Return what is saved, what is running, what is stuck, and why, as this node knows it."""
    saves: list[dict[str, Any]] = [
        _save(role, now_ns) for role in node.saves.participations.values() if role.is_pending
    ]
    saves += [
        _save(role, now_ns) for role in node.saves.coordinations.values() if not role.has_ended
    ]
    return {
        "version": STATUS_VERSION,
        "accepting": not node.halting.is_draining,
        "jobs": [_job(job) for job in node.roster.jobs.values()],
        "saves": saves,
        "peers": [
            {
                "node_id": peer,
                "address": _address(node, peer),
                "last_heard_s": _seconds(now_ns - at_ns),
            }
            for peer, at_ns in sorted(node.peers.heard_at_ns.items())
            if peer != node.node_id
        ],
        "sessions": [
            {
                "job": joined.job.job,
                "rank": joined.rank,
                "pid": joined.seat.pid,
                "attempt": joined.job.attempt,
            }
            for joined in node.roster.joined.values()
        ],
    }


def _seconds(duration_ns: int) -> float:
    return round(duration_ns / SECOND_NS, 3)


def _address(node: Node, peer: str) -> str:
    for job in node.roster.jobs.values():
        if peer in job.nodes:
            return job.nodes[peer].address
    return ""


def _cause(cause: Cause) -> dict[str, Any]:
    return {
        "code": cause.code,
        "message": cause.message,
        "hint": cause.hint,
        "node": cause.node,
        "rank": cause.rank,
    }


def _last(ended: LastFailed | None) -> dict[str, Any] | None:
    if ended is None:
        return None
    return {"step": ended.save.step, "save_id": ended.save.save_id, **_cause(ended.cause)}


def _job(job: Job) -> dict[str, Any]:
    committed = job.history.last_committed
    counts = job.history.outcome_counts
    return {
        "job": job.job,
        "root": job.root,
        "attempt": job.attempt,
        "world": job.world,
        "ranks_here": list(job.ranks_here),
        "nodes": list(job.nodes),
        "coordinator": job.is_coordinator,
        "last_committed": None
        if committed is None
        else {
            "step": committed.save.step,
            "save_id": committed.save.save_id,
            "name": committed.save.name,
            "path": committed.path,
            "bytes": committed.checkpoint_bytes,
            "elapsed_s": committed.elapsed_s,
            "at_ms": committed.at_ms,
        },
        "last_failed": _last(job.history.last_failed),
        "last_skipped": _last(job.history.last_skipped),
        "committed_total": counts.get(Ending.COMMITTED, 0),
        "failed_total": counts.get(Ending.FAILED, 0),
        "skipped_total": counts.get(Ending.SKIPPED, 0),
        "unknown_total": counts.get(Ending.UNKNOWN, 0),
    }


def _save(role: Participation | Coordination, now_ns: int) -> dict[str, Any]:
    is_participant = isinstance(role, Participation)
    return {
        "job": role.save.job,
        "save_id": role.save.save_id,
        "step": role.save.step,
        "name": role.save.name,
        "role": "participant" if is_participant else "coordinator",
        "phase": str(role.phase),
        "age_s": _seconds(now_ns - role.opened_at_ns),
        "bytes_total": role.bytes_total if isinstance(role, Participation) else 0,
        "bytes_written": role.bytes_written if isinstance(role, Participation) else 0,
        "waits_for": role.waits_for(),
    }
