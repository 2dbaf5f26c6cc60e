"""A trainer's link to its daemon and to the other ranks: finding, joining, talking, reconnecting.

Knows nothing of states or images. Never imports torch, except to ask a process group that the
trainer has made for its ranks and its store.
"""
