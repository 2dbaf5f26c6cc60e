"""What tests need that look at system calls, or change them, with strace."""

from __future__ import annotations

import shutil

import pytest

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed; the gate installs it"
)


def skip_if_forbidden(told: str) -> None:
    """Skip the test if that is why strace has ended: as an ordinary user, or in a container."""
    if "ptrace" in told and "not permitted" in told:
        pytest.skip(
            "the kernel does not let this user trace processes: kernel.yama.ptrace_scope is not 0, "
            f"or CAP_SYS_PTRACE is missing ({told.strip()})"
        )
