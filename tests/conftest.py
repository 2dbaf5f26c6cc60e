"""What all tests share: hypothesis without deadlines, since the machines are noisy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("milepost", deadline=None)
settings.load_profile("milepost")
