"""Thousands of nodes in one process, driven by a seed: see `docs/design/0008-simulation.md`."""
