"""How figures are written, and what a bar is."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import Spread


@dataclass(frozen=True)
class Bar:
    """A limit that the design sets, and where this run stands."""

    what: str
    limit: str
    share: float
    """Measured over limit: at most 1 holds."""


def ratio(values: Spread | None, divisor: float) -> str:
    """Write median, lowest and highest value over a divisor."""
    if values is None:
        return "–"
    median, low, high = (value / divisor for value in (values.median, values.low, values.high))
    return f"{number(median)} ({number(low)}–{number(high)})"


def number(value: float) -> str:
    """Write with three significant digits or two decimals, whichever is shorter."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
