"""PyTorch's own bytes: the container of one tensor or object, and `.metadata`. Imports torch.

Imported only by trainers, tools and the daemon's planner child.
"""
