"""The directory of checkpoints: what is written under a root, by whom, and what may be removed.

Knows nothing of tensors or plans, and never imports torch.
"""
