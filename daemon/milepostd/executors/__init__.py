"""What carries out the slow commands of the core: images, fragments, verdicts, retention.

Each command ends in exactly one event. Nothing here touches the core.
"""
