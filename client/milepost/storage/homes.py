"""Where a save's files belong: below the job's root, or in a place of their own."""

from __future__ import annotations

from typing import TypeAlias

from milepost.storage.modes import UNKNOWN
from milepost.storage.place import Place
from milepost.storage.root import Root
from milepost.wire.messages import SaveRef

Home: TypeAlias = Root | Place


def home_of(root: str, save: SaveRef, umask: int = UNKNOWN) -> Home:
    """Return the `Root` or the `Place` in which a save is published.

    umask: gives the modes of what is made there; needed only to write.
    """
    return Place(save.place, umask) if save.place else Root(root, umask)
