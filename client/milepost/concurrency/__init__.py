"""Living in a trainer: its threads, signal handlers and garbage collector.

Knows nothing of checkpoints, and never imports torch.
"""
