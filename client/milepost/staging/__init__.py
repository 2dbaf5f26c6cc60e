"""Copying a state into an image, before `save()` returns or behind the next step.

Knows nothing of daemons or files.
"""
