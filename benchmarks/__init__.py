"""What saves and loads cost: milepost beside torch's own ways, and beside the machine's floors.

`python -m benchmarks` runs everything and writes `bench-results.json`; `docs/performance.md` tells
what is measured and how to read it. Each system runs in processes of its own (`trial`), all with
the same state and the same training steps (`workloads`), in turn, several times over (`campaign`).
What comes out is compared as ratios only (`report`): times say something about the machine. Not
part of the installed package.
"""
