"""A trainer's link to its daemon and to the other ranks: finding, joining, talking, coming back.

Knows nothing of states or images, and never imports torch, except to ask a process group that the
trainer has made for its ranks and its store.
"""
