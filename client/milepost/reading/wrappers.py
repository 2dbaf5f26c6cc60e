"""Prefixes that wrappers add to the keys of a model, and what to do if only the checkpoint or only
the state has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

WRAPPERS: Final[dict[str, str]] = {
    "module": "DistributedDataParallel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "checkpoint_wrapper",
}
"""For each component that a wrapper adds to keys, the wrapper."""


class Mismatch(NamedTuple):
    """Keys that differ only by a wrapper's prefix."""

    keys: int
    hint: str


def find_mismatch(missing: Iterable[str], unexpected: Iterable[str]) -> Mismatch | None:
    """Count the missing keys that the checkpoint holds with or without a wrapper's prefix. Returns
    this number and what to do about it; None if there are no such keys.
    """
    held = {_stripped(key): key for key in unexpected}
    held_words: Counter[str] = Counter()
    asked_words: Counter[str] = Counter()
    count = 0
    for key in missing:
        other = held.get(_stripped(key))
        if other is None:
            continue
        count += 1
        in_held, in_asked = Counter(other.split(".")), Counter(key.split("."))
        held_words.update((in_held - in_asked).keys())
        asked_words.update((in_asked - in_held).keys())
    if not count:
        return None
    hints = []
    if held_words:
        word = held_words.most_common(1)[0][0]
        hints.append(
            f"the checkpoint's keys have {word + '.'!r} in them, which {WRAPPERS[word]} adds, and "
            f"the state's have not: wrap the model alike, or load "
            f"{{{word + '.'!r} + key: value for key, value in model.state_dict().items()}} in its "
            "place, which fills the model's own tensors"
        )
    if asked_words:
        word = asked_words.most_common(1)[0][0]
        hints.append(
            f"the state's keys have {word + '.'!r} in them, which {WRAPPERS[word]} adds, and the "
            f"checkpoint's have not: load into the model inside, model.{word}"
        )
    return Mismatch(count, "; ".join(hints))


def _stripped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)
