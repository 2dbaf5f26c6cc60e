"""Makes `docs/metrics.md` from the table of metrics.

`python -m docs.generate.metrics_page > docs/metrics.md`. Owns the page's form only.
"""

from __future__ import annotations

import sys

from milepostd.ops.metrics import SPECS


def page() -> str:
    """Return `docs/metrics.md`."""
    lines = [
        "# Metrics of milepostd",
        "",
        "Generated from `daemon/milepostd/ops/metrics.py` by "
        "`python -m docs.generate.metrics_page`.",
        "",
        "`GET /metrics` serves them as Prometheus text. Units are base units and end the name;",
        "labels come from closed sets, so the number of series does not grow with steps, saves or",
        "jobs. `deploy/prometheus/alerts.yaml` has the alerts worth waking somebody for.",
        "",
        "| name | kind | unit | labels | what it says |",
        "|---|---|---|---|---|",
    ]
    for spec in SPECS:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        lines.append(f"| `{spec.name}` | {spec.kind} | {spec.unit} | {labels} | {spec.help} |")
    lines += ["", "Values of the labels:", ""]
    closed = {label: values for spec in SPECS for label, values in spec.labels.items() if values}
    for label, values in closed.items():
        meaning = "see docs/errors.md" if label == "code" else ", ".join(f"`{v}`" for v in values)
        lines.append(f"* `{label}`: {meaning}")
    lines.append("* `version`: the package's version")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
