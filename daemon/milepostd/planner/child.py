"""The main loop of the planner's process.

`python -m milepostd.planner.child <plans dir> <niceness>` reads requests from stdin and answers on
stdout, one after the other, until stdin ends. See `frames` for the messages, `composing` for what
is done. Imports no torch by itself.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from milepost.concurrency.collector import collector_paused
from milepost.errors import ProtocolError
from milepostd.ops import logs
from milepostd.planner import frames
from milepostd.planner.composing import Composer
from milepostd.planner.frames import (
    FRAME_HEADER,
    AnyAnswer,
    AnyRequest,
    PlanReady,
    decode_body,
    encode_frame,
)
from milepostd.planner.layouts import LayoutStore

if TYPE_CHECKING:
    from collections.abc import Callable


def answer_requests(
    requests: BinaryIO, answers: BinaryIO, answer: Callable[[AnyRequest], AnyAnswer]
) -> None:
    """Answer requests until the stream ends. Raises ProtocolError for what is no request."""
    while True:
        header = requests.read(FRAME_HEADER.size)
        if len(header) < FRAME_HEADER.size:
            return
        (length,) = FRAME_HEADER.unpack(header)
        if length > frames.FRAME_BYTES_MAX:
            text = f"a request of {length} bytes is over the limit of {frames.FRAME_BYTES_MAX}"
            raise ProtocolError("protocol", text)
        body = requests.read(length)
        if len(body) < length:
            return
        request: AnyRequest = decode_body(body, AnyRequest)
        # Offers are large: hold neither bytes nor request longer than they are needed.
        del body
        answers.write(encode_frame(answer(request)))
        answers.flush()
        del request


def main() -> None:
    """Serve the daemon that started this process, until it closes the pipe or dies."""
    logs.setup("auto", "warning")
    # torch does without numpy, and says so amid the lines of the log; nothing here needs it.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    # A signal to the whole process group is for the daemon to handle: it needs this process while
    # it drains. This process ends when stdin ends, which happens even if the daemon is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A container may refuse even 0. A planner that is too loud is better than none.
    with suppress(OSError):
        os.nice(int(sys.argv[2]))
    # Answers get a descriptor of their own, so that nothing else can print into them.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    composer = Composer(LayoutStore(Path(sys.argv[1])))

    def answer(request: AnyRequest) -> AnyAnswer:
        with collector_paused():
            made = composer.answer(request)
            if isinstance(made, PlanReady):
                # What a plan leaves behind stays for long: spare later collections the walk.
                gc.freeze()
            return made

    with suppress(BrokenPipeError):
        answer_requests(sys.stdin.buffer, answers, answer)


if __name__ == "__main__":
    main()
