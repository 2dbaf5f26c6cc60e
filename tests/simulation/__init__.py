"""Thousands of nodes in one process, under a seed: see `docs/design/0008-simulation.md`."""
