"""What loads cost, as people read it: ratios to the floors of the same run, and the bars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from benchmarks.figures import Bar, number, ratio
from benchmarks.results import OUR_READERS, IndexRead, LoadCost, Loaded, Results

MIB: Final = 1 << 20

TITLES: Final = {
    "large": "1.5 GiB in 64 tensors",
    "small": "80 MiB in 11,000 tensors",
    "ranks": "1.6 GiB on two ranks, in shards and replicas",
}

HEAD: Final = (
    "system",
    "first cold load / read",
    "cold load / read",
    "its processor time / read's",
    "warm load / copy",
    "its processor time / copy's",
    "memory beyond the state, MiB",
)
"""read: the data files past the page cache; copy: out of the page cache; each by as many threads as
are best, just before the load, into memory that was touched before."""

INDEX_HEAD: Final = (
    "index",
    "load of one rank's part, to its first read",
    "processor time",
    "memory",
    "torch reads `.metadata`",
)

COLD_MAX: Final = {"large": 1.3, "small": 5.0, "ranks": 1.3}
"""Direct reads of the same bytes."""

WARM_MAX: Final = {"large": 1.6}
"""Copies out of the page cache. Many small tensors cost by their number, and two ranks copy on the
same cores."""

MEMORY_BYTES_MAX: Final = 256 * MIB

INDEX_S_MAX: Final = 3.0

INTO_STATE: Final = OUR_READERS[:2]
"""Those that load into a state; without one, new memory is touched."""


def title(name: str, loaded: Loaded, size: float) -> str:
    """Return the heading of a table, with the floors."""
    shrunk = "" if size == 1 else f", x {size:g}"
    return (
        f"loads of {name}: {TITLES[name]}{shrunk} "
        f"(read {loaded.read_s.median:.3f} s, copy {loaded.copy_s.median:.3f} s)"
    )


def rows(loaded: Loaded) -> Iterator[tuple[str, ...]]:
    """Yield the table of one workload's loads."""
    for name, cold in loaded.cold.items():
        warm = loaded.warm[name]
        yield (
            name,
            ratio(cold.first_ratio, 1),
            ratio(cold.ratio, 1),
            ratio(cold.cpu_ratio, 1),
            ratio(warm.ratio, 1),
            ratio(warm.cpu_ratio, 1),
            f"{_memory_bytes(cold, warm) / MIB:.0f}",
        )


def index_rows(indexes: tuple[IndexRead, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the table of indexes."""
    for each in indexes:
        yield (
            f"{each.ranks} ranks of {each.tensors} tensors, {each.chunks} chunks",
            f"{number(each.read_s)} s",
            f"{number(each.cpu_s)} s",
            f"{each.memory_bytes / MIB:.0f} MiB",
            f"{number(each.stock_s)} s",
        )


def bars(results: Results) -> Iterator[Bar]:
    """Yield how the loads of a full-sized run stand to the limits of the design."""
    if results.options.size != 1:
        return
    for name, loaded in results.loads.items():
        for system in INTO_STATE:
            if system not in loaded.cold:
                continue
            cold, warm = loaded.cold[system], loaded.warm[system]
            text, limit = f"load of {name}, {system}: ", COLD_MAX[name]
            yield Bar(f"{text}cold", f"{limit:g} direct reads", cold.ratio.median / limit)
            if name in WARM_MAX:
                limit = WARM_MAX[name]
                yield Bar(f"{text}warm", f"{limit:g} copies", warm.ratio.median / limit)
            share = _memory_bytes(cold, warm) / MEMORY_BYTES_MAX
            yield Bar(f"{text}memory of a rank", f"{MEMORY_BYTES_MAX // MIB} MiB", share)
    for each in results.indexes:
        what = f"index of {each.ranks} ranks of {each.tensors} tensors, to the first read"
        yield Bar(what, f"{INDEX_S_MAX:g} s", each.read_s / INDEX_S_MAX)


def _memory_bytes(cold: LoadCost, warm: LoadCost) -> float:
    return max(cold.memory_bytes.high, warm.memory_bytes.high)
