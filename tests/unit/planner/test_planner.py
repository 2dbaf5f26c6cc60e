"""The planner without its process: frames, layouts that outlive it, answers to plans."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from milepost.errors import ProtocolError
from milepost.storage.refusals import storage_error
from milepost.wire.messages import Cause, RankLayout, RankReport, SaveRef, WrittenFile
from milepost.wire.offers import (
    Kind,
    Offer,
    encode_offer,
    layout_id,
    pack_assigned,
    unpack_assigned,
)
from milepostd.planner import child as planner_child
from milepostd.planner import process as planner
from milepostd.planner.child import JOB_DIRS_KEPT, LAYOUTS_KEPT, Composer, Layouts, serve
from milepostd.planner.process import (
    AnyAnswer,
    AnyRequest,
    Failed,
    FileUnseen,
    IndexBuilt,
    IndexWanted,
    PlanMade,
    PlanWanted,
    Warm,
    Warmed,
)

if TYPE_CHECKING:
    from pathlib import Path


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


def put(layouts: Layouts, items: list[int], job: str = "job", rank: int = 3) -> str:
    offer = offer_of(*[f"k{number}" for number in range(9)])
    return layouts.put(job, rank, "print", offer, encode_offer(offer), items).layout_id


def plan_wanted(*reports: RankReport, job: str = "job") -> PlanWanted:
    return PlanWanted(call=1, job=job, reports=reports)


def offered(rank: int, *keys: str) -> RankReport:
    return RankReport(rank, fingerprint=f"print-{rank}", offer=encode_offer(offer_of(*keys)))


# --- frames -----------------------------------------------------------------------------------

REQUESTS: list[AnyRequest] = [
    Warm(call=1),
    plan_wanted(offered(0, "a"), RankReport(1, layout_id="x")),
    IndexWanted(
        call=2,
        root="/root",
        save=SaveRef("job", "1-1", 1, "step_1"),
        files=(WrittenFile(0, "a", "__0_0.distcp", 4096), WrittenFile(1, "b", "", 0)),
        fragments=(".fragment-n",),
    ),
]
ANSWERS: list[AnyAnswer] = [
    Warmed(call=1),
    PlanMade(call=2, layouts=(RankLayout(0, "a", b"\x01"),), warnings=(Cause("usage", "m"),)),
    IndexBuilt(call=3, checkpoint_bytes=1 << 40),
    FileUnseen(call=4, cause=Cause("root-not-shared", "m")),
    Failed(call=5, cause=Cause("internal", "m", "h", "node", 3)),
]


def test_requests_are_answered_in_order_until_the_stream_ends() -> None:
    seen: list[AnyRequest] = []
    answers = io.BytesIO()

    def answer(request: AnyRequest) -> AnyAnswer:
        seen.append(request)
        return Warmed(call=request.call)

    frames = b"".join(map(planner.encode_frame, REQUESTS))
    serve(io.BytesIO(frames + frames[:11]), answers, answer)

    assert seen == REQUESTS
    expected = b"".join(planner.encode_frame(Warmed(call=r.call)) for r in REQUESTS)
    assert expected == answers.getvalue()


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_survives_the_pipe(answer: AnyAnswer) -> None:
    frame = planner.encode_frame(answer)
    (length,) = planner.FRAME_HEADER.unpack(frame[: planner.FRAME_HEADER.size])
    body = frame[planner.FRAME_HEADER.size :]

    assert len(body) == length
    assert answer == planner.decode_body(body, AnyAnswer)


def test_a_frame_over_the_limit_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = planner.encode_frame(REQUESTS[1])
    monkeypatch.setattr(planner, "FRAME_BYTES_MAX", 50)
    monkeypatch.setattr(planner_child, "FRAME_BYTES_MAX", 50)

    with pytest.raises(ProtocolError, match="over the limit of 50"):
        planner.encode_frame(REQUESTS[1])
    with pytest.raises(ProtocolError, match="over the limit of 50"):
        serve(io.BytesIO(frame), io.BytesIO(), lambda request: Warmed(call=request.call))


def test_a_body_that_is_no_request_is_refused() -> None:
    with pytest.raises(ProtocolError, match="malformed planner message"):
        planner.decode_body(b"\x81\xa4type\xa5Bogus", AnyRequest)


def test_neither_side_imports_torch_by_itself() -> None:
    code = "import sys, milepostd.planner.child; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- layouts ----------------------------------------------------------------------------------


def test_a_layout_is_still_known_after_the_process_is_gone(tmp_path: Path) -> None:
    layout = put(Layouts(tmp_path), [1, 4])

    found = Layouts(tmp_path).get("job", 3, layout)

    assert found is not None
    assert found.assigned == [1, 4]
    assert found.offer == offer_of(*[f"k{number}" for number in range(9)])


def test_layouts_of_other_ranks_jobs_and_names_are_unknown(tmp_path: Path) -> None:
    layouts = Layouts(tmp_path)
    layout = put(layouts, [1])

    assert layouts.get("job", 4, layout) is None
    assert layouts.get("other", 3, layout) is None
    assert layouts.get("job", 3, "0" * 24) is None
    assert layouts.get("job", 3, f"../{layout[:21]}") is None


def test_a_damaged_or_exchanged_file_is_an_unknown_layout(tmp_path: Path) -> None:
    layouts = Layouts(tmp_path)
    torn, swapped = put(layouts, [1]), put(layouts, [2])
    (directory,) = tmp_path.iterdir()
    whole = (directory / f"3-{torn}").read_bytes()
    (directory / f"3-{swapped}").write_bytes(whole)
    (directory / f"3-{torn}").write_bytes(whole[:-1])

    again = Layouts(tmp_path)

    assert again.get("job", 3, torn) is None
    assert again.get("job", 3, swapped) is None


def test_a_directory_that_cannot_be_written_costs_only_the_files(tmp_path: Path) -> None:
    layouts = Layouts(tmp_path / "plans")
    (tmp_path / "plans").rmdir()
    (tmp_path / "plans").write_bytes(b"in the way")

    layout = put(layouts, [1])

    assert layouts.get("job", 3, layout) is not None


def test_only_the_newest_layouts_of_a_rank_are_kept_and_use_keeps_one_new(tmp_path: Path) -> None:
    layouts = Layouts(tmp_path)
    directory = tmp_path / planner_child._hash("job")
    made = []
    at_ns, second = 10**18, 10**9
    for number in range(LAYOUTS_KEPT + 2):
        made.append(put(layouts, [item for item in range(5) if number + 1 >> item & 1]))
        os.utime(directory / f"3-{made[-1]}", ns=(at_ns, at_ns + number * second))
        if number == LAYOUTS_KEPT:
            assert layouts.get("job", 3, made[1]) is not None
    layouts.prune("job")

    kept = [layout for layout in made if Layouts(tmp_path).get("job", 3, layout) is not None]

    assert kept == [made[1], *made[3:]]
    assert len(list(directory.iterdir())) == LAYOUTS_KEPT


def test_only_the_newest_jobs_are_kept(tmp_path: Path) -> None:
    layouts = Layouts(tmp_path)
    for number in range(JOB_DIRS_KEPT + 3):
        put(layouts, [0], job=f"job-{number}")
    layouts.prune("job-0")

    assert len(list(tmp_path.iterdir())) == JOB_DIRS_KEPT


# --- plans ------------------------------------------------------------------------------------


def test_a_plan_gives_each_offering_rank_its_layout_by_fingerprint(tmp_path: Path) -> None:
    composer = Composer(Layouts(tmp_path))

    made = composer.answer(plan_wanted(offered(1, "a", "b"), offered(0, "a", "b")))

    assert isinstance(made, PlanMade)
    assert [layout.rank for layout in made.layouts] == [0, 1]
    assert [unpack_assigned(layout.assigned, 2) for layout in made.layouts] == [[0], [1]]
    for layout in made.layouts:
        assert layout_id(f"print-{layout.rank}", layout.assigned) == layout.layout_id


def test_a_rank_that_has_staged_is_planned_around(tmp_path: Path) -> None:
    """Also by a process that was not there when the layout was made."""
    first = Composer(Layouts(tmp_path)).answer(plan_wanted(offered(0, "a"), offered(1, "a")))
    assert isinstance(first, PlanMade)
    assert first.layouts[0].assigned == b"\x01"

    second = Composer(Layouts(tmp_path)).answer(
        plan_wanted(RankReport(0, layout_id=first.layouts[0].layout_id), offered(1, "a", "b"))
    )

    assert isinstance(second, PlanMade)
    (layout,) = second.layouts
    assert (1, pack_assigned([1], 2)) == (layout.rank, layout.assigned)


def test_a_staged_layout_that_is_unknown_fails_the_plan_and_names_the_rank(tmp_path: Path) -> None:
    answer = Composer(Layouts(tmp_path)).answer(plan_wanted(RankReport(7, layout_id="0" * 24)))

    assert isinstance(answer, Failed)
    assert (answer.cause.code, answer.cause.rank) == ("plan-failed", 7)


def test_what_cannot_be_planned_is_answered_with_its_cause(tmp_path: Path) -> None:
    composer = Composer(Layouts(tmp_path))
    other = msgspec.structs.replace(offer_of("a"), dtypes=("float64",))

    conflict = composer.answer(
        plan_wanted(offered(0, "a"), RankReport(1, fingerprint="p", offer=encode_offer(other)))
    )
    malformed = composer.answer(plan_wanted(RankReport(0, fingerprint="p", offer=b"\x01")))

    assert isinstance(conflict, Failed)
    assert conflict.cause.code == "key-conflict"
    assert isinstance(malformed, Failed)
    assert malformed.cause.code == "protocol"


# --- an index that storage refuses ------------------------------------------------------------


class Answering(planner.Planner):
    """A planner whose process gives answers that were prepared."""

    def __init__(self, plans_dir: Path, *answers: AnyAnswer) -> None:
        super().__init__(plans_dir, nice=0)
        self.answers = [*answers]

    async def _ask(self, request: AnyRequest) -> AnyAnswer:
        return self.answers.pop(0)

    def index(self, until_s: float) -> IndexBuilt | Cause:
        save = SaveRef(job="job", save_id="1-1", step=1, name="step_1")
        return asyncio.run(self.build_index(save, "/root", (), (), until_s))


REFUSED = Failed(call=1, cause=Cause("io-error", "stale file handle"), is_passing=True)
BUILT = IndexBuilt(call=1, checkpoint_bytes=7)


def test_an_index_is_asked_for_again_while_its_refusal_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "_FILE_RETRY_S", 0.001)
    asked = Answering(tmp_path, REFUSED, REFUSED, BUILT)
    assert BUILT == asked.index(time.monotonic() + 60)
    late = Answering(tmp_path, REFUSED, BUILT)
    assert REFUSED.cause == late.index(time.monotonic())
    lasting = Answering(tmp_path, Failed(call=1, cause=REFUSED.cause), BUILT)
    assert REFUSED.cause == lasting.index(time.monotonic() + 60)


@pytest.mark.parametrize(("number", "is_passing"), [(errno.ESTALE, True), (errno.EIO, False)])
def test_the_process_says_whether_a_refusal_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_passing: bool
) -> None:
    def refuse(directory: Path, request: IndexWanted) -> None:
        raise storage_error("read", directory, OSError(number, "refused"))

    monkeypatch.setattr(planner_child, "_read_fragments", refuse)
    save = SaveRef(job="job", save_id="1-1", step=1, name="step_1")
    wanted = IndexWanted(call=1, root=str(tmp_path), save=save, files=(), fragments=())
    answer = Composer(Layouts(tmp_path)).answer(wanted)
    assert isinstance(answer, Failed)
    assert is_passing == answer.is_passing
