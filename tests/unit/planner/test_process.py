"""The daemon's side of the planner: what it asks for again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from milepost.wire.messages import Cause, SaveRef
from milepostd.planner import process
from milepostd.planner.frames import AnyAnswer, AnyRequest, IndexReady, RequestFailed
from milepostd.planner.process import Planner


class Answering(Planner):
    """A planner whose process gives answers that were prepared."""

    def __init__(self, plans_dir: Path, *answers: AnyAnswer) -> None:
        super().__init__(plans_dir, nice=0)
        self.answers = [*answers]

    async def _ask(self, request: AnyRequest) -> AnyAnswer:
        return self.answers.pop(0)

    def index(self, until_s: float) -> IndexReady | Cause:
        save = SaveRef(job="job", save_id="1-1", step=1, name="step_1")
        return asyncio.run(self.build_index(save, "/root", (), (), until_s))


REFUSED = RequestFailed(call=1, cause=Cause("io-error", "stale file handle"), is_passing=True)
BUILT = IndexReady(call=1, checkpoint_bytes=7)


def test_an_index_is_asked_for_again_while_its_refusal_may_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_FILE_RETRY_S", 0.001)
    asked = Answering(tmp_path, REFUSED, REFUSED, BUILT)
    assert BUILT == asked.index(time.monotonic() + 60)
    late = Answering(tmp_path, REFUSED, BUILT)
    assert REFUSED.cause == late.index(time.monotonic())
    lasting = Answering(tmp_path, RequestFailed(call=1, cause=REFUSED.cause), BUILT)
    assert REFUSED.cause == lasting.index(time.monotonic() + 60)
