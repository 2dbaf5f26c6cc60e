"""The global plan: which rank writes which item, decided once for each structure.

A pure function of the offers' columns, made for 1,024 ranks with 1,000 items each: an item costs
one dictionary look-up and one short list. Knows no torch, no files, and no layouts (where an item
lies in an image). In: the decoded offers, and the items that ranks with an unchanged structure have
staged already. Out: a `Plan`, or `PlanRefused` with a cause that names key and ranks.

The result means the same as that of torch's DefaultSavePlanner, with three differences on purpose.
Replicas are the same only if their sizes agree too (MetadataIndex ignores the size). The load of a
rank is the bytes that it writes, not global sizes. Items that one rank alone holds are counted
before those that several hold. Source: torch/distributed/checkpoint/default_planner.py and
_dedup_save_plans.py (2.13).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeAlias

from milepost.format.tiling import BOUNDS, check_tiling
from milepost.wire.messages import Cause
from milepost.wire.offers import Box, Kind, Offer
from milepostd.core.causes import LISTED_MAX, and_more, show_ranks
from milepostd.core.replicas import Differences, Rotas, is_refused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OBJECT_BYTES: Final = 1024
"""The load of a serialised object, whose length is not known when the plan is made."""

_Place: TypeAlias = tuple[Box, Box]
"""(offset, size). Items with the same key and place are replicas. Objects have two empty tuples."""

_Holders: TypeAlias = list[int]
"""The ranks that offer a place, ascending, each with its item: rank, item, rank, item ... A flat
list, since there may be a million of them."""

_Schema: TypeAlias = tuple[tuple[str, ...], bytes, tuple[str, ...], tuple[Box, ...]]
"""The columns keys, kinds, dtypes and global_sizes, which are the same on most ranks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rank writes what. Both maps have all ranks of the offers, with items ascending.

    assigned: the items that each rank writes; for a fixed rank those that it has staged.
    counted: those of them that the index names. Together the counted items of all ranks cover each
        tensor exactly once and hold each object once. They differ from `assigned` only where
        several fixed ranks have staged the same.
    differences: replicas that differ.
    rotas: when the replicas of each rank that is not fixed are compared in later saves, packed. No
        part of what the plan is: a plan of what is staged has none.
    """

    assigned: dict[int, list[int]]
    counted: dict[int, list[int]]
    differences: Differences
    rotas: dict[int, bytes] = field(compare=False)


class PlanRefused(Exception):
    """The offers cannot become a checkpoint; `cause` says why, by key and rank."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


def make_plan(
    offers: Mapping[int, Offer], fixed: Mapping[int, Sequence[int]] = MappingProxyType({})
) -> Plan:
    """Decide which rank writes which item.

    Replicas (same key, offset and size) are written once. The heaviest go first; each goes to the
    rank with the least load of those that hold it, and to the lower rank on a tie. If an offer says
    `to_lowest_rank`, each goes to the lowest rank that holds it. The result depends only on the
    contents of the two maps, not on their order. Shards without elements are written like others,
    but only one item at each offset, since torch's index has one entry for it.

    Offers that are `final` come from a user's SavePlanner and are taken as they are. No replica is
    dropped and coverage is not checked, since the planner may save a part on purpose. Cost: about 2
    microseconds for each item offered.

    Args:
        offers: of all ranks in the save.
        fixed: for some of these ranks, the items that they have staged. The plan gives them no
            others, and drops the replicas that other ranks hold.

    Raises:
        PlanRefused: `key-conflict`, `replicas-differ`, `coverage-gap`, `coverage-overlap`,
            `coverage-bounds`; `structure-changed` where a tensor or object cannot be made whole
            beside what the fixed ranks have staged; `plan-failed` for offers that contradict
            themselves.
    """
    ranks = sorted(offers)
    for rank in ranks:
        offer = offers[rank]
        if max(offer.kinds, default=0) > max(Kind) or min(offer.container_bytes, default=0) < 0:
            raise _refusal(
                "plan-failed", f"the offer of rank {rank} has an impossible kind or length"
            )
    finals = [rank for rank in ranks if offers[rank].final]
    if finals:
        if len(finals) != len(ranks):
            others = sorted(set(ranks) - set(finals))
            raise _refusal(
                "plan-failed",
                f"{show_ranks(finals)} planned with the user's SavePlanner, "
                f"{show_ranks(others)} without",
                "give every rank the same planner",
            )
        return _take_as_is(offers, ranks, fixed)

    schemas: dict[_Schema, list[int]] = {}
    for rank in ranks:
        offer = offers[rank]
        schema = (offer.keys, offer.kinds, offer.dtypes, offer.global_sizes)
        schemas.setdefault(schema, []).append(rank)
    described = _describe(schemas)
    places = _gather(offers, ranks, schemas, described)
    for key, boxes in places.items():
        kind, _, size = described[key]
        if kind != Kind.OBJECT:
            if len(boxes) > 1:
                _drop_empty_twins(boxes)
            _check_coverage(key, size, boxes, is_mixed=bool(fixed))
    return _assign(offers, ranks, places, fixed)


def _describe(schemas: Mapping[_Schema, list[int]]) -> dict[str, tuple[int, str, Box]]:
    """Return kind, dtype and global size of each key. Refuse if two ranks disagree on them."""
    described: dict[str, tuple[int, str, Box]] = {}
    disputed: dict[str, None] = {}
    for keys, kinds, dtypes, sizes in schemas:
        for key, description in zip(keys, zip(kinds, dtypes, sizes, strict=True), strict=True):
            if described.setdefault(key, description) != description:
                disputed[key] = None
    if not disputed:
        return described
    sentences = []
    for key in list(disputed)[:LISTED_MAX]:
        sides: dict[tuple[int, str, Box], set[int]] = {}
        for (keys, kinds, dtypes, sizes), holders in schemas.items():
            for item, other in enumerate(keys):
                if other == key:
                    side = sides.setdefault((kinds[item], dtypes[item], sizes[item]), set())
                    side.update(holders)
        claims = " but ".join(
            f"{_show_description(*side)} on {show_ranks(sorted(holders))}"
            for side, holders in list(sides.items())[:3]
        )
        sentences.append(f"key {key!r} is {claims}")
    raise _refusal(
        "key-conflict",
        "; ".join(sentences) + and_more(len(disputed), "key"),
        "pass state that differs by rank as per_rank={...}, or use a key of its own on each rank",
    )


def _gather(
    offers: Mapping[int, Offer],
    ranks: Sequence[int],
    schemas: Mapping[_Schema, list[int]],
    described: Mapping[str, object],
) -> dict[str, dict[_Place, _Holders]]:
    """Return for each key its places and the ranks that offer them."""
    places: dict[str, dict[_Place, _Holders]] = {key: {} for key in described}
    rows: dict[int, list[dict[_Place, _Holders]]] = {}
    for (keys, _, _, _), holders in schemas.items():
        row = [places[key] for key in keys]
        for rank in holders:
            rows[rank] = row
    for rank in ranks:
        offer = offers[rank]
        columns = zip(rows[rank], zip(offer.offsets, offer.sizes, strict=True), strict=True)
        for item, (boxes, place) in enumerate(columns):
            found = boxes.get(place)
            if found is None:
                boxes[place] = [rank, item]
            else:
                found += (rank, item)
    return places


def _drop_empty_twins(boxes: dict[_Place, _Holders]) -> None:
    """Leave out each box without elements that shares its offset with another box.

    The index has one entry for a key and offset, and an empty one would hide the other.
    """
    if len({offset for offset, _ in boxes}) == len(boxes):
        return
    taken = {offset for offset, size in boxes if 0 not in size}
    for offset, size in list(boxes):
        if 0 in size:
            if offset in taken:
                del boxes[offset, size]
            taken.add(offset)


def _check_coverage(key: str, size: Box, boxes: dict[_Place, _Holders], *, is_mixed: bool) -> None:
    placed = list(boxes)
    problem = check_tiling(size, placed)
    if problem is None:
        return
    holders = "; ".join(
        f"shard {index} is from {show_ranks(sorted(set(boxes[placed[index]][::2])))}"
        for index in problem.boxes
    )
    text = f"key {key!r} of size {list(size)}: {problem.text}" + (
        f" ({holders})" if holders else ""
    )
    if is_mixed and problem.code != BOUNDS:
        # The offers fit together, and so do the staged layouts; only both together do not.
        raise _refusal(
            "structure-changed",
            f"the structure changed on some ranks only: {text}",
            "change the state on all ranks before the same save",
        )
    raise _refusal(problem.code, text, "check how the tensor is sharded, on every rank")


def _assign(
    offers: Mapping[int, Offer],
    ranks: Sequence[int],
    places: Mapping[str, dict[_Place, _Holders]],
    fixed: Mapping[int, Sequence[int]],
) -> Plan:
    """Give every place to one of the ranks that offer it."""
    staged = {rank: frozenset(items) for rank, items in fixed.items()}
    counted: dict[int, list[int]] = {rank: [] for rank in ranks}
    loads = dict.fromkeys(ranks, 0)
    weights = {rank: offers[rank].container_bytes for rank in ranks}
    shared: list[tuple[int, str, _Holders]] = []
    missing: dict[str, _Holders] = {}
    for key, boxes in places.items():
        for holders in boxes.values():
            candidates = holders
            if staged:
                pairs = list(zip(holders[::2], holders[1::2], strict=True))
                done = next((p for p in pairs if p[1] in staged.get(p[0], ())), None)
                if done is not None:
                    counted[done[0]].append(done[1])
                    continue
                candidates = [n for pair in pairs if pair[0] not in staged for n in pair]
                if not candidates:
                    missing.setdefault(key, holders)
                    continue
            rank, item = candidates[:2]
            weight = weights[rank][item] or OBJECT_BYTES
            if len(candidates) == 2:
                counted[rank].append(item)
                loads[rank] += weight
            else:
                shared.append((weight, key, candidates))
    if missing:
        listed = "; ".join(
            f"key {key!r} is held by {show_ranks(sorted(set(holders[::2])))}"
            for key, holders in list(missing.items())[:LISTED_MAX]
        )
        raise _refusal(
            "structure-changed",
            "the structure changed on some ranks only, and nobody has staged the "
            "following: " + listed + and_more(len(missing), "key"),
            "change the state on all ranks before the same save",
        )

    to_lowest_rank = any(offers[rank].to_lowest_rank for rank in ranks)
    load_of = loads.__getitem__
    differences = Differences()
    rotas = Rotas({rank: len(offers[rank].keys) for rank in ranks if rank not in fixed})
    shared.sort(key=lambda entry: entry[0], reverse=True)
    for weight, key, candidates in shared:
        holders = candidates[::2]
        rank = holders[0] if to_lowest_rank else min(holders, key=load_of)
        counted[rank].append(candidates[2 * holders.index(rank) + 1])
        loads[rank] += weight
        _compare(offers, key, candidates, rank, differences)
        rotas.take(candidates, weight)
    if differences and is_refused(offers.values()):
        raise PlanRefused(differences.refusal())

    for items in counted.values():
        items.sort()
    assigned = {rank: sorted(fixed[rank]) if rank in fixed else counted[rank] for rank in ranks}
    return Plan(assigned, counted, differences, rotas.packed())


def _compare(
    offers: Mapping[int, Offer], key: str, holders: _Holders, writer: int, into: Differences
) -> None:
    """Note the key if two of its holders have different digests.

    Compare only ranks that are not fixed: the digests of a fixed one are of an earlier save.
    """
    sides: dict[int, list[int]] = {}
    for rank, item in zip(holders[::2], holders[1::2], strict=True):
        digest = offers[rank].digests[item]
        if digest != -1:
            sides.setdefault(digest, []).append(rank)
    if len(sides) > 1:
        into.note(key, list(sides.values()), writer)


def _take_as_is(
    offers: Mapping[int, Offer], ranks: Sequence[int], fixed: Mapping[int, Sequence[int]]
) -> Plan:
    """Plan for final offers: each rank writes all that it offers."""
    writers: dict[tuple[str, Box], int] = {}
    assigned: dict[int, list[int]] = {}
    for rank in ranks:
        offer = offers[rank]
        assigned[rank] = list(range(len(offer.keys)))
        if rank in fixed and sorted(fixed[rank]) != assigned[rank]:
            raise _refusal(
                "structure-changed",
                f"rank {rank} has staged {len(fixed[rank])} of the {len(assigned[rank])} items "
                "of its SavePlanner",
                "change the state on all ranks before the same save",
            )
        for place in zip(offer.keys, offer.offsets, strict=True):
            if place in writers:
                both = show_ranks(sorted({writers[place], rank}))
                raise _refusal(
                    "coverage-overlap",
                    f"key {place[0]!r} at offset {list(place[1])} is planned twice, by {both}",
                    "the SavePlanner's create_global_plan must leave each item to one rank",
                )
            writers[place] = rank
    return Plan(assigned, assigned, Differences(), {})


def _refusal(code: str, message: str, hint: str = "") -> PlanRefused:
    return PlanRefused(Cause(code, message, hint))


def _show_description(kind: int, dtype: str, size: Box) -> str:
    if kind == Kind.OBJECT:
        return "an object"
    what = "a tensor" if kind == Kind.TENSOR else "a sharded tensor"
    return f"{what} {dtype} {list(size)}"
