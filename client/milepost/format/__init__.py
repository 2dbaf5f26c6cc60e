"""PyTorch's on-disk checkpoint format, as both sides see it.

`layout` (where each blob lies in an image) and `manifest` know nothing of torch; `container` (the
bytes torch.save puts around a payload) and `index` (`.metadata`) do, and are imported only by
trainers, tools and the daemon's planner child.
"""
