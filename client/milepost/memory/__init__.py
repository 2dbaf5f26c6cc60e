"""Shared memory: the arenas that trainer and daemon both map. Never imports torch."""
