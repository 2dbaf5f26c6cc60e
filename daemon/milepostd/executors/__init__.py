"""Carrying out what the core commands: `table` says who carries out which slow command.

Nothing here touches the core.
"""
