"""Pinning: page-locked host memory, into which a device copies at full speed.

Source: cudaHostRegister in the CUDA runtime's manual.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Pinner(Protocol):
    """Pins ranges of host memory."""

    def register(self, address: int, nbytes: int) -> str:
        """Pin a range that is not pinned yet; return "", or why it could not be pinned."""

    def unregister(self, address: int) -> None:
        """Unpin the range that starts at this address."""


class NoPinner:
    """For machines without a device: nothing is pinned, and nothing needs to be."""

    def register(self, address: int, nbytes: int) -> str:
        return ""

    def unregister(self, address: int) -> None:
        pass


class CudaPinner:
    """Pins with `cudaHostRegister`, in the context of the current device."""

    def _runtime(self) -> Any:
        return torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(self, address: int, nbytes: int) -> str:
        result = self._runtime().cudaHostRegister(address, nbytes, 0)
        return "" if int(result) == 0 else f"cudaHostRegister: {result}"

    def unregister(self, address: int) -> None:
        self._runtime().cudaHostUnregister(address)


def default_pinner() -> Pinner:
    """Return the pinner for this machine."""
    return CudaPinner() if torch.cuda.is_available() else NoPinner()
