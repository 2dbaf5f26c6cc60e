"""Words that wrappers put into the keys of the model inside, and what to do where a checkpoint has
them and a state has not, or the reverse.
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
"""By the component of a key that it adds, the wrapper."""


class Mismatch(NamedTuple):
    """Keys that would be the same but for wrappers."""

    keys: int
    hint: str


def find_mismatch(missing: Iterable[str], unexpected: Iterable[str]) -> Mismatch | None:
    """Return how many of the keys that a state asks for in vain the checkpoint holds under names
    with or without a wrapper's word, and what to do about it; None if there are none.
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
