"""The metrics of the daemon: one table of names, kinds, units, helps and labels.

Gauges are read from the status at each scrape, so they cannot disagree with it. The runtime counts
counters and histograms in `Counters`. Labels come from closed sets only, never from a step, a save,
a job or a path. `docs/metrics.md` is made from the table (`docs/generate/metrics_page.py`). Source:
Prometheus, "Metric and label naming".
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import product
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from milepost.errors import CODES
from milepost.wire.messages import ClientMessage, DaemonMessage, Ending, PeerMessage
from milepostd.core.phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

OUTCOMES: Final = tuple(map(str, Ending))
ROLES: Final = ("coordinator", "participant")
PHASES: Final = tuple(
    str(phase) for phase in Phase if phase not in (Phase.DISCARDING, Phase.CONCLUDED)
)
"""Phases in which a status shows a save."""
DIRECTIONS: Final = ("in", "out")
MESSAGES: Final = tuple(
    sorted(
        kind.__name__
        for union in (ClientMessage, DaemonMessage, PeerMessage)
        for kind in get_args(union)
    )
)

_FAST_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""For the loop, which should turn within milliseconds."""
_SLOW_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""For the time a disk or a cohort takes; the last one is the default deadline of a save."""


class Spec(NamedTuple):
    """One metric. labels: the closed set of values of each. buckets: upper bounds in seconds."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = {}
    buckets: tuple[float, ...] = ()


SPECS: Final = (
    Spec("milepostd_build_info", "gauge", "", "Always 1; `version` is the package's.",
         {"version": ()}),
    Spec("milepostd_uptime_seconds", "gauge", "seconds", "Since the daemon started."),
    Spec("milepostd_accepting", "gauge", "", "1 while new saves are accepted, 0 while draining."),
    Spec("milepostd_jobs", "gauge", "", "Jobs known to the node."),
    Spec("milepostd_sessions", "gauge", "", "Trainer processes connected to the node."),
    Spec("milepostd_session_silence_seconds_max", "gauge", "seconds",
         "Since the quietest session was heard; a heartbeat comes each second."),
    Spec("milepostd_peers", "gauge", "", "Other nodes this one works with."),
    Spec("milepostd_peer_silence_seconds_max", "gauge", "seconds",
         "Since the quietest peer was heard; peers are silent while nothing is saved."),
    Spec("milepostd_saves_in_flight", "gauge", "",
         "Saves in flight, by this node's role in them and their phase.",
         {"role": ROLES, "phase": PHASES}),
    Spec("milepostd_save_age_seconds_max", "gauge", "seconds", "Age of the oldest save in flight."),
    Spec("milepostd_pending_bytes", "gauge", "bytes", "Staged on this node and not yet written."),
    Spec("milepostd_last_committed_timestamp_seconds", "gauge", "seconds",
         "When the newest checkpoint of any job was published, seconds since 1970; absent before."),
    Spec("milepostd_last_committed_bytes", "gauge", "bytes", "Size of that checkpoint."),
    Spec("milepostd_last_committed_elapsed_seconds", "gauge", "seconds",
         "From its first report to its publication."),
    Spec("milepostd_saves_total", "counter", "", "Saves that ended on this node, by outcome.",
         {"outcome": OUTCOMES}),
    Spec("milepostd_written_bytes_total", "counter", "bytes",
         "Bytes of images handed to the kernel."),
    Spec("milepostd_throttled_seconds_total", "counter", "seconds",
         "Time that writer threads waited for the limit `write_mbps`, added up."),
    Spec("milepostd_errors_total", "counter", "",
         "Causes of saves that failed, and of refusals, by code.", {"code": tuple(CODES)}),
    Spec("milepostd_messages_total", "counter", "", "Messages by type and direction.",
         {"type": MESSAGES, "direction": DIRECTIONS}),
    Spec("milepostd_write_seconds", "histogram", "seconds",
         "From the start of writing one image until its file is synced.", buckets=_SLOW_S),
    Spec("milepostd_commit_seconds", "histogram", "seconds",
         "From a save's first report on the node until it is committed.", buckets=_SLOW_S),
    Spec("milepostd_planning_seconds", "histogram", "seconds",
         "What the planner's child took for a plan or an index.", buckets=_SLOW_S),
    Spec("milepostd_loop_lag_seconds", "histogram", "seconds",
         "How late the event loop wakes; large values delay heartbeats.", buckets=_FAST_S),
    Spec("milepostd_event_seconds", "histogram", "seconds",
         "Time the core takes for one event.", buckets=_FAST_S),
    Spec("milepostd_resident_memory_bytes", "gauge", "bytes",
         "Resident memory of the daemon without mapped files and arenas."),
    Spec("milepostd_open_fds", "gauge", "",
         "Open file descriptors; constant in tensors and saves."),
    Spec("milepostd_cpu_seconds_total", "counter", "seconds", "CPU time of the daemon itself."),
)  # fmt: skip
"""The table."""

_BY_NAME: Final = {spec.name: spec for spec in SPECS}


class Counters:
    """What has happened since the daemon started. Thread-safe; a call costs a microsecond."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._buckets: dict[str, list[int]] = {}
        for spec in SPECS:
            if spec.kind == "histogram":
                self._values[spec.name, ()] = 0.0
                self._buckets[spec.name] = [0] * (len(spec.buckets) + 1)
            elif spec.kind == "counter" and spec.name != "milepostd_cpu_seconds_total":
                first = next(iter(spec.labels.values()), ())
                # Counters with few label values start at 0, so that `rate` sees the first increase.
                for value in first if len(spec.labels) == 1 else ():
                    self._values[spec.name, (value,)] = 0.0
                if not spec.labels:
                    self._values[spec.name, ()] = 0.0

    def save_ended(self, outcome: str) -> None:
        """Count a save that ended, by one of `OUTCOMES`."""
        self._add("milepostd_saves_total", 1, outcome)

    def bytes_written(self, count: int) -> None:
        """Count bytes of an image handed to the kernel."""
        self._add("milepostd_written_bytes_total", count)

    def throttled(self, elapsed_s: float) -> None:
        """Add to the time that writers waited for the bandwidth limit."""
        self._add("milepostd_throttled_seconds_total", elapsed_s)

    def error(self, code: str) -> None:
        """Count a cause by its code, one of `milepost.errors.CODES`."""
        self._add("milepostd_errors_total", 1, code)

    def message(self, kind: str, direction: str) -> None:
        """Count a message by its type's name; direction is `in` or `out`."""
        self._add("milepostd_messages_total", 1, kind, direction)

    def write_took(self, elapsed_s: float) -> None:
        """Record how long one image took until its file was synced."""
        self._observe("milepostd_write_seconds", elapsed_s)

    def commit_took(self, elapsed_s: float) -> None:
        """Record how long a save took from its first report to its commit."""
        self._observe("milepostd_commit_seconds", elapsed_s)

    def planning_took(self, elapsed_s: float) -> None:
        """Record how long the planner's child took for one request."""
        self._observe("milepostd_planning_seconds", elapsed_s)

    def loop_lagged(self, late_s: float) -> None:
        """Record how much later than asked the loop woke."""
        self._observe("milepostd_loop_lag_seconds", late_s)

    def event_took(self, elapsed_s: float) -> None:
        """Record how long the core took for one event."""
        self._observe("milepostd_event_seconds", elapsed_s)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        # With a value outside its closed set a peer could grow our memory: count it as empty.
        allowed = _BY_NAME[name].labels.values()
        known = tuple(
            value if value in values else ""
            for value, values in zip(labels, allowed, strict=True)
        )  # fmt: skip
        with self._lock:
            self._values[name, known] = self._values.get((name, known), 0.0) + amount

    def _observe(self, name: str, value: float) -> None:
        index = bisect_left(_BY_NAME[name].buckets, value)
        with self._lock:
            self._values[name, ()] += value
            self._buckets[name][index] += 1

    def families(self) -> Iterator[Metric]:
        """Yield counters and histograms as prometheus-client wants them."""
        with self._lock:
            values = dict(self._values)
            buckets = {name: list(counts) for name, counts in self._buckets.items()}
        for spec in SPECS:
            if spec.kind == "histogram":
                counts, total = [], 0
                for bound, count in zip(
                    (*map(str, spec.buckets), "+Inf"), buckets[spec.name], strict=True
                ):
                    total += count
                    counts.append((bound, total))
                histogram = HistogramMetricFamily(spec.name, spec.help)
                histogram.add_metric([], counts, values[spec.name, ()])
                yield histogram
            elif spec.kind == "counter" and spec.name != "milepostd_cpu_seconds_total":
                counter = CounterMetricFamily(spec.name, spec.help, labels=list(spec.labels))
                for (name, labels), value in values.items():
                    if name == spec.name:
                        counter.add_metric(list(labels), value)
                yield counter


class StatusCollector(Collector):
    """Makes metrics of the status and the counters, at each scrape.

    Args:
        status: returns the status of version 1, as `GET /status` serves it.
        counters: what the runtime counts.
    """

    def __init__(self, status: Callable[[], dict[str, Any]], counters: Counters) -> None:
        self._status = status
        self._counters = counters
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        readings = _readings(status)
        memory = self._process.memory_info()
        cpu = self._process.cpu_times()
        readings["milepostd_resident_memory_bytes"] = [((), memory.rss - memory.shared)]
        readings["milepostd_open_fds"] = [((), self._process.num_fds())]
        for spec in SPECS:
            if spec.kind == "gauge":
                gauge = GaugeMetricFamily(spec.name, spec.help, labels=list(spec.labels))
                for labels, value in readings[spec.name]:
                    gauge.add_metric(list(labels), value)
                yield gauge
        yield CounterMetricFamily(
            "milepostd_cpu_seconds_total",
            _BY_NAME["milepostd_cpu_seconds_total"].help,
            value=cpu.user + cpu.system,
        )
        yield from self._counters.families()


def _readings(status: Mapping[str, Any]) -> dict[str, list[tuple[tuple[str, ...], float]]]:
    """Return the samples of each gauge, as (label values, value)."""
    node, saves, peers = status["node"], status["saves"], status["peers"]
    sessions, jobs = status["sessions"], status["jobs"]
    in_flight = dict.fromkeys(product(ROLES, PHASES), 0)
    for save in saves:
        in_flight[save["role"], save["phase"]] += 1
    committed = [job["last_committed"] for job in jobs if job["last_committed"]]
    newest = max(committed, key=lambda found: found["at_ms"], default=None)

    def last(value: float | None) -> list[tuple[tuple[str, ...], float]]:
        return [] if value is None else [((), value)]

    return {
        "milepostd_build_info": [((node["version"],), 1)],
        "milepostd_uptime_seconds": [((), node["uptime_s"])],
        "milepostd_accepting": [((), int(status["accepting"]))],
        "milepostd_jobs": [((), len(jobs))],
        "milepostd_sessions": [((), len(sessions))],
        "milepostd_session_silence_seconds_max": [((), _longest(sessions, "last_heard_s"))],
        "milepostd_peers": [((), len(peers))],
        "milepostd_peer_silence_seconds_max": [((), _longest(peers, "last_heard_s"))],
        "milepostd_saves_in_flight": list(in_flight.items()),
        "milepostd_save_age_seconds_max": [((), _longest(saves, "age_s"))],
        "milepostd_pending_bytes": [
            ((), sum(max(0, save["bytes_total"] - save["bytes_written"]) for save in saves))
        ],
        "milepostd_last_committed_timestamp_seconds": last(newest and newest["at_ms"] / 1000),
        "milepostd_last_committed_bytes": last(newest and newest["bytes"]),
        "milepostd_last_committed_elapsed_seconds": last(newest and newest["elapsed_s"]),
    }


def _longest(rows: list[Mapping[str, Any]], field: str) -> float:
    return float(max((row.get(field) or 0.0 for row in rows), default=0.0))


def make_exposition(
    status: Callable[[], dict[str, Any]], counters: Counters
) -> Callable[[], bytes]:
    """Return what `GET /metrics` calls: Prometheus text of type `CONTENT_TYPE`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, counters))

    def exposition() -> bytes:
        return generate_latest(registry)

    return exposition
