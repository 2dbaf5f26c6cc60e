"""What the planner's tests ask of it."""

from __future__ import annotations

from milepost.wire.messages import RankReport
from milepost.wire.offers import Kind, Offer, encode_offer
from milepostd.planner.frames import PlanWanted


def offer_of(*keys: str) -> Offer:
    count = len(keys)
    return Offer(
        keys=keys,
        kinds=bytes([Kind.TENSOR] * count),
        dtypes=("float32",) * count,
        global_sizes=((4,),) * count,
        offsets=((0,),) * count,
        sizes=((4,),) * count,
        container_bytes=(1500,) * count,
        requires_grad=bytes(count),
        pinned=bytes(count),
        digests=(-1,) * count,
        paths=tuple((key,) for key in keys),
    )


def plan_wanted(*reports: RankReport, job: str = "job", attempt: int = 1) -> PlanWanted:
    return PlanWanted(call=1, job=job, attempt=attempt, reports=reports)


def offered(rank: int, *keys: str) -> RankReport:
    return RankReport(rank, fingerprint=f"print-{rank}", offer=encode_offer(offer_of(*keys)))
