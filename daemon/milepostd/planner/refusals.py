"""Why the planner's process cannot do what it was asked: exceptions that carry a `Cause`."""

from __future__ import annotations

from milepost.wire.messages import Cause


class RequestRefused(Exception):
    """The request cannot be met; `cause` is the answer."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


class UnseenFile(Exception):
    """A file is missing or too short, seen from here; looking again may help."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.message)
        self.cause = cause


def fault_of_ours(message: str, node: str = "") -> RequestRefused:
    """Return the refusal of what only a fault of milepost's own can have made."""
    return RequestRefused(Cause("internal", message, "please report this", node=node))
