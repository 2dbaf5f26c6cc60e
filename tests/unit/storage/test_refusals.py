"""What the system refused, as errors: code, reason, and whether it may pass."""

from __future__ import annotations

import errno
import os

import pytest

from milepost.storage.refusals import storage_error


@pytest.mark.parametrize(
    ("number", "code", "transient"),
    [
        (errno.ENOSPC, "no-space", False),
        (errno.EDQUOT, "quota", False),
        (errno.EPERM, "permission", False),
        (errno.ESTALE, "io-error", True),
        (errno.ETIMEDOUT, "io-error", True),
        (errno.ENOENT, "io-error", False),
    ],
)
def test_errors_say_whether_trying_again_may_help(number: int, code: str, transient: bool) -> None:
    error = storage_error("rename", "/ckpt/a", OSError(number, "x"))
    assert (code, transient) == (error.code, error.transient)
    assert f"rename /ckpt/a: {os.strerror(number).lower()}" == error.message
    assert "none" not in storage_error("rename", "/a", OSError("odd")).message.lower()
