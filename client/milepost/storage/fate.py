"""What became of a save that was to be given up, as the shared directory shows it. Pure."""

from __future__ import annotations

from enum import StrEnum


class Fate(StrEnum):
    """What the shared directory shows of a save that was to be given up."""

    ABORTED = "aborted"
    """It can never be published."""
    COMMITTED = "committed"
    """It was published, durably."""
    UNKNOWN = "unknown"
    """It is visible in neither place (because of attribute caching, or since it ended long ago), or
    storage did not answer: look again."""
