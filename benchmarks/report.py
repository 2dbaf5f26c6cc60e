"""Results as people read them: ratios within one run, and how they stand to the bars.

Every number is a quotient of two quantities of the same run; what each is divided by stands in the
table's head. Spreads are the lowest and the highest value over the median of the divisor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from benchmarks import load_report
from benchmarks.figures import Bar, number, ratio
from benchmarks.results import BARE_WRITER, OTHERS, OUR_READERS, OURS, Cost, Measured, Results

SLOTS: Final = 2
"""Images that a rank has room for, by default."""

CPU_S_PER_BYTE: Final = 0.4 / (1.5 * 2**30)
"""Most processor time for a byte of the image, of all processes together."""

TITLES: Final = {
    "large": "1.5 GiB in 64 tensors",
    "small": "80 MiB in 11,000 tensors",
    "ranks": "1 GiB on two ranks, in shards and replicas",
}

HEAD: Final = (
    "system",
    "first save() / copy",
    "save() / copy",
    "guard / copy",
    "step / quiet step",
    "lost / copy",
    "processor / copy",
    "committed / floor",
    "shared memory / state",
    "all memory / state",
    "descriptors",
)
"""copy: one thread copies the rank's part of the state into shared memory that was touched before.
floor: that copy, then a sequential direct write and fsync of the same bytes."""


def _row(name: str, cost: Cost, measured: Measured) -> tuple[str, ...]:
    copy_s, floor_s = _copy_s(measured), _floor_s(measured)
    return (
        name if cost.is_synced else f"{name} (not synced)",
        ratio(cost.first_stall_s, copy_s),
        ratio(cost.stall_s, copy_s),
        ratio(cost.guard_s, copy_s),
        ratio(cost.slow_down, 1),
        ratio(cost.lost_s, copy_s),
        ratio(cost.cpu_s, copy_s),
        ratio(cost.commit_s, floor_s),
        ratio(cost.shared_bytes, measured.state_bytes),
        ratio(cost.memory_bytes, measured.state_bytes),
        f"{cost.descriptors.median:.0f}",
    )


def _copy_s(measured: Measured) -> float:
    return measured.floors.copy_s.median


def _floor_s(measured: Measured) -> float:
    return measured.floors.copy_s.median + measured.floors.write_s.median


def _rows(measured: Measured) -> Iterator[tuple[str, ...]]:
    for name, cost in measured.costs.items():
        yield _row(name, cost, measured)
    if measured.bare_writer is not None:
        bare, copy_s = measured.bare_writer, _copy_s(measured)
        yield (
            BARE_WRITER, "", "", "", ratio(bare.slow_down, 1), ratio(bare.lost_s, copy_s),
            ratio(bare.cpu_s, copy_s), ratio(bare.commit_s, _floor_s(measured)), "", "", "",
        )  # fmt: skip


def bars(results: Results) -> list[Bar]:
    """Return how the run stands to the limits of the design; those in absolute terms only for full
    sizes.
    """
    return [*saving_bars(results), *load_report.bars(results)]


def saving_bars(results: Results) -> list[Bar]:
    """Return the bars of saving."""
    found: list[Bar] = []
    is_full = results.options.size == 1
    for name, measured in results.workloads.items():
        ours: dict[str, Cost] = {
            system: measured.costs[system] for system in OURS if system in measured.costs
        }
        for system, cost in ours.items():
            found += _stall_bars(name, system, cost, measured, is_full)
            found += _shared_bars(f"{name}, {system}: ", cost, measured)
            if is_full:
                found += _absolute_bars(name, f"{name}, {system}: ", cost, measured)
        found += _lost_bars(name, ours, measured)
    limits: tuple[tuple[int, float], ...] = ((64, 1.0), (1024, 8.0))
    for planned in results.planning:
        for ranks, limit_s in limits:
            if planned.ranks == ranks:
                what = f"plan for {ranks} ranks of {planned.tensors} tensors"
                found.append(Bar(what, f"{limit_s:g} s", planned.plan_s / limit_s))
        what = f"{planned.ranks} ranks, later save: wire a rank"
        found.append(Bar(what, "1 KiB", planned.steady_wire_bytes / 1024))
        if planned.ranks == 1024:
            found.append(Bar("memory of that plan", "3 GiB", planned.plan_memory_bytes / 3 / 2**30))
            found.append(Bar("`.metadata` of that plan", "40 s", planned.index_s / 40))
    return found


def _stall_bars(
    name: str, system: str, cost: Cost, measured: Measured, is_full: bool
) -> Iterator[Bar]:
    for what, stall in (("first save()", cost.first_stall_s), ("save()", cost.stall_s)):
        text = f"{name}, {system}: {what}"
        if system == "milepost" and name != "small":
            yield Bar(text, "1.25 copies", stall.median / _copy_s(measured) / 1.25)
        elif is_full:
            limit_s = 0.040 if system == "milepost" else 0.025 if name == "small" else 0.002
            yield Bar(text, f"{limit_s * 1000:g} ms", stall.median / limit_s)


def _shared_bars(text: str, cost: Cost, measured: Measured) -> Iterator[Bar]:
    bare = measured.bare_writer
    # Where every core computes, what a save takes of the processor is what training loses of it;
    # the bare writer's steps are no measure then.
    if measured.world == 1 and cost.slow_down and bare and bare.slow_down:
        limit = bare.slow_down.median + 0.03
        yield Bar(f"{text}step", "beside the bare writer + 0.03", cost.slow_down.median / limit)
    limit_bytes = SLOTS * 1.1 * measured.image_bytes
    yield Bar(
        f"{text}shared memory", "slots x image + 10 %", cost.shared_bytes.median / limit_bytes
    )
    if measured.world == 1 and measured.tensors <= 64:
        limit_s = 1.3 * _floor_s(measured)
        yield Bar(f"{text}committed", "1.3 floors", cost.commit_s.median / limit_s)


def _lost_bars(name: str, ours: Mapping[str, Cost], measured: Measured) -> Iterator[Bar]:
    """Compare the better of our modes with the best of those who also sync what they call saved."""
    others = {
        system: measured.costs[system].lost_s.median
        for system in OTHERS
        if system in measured.costs and measured.costs[system].is_synced
    }
    if not ours or not others:
        return
    system = min(ours, key=lambda each: ours[each].lost_s.median)
    best = min(others, key=others.__getitem__)
    limit_s = others[best] / 3
    # What noise makes negative is no training lost.
    share = max(0.0, ours[system].lost_s.median) / limit_s if limit_s > 0 else float("inf")
    yield Bar(f"{name}, {system}: training time lost", f"1/3 of the best other, {best}", share)


def _absolute_bars(name: str, text: str, cost: Cost, measured: Measured) -> Iterator[Bar]:
    if name == "small":
        yield Bar(f"{text}committed", "0.3 s", cost.commit_s.median / 0.3)
        return
    limit_s = CPU_S_PER_BYTE * measured.image_bytes
    yield Bar(f"{text}processor time", f"{limit_s:.2f} s", cost.cpu_s.median / limit_s)


# --- forms --------------------------------------------------------------------------------------


def table(results: Results) -> RenderableType:
    """Return the results for a terminal."""
    parts: list[RenderableType] = []
    for name, measured in results.workloads.items():
        parts.append(_grid(_title(name, results), HEAD, _rows(measured)))
        parts += [Text(f"{system}: {why}") for system, why in measured.failures.items()]
    for name, loaded in results.loads.items():
        heading = load_report.title(name, loaded, results.options.size)
        parts.append(_grid(heading, load_report.HEAD, load_report.rows(loaded)))
        parts += [Text(f"{system}: {why}") for system, why in loaded.failures.items()]
    if results.indexes:
        parts.append(
            _grid("index", load_report.INDEX_HEAD, load_report.index_rows(results.indexes))
        )
    parts += [Text(f"{name}: {why}") for name, why in results.failures.items()]
    grid = Table("bar", "limit", "share of it", title="bars", title_justify="left")
    for bar in bars(results):
        grid.add_row(bar.what, bar.limit, number(bar.share), style="" if bar.share <= 1 else "red")
    parts.append(grid)
    return Group(*parts)


def _grid(heading: str, head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Table:
    grid = Table(*head, title=heading, title_justify="left")
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in rows:
        grid.add_row(*row, style="bold" if row[0] in (*OURS, *OUR_READERS) else "")
    return grid


def page(results: Results) -> str:
    """Return the results as Markdown."""
    return "\n".join(sections(results).values())


def sections(results: Results) -> dict[str, str]:
    """Return the results as Markdown: of "saves" and "loads", what was measured."""
    found = {}
    if results.workloads or results.planning:
        found["saves"] = _saves(results)
    if results.loads or results.indexes:
        found["loads"] = _loads(results)
    return found


def _saves(results: Results) -> str:
    floors = {name: measured.floors for name, measured in results.workloads.items()}
    buffered = [name for name, floor in floors.items() if not floor.is_direct]
    lines = [_run(results, f"each of {results.options.saves} saves beside training")]
    if buffered:
        lines += ["", f"No direct writes there: {', '.join(buffered)}."]
    for name, measured in results.workloads.items():
        lines += ["", f"### {_title(name, results)}", "", *_markdown(HEAD, _rows(measured))]
        lines += ["", *(f"* {system}: {why}" for system, why in measured.failures.items())]
    lines += ["", *_failures(results, of_saves=True)]
    return _joined([*lines, "", "### Bars", "", *_bar_lines(saving_bars(results))])


def _loads(results: Results) -> str:
    lines = [
        _run(results, f"each of {results.options.loads} cold and as many warm loads a process")
    ]
    for name, loaded in results.loads.items():
        heading = load_report.title(name, loaded, results.options.size)
        table = _markdown(load_report.HEAD, load_report.rows(loaded))
        lines += ["", f"### {heading}", "", *table]
        lines += ["", *(f"* {system}: {why}" for system, why in loaded.failures.items())]
    if results.indexes:
        table = _markdown(load_report.INDEX_HEAD, load_report.index_rows(results.indexes))
        lines += ["", "### Index of many ranks", "", *table]
    lines += ["", *_failures(results, of_saves=False)]
    return _joined([*lines, "", "### Bars of loads", "", *_bar_lines(load_report.bars(results))])


def _failures(results: Results, *, of_saves: bool) -> Iterator[str]:
    for name, why in results.failures.items():
        if (name in TITLES) == of_saves:
            yield f"* {name}: {why}"


def _run(results: Results, rounds: str) -> str:
    """Return what the run was."""
    machine = results.machine
    packages = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    return (
        f"Run of {results.at[:10]} on {machine.cores} cores ({machine.processor}), "
        f"{machine.memory_bytes / 2**30:.0f} GiB of memory, device {machine.device}, "
        f"{machine.file_system}, Linux {machine.kernel}, Python {machine.python}; {packages}. "
        f"Sizes x {results.options.size:g}, rounds: {results.options.repeats}, {rounds}; load "
        f"average at the start {machine.load:.1f}."
    )


def _bar_lines(found: Iterable[Bar]) -> Iterator[str]:
    rows = ((bar.what, bar.limit, number(bar.share)) for bar in found)
    return _markdown(("bar", "limit", "share of it"), rows)


def _joined(lines: list[str]) -> str:
    text = "\n".join(lines) + "\n"
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


def _title(name: str, results: Results) -> str:
    size = results.options.size
    return f"{name}: {TITLES[name]}" + ("" if size == 1 else f", x {size:g}")


def _markdown(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(' --- ' if index == 0 else ' ---: ' for index in range(len(head)))}|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
