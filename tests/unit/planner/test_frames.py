"""The messages of the planner's process survive the pipe, within their limit."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from tests.unit.planner.planner_requests import offered, plan_wanted

from milepost.errors import ProtocolError
from milepost.wire.messages import Cause, RankLayout, RankReport, SaveRef, WrittenFile
from milepostd.planner import frames
from milepostd.planner.child import answer_requests
from milepostd.planner.frames import (
    AnyAnswer,
    AnyRequest,
    FileUnseen,
    IndexReady,
    IndexWanted,
    PlanReady,
    RequestFailed,
    Warm,
    Warmed,
)

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
    PlanReady(call=2, layouts=(RankLayout(0, "a", b"\x01"),), warnings=(Cause("usage", "m"),)),
    IndexReady(call=3, checkpoint_bytes=1 << 40),
    FileUnseen(call=4, cause=Cause("root-not-shared", "m")),
    RequestFailed(call=5, cause=Cause("internal", "m", "h", "node", 3)),
]


def test_requests_are_answered_in_order_until_the_stream_ends() -> None:
    seen: list[AnyRequest] = []
    answers = io.BytesIO()

    def answer(request: AnyRequest) -> AnyAnswer:
        seen.append(request)
        return Warmed(call=request.call)

    sent = b"".join(map(frames.encode_frame, REQUESTS))
    answer_requests(io.BytesIO(sent + sent[:11]), answers, answer)

    assert seen == REQUESTS
    expected = b"".join(frames.encode_frame(Warmed(call=r.call)) for r in REQUESTS)
    assert expected == answers.getvalue()


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_an_answer_survives_the_pipe(answer: AnyAnswer) -> None:
    frame = frames.encode_frame(answer)
    (length,) = frames.FRAME_HEADER.unpack(frame[: frames.FRAME_HEADER.size])
    body = frame[frames.FRAME_HEADER.size :]

    assert len(body) == length
    assert answer == frames.decode_body(body, AnyAnswer)


def test_a_frame_over_the_limit_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = frames.encode_frame(REQUESTS[1])
    monkeypatch.setattr(frames, "FRAME_BYTES_MAX", 50)

    with pytest.raises(ProtocolError, match="over the limit of 50"):
        frames.encode_frame(REQUESTS[1])
    with pytest.raises(ProtocolError, match="over the limit of 50"):
        answer_requests(io.BytesIO(frame), io.BytesIO(), lambda request: Warmed(call=request.call))


def test_a_body_that_is_no_request_is_refused() -> None:
    with pytest.raises(ProtocolError, match="malformed planner message"):
        frames.decode_body(b"\x81\xa4type\xa5Bogus", AnyRequest)


def test_neither_side_imports_torch_by_itself() -> None:
    code = "import sys, milepostd.planner.child; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
